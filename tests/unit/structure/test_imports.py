"""Which part may import which, and which third parties."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from fnmatch import fnmatch

import pytest

from tests.unit.structure.sources import ROOT, Source, dotted, sources

# Lowest first: a part may import its own level and those below.
LEVELS = (
    {"errors", "schedules", "config_checks", "config_report", "config"},
    {"math"},
    {"layers"},
    {"plan"},
    {"comm"},
    {"state", "capture"},
    set(),  # parts of a step that are not named elsewhere: refresh, direct, owner, assembly ...
    {"preconditioner"},
    {"hosts", "megatron"},
    {"cli", "run", ""},
)
PARTS_OF_A_STEP = 6
# Within one level, packages that must not know each other.
STRANGERS = [("state", "capture"), ("capture", "state")]
# Whoever may import these, by path; everybody else may not.
THIRD_PARTIES = {
    "torch.distributed": ["ds_kfac/comm/*", "ds_kfac/hosts/*"],
    "deepspeed": ["ds_kfac/hosts/deepspeed*"],
    "megatron": ["ds_kfac/hosts/megatron*"],
    "apex": ["ds_kfac/hosts/apex*"],
    "pydantic": ["ds_kfac/config*.py", "ds_kfac/schedules.py", "ds_kfac/checkpoint/manifest.py"],
    "safetensors": ["ds_kfac/checkpoint/*"],
    "numpy": [],
    "transformers": ["ds_kfac/cli/plan_source.py"],
}
SOURCES = sources()


def part_of(module: str) -> str:
    """``ds_kfac.math.solvers`` belongs to ``math``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def level_of(module: str) -> int:
    part = part_of(module)
    return next((i for i, names in enumerate(LEVELS) if part in names), PARTS_OF_A_STEP)


def own_imports(source: Source) -> list[tuple[str, int]]:
    return [
        (item.module, item.line)
        for item in source.imports
        if item.runtime and item.module.split(".")[0] == "ds_kfac"
    ]


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_arrows_point_down(source: Source) -> None:
    for module, line in own_imports(source):
        place = f"{source.name}:{line} imports {module}"
        # The package itself: its version and its submodules by name.
        assert module == "ds_kfac" or level_of(module) <= level_of(source.module), place
        assert (part_of(source.module), part_of(module)) not in STRANGERS, place


def test_math_knows_only_itself_and_layers_no_processes() -> None:
    for source in SOURCES:
        if part_of(source.module) == "math":
            assert {part_of(module) for module, _ in own_imports(source)} <= {"math"}, source


def test_only_the_preconditioner_knows_the_order_of_a_step() -> None:
    """Nobody below it reaches for both capture and the owner's work."""
    for source in SOURCES:
        parts = {part_of(module) for module, _ in own_imports(source)}
        if {"capture", "owner", "comm"} <= parts:
            assert part_of(source.module) == "preconditioner", source


def test_no_import_cycles() -> None:
    graph = {source.module: {module for module, _ in own_imports(source)} for source in SOURCES}
    for module, imported in graph.items():
        imported.discard("ds_kfac")  # loads its parts on demand
        imported.discard(module)
    tuple(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_third_parties_stay_where_they_belong(source: Source) -> None:
    for item in source.imports:
        for name, homes in THIRD_PARTIES.items():
            uses = item.module == name or item.module.startswith(name + ".")
            if uses and item.runtime:
                place = f"{source.name}:{item.line} imports {item.module}"
                assert any(fnmatch(source.name, home) for home in homes), place


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_process_groups_are_not_reached_through_attributes(source: Source) -> None:
    homes = THIRD_PARTIES["torch.distributed"]
    if any(fnmatch(source.name, home) for home in homes):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            assert dotted(node) != "torch.distributed", f"{source.name}:{node.lineno}"


def loaded_by(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after running ``code``."""
    report = "import sys, json; before = set(sys.modules)\n" + code
    report += "\njson.dump(sorted(set(sys.modules) - before), sys.stdout)"
    done = subprocess.run(
        [sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return set(json.loads(done.stdout))


def roots(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


def test_importing_the_package_loads_nothing_else() -> None:
    loaded = loaded_by("import ds_kfac; dir(ds_kfac); ds_kfac.__version__")
    assert {name for name in loaded if name.startswith("ds_kfac")} == {"ds_kfac"}
    assert not roots(loaded) & {"torch", "pydantic", "numpy", "deepspeed", "megatron", "logging"}


def test_the_configuration_needs_no_torch() -> None:
    """``ds-kfac schema`` and editors work without it."""
    loaded = loaded_by("import ds_kfac; ds_kfac.KFACConfig(damping=0.5)")
    assert not roots(loaded) & {"torch", "numpy", "deepspeed"}


def test_plain_training_needs_no_deepspeed() -> None:
    loaded = roots(loaded_by("import ds_kfac; ds_kfac.attach; ds_kfac.KFAC; ds_kfac.Groups"))
    assert "torch" in loaded
    assert not loaded & {"deepspeed", "megatron", "apex", "transformers"}


def test_attaching_to_megatron_loads_it_only_when_called() -> None:
    loaded = roots(loaded_by("import ds_kfac; ds_kfac.megatron.attach"))
    assert "torch" in loaded
    assert not loaded & {"deepspeed", "megatron"}


def test_public_names_resolve_and_unknown_ones_do_not() -> None:
    import ds_kfac

    for name in ds_kfac.__all__:
        assert getattr(ds_kfac, name) is not None
        assert name in dir(ds_kfac)
    with pytest.raises(AttributeError, match="module 'ds_kfac' has no attribute 'optimise'"):
        ds_kfac.optimise  # noqa: B018

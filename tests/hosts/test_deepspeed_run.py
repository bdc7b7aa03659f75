"""Scripts that know nothing of ds_kfac: `deepspeed --module ds_kfac.run script.py ...`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_kfac
from ds_kfac.hosts import deepspeed_patch
from tests._harness import deepspeed_cpu
from tests.launch.processes import free_port

ROOT = Path(__file__).parents[2]
USER_SCRIPT = Path(__file__).with_name("user_script.py")

# Says how it was started; needs neither torch nor DeepSpeed.
PROBE = "import sys, json; print(json.dumps([__name__, sys.argv, sys.path[0], __file__]))\n"


def start(*command: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_script_sees_its_own_command_line_and_folder(tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    done = start("-m", "ds_kfac.run", "--local_rank=3", str(script), "--flag", "-m", "x")
    name, argv, path, file = json.loads(done.stdout)
    assert name == "__main__"
    assert argv == [str(script), "--local_rank=3", "--flag", "-m", "x"]
    assert path == str(tmp_path)
    assert file == str(script)


def test_module_is_run_like_python_m_does(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "tool.py").write_text(PROBE)
    done = start(
        "-m", "ds_kfac.run", "--local-rank", "1", "-m", "package.tool", "--flag", cwd=tmp_path
    )
    name, argv, path, file = json.loads(done.stdout)
    assert name == "__main__"
    assert argv == [str(package / "tool.py"), "--local-rank", "1", "--flag"]
    assert path == str(tmp_path)
    assert file == str(package / "tool.py")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "give a script, or -m and a module"),
        (("--local_rank=0",), "give a script, or -m and a module"),
        (("-m",), "give a module after -m"),
        (("missing.py",), "no such script: 'missing.py'"),
        (("--deepspeed", "x.py"), "expected a script or -m MODULE before other options"),
    ],
)
def test_command_line_without_a_script_is_explained(
    arguments: tuple[str, ...], problem: str
) -> None:
    done = start("-m", "ds_kfac.run", *arguments)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "usage: deepspeed --module ds_kfac.run SCRIPT" in done.stderr
    assert "Traceback" not in done.stderr


def test_exit_code_and_traceback_of_the_script_survive(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('mine')\n")
    done = start("-m", "ds_kfac.run", str(script))
    assert done.returncode == 1
    assert "fails.py" in done.stderr
    assert "ValueError: mine" in done.stderr
    script.write_text("import sys; sys.exit(7)\n")
    assert start("-m", "ds_kfac.run", str(script)).returncode == 7


def test_deepspeed_is_patched_when_the_script_imports_it(tmp_path: Path) -> None:
    """Importing it earlier would freeze settings that the script makes first."""
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os\nSEEN = os.environ['LATE']\n"
        "def initialize(args=None, model=None, config=None): return 'own'\n"
    )
    script = tmp_path / "late.py"
    script.write_text(
        "import os, sys\n"
        "assert 'deepspeed' not in sys.modules and 'torch' not in sys.modules\n"
        "os.environ['LATE'] = 'set by the script'\n"
        "import deepspeed\n"
        "from deepspeed import initialize\n"
        "assert deepspeed.SEEN == 'set by the script'\n"
        "assert initialize is deepspeed.initialize and initialize.__wrapped__() == 'own'\n"
        "from ds_kfac.hosts.deepspeed_patch import original_initialize, patch\n"
        "patch()\n"
        "assert deepspeed.initialize is initialize and original_initialize()() == 'own'\n"
        "print(type(deepspeed.__spec__.loader).__name__)\n"
    )
    done = start("-m", "ds_kfac.run", str(script))
    assert done.stdout == "SourceFileLoader\n", done.stderr


def test_script_without_deepspeed_just_runs(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import sys; print('deepspeed' in sys.modules)\n")
    assert start("-m", "ds_kfac.run", str(script)).stdout == "False\n"


# --------------------------------------------------------------------- real engines

SETTINGS = {"factor_update_steps": 1, "inv_update_steps": 1}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10**9,
}


def write_config(folder: Path, **changes: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return str(path)


def reports(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def single_process_variables() -> dict[str, str]:
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }


def test_unmodified_script_with_a_kfac_section(tmp_path: Path) -> None:
    """`from deepspeed import initialize`, which binds the function at import."""
    pytest.importorskip("deepspeed")
    config = write_config(tmp_path, kfac=SETTINGS)
    arguments = [str(tmp_path), "--imported", "--deepspeed", "--deepspeed_config", config]
    done = start(
        *("-m", "ds_kfac.run", "--local_rank=0", str(USER_SCRIPT), *arguments),
        **single_process_variables(),
    )
    assert done.returncode == 0, done.stderr
    (report,) = reports(tmp_path, 1)
    assert report["argv"] == [str(USER_SCRIPT), "--local_rank=0", *arguments]
    assert report["accelerator"] == "cpu"
    assert report["kfac_steps"] == 2
    assert report["layers"] == ["0", "2"]
    assert report["optimizer"] == "SGD"


@pytest.mark.launcher
def test_deepspeed_launcher_with_optimizer_type_kfac(tmp_path: Path) -> None:
    """`deepspeed.initialize` on two ranks; DeepSpeed alone refuses the optimizer's name."""
    pytest.importorskip("deepspeed")
    config = write_config(tmp_path, optimizer={"type": "KFAC", "params": {"lr": 0.01, **SETTINGS}})
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    done = start(
        *(launcher, "--num_gpus", "2", "--master_port", free_port(), "--module", "ds_kfac.run"),
        *(str(USER_SCRIPT), str(tmp_path), "--deepspeed", "--deepspeed_config", config),
        DS_ACCELERATOR="cpu",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = reports(tmp_path, 2)
    assert (first["local_rank"], second["local_rank"]) == (0, 1)
    assert first["kfac_steps"] == second["kfac_steps"] == 2
    assert first["optimizer"] == "KFACOptimizer"
    assert first["weights"] == second["weights"]


def _patched(rank: int, size: int) -> dict[str, Any]:
    deepspeed = deepspeed_cpu.prepare()
    own = deepspeed.initialize
    deepspeed_patch.patch()
    replaced = deepspeed.initialize
    deepspeed_patch.patch()
    facts: dict[str, Any] = {
        "replaced": replaced is not own,
        "idempotent": deepspeed.initialize is replaced,
        "original": deepspeed_patch.original_initialize() is own,
    }
    try:
        for name, function, section in (
            ("patched", deepspeed.initialize, SETTINGS),
            ("direct", ds_kfac.initialize, SETTINGS),
            ("nothing asked", deepspeed.initialize, None),
            ("disabled", deepspeed.initialize, {"enabled": False}),
        ):
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 3)
            config = {**CONFIG, **({} if section is None else {"kfac": section})}
            engine = function(model=model, model_parameters=model.parameters(), config=config)[0]
            engine.backward(engine(torch.ones(4, 4)).square().mean())
            engine.step()
            wrapped = "_take_model_step" in engine.__dict__
            facts[name] = (engine.kfac and engine.kfac.counters.preconditions, wrapped)
            engine.destroy()
        # Without optimizer the engine only evaluates: Trainer.evaluate() of a training config.
        config = {k: v for k, v in CONFIG.items() if k not in ("optimizer", "zero_optimization")}
        engine = deepspeed.initialize(model=torch.nn.Linear(4, 3), config={**config, "kfac": {}})[0]
        facts["evaluation"] = engine.kfac
        engine.destroy()
    finally:
        deepspeed_patch.unpatch()
    facts["undone"] = deepspeed.initialize is own
    return facts


def test_patched_and_direct_calls_attach_once(run_world: Any) -> None:
    """No recursion: ds_kfac.initialize calls DeepSpeed's own function."""
    pytest.importorskip("deepspeed")
    (facts,) = run_world(1, _patched)
    assert facts == {
        "replaced": True,
        "idempotent": True,
        "original": True,
        "patched": (1, True),
        "direct": (1, True),
        "nothing asked": (None, False),
        "disabled": (None, False),
        "evaluation": None,
        "undone": True,
    }

"""``ds-kfac doctor``: what it finds, what it advises, and how it ends."""

from __future__ import annotations

import importlib
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ds_kfac.cli import build_locks, doctor, dry_run
from ds_kfac.cli.__main__ import main

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _own_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of this machine's real builds are none of the tests' business."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and the checks of ``--json`` by name, without a dry run."""
    code = main(["doctor", "--json", "--no-dry-run", *arguments])
    whole = json.loads(capsys.readouterr().out)
    assert whole["ok"] == (code == 0)
    return code, {check["name"]: check for check in whole["checks"]}


def test_a_good_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything once for real; two processes train."""
    monkeypatch.setitem(sys.modules, "apex", None)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ok +python +3\.", text, re.M)
    assert re.search(r"^ok +torch +2\.", text, re.M)
    assert re.search(r"^ok +backends +gloo yes", text, re.M)
    assert re.search(r"^ok +apex +not installed", text, re.M)
    assert re.search(r"^ok +build locks +none in ", text, re.M)
    assert re.search(r"^ok +dry run +2 processes, 4 steps .* same weights$", text, re.M)
    assert re.search(r"^\d+ checks: 0 failed, 0 with a warning$", text, re.M)


def test_a_false_apex_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package of that name on PyPI runs its own code when it is imported."""
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the wrong package was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    importlib.invalidate_caches()
    code, checks = lines(capsys)
    assert code == 0  # K-FAC itself does not need it
    assert checks["apex"]["status"] == "warn" and "not NVIDIA's" in checks["apex"]["found"]
    assert checks["apex"]["fix"].startswith("pip uninstall apex")


@pytest.mark.parametrize(
    ("installed", "package", "status", "fix"),
    [
        ("2.3.1+cu121", "torch", "fail", "pip install 'torch>=2.4'"),
        ("2.10", "torch", "ok", ""),
        (None, "safetensors", "fail", "pip install 'safetensors>=0.4'"),
        (None, "deepspeed", "warn", "pip install 'deepspeed>=0.19'"),
        ("0.18.4", "deepspeed", "warn", "pip install 'deepspeed>=0.19'"),
        (None, "transformers", "ok", ""),
        (None, "megatron-core", "ok", ""),
        ("0.9", "megatron-core", "warn", "pip install 'megatron-core>=0.14'"),
    ],
)
def test_versions(
    installed: str | None,
    package: str,
    status: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Compared as numbers: as text 2.10 is older than 2.4."""
    original = metadata.version

    def version(name: str) -> str:
        if name != package:
            return original(name)
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    code, checks = lines(capsys)
    assert (checks[package]["status"], checks[package]["fix"]) == (status, fix)
    assert code == (status == "fail")


def test_minimum_versions_are_those_of_the_package() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f'python_requires=">={doctor.MINIMUM_PYTHON}"' in setup
    for package in doctor.PACKAGES:
        assert f'"{package.name}>={package.minimum}"' in setup


def test_a_broken_torch_is_a_line_and_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing library of CUDA: torch is installed and cannot be imported."""

    def missing(name: str) -> Any:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", missing)
    code, checks = lines(capsys)
    assert code == 1
    assert checks["torch"]["status"] == "fail" and "libcudart" in checks["torch"]["found"]


def test_locks_of_killed_and_of_running_builds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed's start waited for a lock whose builder was dead, without a word."""
    folder = tmp_path / "extensions"
    for name in ("killed", "running", "done"):
        (folder / name).mkdir(parents=True)
    stale, held = folder / "killed" / "lock", folder / "running" / "lock"
    stale.touch()
    with held.open("w"):
        assert build_locks.find(folder) == ([held], [stale])
        code, checks = lines(capsys)
        assert code == 1 and checks["build locks"]["fix"].endswith(f": rm {stale}")
        stale.unlink()
        code, checks = lines(capsys)
        assert code == 0 and checks["build locks"]["status"] == "warn"
    held.unlink()
    assert build_locks.find(folder) == ([], [])


def test_the_folder_of_operators_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setattr(cpp_extension.os, "makedirs", lambda *_, **__: None)
    expected = cpp_extension._get_build_directory("operator", verbose=False)
    assert build_locks.extensions_folder() == Path(expected).parent


def test_processes_that_cannot_connect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong network interface, the most common reason for gloo not to start."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"^fail  dry run +the ranks ended with codes .*nosuch0", text, re.M)
    assert "GLOO_SOCKET_IFNAME" in text


def test_processes_that_wait_for_ever() -> None:
    """The time limit ends them; a module that needs no torch stands in for a hang."""
    outcome = dry_run.run(3.0, module="tests.unit.cli.sleeper")
    # On a busy machine they may not have come to say anything.
    assert not outcome.ok and outcome.text.startswith("not done after 3 s: ")
    assert "--timeout" in outcome.fix


def test_a_dry_run_with_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that end well are not believed blindly."""
    outcome = dry_run.run(60.0, module="tests.unit.cli.wrong_result")
    assert not outcome.ok and outcome.text == "ranks ended with different weights"

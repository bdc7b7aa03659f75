"""The shell scripts: syntax, choice of interpreter, refusals, what they may refer to."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]
SETUP = ROOT / "launch" / "setup_env.sh"
TOOLS = "bash dirname grep ls cksum cat".split()


def shell(command: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Source setup_env.sh and run a command with nothing on PATH but `path`."""
    return subprocess.run(
        [str(shutil.which("bash")), "-c", f'set -euo pipefail; source "{SETUP}"; {command}'],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with the basic tools and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def fake_python(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_syntax(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_registry_is_named(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links|--trusted-host", text)


def test_executable_scripts_stop_at_the_first_error() -> None:
    for script in SCRIPTS:
        if script != SETUP:
            assert "set -euo pipefail" in script.read_text(encoding="utf-8")
            assert os.access(script, os.X_OK), script


def test_no_python_at_all_is_a_clear_error(tools: Path) -> None:
    result = shell("find_python", tools)
    assert result.returncode == 1
    assert "error: no Python 3.11 to 3.14 found" in result.stderr
    assert "DS_KFAC_PYTHON" in result.stderr


def test_an_old_or_broken_python_is_passed_over(tools: Path) -> None:
    fake_python(tools, "python3", "exit 1")
    fake_python(tools, "python3.12", "exit 127")
    (tools / "python3.11").symlink_to(sys.executable)
    result = shell("find_python", tools)
    if sys.version_info < (3, 15):
        assert result.stdout.strip() == str(tools / "python3.11")


def test_a_python_without_venv_is_explained(tools: Path) -> None:
    fake_python(tools, "python3", '[[ "$2" != *ensurepip* ]]')
    result = shell("find_python", tools)
    assert result.returncode == 1
    assert "install the package python3-venv" in result.stderr


def test_named_interpreter_comes_first(tools: Path) -> None:
    fake_python(tools, "python3", "exit 0")
    fake_python(tools, "mine", "exit 0")
    result = shell("find_python", tools, DS_KFAC_PYTHON=str(tools / "mine"))
    assert result.stdout.strip() == str(tools / "mine")


def test_a_folder_that_is_no_environment_is_left_alone(tools: Path, tmp_path: Path) -> None:
    fake_python(tools, "python3", "exit 0")
    venv = tmp_path / "precious"
    venv.mkdir()
    (venv / "thesis.txt").write_text("years of work")
    result = shell("setup_env dev", tools, DS_KFAC_VENV=str(venv))
    assert result.returncode == 1
    assert "is not a virtual environment" in result.stderr
    assert (venv / "thesis.txt").read_text() == "years of work"


def test_a_finished_environment_is_reused(tools: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    # Any attempt to install would be recorded.
    fake_python(venv / "bin", "python", f'[[ "$1" == -c ]] || echo "$@" >>{tmp_path}/calls')
    shell("setup_env plots", tools, DS_KFAC_VENV=str(venv))
    first = (tmp_path / "calls").read_text()
    result = shell("setup_env plots", tools, DS_KFAC_VENV=str(venv))
    assert result.returncode == 0, result.stderr
    assert f"using {venv}" in result.stdout
    assert (tmp_path / "calls").read_text() == first
    assert "pip install" in first
    assert "[plots]" in first


def test_an_interrupted_installation_is_completed(tools: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    fake_python(venv / "bin", "python", '[[ "$*" != *--editable* ]]')
    assert shell("setup_env plots", tools, DS_KFAC_VENV=str(venv)).returncode != 0
    fake_python(venv / "bin", "python", "exit 0")
    result = shell("setup_env plots", tools, DS_KFAC_VENV=str(venv))
    assert result.returncode == 0
    assert "installing ds_kfac[plots]" in result.stdout


def test_package_version_is_stated_once_and_apex_is_never_required() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    found = re.search(r'^VERSION = "(.+)"$', text, flags=re.MULTILINE)
    assert found is not None
    import ds_kfac

    assert found.group(1) == ds_kfac.__version__
    assert not re.search(r"[\"']apex", text)

"""Files that were damaged, or made to do harm, are refused before anything changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_kfac.checkpoint import manifest
from ds_kfac.errors import StateError
from tests.unit.checkpoint.forging import HOSTILE
from tests.unit.checkpoint.training import assert_identical, make

SETTINGS = {"factor_update_steps": 1, "inv_update_steps": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A good checkpoint's files."""
    folder = tmp_path_factory.mktemp("good")
    run = make(SETTINGS)
    for step in range(3):
        run.step(step)
    run.kfac.save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files(what: str, saved: dict[str, bytes], tmp_path: Path) -> None:
    """Pickles run code, paths lead out of the folder, NaN stays for ever: one error each."""
    forge, text = HOSTILE[what]
    folder = tmp_path / "kfac"
    folder.mkdir()
    for name, data in saved.items():
        (folder / name).write_bytes(data)
    forge(folder)
    run = make({**SETTINGS, "resume": "auto"})
    run.step(0)
    before = run.fingerprint()
    with pytest.raises(StateError, match=f"KFAC-{text}"):
        run.kfac.load(folder)
    assert_identical(run.fingerprint(), before)


def test_a_manifest_beyond_all_reason(
    saved: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes of JSON would be read into memory on every rank."""
    from ds_kfac.checkpoint import reader

    monkeypatch.setattr(reader, "MAX_BYTES", 1000)
    for name, data in saved.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(StateError, match="E306 .*larger than 1000 bytes"):
        make(SETTINGS).kfac.load(tmp_path)


def test_the_manifest_says_what_was_saved(saved: dict[str, bytes]) -> None:
    """Format version, step, counters, settings, topology, dims, sizes and hashes."""
    whole = json.loads(saved[manifest.FILE])
    content = whole["content"]
    assert (whole["format"], whole["version"]) == (manifest.FORMAT, manifest.VERSION)
    assert content["step"] == content["counters"][0]["steps"] == 3
    assert content["config"]["factor_update_steps"] == 1 and content["data_size"] == 1
    assert [layer["name"] for layer in content["layers"]] == ["0", "2"]
    assert content["layers"][1]["a_blocks"] == [[0, 7]]
    assert content["files"][0]["bytes"] == len(saved[content["files"][0]["name"]])

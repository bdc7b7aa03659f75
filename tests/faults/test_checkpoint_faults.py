"""Saves that are interrupted, run out of space or fail on one rank; loads of damaged files."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import pytest

from tests._harness import world
from tests.faults import checkpoint_jobs as jobs
from tests.unit.checkpoint import forging
from tests.unit.checkpoint.training import make

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ticks(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    found: list[list[str]] = world(2).run(jobs.count_ticks, str(tmp_path_factory.mktemp("ticks")))
    return found


def complete_step(folder: Path) -> int:
    """The step of a checkpoint, all files of which are as its manifest says."""
    content = json.loads((folder / "manifest.json").read_text())["content"]
    assert len(content["files"]) == 2
    for file in content["files"]:
        data = (folder / file["name"]).read_bytes()
        assert len(data) == file["bytes"]
        assert hashlib.sha256(data).hexdigest() == file["sha256"]
    step: int = content["step"]
    return step


def test_a_save_changes_the_disk_in_this_order(ticks: list[list[str]]) -> None:
    """Data, then the folder, then the manifest in one move: any other order can tear."""
    data = ["make folder", "write tensors", "flush tensors"]
    assert ticks[1] == data
    rest = ["open", "write", "flush", "flush folder", "replace", "flush folder"]
    assert ticks[0] == [*data, *rest, "remove", "remove"]


def test_killed_at_every_tick(ticks: list[list[str]], tmp_path: Path) -> None:
    """A job at its time limit: half a checkpoint was found complete, and the old one was gone."""
    outcomes = []
    for victim, operations in enumerate(ticks):
        for number in range(1, len(operations) + 1):
            folder = tmp_path / f"{victim}-{number}"
            errors = world(2).run_expecting_errors(
                jobs.killed, str(folder), victim, number, isolated=True
            )
            assert [error and error.text for error in errors][victim] == "exit code 9"
            assert [error and error.text for error in errors][1 - victim] == "exit code 5"
            outcomes.append((victim, operations[number - 1], complete_step(folder)))
            # On another number of ranks, and what is left over goes with the next save.
            run = make(jobs.SETTINGS)
            assert run.kfac.load(folder)
            assert run.kfac.counters.steps == outcomes[-1][2]
            run.kfac.save(folder)
            assert len(list(folder.glob("*.safetensors"))) == 1
    after = [step for victim, operation, step in outcomes if victim == 0]
    assert after == [1] * ticks[0].index("replace") + [1, 2, 2, 2]
    assert [step for victim, _, step in outcomes if victim == 1] == [1, 1, 1]


def test_no_space_at_every_tick(ticks: list[list[str]], tmp_path: Path) -> None:
    """One rank's disk is full: the others waited for it in the next collective."""
    folder = tmp_path / "kfac"
    texts = world(2).run(jobs.failing, str(folder), ticks)
    assert texts[0] == texts[1]
    for text in texts[0]:
        operation, _, rest = text.partition(": ")
        if operation == "remove":  # what is left over is no reason to fail
            assert rest == "saved"
        else:
            assert rest.startswith(f"KFAC-E307 K-FAC state was not saved to {folder}: rank ")
            assert rest.endswith("No space left on device")
    assert complete_step(folder) == 2
    assert len(list(folder.iterdir())) == 3


def test_the_kernel_refuses_a_write(tmp_path: Path) -> None:
    """A quota: the error comes from inside the library that writes."""
    texts = world(2).run(jobs.small_files_only, str(tmp_path))
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"KFAC-E307 K-FAC state was not saved to {tmp_path}: rank 1: ")
    assert not list(tmp_path.iterdir())


def test_nothing_is_saved_with_a_pending_error(tmp_path: Path) -> None:
    """A failed step leaves factors half updated on one rank: the save raises its error."""
    errors = world(2).run_expecting_errors(jobs.pending_error, str(tmp_path / "kfac"))
    assert {error.same_error for error in errors if error} == {
        ("DistributedError", "KFAC-E121 rank 1 failed: ValueError: made up")
    }
    assert not (tmp_path / "kfac").exists()


@pytest.mark.parametrize("index", [0, 1])
def test_damage_on_one_rank_stops_all(index: int, tmp_path: Path) -> None:
    """The file of one rank was bad: the other loaded its own and went on alone."""
    texts = world(2).run(jobs.damaged, str(tmp_path), functools.partial(_flip_file, index))
    assert texts[0] == texts[1]
    assert texts[0].startswith("KFAC-E301 ") and texts[0].endswith("sha256 differs")


def _flip_file(index: int, folder: Path) -> None:
    path = forging.data_file(folder, index)
    path.write_bytes(forging.flip(path.read_bytes()))


def test_ranks_that_see_different_folders(tmp_path: Path) -> None:
    """A folder that is not shared: rank 1 found nothing and started anew, rank 0 resumed."""
    texts = world(2).run(jobs.different_folders, str(tmp_path))
    assert texts[0] == texts[1]
    assert texts[0].startswith("KFAC-E301 ranks see different manifests (rank 0: ")
    assert f"rank 1: none in {tmp_path}/1)" in texts[0]

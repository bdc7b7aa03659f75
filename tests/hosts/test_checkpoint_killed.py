"""Kill points of ``engine.save_checkpoint`` under ZeRO 2: one whole checkpoint is always there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests._harness import World, world
from tests._harness.errors import PROCESS_DIED
from tests.hosts import killed_jobs as jobs

pytestmark = pytest.mark.dist
OURS = ["kfac make folder", "kfac write tensors", "kfac flush tensors"]
DEEPSPEEDS = ["deepspeed states.pt"]
MOVE = ("open", "write", "flush", "flush folder", "replace", "flush folder")
POINTS = {
    0: [
        *OURS,
        *(f"kfac {name}" for name in MOVE),
        *(DEEPSPEEDS * 2),
        *(name if "folder" in name else f"latest {name}" for name in MOVE),
        "done",
    ],
    1: [*OURS, *DEEPSPEEDS, "done"],
}
# Every kind of place once; those within K-FAC's manifest are swept in tests/faults.
DEADLY = {0: (8, 9, 10, 11, 16, 17), 1: (2, 4)}


def test_a_save_passes_these_points(tmp_path: Path) -> None:
    """K-FAC's state first, then DeepSpeed's, and in the end the pointer, in one move."""
    found = world(2).run(jobs.save_twice, str(tmp_path), 0, None, None, isolated=True)
    assert dict(enumerate(found)) == POINTS
    # Left empty by saves without K-FAC: DeepSpeed writes the pointer in place.
    (tmp_path / "latest").write_text("")
    ((text, _),), _ = world(2).run(jobs.load_all, [str(tmp_path)])[0]
    assert text.startswith(f"KFAC-E301 {tmp_path}/latest is empty")
    assert text.endswith("complete: global_step2, global_step3")


def test_killed_at_every_kind_of_point(tmp_path: Path) -> None:
    """What ``latest`` names is complete and belongs together, and resumes to the last bit."""
    cells = [(victim, number) for victim, numbers in DEADLY.items() for number in numbers]
    folders = [str(tmp_path / f"{victim}-{number}") for victim, number in cells]

    def kill(cell: tuple[int, int], folder: str) -> None:
        victim, number = cell
        errors = World(2).run_expecting_errors(
            jobs.save_twice, folder, victim, number, None, isolated=True, grace=3.0
        )
        gone = errors[victim]
        assert gone is not None
        assert (gone.type_name, gone.text) == (PROCESS_DIED, f"exit code {jobs.GONE}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(kill, cells, folders))
    found, odd = world(2).run(jobs.load_all, folders)[0]
    moved = POINTS[0].index("latest replace") + 1
    expected = [3 if victim == 0 and number > moved else 2 for victim, number in cells]
    assert found == [("loaded", step) for step in expected]
    assert odd == [[]] * len(cells)


def test_killed_while_a_tag_is_overwritten(tmp_path: Path) -> None:
    """DeepSpeed writes over its files one by one: the mixture is refused, not trained on."""
    number = POINTS[0].index("deepspeed states.pt") + 1
    errors = world(2).run_expecting_errors(
        jobs.save_twice, str(tmp_path), 0, number, "last", isolated=True, grace=3.0
    )
    assert errors[0] is not None and errors[0].text == f"exit code {jobs.GONE}"
    ((text, _),), _ = world(2).run(jobs.load_all, [str(tmp_path)])[0]
    assert text.startswith("KFAC-E305 the K-FAC state was saved at step 3 of the engine, which has")

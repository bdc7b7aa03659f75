"""No hang without a name: whoever waits too long says where, for what and for whom."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ds_kfac.comm.progress import Progress, Wait
from ds_kfac.comm.watchdog import EXIT_CODE, Timing, absent
from tests._harness import World, world
from tests._harness.errors import ErrorInfo
from tests.faults import watchdog_jobs as jobs

pytestmark = pytest.mark.dist
PLACES = {
    "vote": "step 1, vote",
    "factors": "step 1, statistics, layers 0, 2",
    "scalars": "step 1, KL clip",
    "directions": "step 1, directions back, layers 0, 2",
}


def report(error: ErrorInfo | None) -> str:
    """What a rank that the watchdog ended has said."""
    assert error is not None and error.text == f"exit code {EXIT_CODE}", error
    lines = [line for line in error.output.splitlines() if "KFAC-E122" in line]
    assert len(lines) == 1, error.output
    assert "most recent call first" in error.output  # and its stack, for those who look closer
    return lines[0]


def test_the_program_of_a_step() -> None:
    """The sweeps below cover every phase."""
    found = world(2).run(jobs.program, jobs.PlainRun, isolated=True)
    assert found == [list(PLACES.items())] * 2


def strike(
    make_run: Callable[[int], Any], how: str, number: int, **options: Any
) -> list[ErrorInfo | None]:
    """Both ranks' ends, when rank 1 is hit before the n-th collective of its second step."""
    return World(2).run_expecting_errors(
        *(jobs.struck, make_run, 1, number, how),
        isolated=True,
        grace=1.0 if how == "stopped" else 10.0,
        **options,
    )


@pytest.fixture(scope="module")
def struck() -> dict[tuple[str, int], list[ErrorInfo | None]]:
    """Both ranks' ends, by what hit rank 1 and before which collective of its second step."""
    cells = [(how, number) for how in jobs.SIGNALS for number in range(1, len(PLACES) + 1)]

    with ThreadPoolExecutor(2) as pool:  # most of the time is waiting
        ends = pool.map(lambda cell: strike(jobs.PlainRun, *cell), cells)
        return dict(zip(cells, ends, strict=True))


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_stopped_rank_is_named_at_every_phase(
    struck: dict[tuple[str, int], list[ErrorInfo | None]], number: int
) -> None:
    """SIGSTOP, a hanging device, a full disk: the others waited until the launcher's limit."""
    kind, place = list(PLACES.items())[number - 1]
    text = report(struck["stopped", number][0])
    assert re.search(rf"KFAC-E122 {place} \(collective \d+, kind {kind}\): rank 0 has waited", text)
    assert "; absent ranks: 1; no sign of life from rank 1 (stopped, gone or cut off)" in text
    assert f"kfac.watchdog_timeout is {jobs.TIMEOUT:.3g} s" in text


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_killed_rank_is_named_at_every_phase(
    struck: dict[tuple[str, int], list[ErrorInfo | None]], number: int
) -> None:
    """The backend says "Connection reset by peer", not which peer and what for."""
    first, second = struck["killed", number]
    assert first is not None and second is not None
    assert second.text == "killed by SIGKILL"
    kind, place = list(PLACES.items())[number - 1]
    assert first.type_name == "DistributedError"
    assert re.match(
        rf"KFAC-E122 {place} \(collective \d+, kind {kind}\): lost the other ranks: "
        r"\w+: .*; absent ranks: 1; no sign of life from rank 1",
        first.text,
    ), first.text


ZERO_PLACES = [
    ("vote", "step 1, vote"),
    ("scalars", "step 1, gradient norm"),
    ("factors", "step 1, statistics, layers first, middle, last"),
    ("gradients", "step 1, gradients to owners, layers first, middle, last"),
    ("scalars", "step 1, KL clip"),
    ("directions", "step 1, directions back, layers first, middle, last"),
]


def test_under_deepspeed_zero_2() -> None:
    """Gradients are partitioned there, so there are two more places to be stopped at."""
    found = world(2).run(jobs.program, jobs.ZeroRun, isolated=True, timeout=120)
    assert found == [ZERO_PLACES] * 2

    numbers = (2, 4)
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(lambda n: strike(jobs.ZeroRun, "stopped", n, timeout=120), numbers)
        for number, errors in zip(numbers, ends, strict=True):
            kind, place = ZERO_PLACES[number - 1]
            text = report(errors[0])
            assert re.search(rf"KFAC-E122 {place} \(collective \d+, kind {kind}\)", text)
            assert "absent ranks: 1; no sign of life from rank 1" in text


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_the_rank_that_hosts_the_store(how: str) -> None:
    """Nobody can call a roll without the store; the others must not wait for it either."""
    errors = World(2).run_expecting_errors(
        jobs.with_the_store_in_rank_0, jobs.PlainRun, how, isolated=True, grace=4.0
    )
    other = errors[1]
    assert other is not None
    text = other.text if how == "killed" else report(other)
    assert "KFAC-E122 step 1, vote (collective " in text
    assert "the job's key-value store does not answer: the process that hosts it (rank 0" in text


def test_a_late_and_a_stopped_rank_are_told_apart() -> None:
    """All ranks end: also the one that is alive and does not know that others wait for it."""
    errors = world(3).run_expecting_errors(jobs.late_and_stopped, isolated=True, grace=8.0)
    first, second = report(errors[0]), report(errors[1])
    assert first == second
    assert "checkpoint saved (collective" in first
    assert "absent ranks: 1, 2; no sign of life from rank 2" in first
    assert re.search(r"; rank 1 is in step 0, training script for [\d.]+ s", first)
    assert errors[1] is not None and "late_and_stopped" in errors[1].output  # where it is


def test_a_rank_that_stops_while_all_save(tmp_path: Any) -> None:
    errors = world(2).run_expecting_errors(
        jobs.saving, str(tmp_path / "kfac"), isolated=True, grace=1.0
    )
    assert "step 0, checkpoint saved (collective" in report(errors[0])


def test_ranks_that_come_in_time_are_left_alone() -> None:
    """Waits are not added up."""
    assert world(2).run(jobs.slow_but_coming, isolated=True, compare_collectives=False) == [4, 4]


def test_a_broken_call_is_named_with_its_place() -> None:
    text = world(2).run(jobs.lost_in_a_call, isolated=True, compare_collectives=False)[0]
    assert (
        text.startswith("KFAC-E122 step 1, vote (collective ")
        and "lost the other ranks: RuntimeError: Connection closed by peer; " in text
    )
    # What broke here is this rank's own call: where the other one is by then is up to it.


def test_who_is_absent_in_words() -> None:
    wait = Wait((0, 1, 2, 3), 7, "vote", "step 5, vote", time.monotonic())

    def answer(count: int, waits: Any, place: str) -> Any:
        counts = [[[0, 1, 2, 3], count]]
        return {"place": place, "seconds": 3.0, "waits": waits, "counts": counts}

    here = answer(7, [[0, 1, 2, 3], 7, "vote"], "step 5, vote")
    assert absent(wait, 0, dict.fromkeys(range(4), here)).startswith("all ranks have come")
    assert "store does not answer" in absent(wait, 0, None)
    lost = answer(6, [[2, 3], 9, "factors"], "step 5, statistics")
    text = absent(wait, 0, {0: here, 1: here, 2: lost})
    assert text == (
        "absent ranks: 2, 3; no sign of life from rank 3 (stopped, gone or cut off); rank 2 "
        "waits in another collective, step 5, statistics for 3 s"
    )


def test_layers_are_counted_where_there_are_many() -> None:
    progress = Progress()
    progress.begin(12)
    progress.at("bases", [f"h.{index}" for index in range(50)])
    assert progress.place == "step 12, bases, layers h.0, h.1, h.2 and 47 more"


def test_a_look_costs_little() -> None:
    """Once a second with the usual timeouts, whatever they are."""
    assert Timing(1440.0).tick == 1.0 and Timing(1440.0).patience == 4.0
    assert Timing(1.0).tick == 0.05

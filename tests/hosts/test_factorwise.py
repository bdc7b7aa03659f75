"""A and G of a layer decomposed on different ranks: the same bits, other ranks' time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests._harness import world
from tests.hosts import promise_jobs as promises
from tests.hosts import strategy_jobs as strategies
from tests.hosts.test_strategies import ALL, HALF, assert_equal, settings
from tests.hosts.topology_jobs import Cell

pytestmark = pytest.mark.dist

FACTOR = {"distribute": "factor"}
CELLS = [
    ("ddp", settings("eigen_adam")),
    ("ddp", settings("natural", solver="cholesky", damping_mode="absolute", damping=0.1)),
    ("ddp", settings("ekfac", **HALF)),
    ("2", settings("natural")),
    ("3", settings("orthogonal")),
]


@pytest.mark.parametrize(("host", "kfac"), CELLS)
def test_who_decomposes_changes_no_bit(host: str, kfac: dict[str, Any]) -> None:
    """Also after failures: the owner counts them and keeps its last good basis."""
    results = {}
    for distribute in ("layer", "factor"):
        cell = Cell(host, {**kfac, "distribute": distribute}, own=True)
        if host == "ddp" and not results:  # its first run in a process adds in another order
            world(4).run(strategies.train, cell)
        results[distribute] = world(4).run(strategies.train, cell, (4, 5, 6), (3,))
    work = {}
    for distribute, found in results.items():
        metrics = [state.pop("metrics") for state in found]
        work[distribute] = [m.pop("decompositions") for m in metrics]
        assert sum(m["failing_blocks"] for m in metrics) == 1
    for layer, factor in zip(results["layer"], results["factor"], strict=True):
        assert_equal(factor, layer)
    assert sum(work["layer"]) == sum(work["factor"])  # P2: every block once
    assert max(work["factor"]) <= max(work["layer"])
    assert sum(count > 0 for count in work["factor"]) == 4  # three layers on four ranks


@pytest.mark.parametrize("more", [{}, ALL])
@pytest.mark.parametrize("stage", ["0", "2"])
def test_bytes_are_those_of_the_plan(stage: str, more: dict[str, Any]) -> None:
    if stage != "0" and more:
        return  # refused there
    for size in (2, 4):
        results = world(size).run(
            strategies.traffic, stage, {"direction": "natural", **FACTOR, **more}
        )
        for step in range(7):
            kinds = [result["ledgers"][step] for result in results]
            assert any("solving" in kind for kind in kinds) == (step % 3 == 0)
            for kind in kinds:
                assert all(entry["bytes"] == entry["planned_bytes"] for entry in kind.values())
        for result in results:
            lengths = [len(log) for log in result["collectives"]]
            assert max(lengths[1:3]) <= 6  # every step captures
            assert "broadcast" not in result["collectives"][0]


def test_resume_is_exact(tmp_path: Path) -> None:
    cell = Cell("ddp", settings("eigen_adam", inv_update_steps=4))
    for straight, resumed in world(4).run(strategies.stopped, cell, 5, str(tmp_path), FACTOR):
        assert_equal(resumed, straight)


@pytest.mark.parametrize("point", ["_prepare", "_lend", "_solve", "_give_back", "_take"])
def test_local_error_reaches_all_ranks(point: str) -> None:
    cell = Cell("0", settings("natural", **FACTOR, inv_update_steps=1), clipping=0.5)
    errors = world(4).run_expecting_errors(promises.local_error, cell, f"factorwise.{point}")
    for error in errors:
        assert error is not None
        assert "rank 1 failed: MemoryError: no memory for statistics" in error.text
    assert errors[0].same_error == errors[1].same_error


def test_all_ranks_stop_together_after_max_failures() -> None:
    """A block that other ranks decompose fails at its owner."""
    cell = Cell("ddp", settings("natural", **FACTOR, max_failures=1, inv_update_steps=1))
    errors = world(4).run_expecting_errors(strategies.train, cell, (1, 2, 3))
    for error in errors:
        assert error is not None
        assert "KFAC-E110 layer first: the decomposition of factor A failed 2 times" in error.text

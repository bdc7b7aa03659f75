"""P2 to P6 and their neighbours, on real hosts."""

from __future__ import annotations

import math

import pytest
import torch

from tests._harness import world
from tests.hosts import counts_table
from tests.hosts import promise_jobs as promises
from tests.hosts import topology_jobs as jobs
from tests.hosts.topology_jobs import Cell

pytestmark = pytest.mark.dist
STAGES = ("0", "1", "2")
INTERVALS = {"factor_update_steps": 1, "inv_update_steps": 2}


@pytest.mark.parametrize("stage", STAGES)
def test_every_block_is_decomposed_once_in_the_whole_job(stage: str) -> None:
    """P2. kfac-pytorch 0.4.1 shipped with every rank inverting every layer, unnoticed."""
    metrics = world(2).run(promises.decompositions, stage)
    blocks = 5 * (2 + 2)  # five layers, 13 columns and 12 rows in blocks of at most 7
    assert sum(m["decompositions"] for m in metrics) == 3 * blocks
    assert all(m["decompositions"] > 0 for m in metrics)
    assert all(m["refreshes"] == 3 and m["captures"] == 5 for m in metrics)


@pytest.mark.parametrize("stage", STAGES)
def test_work_is_done_once_per_optimizer_step(stage: str) -> None:
    """DeepSpeed#8443: ZeRO-3 Muon ran once per micro-batch and changed the optimizer."""
    for metrics in world(2).run(promises.accumulation_counts, stage):
        assert metrics["preconditions"] == metrics["captures"] == metrics["refreshes"] == 2
        assert metrics["steps"] == 2


def test_work_is_done_once_under_zero() -> None:
    """Captures, refreshes, directions, and what is sent; offloaded and in bf16."""
    names = ["ZeRO 3", "ZeRO 2, offload", "ZeRO 3, offload", "ZeRO 1, bf16, fp32 sums"]
    for row in counts_table.zero_rows(names):
        assert row.passed, row


@pytest.mark.parametrize("label", counts_table.PARALLEL)
def test_work_is_done_once_in_every_engine(label: str) -> None:
    """As under ZeRO alone; experts are one group of ranks more."""
    row = counts_table.parallel_row(label, counts_table.PARALLEL[label][1][1])
    assert row.passed and max(row.calls) >= 1, row


@pytest.mark.parametrize("strategy", ["zero_aligned", "memory"])
@pytest.mark.parametrize("stage", STAGES)
def test_ledger_equals_plan_exactly(stage: str, strategy: str) -> None:
    """P3: bytes of every kind, on every rank, are those the plan predicts."""
    for size in (2, 4):
        for result in world(size).run(promises.traffic, stage, 5, "natural", strategy):
            ledger = result["ledger"]
            assert ledger["bytes"] > 0
            for kind, entry in ledger["kinds"].items():
                assert entry["bytes"] == entry["planned_bytes"], (kind, entry)


@pytest.mark.parametrize("stage", ["1", "2"])
def test_aligned_layers_do_not_move(stage: str) -> None:
    """Only layers cut by a partition border travel under zero_aligned."""
    for result in world(2).run(promises.traffic, stage, 5, "orthogonal", "zero_aligned"):
        outside = sum(
            piece.numel
            for name, layout in result["layouts"].items()
            for piece in layout.pieces
            if piece.rank != result["owners"][name.rpartition(".")[0]]
        )
        steps = result["ledger"]["steps"]
        kinds = result["ledger"]["kinds"]
        # Both ranks together send the cut layers' slices out once and back once.
        assert kinds["directions"]["bytes"] <= steps * outside * 4
        cut = [
            name
            for name, layout in result["layouts"].items()
            if len({piece.rank for piece in layout.pieces}) > 1
        ]
        assert len(cut) <= 1  # one border, two ranks


@pytest.mark.parametrize("direction", ["natural", "orthogonal", "ekfac", "eigen_adam"])
@pytest.mark.parametrize("stage", STAGES)
def test_collectives_do_not_grow_with_depth(stage: str, direction: str) -> None:
    """At most five collectives on an ordinary step, however many layers; factors are never
    all-reduced, nothing is broadcast."""
    counts = []
    for depth in (9, 15):
        for result in world(2).run(promises.traffic, stage, depth, direction, "memory"):
            capture, *ordinary = result["collectives"]
            for log in ordinary:
                assert len(log) <= 5, log
            counts.append([len(log) for log in (capture, *ordinary)])
            assert "broadcast" not in capture
            assert len(capture) == len(ordinary[0]) + 1  # one reduce-scatter more
            assert capture.count("all_reduce") == ordinary[0].count("all_reduce")
    assert len({tuple(count) for count in counts}) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("host", ["ddp", *STAGES])
def test_bad_step_leaves_no_trace(host: str, value: float) -> None:
    """P4. One NaN batch made every factor of kfac-pytorch NaN for ever."""
    for dtype in ("fp32",) if host == "ddp" else ("fp32", "bf16"):
        for direction in ("natural", "orthogonal"):
            cell = Cell(host, {"direction": direction, **INTERVALS}, dtype=dtype)
            clean = world(2).run(promises.bad_batches, cell, [], value)
            dirty = world(2).run(promises.bad_batches, cell, [0, 3, 4], value)
            for expected, found in zip(clean, dirty, strict=True):
                assert found["metrics"]["skipped"] == 3
                assert found["metrics"]["steps"] == expected["metrics"]["steps"] == jobs.STEPS
                for name, weight in expected["weights"].items():
                    assert torch.equal(found["weights"][name], weight), name
                for name, pair in expected["factors"].items():
                    for a, b in zip(pair, found["factors"][name], strict=True):
                        assert torch.equal(a, b), name


@pytest.mark.parametrize("host", ["ddp", *STAGES])
def test_raise_on_nonfinite_is_the_same_on_all_ranks(host: str) -> None:
    """P6: the rank with good numbers raises the same text."""
    cell = Cell(host, {"direction": "natural", "on_nonfinite": "raise", **INTERVALS})
    errors = world(2).run_expecting_errors(promises.error_of, cell, 2)
    assert all(error is not None and "KFAC-E102 step 2" in error.text for error in errors)
    assert errors[0].same_error == errors[1].same_error


@pytest.mark.parametrize("host", ["ddp", *STAGES, "3"])
@pytest.mark.parametrize("point", promises.LOCAL_WORK)
def test_local_error_reaches_all_ranks(point: str, host: str) -> None:
    """P6. A gradient buffer that could not be read on one rank left the others waiting for ever."""
    cell = Cell(host, {"direction": "natural", **INTERVALS}, clipping=0.5)
    errors = world(2).run_expecting_errors(promises.local_error, cell, point)
    for error in errors:
        assert error is not None
        assert "rank 1 failed: MemoryError: no memory for statistics" in error.text
    assert errors[0].same_error == errors[1].same_error


def test_packing_error_reaches_all_ranks() -> None:
    """P6, inside the reduction of statistics: the other ranks wait in a reduce-scatter."""
    cell = Cell("ddp", {"direction": "natural", **INTERVALS})
    for error in world(3).run_expecting_errors(promises.packing_error, cell):
        assert error is not None
        assert "rank 1 failed: MemoryError: no memory for statistics" in error.text


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("section", [{"enabled": False}, "detached"])
def test_switched_off_is_bit_identical_to_deepspeed(stage: str, section: object) -> None:
    """R12: enabled=false and detach() both give DeepSpeed's own weights."""
    expected = world(2).run(promises.plain_engine, stage, "absent")[0]
    found = world(2).run(promises.plain_engine, stage, section)[0]
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_means_the_raw_gradient(stage: str) -> None:
    """DeepSpeed#8439: its clipping of 1.0 shrank Muon's steps 4 to 85 times.

    The reported norm is the raw gradient's, and a direction with its own length rule moves
    the weights as far with clipping as without.
    """
    free = world(2).run(promises.norms, stage, 0.0)[0]
    clipped = world(2).run(promises.norms, stage, 1e-3)[0]
    for (reported, true, moved), (_, _, moved_clipped) in zip(free, clipped, strict=True):
        assert math.isclose(reported, true, rel_tol=1e-4)
        assert moved_clipped > 0.5 * moved
    for reported, true, _ in clipped:
        assert math.isclose(reported, true, rel_tol=1e-4)


def test_auxiliary_rate_keeps_its_ratio_under_schedulers() -> None:
    """DeepSpeed's WarmupLR writes one number into every group."""
    rates = world(2).run(promises.scheduled_rates)[0]
    ratio = jobs.AUX_LR / jobs.LR
    assert any(rate > 0 for rate, _ in rates)
    for rate, moved in rates:
        # Adam's first steps have size one: the parameter moves by its rate, and decays.
        assert math.isclose(moved, rate * ratio, rel_tol=0.15, abs_tol=1e-7)

"""Bad gradients of one rank in half precision, accumulated and offloaded."""

from __future__ import annotations

import pytest

from tests._harness import world
from tests.hosts import deepspeed_cells as cells
from tests.hosts import topology_jobs as jobs
from tests.hosts.deepspeed_cells import Report, cell
from tests.hosts.test_deepspeed_precision import ACCUMULATE_FP32, OFFLOAD, dynamic, static
from tests.hosts.topology_jobs import Cell

pytestmark = pytest.mark.dist

BAD = {0: float("nan"), 2: float("inf"), 4: 1e38}  # factors of a loss, by position
BAD_PLACES = [
    *(cell("natural", host, accumulation=2, dtype="fp16", extra=static(64.0)) for host in "0123"),
    cell("natural", "1", accumulation=2, dtype="fp16", extra=dynamic(12)),
    cell("natural", "2", accumulation=2, dtype="fp16", extra={**static(64.0), **ACCUMULATE_FP32}),
    *(
        cell("natural", host, accumulation=2, dtype="fp16", zero=OFFLOAD, extra=dynamic(12))
        for host in "123"
    ),
    *(cell("natural", host, accumulation=2, dtype="bf16") for host in "023"),
    *(cell("natural", host, accumulation=2, dtype="bf16", extra=ACCUMULATE_FP32) for host in "12"),
    *(cell("natural", host, accumulation=2, dtype="bf16", zero=OFFLOAD) for host in "123"),
]


def among_bad_steps(rank: int, size: int, items: list[Cell]) -> list[list[Report]]:
    """Each cell without and with steps that are bad in the last rank's first micro-batch."""
    return [[_among_bad_steps(rank, size, item, bad) for bad in ({}, BAD)] for item in items]


def _among_bad_steps(rank: int, size: int, item: Cell, bad: dict[int, float]) -> Report:
    engine = jobs.make_engine(item, size)
    good = iter(range(jobs.STEPS))
    for position in range(jobs.STEPS + len(bad)):
        step = 0 if position in bad else next(good)
        for index, (x, y, factor) in enumerate(jobs.micro_batches(rank, size, item, step)):
            loss = jobs.loss_sum(engine(x.to(jobs.DTYPES[item.dtype])), y, integers=False) * factor
            if rank == size - 1 and index == 0:
                loss = loss * bad.get(position, 1.0)
            engine.backward(loss)
            engine.step()
        assert engine.was_step_applied() == (position not in bad), (item, position)
    report = Report(
        jobs.full_weights(engine),
        {name: engine.kfac.factors(name) for name in engine.kfac.owners},
        dict(vars(engine.kfac.counters)),
        wrapper=type(engine.optimizer).__name__,
    )
    engine.destroy()
    return report


def test_bad_gradients_of_one_rank_leave_no_trace() -> None:
    """NaN, Inf and overflow in one of two micro-batches, in half precision and offloaded.

    1e38 times a gradient is finite in bf16 and its square is not.
    """
    found = world(2).run(among_bad_steps, BAD_PLACES, isolated=True, timeout=240)
    for item, *reports in zip(BAD_PLACES, *found, strict=True):
        for clean, dirty in reports:
            print(clean.wrapper, item.host, item.dtype, item.extra)
            assert (clean.counters["skipped"], dirty.counters["skipped"]) == (0, len(BAD)), item
            cells.assert_identical(clean, dirty)

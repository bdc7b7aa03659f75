"""P2 as a table: how often work is done per optimizer step under accumulation, by engine.

Run ``python -m tests.hosts.counts_table`` to print it. Two ranks (pipelines: four), four
micro-batches per step, statistics and bases due in every step; the largest count of any rank,
divided by the steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests._harness import close_all, world
from tests.hosts import autotp_jobs, moe_jobs, pipeline_jobs, promise_jobs, ulysses_jobs

STEPS, ACCUMULATION = 2, 4
KFAC = {"direction": "natural", "factor_update_steps": 1, "inv_update_steps": 1}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
COUNTERS = ("captures", "refreshes", "preconditions")
EXCHANGES = ("factors", "gradients", "directions")

# name: (ZeRO stage, dtype, more JSON)
ZERO: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"ZeRO {stage}": (stage, "fp32", {}) for stage in "0123"},
    **{f"ZeRO {stage}, offload": (stage, "fp32", OFFLOAD) for stage in "123"},
    **{f"ZeRO {stage}, bf16": (stage, "bf16", {}) for stage in "0123"},
    "ZeRO 1, bf16, fp32 sums": ("1", "bf16", FP32_SUMS),
}


@dataclass(frozen=True)
class Row:
    """Counts of one engine.

    Attributes:
        engine: Its name.
        micro_batches: Backward passes per optimizer step.
        work: Captures, refreshes and preconditionings per optimizer step.
        calls: Exchanges per optimizer step of sums, gradients and directions.
    """

    engine: str
    micro_batches: int
    work: tuple[float, ...]
    calls: tuple[float, ...]

    @property
    def passed(self) -> bool:
        """Everything once; an exchange not at all where everything is there already.

        Experts are one group more.
        """
        groups = 2 if self.engine.startswith("MoE") else 1
        return self.work == (1.0,) * len(COUNTERS) and max(self.calls) <= groups


def _report(engine: Any) -> dict[str, dict[str, int]]:
    kfac = engine.kfac
    kinds = kfac.ledger()["kinds"]
    counters = vars(kfac.counters)
    assert counters["steps"] == engine.global_steps == STEPS
    report = {
        "work": {name: counters[name] for name in COUNTERS},
        "calls": {name: kinds.get(name, {"calls": 0})["calls"] for name in EXCHANGES},
    }
    engine.destroy()
    return report


def zero(rank: int, size: int, names: list[str]) -> list[Any]:
    """ZeRO in several precisions."""
    reports = []
    for name in names:
        stage, dtype, extra = ZERO[name]
        settings = {"accumulation": ACCUMULATION, "dtype": dtype, "extra": extra}
        engine = promise_jobs.deep_engine(4, stage, size, KFAC, **settings)
        for step in range(STEPS):
            promise_jobs.take_step(engine, rank, step, ACCUMULATION)
        reports.append(_report(engine))
    return reports


def pipeline(rank: int, size: int, stage: int) -> list[Any]:
    """Pipelines of two stages."""
    copies = size // 2
    rows = pipeline_jobs.ROWS // copies // ACCUMULATION
    parts = {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": ACCUMULATION}
    engine = pipeline_jobs.make_engine(
        pipeline_jobs.Cell("tied", 2, stage, KFAC, extra=parts), size
    )
    copy = engine.grid.get_data_parallel_rank()
    for step in range(STEPS):
        x, y = (v.chunk(copies)[copy] for v in pipeline_jobs.batch("tied", step, torch.float32))
        engine.train_batch(data_iter=zip(x.split(rows), y.split(rows), strict=True))
    return [_report(engine)]


def tensor(rank: int, size: int, stage: int) -> list[Any]:
    """AutoTP of degree two."""
    cell = autotp_jobs.Cell(KFAC, stage=stage, accumulation=ACCUMULATION)
    engine = autotp_jobs.make_engine(cell, size)
    for step in range(STEPS):
        autotp_jobs.take_step(engine, cell, size, size, step)
    return [_report(engine)]


def sequences(rank: int, size: int, stage: int) -> list[Any]:
    """Ulysses over two ranks."""
    mpu = ulysses_jobs.start(size)
    engine = ulysses_jobs.make_engine(
        ulysses_jobs.Cell(stage, KFAC, accumulation=ACCUMULATION), mpu, 1
    )
    for step in range(STEPS):
        x, y = (value.chunk(size, dim=1)[rank] for value in ulysses_jobs.batch(step))
        for row in range(ACCUMULATION):
            output = engine(x[row : row + 1])
            engine.backward(ulysses_jobs.loss(output, y[row : row + 1]))
            engine.step()
    return [_report(engine)]


def experts(rank: int, size: int, stage: int) -> list[Any]:
    """Experts over two ranks; two batches of two micro-batches are a step."""
    cell = moe_jobs.Cell(2, 2, stage, KFAC)
    more = {"train_batch_size": size * ACCUMULATION, "gradient_accumulation_steps": ACCUMULATION}
    engine = moe_jobs.make_engine(cell, rank, size, **more)
    for batch in range(STEPS * ACCUMULATION * size // moe_jobs.PARTS):
        moe_jobs.take_step(engine, cell, batch, rank, size)
    return [_report(engine)]


# label: (job, ZeRO stages)
PARALLEL: dict[str, tuple[Callable[..., list[Any]], tuple[int, ...]]] = {
    "pipeline of 2": (pipeline, (0, 1)),
    "AutoTP 2": (tensor, (0, 2)),
    "Ulysses 2": (sequences, (1, 3)),
    "MoE, ep 2": (experts, (0, 2)),
}


def zero_rows(names: list[str]) -> list[Row]:
    """Rows of ``ZERO``."""
    return _rows(names, world(2).run(zero, names, timeout=120))


def parallel_row(label: str, stage: int) -> Row:
    """A row of ``PARALLEL``; DeepSpeed's groups need processes of their own."""
    job, _ = PARALLEL[label]
    stages = job is pipeline  # whose neighbours call different collectives
    by_rank = world(4 if stages else 2).run(
        job, stage, isolated=True, timeout=120, compare_collectives=not stages
    )
    return _rows([f"{label}, ZeRO {stage}"], by_rank)[0]


def _rows(names: list[str], by_rank: list[list[Any]]) -> list[Row]:
    rows = []
    for name, reports in zip(names, zip(*by_rank, strict=True), strict=True):
        work, calls = (
            tuple(max(report[part][key] for report in reports) / STEPS for key in keys)
            for part, keys in (("work", COUNTERS), ("calls", EXCHANGES))
        )
        rows.append(Row(name, ACCUMULATION, work, calls))
    return rows


def format_table(rows: list[Row]) -> str:
    """The table as text."""
    heads = ("micro-batches", *COUNTERS, *(f"{name} sent" for name in EXCHANGES))
    lines = [f"{'per optimizer step':<26}" + "".join(f"{head:>17}" for head in heads)]
    for row in rows:
        values = (row.micro_batches, *row.work, *row.calls)
        verdict = "" if row.passed else "   FAILED"
        lines.append(f"{row.engine:<26}" + "".join(f"{v:>17g}" for v in values) + verdict)
    return "\n".join(lines)


def main() -> int:
    """Print the table; exit code 1 when something is done more than once per step."""
    torch.set_num_threads(1)
    rows = zero_rows(list(ZERO))
    rows += [parallel_row(label, stage) for label in PARALLEL for stage in PARALLEL[label][1]]
    print(format_table(rows))
    close_all()
    return int(not all(row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())

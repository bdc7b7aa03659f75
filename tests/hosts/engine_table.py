"""P1 over DeepSpeed's engines: engine x precision x accumulation x offload x ranks.

Run ``python -m tests.hosts.engine_table`` to print it, with ``--engine AutoTP --engine MoE`` or
``--ranks 2`` a part of it. Cells are the largest relative difference
of a weight to the float64 oracle (fp32), or the error of the weights' movement relative to its
size (half precision; docs/adr/0006), or why the combination is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests._harness import close_all, world
from tests.hosts import (
    deepspeed_cells,
    parallel_rows,
    pipeline_jobs,
    test_deepspeed_pipeline,
    topology_jobs,
)
from tests.hosts import topology_table as table
from tests.hosts.deepspeed_cells import cell
from tests.hosts.engine_rows import PRECISIONS, Choice, Row, attempt
from tests.hosts.topology_jobs import Cell

SIZES = (1, 2, 4)
ACCUMULATIONS = (1, 4)
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
PARAMETERS = {**OFFLOAD, "offload_param": {"device": "cpu", "pin_memory": False}}

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "ZeRO 0": ("0", {}),
    "ZeRO 1": ("1", {}),
    "ZeRO 1, offload": ("1", OFFLOAD),
    "ZeRO 2": ("2", {}),
    "ZeRO 2, offload": ("2", OFFLOAD),
    "ZeRO 3": ("3", {}),
    "ZeRO 3, offload": ("3", OFFLOAD),
    "ZeRO 3, all offload": ("3", PARAMETERS),
}

PIPELINES = {f"pipeline of 2, ZeRO {zero}": zero for zero in (0, 1)}
PIPELINE_PRECISIONS = ("fp32", "bf16", "fp16", "autocast bf16", "autocast fp16")


def outcomes(rank: int, size: int, items: list[Cell]) -> list[dict[str, Tensor] | str]:
    """Weights of each cell, or why its engine does not start."""
    return [
        attempt(lambda item=item: deepspeed_cells.reports(rank, size, [item])[0].weights)
        for item in items
    ]


def measure(size: int, engines: list[str], precisions: Sequence[str]) -> list[Row]:
    """Some precisions and all accumulations of some engines.

    Autocast and fp16 change the process they run in: one isolated job per precision.
    """
    keys = [(engine, acc) for engine in engines for acc in ACCUMULATIONS]
    columns: dict[str, list[float | str]] = {}
    for name in precisions:
        dtype, extra, _ = PRECISIONS[name]
        items = [
            cell(
                "natural",
                ENGINES[engine][0],
                accumulation=acc,
                zero=ENGINES[engine][1],
                dtype=dtype,
                extra=extra,
            )
            for engine, acc in keys
        ]
        found = world(size).run(outcomes, items, isolated=True, timeout=300)[0]
        columns[name] = [_value(outcome, dtype, extra) for outcome in found]
    return [
        Row(engine, size, acc, {name: columns[name][index] for name in precisions})
        for index, (engine, acc) in enumerate(keys)
    ]


def _value(outcome: dict[str, Tensor] | str, dtype: str, extra: dict[str, Any]) -> float | str:
    if isinstance(outcome, str):
        return outcome
    exact = table.oracle("natural")
    if dtype == "fp32" and not extra:
        return deepspeed_cells.difference(outcome, exact)
    torch.manual_seed(7)
    return deepspeed_cells.movement_error(outcome, exact, topology_jobs.Net())


def pipeline_outcome(rank: int, size: int, item: pipeline_jobs.Cell) -> dict[str, Tensor] | str:
    """Weights of this rank's stage, or why its engine does not start."""
    return attempt(lambda: pipeline_jobs.train_cell(rank, size, item)["weights"])


def measure_pipelines(size: int, engines: list[str], precisions: Sequence[str]) -> list[Row]:
    """Pipelines of two stages: three micro-batches per step."""
    base = pipeline_jobs.Cell("holes", 2, 0, test_deepspeed_pipeline.NATURAL)
    model = pipeline_jobs.Whole("holes").double()

    def loss(step: int) -> Tensor:
        x, y = pipeline_jobs.batch("holes", step)
        return 0.5 * (model(x) - y).square().sum() / pipeline_jobs.ROWS

    exact = parallel_rows.oracle(
        model,
        test_deepspeed_pipeline.LAYERS["holes"],
        test_deepspeed_pipeline.NATURAL,
        loss=loss,
        steps=pipeline_jobs.STEPS,
    )
    rows = []
    for engine in engines:
        cells: dict[str, float | str] = {}
        for name in (name for name in PIPELINE_PRECISIONS if name in precisions):
            dtype, extra, _ = PRECISIONS[name]
            item = replace(
                base,
                zero=PIPELINES[engine],
                dtype=dtype,
                extra={**extra, **parallel_rows.WITHOUT_DECAY},
            )
            # Stages send to their neighbours, so that ranks differ in what they call.
            found = world(size).run(
                pipeline_outcome, item, timeout=240, compare_collectives=False, isolated=True
            )
            cells[name] = _of_stages(name, found, exact)
        rows.append(Row(engine, size, pipeline_jobs.MICRO_BATCHES, cells))
    return rows


def _of_stages(
    name: str, found: list[dict[str, Tensor] | str], exact: dict[str, Tensor]
) -> float | str:
    weights: dict[str, Tensor] = {}
    for part in found:
        if isinstance(part, str):
            return part
        weights |= part
    if name == "fp32":
        return deepspeed_cells.difference(weights, exact)
    return deepspeed_cells.movement_error(weights, exact, pipeline_jobs.Whole("holes"))


def format_table(rows: list[Row]) -> str:
    """The table as text, reasons of refusals below it."""
    heads = [*PRECISIONS]
    reasons: list[str] = []
    lines = [
        f"{'engine':<34}{'ranks':>6}{'acc':>5}" + "".join(f"{head:>17}" for head in heads),
    ]
    for row in rows:
        texts = [_text(row.cells.get(head), reasons) for head in heads]
        verdict = "" if row.passed else "   FAILED"
        lines.append(
            f"{row.engine:<34}{row.size:>6}{row.accumulation:>5}"
            + "".join(f"{text:>17}" for text in texts)
            + verdict
        )
    limits = "".join(f"{PRECISIONS[head][2]:>17.0e}" for head in heads)
    lines.append(f"{'allowed':<45}{limits}")
    return "\n".join([*lines, *(f"[{i}] {reason}" for i, reason in enumerate(reasons, 1))])


def _text(value: float | str | None, reasons: list[str]) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}"
    reason = " ".join(value.split())[:200]
    if reason not in reasons:
        reasons.append(reason)
    return f"refused [{reasons.index(reason) + 1}]"


def rows_of(choice: Choice) -> list[Row]:
    """The chosen rows, in the order of the table."""
    rows = []
    for size in choice.sizes:
        if engines := [name for name in ENGINES if choice.wants(name, size)]:
            rows += measure(size, engines, choice.precisions)
        if size > 1 and (engines := [name for name in PIPELINES if choice.wants(name, size)]):
            rows += measure_pipelines(size, engines, choice.precisions)
    return rows + parallel_rows.measure(choice)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 when a cell is out of tolerance, or no row has the name."""
    parser = argparse.ArgumentParser(description="P1 over DeepSpeed's engines.")
    parser.add_argument(
        *("--engine",), action="append", default=[], help="pattern in a row's name; may be repeated"
    )
    parser.add_argument(
        *("--ranks",), action="append", type=int, choices=SIZES, help="may be repeated"
    )
    parser.add_argument(
        *("--precision",), action="append", choices=list(PRECISIONS), help="may be repeated"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = rows_of(
        Choice(
            tuple(options.engine),
            tuple(options.ranks or SIZES),
            tuple(options.precision or PRECISIONS),
        )
    )
    order = {name: index for index, name in enumerate([*ENGINES, *PIPELINES])}
    rows.sort(key=lambda row: (order.get(row.engine, len(order)), row.engine, row.size))
    print("natural: difference to the single-process float64 oracle")
    print(format_table(rows))
    close_all()
    return int(not rows or not all(row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())

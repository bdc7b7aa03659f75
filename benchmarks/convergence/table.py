"""The table of a task: steps and time to a baseline's final loss, and all final losses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.convergence.cells import Record, Results
from benchmarks.convergence.compare import Row, rows
from benchmarks.convergence.cost import read_costs

HEAD = ("optimizer", "hidden / other / warm-up", "steps", "by seed", "step costs", "time", "losses")


def text(table: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---|---|---|---|---|---|---|"]
    for row in table:
        optimizer, options, setting = row.method
        name = _name(optimizer, options)
        shares = ", ".join(
            f"{reach.bound}{reach.steps:.0f}" for _, reach in sorted(row.reaches.items())
        )
        cost = "" if row.cost is None else f"{row.cost.ratio:.2f}"
        time = "" if row.time is None else f"{row.bound}{100 * row.time:.0f} %"
        losses = ", ".join(f"{loss:.4f} @{steps}" for steps, loss in row.losses.items())
        spread = f" ± {100 * row.spread:.1f}" if row.spread else ""
        steps = f"{row.bound}{100 * row.steps:.1f}{spread} %"
        lines.append(f"| {name} | {setting} | {steps} | {shares} | {cost} | {time} | {losses} |")
    return "\n".join(lines)


def tries(records: Sequence[Record]) -> str:
    """A Markdown table of the settings tried, the best first by method and length."""
    lines = ["| optimizer, steps | hidden / other / warm-up | selecting half | reported half |"]
    lines.append("|---|---|---|---|")
    for record in sorted(records, key=_place):
        cell = record.cell
        name = _name(cell.optimizer, cell.options)
        losses = f"{record.select:.4f} | {record.loss:.4f}"
        lines.append(f"| {name}, {cell.steps} | {cell.setting} | {losses} |")
    return "\n".join(lines)


def _name(optimizer: str, options: str) -> str:
    return optimizer if options == "{}" else f"{optimizer} `{options}`"


def _place(record: Record) -> tuple[str, str, int, float]:
    cell = record.cell
    return cell.optimizer, cell.options, cell.steps, record.select


def _records(args: argparse.Namespace) -> list[Record]:
    records = [
        record
        for record in Results(args.results).records.values()
        if record.cell.task == args.task and args.batch in (None, record.cell.batch)
    ]
    sizes = {record.cell.batch for record in records}
    if len(sizes) > 1:
        raise LookupError(f"several batch sizes ({sorted(sizes)}): choose one with --batch")
    return records


def selected(args: argparse.Namespace) -> list[Row]:
    """Rows of the task, batch and seeds that the arguments name.

    Raises:
        LookupError: There are no such runs.
    """
    return rows(
        _records(args),
        read_costs(args.results),
        baseline=args.baseline,
        target_steps=args.target_steps,
        seeds=args.seeds,
    )


def add_arguments(cli: argparse.ArgumentParser) -> None:
    """Arguments that choose rows."""
    cli.add_argument("--baseline", default="adamw", help="whose final loss is the target")
    cli.add_argument("--target-steps", type=int, default=400, help="length of its schedule")
    cli.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])


def add_command(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add ``table`` and ``tries`` to the command line."""
    cli = commands.add_parser("table", parents=[shared], help="steps and time to the target")
    add_arguments(cli)
    cli.set_defaults(command=lambda args: print(text(selected(args))))
    cli = commands.add_parser("tries", parents=[shared], help="settings tried with seed 0")
    cli.set_defaults(command=_print_tries)


def _print_tries(args: argparse.Namespace) -> None:
    print(tries([record for record in _records(args) if record.cell.seed == 0]))

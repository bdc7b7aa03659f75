"""What a step costs in steps of a baseline, on a machine that others use too.

Methods train in turn in one process, block by block, and every block is divided by the baseline's
blocks right before and after it. Processor time, medians over the rounds. A block is as long as the
longest interval of the methods, so that each holds its share of refreshes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence.cells import Cell, Setting
from benchmarks.convergence.tasks import Task
from benchmarks.convergence.train import Trainer

BLOCK = 20
ENDLESS = 10**9
HARMLESS = Setting(1e-3, 1e-3, 0)
"""Rates change no times; these let no method diverge."""


@dataclass(frozen=True)
class Cost:
    """The cost of a method's step.

    Attributes:
        task: Name of the task.
        batch: Batch size.
        baseline: Whose step is the unit.
        optimizer: Whose step is measured.
        options: Its further settings, JSON text.
        ratio: Median over the rounds.
        low: First quartile.
        high: Third quartile.
        unit: Processor seconds of the baseline's step, median.
    """

    task: str
    batch: int
    baseline: str
    optimizer: str
    options: str
    ratio: float
    low: float
    high: float
    unit: float


def costs_path(results: Path) -> Path:
    """Where costs are kept, beside the results."""
    return results.with_suffix(".cost.jsonl")


def read_costs(results: Path) -> dict[tuple[str, int, str, str, str], Cost]:
    """The latest measurements by task, batch, baseline, optimizer and options."""
    path = costs_path(results)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [Cost(**json.loads(line)) for line in lines]
    return {(c.task, c.batch, c.baseline, c.optimizer, c.options): c for c in found}


def measure(
    task: Task, baseline: Cell, others: list[Cell], *, rounds: int, block: int = BLOCK
) -> list[Cost]:
    """Measure methods against a baseline.

    Args:
        task: What all train.
        baseline: Whose step is the unit.
        others: What to measure.
        rounds: Blocks of every method that count; one more warms up.
        block: Steps per block.
    """
    torch.set_num_threads(1)
    first = Trainer(task, baseline)
    trainers = [Trainer(task, cell) for cell in others]
    ratios: list[list[float]] = [[] for _ in others]
    units: list[float] = []
    for done in range(rounds + 1):
        before = _block(first, block)
        # In turn from another start: no method always follows the same one.
        for place in range(len(others)):
            index = (place + done) % len(others)
            seconds = _block(trainers[index], block)
            after = _block(first, block)
            if done > 0:
                ratios[index].append(2 * seconds / (before + after))
                units.append(after / block)
            before = after
    unit = statistics.median(units)
    return [_cost(baseline, cell, r, unit) for cell, r in zip(others, ratios, strict=True)]


def _block(trainer: Trainer, steps: int) -> float:
    return sum(trainer.step()[1] for _ in range(steps))


def _cost(baseline: Cell, cell: Cell, ratios: list[float], unit: float) -> Cost:
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return Cost(
        cell.task, cell.batch, baseline.optimizer, cell.optimizer, cell.options,
        ratio=middle, low=low, high=high, unit=unit,
    )  # fmt: skip


def add_command(
    commands: Any, shared: argparse.ArgumentParser, load: Callable[[argparse.Namespace], Task]
) -> None:
    """Add ``cost`` to the command line.

    Args:
        commands: Where to add it.
        shared: Arguments of all commands.
        load: Makes the task that the arguments name.
    """
    cli = commands.add_parser("cost", parents=[shared], help="processor time of a step, paired")
    cli.add_argument("--baseline", default="adamw")
    cli.add_argument("--optimizers", nargs="+", required=True, metavar="NAME[:JSON]")
    cli.add_argument("--rounds", type=int, default=12)
    cli.set_defaults(command=lambda args: _run(args, load(args)))


def _run(args: argparse.Namespace, task: Task) -> None:
    def cell(text: str) -> Cell:
        name, _, options = text.partition(":")
        size = args.batch or task.batch
        return Cell(task.name, name, HARMLESS, ENDLESS, 0, size, options or "{}")

    others = [cell(text) for text in args.optimizers]
    for cost in measure(task, cell(args.baseline), others, rounds=args.rounds):
        with costs_path(args.results).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(cost)) + "\n")
        print(
            f"{cost.optimizer} {cost.options}: {cost.ratio:.3f} "
            f"({cost.low:.3f}-{cost.high:.3f}) of {cost.baseline} ({cost.unit:.4f} s)",
            flush=True,
        )

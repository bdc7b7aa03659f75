"""The figure of a task: final losses of complete schedules over their steps and their time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence.compare import Row
from benchmarks.convergence.table import add_arguments, selected


def draw(path: Path, table: Sequence[Row], *, baseline: str, title: str) -> None:
    """Write the figure as PNG.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for row in table:
        cost = 1.0 if row.method[0] == baseline else row.cost.ratio if row.cost else None
        label = row.method[0] + ("" if row.method[1] == "{}" else f" {row.method[1]}")
        lengths, losses = list(row.losses), list(row.losses.values())
        panels[0].plot(lengths, losses, marker="o", label=label)
        if cost is not None:
            panels[1].plot([cost * n for n in lengths], losses, marker="o", label=label)
        if row.method[0] == baseline and row.target_steps in row.losses:
            for panel in panels:
                panel.axhline(row.losses[row.target_steps], color="0.6", linestyle="--")
    panels[0].set_xlabel("steps of the complete schedule")
    panels[1].set_xlabel(f"processor time, in steps of {baseline}")
    panels[0].set_ylabel("final loss, mean over the seeds")
    panels[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _run(args: argparse.Namespace) -> None:
    out = args.out or args.results.with_name(f"{args.results.stem}-{args.task}.png")
    draw(out, selected(args), baseline=args.baseline, title=args.task)
    print(f"written to {out}")


def add_command(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add ``plot`` to the command line."""
    cli = commands.add_parser("plot", parents=[shared], help="final losses over steps and time")
    add_arguments(cli)
    cli.add_argument("--out", type=Path, help="PNG file (beside the results)")
    cli.set_defaults(command=_run)

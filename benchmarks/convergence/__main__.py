r"""Command line of the convergence benchmarks.

    python -m benchmarks.convergence tune --optimizer adamw --steps 400 --start 4e-3 8e-3 80
    python -m benchmarks.convergence run --optimizer adamw --steps 400 --seeds 1 2 3
    python -m benchmarks.convergence cost --optimizers kfac muon soap
    python -m benchmarks.convergence table
    python -m benchmarks.convergence tries
    python -m benchmarks.convergence plot

Every finished run is one line of ``--results``; a command that was interrupted computes what is
missing when it is started again. ``--text NAME=PATH`` adds a text, ``--task`` chooses one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.convergence import cost, plot, table
from benchmarks.convergence.cells import Cell, Results, Setting
from benchmarks.convergence.images import ImageTask
from benchmarks.convergence.optimizers import BUILDERS
from benchmarks.convergence.search import GRIDS, search
from benchmarks.convergence.tasks import Task, TextTask
from benchmarks.convergence.train import run_cell
from launch.data import DataError

STDLIB = "stdlib"
UNTUNED = Setting(0.0, 0.0, 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    args = parser().parse_args(arguments)
    try:
        command: Callable[[argparse.Namespace], None] = args.command
        command(args)
    except (DataError, ImportError, LookupError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    cli = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--results", type=Path, default=Path("runs/convergence.jsonl"))
    shared.add_argument("--task", default=STDLIB, help="stdlib, fashion-mnist, mnist-5k, or a NAME")
    shared.add_argument("--text", metavar="NAME=PATH", action="append", default=[])
    shared.add_argument("--batch", type=int, help="sequences or images per step")
    commands = cli.add_subparsers(required=True)
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("--optimizer", choices=sorted(BUILDERS), required=True)
    one.add_argument("--options", default="{}", help="JSON of further settings of the optimizer")
    tune = commands.add_parser("tune", parents=[shared, one], help="search a setting, seed 0")
    tune.add_argument("--steps", type=int, required=True)
    tune.add_argument("--start", nargs=3, type=float, required=True, metavar=("LR", "AUX", "WARM"))
    tune.set_defaults(command=_tune)
    run = commands.add_parser("run", parents=[shared, one], help="run a tuned setting")
    run.add_argument("--steps", type=int, nargs="+", required=True)
    run.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    run.add_argument("--setting", nargs=3, type=float, metavar=("LR", "AUX", "WARM"))
    run.add_argument("--tuned-on", metavar="TASK", help="take the setting found on another task")
    run.set_defaults(command=_run)
    cost.add_command(commands, shared, lambda args: _task(args))
    table.add_command(commands, shared)
    plot.add_command(commands, shared)
    return cli


def _task(args: argparse.Namespace) -> Task:
    texts: dict[str, str] = dict(given.split("=", 1) for given in args.text)
    if args.task in texts:
        return TextTask(args.task, Path(texts[args.task]))
    if args.task == STDLIB:
        return TextTask(STDLIB)
    return ImageTask(args.task)


def _cell(args: argparse.Namespace, task: Task, steps: int, seed: int) -> Cell:
    batch = args.batch or task.batch
    return Cell(args.task, args.optimizer, UNTUNED, steps, seed, batch, args.options)


def _setting(values: Sequence[float]) -> Setting:
    return Setting(values[0], values[1], int(values[2]))


def _once(results: Results, task: Task, cell: Cell) -> float:
    if cell not in results.records:
        begin = time.perf_counter()
        record = run_cell(task, cell)
        results.add(record)
        print(
            f"{cell.task} {cell.optimizer} {cell.options} {cell.setting} x{cell.steps} "
            f"seed {cell.seed}: {record.select:.4f} {record.loss:.4f} "
            f"({record.cpu:.0f} s, {time.perf_counter() - begin:.0f} s wall)",
            flush=True,
        )
    return results.records[cell].select


def _tune(args: argparse.Namespace) -> None:
    task, results = _task(args), Results(args.results)
    cell, grid = _cell(args, task, args.steps, seed=0), GRIDS[task.kind]

    def loss(setting: Setting) -> float:
        return _once(results, task, replace(cell, setting=setting))

    best = search(grid, _setting(args.start), loss)
    edges = grid.edges(best)
    print(f"best: {best}" + (f" (edge of the grid: {', '.join(edges)})" if edges else ""))


def _run(args: argparse.Namespace) -> None:
    task, results = _task(args), Results(args.results)
    for seed in args.seeds:
        for steps in args.steps:
            cell = _cell(args, task, steps, seed)
            if args.setting:
                setting = _setting(args.setting)
            else:
                setting = results.best(replace(cell, task=args.tuned_on or args.task))
            _once(results, task, replace(cell, setting=setting))


if __name__ == "__main__":
    sys.exit(main())

r"""How K-FAC's extra time scales with ranks, width and tokens.

    python benchmarks/scaling.py

Method and unit are those of ``step_cost.py``: shares of an AdamW step on the same model, tokens and
ranks, measured around every block. One number is varied at a time, from a base of one rank, width
128 and 2048 tokens per rank. Ranks share the machine's cores, one each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Started as a script, Python looks for modules beside this file instead of in the checkout.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from benchmarks import tables  # noqa: E402
from benchmarks.amortised import COLUMNS, rows  # noqa: E402
from benchmarks.parts import CLOCKS, PARTS  # noqa: E402
from benchmarks.ranks import Ranks, start  # noqa: E402
from benchmarks.step_cost import Meter, measure  # noqa: E402
from benchmarks.systems import build  # noqa: E402
from launch.data import Batches, DataError, load_text  # noqa: E402
from launch.model import GPTConfig  # noqa: E402

LAYERS = 2
INTERVALS = (10, 10)
"""Between captures and between refreshes: the defaults."""


@dataclass(frozen=True)
class Point:
    """One configuration.

    Attributes:
        ranks: Processes.
        width: Of the model.
        tokens: Per rank and step.
    """

    ranks: int = 1
    width: int = 128
    tokens: int = 2048


@dataclass
class Job:
    """What every rank measures, and where the first one writes its line."""

    point: Point
    system: str
    rounds: int
    seq_len: int
    text: torch.Tensor
    result: Path


def points(args: argparse.Namespace) -> list[Point]:
    """The base and its variations."""
    base = Point(args.ranks[0], args.widths[0], args.tokens[0])
    varied = [replace(base, ranks=n) for n in args.ranks[1:]]
    varied += [replace(base, width=n) for n in args.widths[1:]]
    varied += [replace(base, tokens=n) for n in args.tokens[1:]]
    return [base, *varied]


def measure_point(ranks: Ranks, job: Job) -> None:
    """Measure one configuration; the first rank writes parts of a step to the result file."""
    torch.set_num_threads(1)
    point = job.point
    sizes = GPTConfig(
        seq_len=job.seq_len, layers=LAYERS, width=point.width, heads=max(1, point.width // 32)
    )
    built = build(sizes, kfac_pytorch=None, distributed=ranks.size > 1)
    systems = [built[0], *(system for system in built[1:] if system.name == job.system)]
    sequences = point.tokens // job.seq_len * ranks.size
    meter = Meter(CLOCKS["cpu"], Batches(job.text, job.seq_len, sequences, seed=0), ranks)
    samples, _ = measure(systems, meter, rounds=job.rounds, say=lambda text: None)
    (row,) = rows(samples, [INTERVALS])
    if ranks.rank == 0:
        job.result.write_text(",".join(repr(row.parts[name]) for name in COLUMNS))


def parser() -> argparse.ArgumentParser:
    """Return the command line of the script."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("ranks", [1, 2]), ("widths", [128, 64, 256]), ("tokens", [2048, 512])):
        text = " ".join(map(str, default))
        cli.add_argument(
            f"--{name}", type=int, nargs="+", default=default, help=f"base first ({text})"
        )
    cli.add_argument("--system", default="ds_kfac natural cholesky", help="as in step_cost.py")
    cli.add_argument("--rounds", type=int, default=3, help="measured blocks (3)")
    cli.add_argument("--seq-len", type=int, default=128, help="bytes per sequence (128)")
    cli.add_argument("--text", type=Path, help="file or folder (the standard library's sources)")
    cli.add_argument("--out", type=Path, default=Path("runs/scaling"), help="output folder")
    cli.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    return cli


def run(args: argparse.Namespace) -> None:
    """Measure all points and show them.

    Raises:
        DataError: The text or the number of tokens cannot be used.
        ValueError: There is no such system.
    """
    text = load_text(args.text)
    text.require(args.seq_len)
    if any(number % args.seq_len for number in args.tokens):
        raise DataError(f"--tokens have to be multiples of --seq-len {args.seq_len}")
    names = [system.name for system in build(GPTConfig(8, 8, 1, 8, 1), kfac_pytorch=None)[1:]]
    if args.system not in names:
        raise ValueError(f"--system {args.system!r} is none of {', '.join(names)}")
    lines = [["ranks, width, tokens", *PARTS, "all parts"]]
    values: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "parts"
        for point in points(args):
            job = Job(point, args.system, args.rounds, args.seq_len, text.train, result)
            start(measure_point, job, point.ranks)
            found = dict(zip(COLUMNS, map(float, result.read_text().split(",")), strict=True))
            label = f"{point.ranks}, {point.width}, {point.tokens}"
            values[label] = {name: found[name] for name in PARTS}
            cells = [*values[label].values(), sum(values[label].values())]
            lines.append([label, *(f"{share:.3f}" for share in cells)])
            print(label, file=sys.stderr, flush=True)
    tables.publish(
        args.out,
        "scaling",
        lines,
        values,
        markdown=args.markdown,
        title=f"{args.system}, statistics and bases every {INTERVALS[0]} steps, {LAYERS} layers",
        label="of an AdamW step",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    try:
        run(parser().parse_args(arguments))
    except (DataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

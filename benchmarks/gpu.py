r"""What a K-FAC step costs on a GPU, at the layer sizes of GPT-125M and GPT-1.3B, in bf16.

    python benchmarks/gpu.py --kfac-pytorch PATH --markdown

Blocks of the transformer are alike, so that a few of them tell the shares of all. Systems and
method are those of ``step_cost.py``; times are device times between CUDA events, read after each
step. Besides the table over AdamW, the stages are shown in milliseconds each time they are due.
Without a GPU there is nothing to measure: it says so and ends well. ``--device cpu --size tiny``
takes the same way through the code.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Started as a script, Python looks for modules beside this file instead of in the checkout.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from benchmarks import bars  # noqa: E402
from benchmarks.amortised import Row, Sample, rows, table_text, verdict, write_csv  # noqa: E402
from benchmarks.parts import PARTS  # noqa: E402
from benchmarks.step_cost import Meter, measure  # noqa: E402
from benchmarks.systems import BASELINE, DS_KFAC, PEER, build, import_kfac_pytorch  # noqa: E402
from ds_kfac.telemetry.clock import Clock, Mark  # noqa: E402
from launch.data import Batches, DataError, load_text  # noqa: E402
from launch.model import GPTConfig  # noqa: E402

SIZES = {
    # Width and heads of the models; 4 of 12 and 2 of 24 blocks.
    "125m": (GPTConfig(seq_len=1024, layers=4, width=768, heads=12), 8192),
    "1.3b": (GPTConfig(seq_len=1024, layers=2, width=2048, heads=16), 8192),
    "tiny": (GPTConfig(seq_len=8, layers=1, width=8, heads=1), 16),
}
"""Model and tokens per step, by name."""


def parser() -> argparse.ArgumentParser:
    """Return the command line of the script."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--kfac-pytorch", type=Path, metavar="PATH", help="checkout to compare with")
    cli.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu (cuda)")
    cli.add_argument(
        "--size", nargs="+", choices=sorted(SIZES), default=["125m", "1.3b"], help="models"
    )
    cli.add_argument("--only", nargs="+", metavar="TEXT", help="systems with one of these in them")
    cli.add_argument("--rounds", type=int, default=5, help="measured blocks per system (5)")
    cli.add_argument("--seconds", type=float, default=240, help="no round begins later (240)")
    cli.add_argument("--text", type=Path, help="file or folder (the standard library's sources)")
    cli.add_argument("--out", type=Path, default=Path("runs/gpu"), help="output folder")
    cli.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    return cli


def run(args: argparse.Namespace) -> int:
    """Measure size by size.

    Raises:
        DataError: The text cannot be used.
        ImportError: There is no kfac-pytorch at the given path.
        ValueError: ``--only`` names no system, or a number is too small.
    """
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "no GPU here (torch.cuda.is_available() is false): nothing measured. Run this where "
            "there is one, or try the code with --device cpu --size tiny"
        )
        return 0
    if args.rounds < 1:
        raise ValueError("--rounds has to be 1 or more")
    if args.kfac_pytorch is not None:
        import_kfac_pytorch(args.kfac_pytorch)
    args.out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    print(f"{name}, torch {torch.__version__}, bf16 weights and gradients, fp32 factors")
    begin = time.monotonic()
    for number, size in enumerate(args.size, start=1):
        deadline = begin + args.seconds * number / len(args.size)
        _measure_size(args, size, device, deadline)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"written to {args.out}")
    return 0


def _measure_size(
    args: argparse.Namespace, size: str, device: torch.device, deadline: float
) -> None:
    sizes, tokens = SIZES[size]
    text = load_text(args.text)
    text.require(sizes.seq_len)
    systems = build(sizes, kfac_pytorch=args.kfac_pytorch, device=device, dtype=torch.bfloat16)
    if args.only:
        systems[1:] = [s for s in systems[1:] if any(text in s.name for text in args.only)]
    if len(systems) == 1:
        raise ValueError(f"--only {' '.join(args.only)} names no system")
    clock = Clock(device)

    def elapsed(end: Mark, start: Mark) -> float:
        return clock.nanoseconds(start, end) / 1e9

    batches = Batches(text.train, sizes.seq_len, tokens // sizes.seq_len, seed=0)
    meter = Meter(clock.mark, batches, elapsed=elapsed, device=device)
    samples, seconds = measure(
        systems,
        meter,
        rounds=args.rounds,
        say=lambda text: print(f"{size}: {text}", file=sys.stderr, flush=True),
        deadline=deadline,
    )
    _report(args, size, samples, seconds)


def _report(
    args: argparse.Namespace, size: str, samples: dict[str, list[Sample]], seconds: float
) -> None:
    sizes, tokens = SIZES[size]
    table = rows(samples)
    cycles = min(len(cycles) for cycles in samples.values())
    title = f"{size}: {sizes.layers} blocks of width {sizes.width}, {tokens} tokens per step"
    print(f"\n{title}; {cycles} cycles per system, medians")
    print(f"unit: one {BASELINE} step, {1e3 * seconds:.3g} ms\n")
    print(table_text(table, markdown=args.markdown) + "\n")
    print(stages_text(rows(samples, [(1, 1)]), 1e3 * seconds, markdown=args.markdown) + "\n")
    if DS_KFAC in samples:
        print(verdict(table, DS_KFAC, PEER))
    write_csv(args.out / f"{size}.csv", table)
    if importlib.util.find_spec("matplotlib") is not None:
        bars.draw(args.out / f"{size}.png", table, title=title)


def stages_text(table: Sequence[Row], milliseconds: float, *, markdown: bool) -> str:
    """Milliseconds of each stage each time that it is due.

    Args:
        table: Rows at intervals of one step.
        milliseconds: Of an AdamW step, their unit.
        markdown: With pipes.
    """
    lines = [["ms when due", *PARTS]]
    lines += [
        [row.system, *(f"{row.parts[part] * milliseconds:.3g}" for part in PARTS)] for row in table
    ]
    if markdown:
        lines.insert(1, ["---", *["---:"] * len(PARTS)])
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    width = max(len(line[0]) for line in lines)
    return "\n".join(
        line[0].ljust(width) + "".join(cell.rjust(12) for cell in line[1:]) for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    try:
        return run(parser().parse_args(arguments))
    except (DataError, ImportError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

r"""How long the steps of a refresh interval take, with bases computed at once and beside training.

    python benchmarks/background_inverse.py

Both systems train the same model on the same tokens in one process, interval by interval in turn.
Every step captures, so that the steps of an interval differ by the refresh alone: it begins at
step 0 of the interval; computed beside training, its result is used from the middle on. Wall time,
medians over all intervals. A second core has to be idle.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Started as a script, Python looks for modules beside this file instead of in the checkout.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

import ds_kfac  # noqa: E402
from benchmarks.systems import SKIPPED, System  # noqa: E402
from launch.data import Batches, load_text  # noqa: E402
from launch.model import GPT, GPTConfig  # noqa: E402

GOAL = 1.15
Intervals = list[list[float]]
"""Seconds of every step of every interval."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description="Refresh at once and beside training.")
    result.add_argument("--text", type=Path, help="file or folder (standard library)")
    result.add_argument("--layers", type=int, default=6)
    result.add_argument("--width", type=int, default=128)
    result.add_argument("--seq-len", type=int, default=128)
    result.add_argument("--tokens", type=int, default=2048, help="per step")
    result.add_argument("--interval", type=int, default=10, help="steps between refreshes")
    result.add_argument("--rounds", type=int, default=12, help="intervals per system")
    result.add_argument("--solver", choices=("eigen", "cholesky"), default="eigen")
    result.add_argument("--threads", type=int, default=1, help="torch threads of either side")
    return result


def build(args: argparse.Namespace) -> dict[str, System]:
    """The same model twice."""
    sizes = GPTConfig(
        seq_len=args.seq_len,
        layers=args.layers,
        width=args.width,
        heads=max(1, args.width // 32),
    )
    systems = {}
    for name, background in (("at once", False), ("beside training", True)):
        torch.manual_seed(0)
        model = GPT(sizes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        section = {
            "direction": "natural",
            "solver": args.solver,
            "factor_update_steps": 1,
            "inv_update_steps": args.interval,
            "background_inverse": background,
            "skip_layers": [SKIPPED],
        }
        ds_kfac.attach(model, optimizer, section)
        systems[name] = System(name, model, optimizer)
    return systems


def measure(
    systems: dict[str, System], batches: Batches, args: argparse.Namespace
) -> dict[str, Intervals]:
    """Train all systems in turn; the first intervals warm up and are not counted."""
    seconds: dict[str, Intervals] = {name: [] for name in systems}
    for round_ in range(args.rounds + 1):
        for name, system in systems.items():
            steps = []
            for step in range(args.interval):
                number = round_ * args.interval + step
                inputs, targets = next(batches.micro_batches(number, rank=0, world=1, count=1))
                start = time.perf_counter()
                system.step(inputs, targets)
                steps.append(time.perf_counter() - start)
            if round_:
                seconds[name].append(steps)
    return seconds


def neighbours_ratio(intervals: Intervals) -> float:
    """Median of a refresh step over the mean of the steps right before and after it."""
    flat = [seconds for steps in intervals for seconds in steps]
    length = len(intervals[0])
    return statistics.median(
        2 * flat[i] / (flat[i - 1] + flat[i + 1]) for i in range(length, len(flat), length)
    )


def table(seconds: dict[str, Intervals]) -> str:
    """Steps of the interval by system, in units of the median step that works on no refresh."""
    plain = statistics.median(s for steps in seconds["at once"] for s in steps[1:])
    length = len(seconds["at once"][0])
    head = ["step of the interval", *map(str, range(length)), "mean"]
    lines = [head]
    for name, intervals in seconds.items():
        medians = [
            statistics.median(steps[i] for steps in intervals) / plain for i in range(length)
        ]
        lines.append([name, *(f"{m:.2f}" for m in (*medians, statistics.fmean(medians)))])
    rule = ["---", *["---:"] * (len(head) - 1)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))
    return f"unit: a step without a refresh, {plain:.3f} s\n\n{text}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    args = parser().parse_args(arguments)
    if args.interval < 3 or args.rounds < 2:
        print("error: --interval has to be 3 or more, --rounds 2 or more", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)
    batches = Batches(load_text(args.text).train, args.seq_len, args.tokens // args.seq_len, seed=0)
    seconds = measure(build(args), batches, args)
    print(
        f"{args.layers} layers of width {args.width}, {args.tokens} tokens per step, "
        f"{args.solver}, {args.threads} thread(s), {args.rounds} intervals; wall time, medians"
    )
    print(table(seconds) + "\n")
    for name, intervals in seconds.items():
        print(f"refresh step over its neighbours, {name}: {neighbours_ratio(intervals):.2f}")
    print(f"goal beside training: at most {GOAL}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

r"""What a K-FAC step costs, in AdamW steps on the same model and the same tokens.

    python benchmarks/step_cost.py --out runs/step_cost --kfac-pytorch PATH

All systems are trained in one process, block by block in turn, so that noise of the machine hits
all of them alike. Each block is measured in units of the AdamW steps right before and after it.
Steps that only precondition, steps that also capture and steps that also refresh are measured
apart and put together for every pair of intervals; every number is a median over all blocks.

With ``--ranks N`` the systems train under DistributedDataParallel in N processes (gloo), each with
its own ``--tokens``. Times are then means over the ranks; processor time counts the threads of the
collectives of every system alike.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import operator
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Started as a script, Python looks for modules beside this file instead of in the checkout.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import bars  # noqa: E402
from benchmarks.amortised import INTERVALS, Sample, rows, table_text, verdict, write_csv  # noqa: E402
from benchmarks.parts import CLOCKS, PartTimer  # noqa: E402
from benchmarks.ranks import WALL, Ranks, rank_key, start  # noqa: E402
from benchmarks.systems import (  # noqa: E402
    BASELINE,
    CYCLE,
    DS_KFAC,
    PEER,
    System,
    build,
    import_kfac_pytorch,
)
from launch.data import Batches, DataError, load_text  # noqa: E402
from launch.model import GPTConfig  # noqa: E402

BASELINE_STEPS = 3
"""AdamW steps between two blocks."""

Measured = dict[str, float]


class Meter:
    """Measures steps.

    Args:
        clock: Returns marks, plain seconds by default.
        batches: Where every system's step n gets its tokens.
        ranks: Who trains together.
        elapsed: Seconds from the second mark to the first.
        device: Where the models are.
    """

    def __init__(
        self,
        clock: Callable[[], Any],
        batches: Batches,
        ranks: Ranks | None = None,
        *,
        elapsed: Callable[[Any, Any], float] = operator.sub,
        device: torch.device | None = None,
    ) -> None:
        self._clock = clock
        self._elapsed = elapsed
        self._batches = batches
        self._ranks = ranks or Ranks()
        self._device = device
        self._timer = PartTimer(clock, elapsed)

    def cycle(self, system: System, first: int, count: int) -> list[Measured]:
        """Measure consecutive steps of a system.

        Args:
            system: What to measure.
            first: Number of its first step, which chooses the tokens.
            count: How many steps.

        Returns:
            Seconds of each step, of all ranks together: ``total``, every part, ``wall``, and
            the total of each rank.
        """
        result = []
        with self._timer.installed(system.functions):
            for step in range(first, first + count):
                inputs, targets = self._tokens(step)
                self._timer.reset()
                wall, start = time.perf_counter(), self._clock()
                system.step(inputs, targets)
                total = self._elapsed(self._clock(), start)  # waits for a device
                times = {"total": total, WALL: time.perf_counter() - wall}
                result.append({**times, **self._timer.seconds})
        return self._ranks.together(result)

    def _tokens(self, step: int) -> tuple[Tensor, Tensor]:
        rank, world = self._ranks.rank, self._ranks.size
        inputs, targets = next(self._batches.micro_batches(step, rank=rank, world=world, count=1))
        return inputs.to(self._device), targets.to(self._device)


def cycle_sample(cycle: list[Measured], unit: Measured) -> Sample:
    """One block as costs in AdamW steps.

    Args:
        cycle: Seconds of the steps of a cycle.
        unit: Seconds of an AdamW step: ``total`` and ``wall``, which counts for wall times.
    """

    def mean(kind: str) -> dict[str, float]:
        steps = [step for step, found in zip(cycle, CYCLE, strict=True) if found == kind]
        return {
            key: statistics.fmean(s[key] for s in steps) / unit[WALL if key == WALL else "total"]
            for key in steps[0]
        }

    return Sample(mean("plain"), mean("capture"), mean("refresh"))


def measure(
    systems: list[System],
    meter: Meter,
    *,
    rounds: int,
    say: Callable[[str], None],
    deadline: float = math.inf,
) -> tuple[dict[str, list[Sample]], float]:
    """Run all systems in turn.

    Args:
        systems: AdamW first.
        meter: Measures steps.
        rounds: Blocks of every system that count; one more warms up.
        say: Shows progress.
        deadline: Time of ``time.monotonic()`` after which no further round begins.

    Returns:
        Samples by system, and the median of all AdamW steps in seconds.
    """
    baseline, *others = systems
    samples: dict[str, list[Sample]] = {system.name: [] for system in others}
    seconds: list[float] = []
    steps = _counter(BASELINE_STEPS)
    for round_index in range(rounds + 1):
        before = meter.cycle(baseline, next(steps), BASELINE_STEPS)
        # In turn from another start: no system always follows the same one.
        shift = round_index % max(1, len(others))
        for system in (*others[shift:], *others[:shift]):
            cycle = meter.cycle(system, round_index * len(CYCLE), len(CYCLE))
            after = meter.cycle(baseline, next(steps), BASELINE_STEPS)
            around = (*before, *after)
            if round_index > 0:
                unit = {k: statistics.median(s[k] for s in around) for k in ("total", WALL)}
                samples[system.name].append(cycle_sample(cycle, unit))
                seconds += [step["total"] for step in around]
            before = after
        say(f"round {round_index} of {rounds}" + (" (warm-up)" if round_index == 0 else ""))
        if round_index > 0 and time.monotonic() > deadline:
            break
    return samples, statistics.median(seconds)


def _counter(stride: int) -> Iterator[int]:
    first = 0
    while True:
        yield first
        first += stride


def parser() -> argparse.ArgumentParser:
    """Return the command line of the script."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = GPTConfig()
    cli.add_argument("--kfac-pytorch", type=Path, metavar="PATH", help="checkout to compare with")
    for name, default, text in (
        ("width", sizes.width, "model dimension"),
        ("layers", sizes.layers, "transformer blocks"),
        ("seq-len", sizes.seq_len, "bytes per sequence"),
        ("tokens", 2048, "per step"),
        ("rounds", 12, "measured blocks per system"),
        ("threads", 1, "of torch"),
        ("ranks", 1, "processes"),
    ):
        cli.add_argument(f"--{name}", type=_positive, default=default, help=f"{text} ({default})")
    cli.add_argument(
        "--only", nargs="+", metavar="TEXT", help="systems whose names contain one of these"
    )
    cli.add_argument("--clock", choices=sorted(CLOCKS), default="cpu", help="time taken (cpu)")
    cli.add_argument("--text", type=Path, help="file or folder (the standard library's sources)")
    cli.add_argument("--out", type=Path, default=Path("runs/step_cost"), help="output folder")
    cli.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    return cli


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return number


@dataclass
class Job:
    """What every rank measures.

    Attributes:
        args: The command line.
        sizes: Of the model.
        text: Training bytes.
    """

    args: argparse.Namespace
    sizes: GPTConfig
    text: Tensor


def run(args: argparse.Namespace) -> int:
    """Measure, print, write.

    Raises:
        DataError: The text or the number of tokens cannot be used.
        ImportError: There is no kfac-pytorch at the given path.
        ValueError: The sizes of the model do not fit.
    """
    heads = max(1, args.width // 32)
    sizes = GPTConfig(seq_len=args.seq_len, layers=args.layers, width=args.width, heads=heads)
    if args.tokens % args.seq_len:
        raise DataError(f"--tokens {args.tokens} is no multiple of --seq-len {args.seq_len}")
    text = load_text(args.text)
    text.require(args.seq_len)
    if args.kfac_pytorch is not None:
        import_kfac_pytorch(args.kfac_pytorch)
    start(measure_and_report, Job(args, sizes, text.train), args.ranks)
    return 0


def measure_and_report(ranks: Ranks, job: Job) -> None:
    """Measure on one rank; the first one reports."""
    args = job.args
    torch.set_num_threads(args.threads)
    sequences = args.tokens // args.seq_len * ranks.size
    batches = Batches(job.text, args.seq_len, sequences, seed=0)
    systems = build(job.sizes, kfac_pytorch=args.kfac_pytorch, distributed=ranks.size > 1)
    if args.only:
        systems[1:] = [s for s in systems[1:] if any(text in s.name for text in args.only)]
    if len(systems) == 1:
        raise ValueError(f"--only {' '.join(args.only)} names no system")
    meter = Meter(CLOCKS[args.clock], batches, ranks)
    samples, seconds = measure(systems, meter, rounds=args.rounds, say=_progress(ranks))
    if ranks.rank == 0:
        numel = sum(p.numel() for p in systems[0].model.parameters())
        report(job, samples, seconds, numel=numel)


def _progress(ranks: Ranks) -> Callable[[str], None]:
    def say(text: str) -> None:
        if ranks.rank == 0:
            print(text, file=sys.stderr, flush=True)

    return say


def report(job: Job, samples: dict[str, list[Sample]], seconds: float, *, numel: int) -> None:
    """Print the table and the comparison, write CSV and PNG."""
    args, table = job.args, rows(samples)
    title = (
        f"{job.sizes.layers} layers of width {job.sizes.width} ({numel:,} parameters), "
        f"{args.tokens} tokens per step" + (f" and rank, {args.ranks} ranks" * (args.ranks > 1))
    )
    print(f"{title}; {args.clock} time, {args.threads} thread(s), {args.rounds} cycles per system")
    print(f"unit: one {BASELINE} step, {seconds:.3f} s; medians\n")
    print(table_text(table, markdown=args.markdown) + "\n")
    if DS_KFAC in samples:
        print(verdict(table, DS_KFAC, PEER))
    others = [(a, b) for b in samples if "pytorch" in b for a in samples if "pytorch" not in a]
    for ours, theirs in others:
        if (ours, theirs) != (DS_KFAC, PEER):
            print(f"  {verdict(table, ours, theirs)}")
    if args.ranks > 1:
        print("steps at (10,100) rank by rank:")
        for name, cycles in samples.items():
            print(f"  {name}: " + ", ".join(_rank_totals(cycles, args.ranks)))
    args.out.mkdir(parents=True, exist_ok=True)
    write_csv(args.out / "step_cost.csv", table)
    if importlib.util.find_spec("matplotlib") is None:
        print("PNG: not drawn, matplotlib is missing (pip install matplotlib)")
    else:
        bars.draw(args.out / "step_cost.png", table, title=title)
    print(f"written to {args.out}")


def _rank_totals(cycles: list[Sample], size: int) -> list[str]:
    means = [cycle.at(*INTERVALS[-1]) for cycle in cycles]
    keys = [rank_key(rank) for rank in range(size)]
    return [f"{statistics.median(mean[key] for mean in means):.2f}" for key in keys]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    try:
        return run(parser().parse_args(arguments))
    except (DataError, ImportError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

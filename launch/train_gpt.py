r"""Train a byte-level GPT from a DeepSpeed JSON, with K-FAC or any other optimizer.

On two ranks, on CPU and GPU alike:

    deepspeed --num_gpus 2 launch/train_gpt.py --deepspeed \
        --deepspeed_config configs/zero2_kfac.json

`--compare` also trains the tuned AdamW baseline and tells which of the two got further.
"""

import argparse
import importlib.util
import logging
import os
import socket
import sys
import warnings
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Started as a script, Python looks for modules beside this file instead of in the checkout.
    sys.path[0] = str(ROOT)

from launch import cpu  # noqa: E402

cpu.prepare_environment()

import deepspeed  # noqa: E402

from launch import data, loop, plots, report  # noqa: E402
from launch.model import GPT, GPTConfig  # noqa: E402

HEAD_WIDTH = 32
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def parser() -> argparse.ArgumentParser:
    """Return the command line of the script."""
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--steps", type=_positive, default=400, help="steps of the schedule (400)")
    cli.add_argument("--seq-len", type=_positive, default=128, help="bytes per sequence (128)")
    cli.add_argument("--layers", type=_positive, default=6, help="transformer blocks (6)")
    cli.add_argument("--width", type=_positive, default=128, help="model dimension (128)")
    cli.add_argument("--text", type=Path, help="file or folder (the standard library's sources)")
    cli.add_argument("--seed", type=int, default=0, help="of the weights and the batches (0)")
    cli.add_argument(
        "--warmup-steps",
        type=_positive,
        help="(train_gpt.warmup_steps of the JSON, else 40; at most half of the steps)",
    )
    cli.add_argument("--eval-every", type=_positive, default=50, help="steps (50)")
    cli.add_argument(
        "--eval-sequences", type=_positive, default=512, help="in the final validation (512)"
    )
    cli.add_argument("--out", type=Path, help="output folder (runs/NAME_OF_THE_JSON)")
    cli.add_argument("--compare", action="store_true", help="train the AdamW baseline first")
    cli.add_argument(
        "--compare-fraction",
        type=_fraction,
        default=0.6,
        help="share of the baseline's steps that the compared run gets (0.6)",
    )
    cli.add_argument(
        "--baseline-config",
        type=Path,
        default=ROOT / "configs" / "zero2_adamw.json",
        help="DeepSpeed JSON of the baseline (configs/zero2_adamw.json)",
    )
    cli.add_argument(
        "--require", action="store_true", help="exit with 1 if --compare's verdict is negative"
    )
    cli.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    deepspeed.add_config_arguments(cli)
    return cli


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return number


def _fraction(value: str) -> float:
    number = float(value)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {value}")
    return number


def _heads(width: int) -> int:
    """Heads of at least HEAD_WIDTH dimensions (one for a narrower model) that divide the width."""
    most = max(1, width // HEAD_WIDTH)
    return next(heads for heads in range(most, 0, -1) if width % heads == 0)


def start_processes() -> None:
    """Join the launcher's process group, or form one of a single process without a launcher."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # Renamed collectives that DeepSpeed still calls by their old names: nothing to act on here.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    cpu.disable_native_operators()
    deepspeed.init_distributed(timeout=COLLECTIVE_TIMEOUT)


def run(args: argparse.Namespace) -> list[report.RunLog]:
    """Train what the command line asks for: the baseline if compared, then the given JSON.

    Raises:
        DataError: the text cannot be used.
        ConfigError: a configuration file cannot be used.
    """
    if args.deepspeed_config is None:
        raise loop.ConfigError("give a DeepSpeed JSON with --deepspeed_config")
    heads = _heads(args.width)
    sizes = GPTConfig(seq_len=args.seq_len, layers=args.layers, width=args.width, heads=heads)
    recipe = loop.Recipe.read(Path(args.deepspeed_config))
    plan = [("K-FAC" if args.compare else recipe.path.stem, recipe, args.steps)]
    if args.compare:
        shorter = max(1, round(args.steps * args.compare_fraction))
        baseline = loop.Recipe.read(args.baseline_config)
        plan = [("AdamW", baseline, args.steps), ("K-FAC", recipe, shorter)]
    text = data.load_text(args.text)
    text.require(args.seq_len)
    settings = loop.Settings(
        seed=args.seed,
        warmup_override=args.warmup_steps,
        eval_every=args.eval_every,
        eval_sequences=args.eval_sequences,
    )
    start_processes()
    say(f"text: {text.description}")
    parameters = sum(p.numel() for p in GPT(sizes).parameters())
    say(f"model: {parameters:,} parameters, {sizes.layers} layers of width {sizes.width}")
    runs = []
    for name, chosen, steps in plan:
        trainer = loop.Trainer(name, chosen, sizes=sizes, text=text, steps=steps, settings=settings)
        runs.append(trainer.train())
        say(f"{name}: final validation loss {runs[-1].final_loss:.4f}")
    return runs


def write(runs: list[report.RunLog], folder: Path) -> None:
    """Write CSV and PNG and print the closing lines; rank 0 only."""
    folder.mkdir(parents=True, exist_ok=True)
    table, picture = folder / "loss.csv", folder / "loss.png"
    report.write_csv(table, runs)
    say(f"CSV: {table}")
    if importlib.util.find_spec("matplotlib") is None:
        say("PNG: not drawn, matplotlib is missing (pip install matplotlib)")
    else:
        plots.draw(picture, runs, title=" against ".join(run.name for run in reversed(runs)))
        say(f"PNG: {picture}")
    say(runs[-1].coverage)
    if len(runs) == 2:
        say(report.comparison(*runs))


def say(message: str) -> None:
    """Print on rank 0."""
    if deepspeed.comm.get_rank() == 0:
        print(message, flush=True)


def main() -> int:
    """Run the script; returns the exit code."""
    args = parser().parse_args()
    try:
        runs = run(args)
    except (data.DataError, loop.ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if deepspeed.comm.get_rank() == 0:
        write(runs, args.out or Path("runs") / Path(args.deepspeed_config).stem)
    # Rank 0 still draws when the others are done: a rank that tears its connections down alone
    # has been seen to abort at exit.
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()
    failed = args.require and len(runs) == 2 and not report.reached(*runs)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

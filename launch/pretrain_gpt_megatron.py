r"""Pretrain a byte-level GPT of megatron-core, with K-FAC (`--kfac`) or without.

On two ranks, on CPU (gloo) and GPUs (NCCL) alike:

    torchrun --nproc-per-node 2 launch/pretrain_gpt_megatron.py @configs/megatron_tp2.args
"""

import argparse
import importlib.util
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Started as a script, Python looks for modules beside this file instead of in the checkout.
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from ds_kfac.errors import KFACError  # noqa: E402
from launch import data, megatron_arguments, report  # noqa: E402

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def start_processes() -> None:
    """Join torchrun's process group; without torchrun, form one of a single process."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    accelerated = torch.cuda.is_available()
    if accelerated:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from launch import megatron_cpu

        megatron_cpu.install()
    torch.distributed.init_process_group(
        "nccl" if accelerated else "gloo", timeout=COLLECTIVE_TIMEOUT
    )


def run(args: argparse.Namespace) -> report.RunLog:
    """Train what the command line asks for.

    Raises:
        data.DataError: The text cannot be used.
        KFACError: K-FAC cannot work with what was asked for.
    """
    text = data.load_text(args.text)
    text.require(args.seq_length)
    start_processes()
    from launch import megatron_gpt
    from launch.megatron_training import Trainer

    megatron_gpt.start(args)
    say(f"text: {text.description}")
    sizes = ("tensor", "pipeline")
    layout = ", ".join(f"{k} {getattr(args, f'{k}_model_parallel_size')}" for k in sizes)
    say(f"layout: {torch.distributed.get_world_size()} rank(s), {layout}")
    log = Trainer(args, text, say).train()
    say(f"{log.name}: final validation loss {log.final_loss:.4f}")
    return log


def say(message: str) -> None:
    """Print on rank 0."""
    if torch.distributed.get_rank() == 0:
        print(message, flush=True)


def write(log: report.RunLog, folder: Path, baseline: report.RunLog | None) -> None:
    """Write CSV and PNG and print the closing lines; rank 0 only."""
    folder.mkdir(parents=True, exist_ok=True)
    table, picture = folder / "loss.csv", folder / "loss.png"
    report.write_csv(table, [log])
    print(f"CSV: {table}")
    runs = [log] if baseline is None else [baseline, log]
    if importlib.util.find_spec("matplotlib") is None:
        print("PNG: not drawn, matplotlib is missing (pip install matplotlib)")
    else:
        from launch import plots

        plots.draw(picture, runs, title=" against ".join(run.name for run in reversed(runs)))
        print(f"PNG: {picture}")
    print(log.coverage)
    if baseline is not None:
        print(report.comparison(baseline, log), flush=True)


def main() -> int:
    """Run the script; returns the exit code."""
    args = megatron_arguments.parse()
    try:
        baseline = None if args.compare_with is None else report.read_csv(args.compare_with)
        log = run(args)
    except (data.DataError, report.TableError, KFACError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if torch.distributed.get_rank() == 0:
        write(log, args.out, baseline)
    # Ranks leave together: one that tears its connections down alone may abort the others.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

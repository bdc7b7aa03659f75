"""Command line of launch/pretrain_gpt_megatron.py; names are Megatron-LM's where it has one."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from ds_kfac.errors import KFACError
from ds_kfac.hosts import megatron_arguments as kfac_flags


class _Parser(argparse.ArgumentParser):
    """`@file` holds arguments as on a command line: several on a line, `#` starts a comment."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)


def parser() -> argparse.ArgumentParser:
    """Return the command line of the script."""
    cli = _Parser(
        description="Pretrain a byte-level GPT of megatron-core, with or without K-FAC.",
        epilog="Arguments may come from files: @configs/megatron_tp2.args",
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    _model(cli)
    _parallel(cli)
    _training(cli)
    _optimizer(cli)
    _output(cli)
    kfac_flags.add_arguments(cli)
    return cli


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check; a problem ends the process with code 2.

    Args:
        words: The command line; by default the process's own.
    """
    cli = parser()
    args = cli.parse_args(words)
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        cli.error("--sequence-parallel needs --tensor-model-parallel-size of 2 or more")
    if args.num_layers % args.pipeline_model_parallel_size:
        cli.error(
            f"--num-layers {args.num_layers} is not a multiple of "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}"
        )
    if args.overlap_param_gather and not args.use_distributed_optimizer:
        cli.error("--overlap-param-gather needs --use-distributed-optimizer")
    if args.use_distributed_optimizer and args.optimizer != "adam":
        cli.error(
            f"--use-distributed-optimizer works with --optimizer adam only, not {args.optimizer}"
        )
    try:
        kfac_flags.settings(args)
    except KFACError as error:
        cli.error(str(error))
    if args.optimizer == "kfac" and not args.kfac:
        cli.error("--optimizer kfac applies K-FAC's directions as they are: it needs --kfac")
    return args


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return number


def _model(cli: argparse.ArgumentParser) -> None:
    group = cli.add_argument_group("model")
    group.add_argument("--num-layers", type=_positive, default=4, help="transformer layers (4)")
    group.add_argument("--hidden-size", type=_positive, default=128, help="width (128)")
    group.add_argument("--num-attention-heads", type=_positive, default=4, help="heads (4)")
    group.add_argument("--seq-length", type=_positive, default=128, help="bytes (128)")
    group.add_argument(
        "--swiglu", action="store_true", help="gated MLP, RMSNorm, no biases, rotary positions"
    )
    group.add_argument(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="a weight of its own for the output layer",
    )
    group.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        default="local",
        help="layers of megatron-core alone, or NVIDIA's Transformer Engine (local)",
    )


def _parallel(cli: argparse.ArgumentParser) -> None:
    group = cli.add_argument_group("parallel layout")
    group.add_argument("--tensor-model-parallel-size", type=_positive, default=1, metavar="N")
    group.add_argument("--pipeline-model-parallel-size", type=_positive, default=1, metavar="N")
    group.add_argument("--sequence-parallel", action="store_true", help="beside tensor parallelism")
    group.add_argument(
        "--use-distributed-optimizer",
        action="store_true",
        help="shard the optimizer over the data-parallel ranks",
    )
    group.add_argument(
        "--overlap-grad-reduce", action="store_true", help="reduce during the backward pass"
    )
    group.add_argument(
        "--overlap-param-gather", action="store_true", help="gather during the forward pass"
    )


def _training(cli: argparse.ArgumentParser) -> None:
    group = cli.add_argument_group("training")
    group.add_argument("--text", type=Path, help="file or folder (the standard library's sources)")
    group.add_argument("--train-iters", type=_positive, default=200, help="steps (200)")
    group.add_argument(
        "--micro-batch-size", type=_positive, default=8, metavar="N", help="sequences (8)"
    )
    group.add_argument(
        "--global-batch-size",
        type=_positive,
        default=16,
        metavar="N",
        help="sequences per step over all ranks; the rest is accumulated (16)",
    )
    group.add_argument("--seed", type=int, default=1234, help="of weights and batches (1234)")
    precision = group.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true")
    precision.add_argument("--fp16", action="store_true", help="with a dynamic loss scale")
    group.add_argument("--hidden-dropout", type=float, default=0.0, metavar="P", help="(0)")
    group.add_argument("--attention-dropout", type=float, default=0.0, metavar="P", help="(0)")
    group.add_argument(
        "--recompute-activations", action="store_true", help="whole layers in the backward pass"
    )


def _optimizer(cli: argparse.ArgumentParser) -> None:
    group = cli.add_argument_group("optimizer")
    group.add_argument(
        "--optimizer",
        choices=("adam", "sgd", "kfac"),
        default="adam",
        help="adam and sgd consume K-FAC's directions as gradients; kfac applies them as they are "
        "to the matrices of the layers, and Adam to everything else (adam)",
    )
    group.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (0.002)")
    group.add_argument("--min-lr", type=float, default=0.0, help="at the end (0)")
    group.add_argument(
        "--decoupled-lr", type=float, metavar="LR", help="of embeddings and output layer (--lr)"
    )
    group.add_argument(
        "--lr-warmup-iters", type=int, default=20, metavar="N", help="at most half of the run (20)"
    )
    group.add_argument(
        "--lr-decay-style", choices=("constant", "linear", "cosine"), default="cosine"
    )
    group.add_argument("--weight-decay", type=float, default=0.01, metavar="W", help="(0.01)")
    group.add_argument(
        "--clip-grad", type=float, default=1.0, metavar="NORM", help="0 is off (1.0)"
    )
    group.add_argument("--adam-beta1", type=float, default=0.9, metavar="B", help="(0.9)")
    group.add_argument("--adam-beta2", type=float, default=0.95, metavar="B", help="(0.95)")


def _output(cli: argparse.ArgumentParser) -> None:
    group = cli.add_argument_group("output and checkpoints")
    group.add_argument("--name", help="of the run in tables and plots (K-FAC or the optimizer)")
    group.add_argument("--out", type=Path, default=Path("runs/megatron"), help="(runs/megatron)")
    group.add_argument("--eval-interval", type=_positive, default=50, metavar="N", help="(50)")
    group.add_argument(
        "--eval-sequences", type=_positive, default=256, metavar="N", help="in validation (256)"
    )
    group.add_argument(
        "--compare-with", type=Path, metavar="CSV", help="loss.csv of a run to draw beside this one"
    )
    group.add_argument("--save", type=Path, metavar="DIR", help="write checkpoints here")
    group.add_argument("--save-interval", type=_positive, metavar="N", help="(at the end only)")
    group.add_argument("--load", type=Path, metavar="DIR", help="resume from here, if it has any")
    group.add_argument(
        "--exit-interval", type=_positive, metavar="N", help="stop (and save) at this iteration"
    )

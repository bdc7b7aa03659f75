"""Arguments of ``ds-kfac plan``; apart from the rest, which needs torch."""

from __future__ import annotations

import argparse
import math
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--dims",
        nargs="+",
        metavar="INxOUTxCOUNT",
        help="linear layers: inputs, outputs, how many (default 1); +bias if they have one",
    )
    source.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="function that builds the model (on meta)"
    )
    source.add_argument(
        "--hf-config", type=Path, metavar="FILE", help="config.json of a Hugging Face model"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="DeepSpeed JSON with K-FAC's settings"
    )
    parser.add_argument("--ranks", type=_count, required=True, help="data-parallel ranks")
    parser.add_argument(
        "--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage (default: the JSON's, or 0)"
    )
    parser.add_argument(
        "--tokens-per-rank", type=_count, help="rows each layer sees per rank and step"
    )
    parser.add_argument("--flops", type=_rate, help="FLOP/s that matrix products reach on a rank")
    parser.add_argument("--bandwidth", type=_rate, help="bytes/s that a rank sends")
    parser.add_argument("--owners", action="store_true", help="list the owner of every layer")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory, bytes and times")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number >= 1")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number > 0")
    return value

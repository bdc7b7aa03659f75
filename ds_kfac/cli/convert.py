"""``ds-kfac convert``: a saved state for another number of tensor ranks."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint")
    parser.add_argument("new", type=Path, help="folder to write; the state goes to NEW/kfac")
    parser.add_argument(
        "--tensor-ranks",
        type=int,
        default=1,
        metavar="N",
        help='ranks of tensor_parallel "block"; 1 (the default) gives whole layers, for "exact" '
        "at any degree and for runs without tensor parallelism",
    )


def report(options: argparse.Namespace) -> str:
    """Convert.

    Args:
        options: From :func:`add_arguments`.

    Returns:
        One line that says what was done.

    Raises:
        StateError: The state is damaged, cannot be converted (E303), or there is one in the new
            folder already (E307).
    """
    from ds_kfac.checkpoint import convert
    from ds_kfac.checkpoint.reader import read_layers, read_manifest
    from ds_kfac.cli.inspect import locate

    folder = locate(options.checkpoint)
    manifest = read_manifest(folder)
    assert manifest is not None
    layers = read_layers(folder, manifest, [layer.name for layer in manifest.layers])
    tensor, converted = convert.convert(manifest, layers, options.tensor_ranks)
    target = options.new / "kfac"
    convert.write(target, manifest, tensor, converted)
    was, now = (
        str(layout) if layout is not None and layout.mode == "block" else "whole layers"
        for layout in (manifest.tensor, tensor)
    )
    return f"{target}: {len(converted)} layers, {was} -> {now}; bases are recomputed at load\n"

"""``ds-kfac convert``: a saved state for another number of tensor ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ds_kfac.errors import StateError

if TYPE_CHECKING:
    from torch import Tensor

    from ds_kfac.checkpoint.manifest import Manifest, StoredTensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, also of Megatron's")
    parser.add_argument(
        "new",
        type=Path,
        help="folder to write; the state goes to NEW/kfac. Of a checkpoint of Megatron give its "
        "own iter_ folder: what is in its kfac goes before what is in its files",
    )
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

    manifest, layers = _read(options.checkpoint)
    target = options.new / "kfac"
    was = manifest.tensor
    ranks = was.ranks if was is not None and was.mode == "block" else 1
    if ranks == options.tensor_ranks:
        convert.rewrite(target, manifest, layers)
        return f"{target}: {len(layers)} layers as they were, {_words(was)}\n"
    tensor, converted = convert.convert(manifest, layers, options.tensor_ranks)
    convert.write(target, manifest, tensor, converted)
    return (
        f"{target}: {len(converted)} layers, {_words(was)} -> {_words(tensor)}; bases are "
        "recomputed at load\n"
    )


def _words(layout: StoredTensor | None) -> str:
    return str(layout) if layout is not None and layout.mode == "block" else "whole layers"


def _read(path: Path) -> tuple[Manifest, dict[str, dict[str, Tensor]]]:
    """A state beside a checkpoint, or else in the files of one of Megatron's."""
    from ds_kfac.checkpoint.reader import read_layers, read_manifest
    from ds_kfac.cli.inspect import locate
    from ds_kfac.hosts import megatron_files

    try:
        folder = locate(path)
    except StateError:
        checkpoint = megatron_files.locate(path)
        if checkpoint is None:
            raise
        return megatron_files.read(checkpoint)
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest, read_layers(folder, manifest, [layer.name for layer in manifest.layers])

"""K-FAC state in the files of a ``torch_dist`` checkpoint, read without Megatron or processes.

The names of what is stored are those that :mod:`ds_kfac.hosts.megatron_checkpoint` gives. The
checkpoint's own index is a pickle of torch: read files of a source that you trust, as when
Megatron loads them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ds_kfac.checkpoint.manifest import Manifest, parse
from ds_kfac.errors import StateError

KEY = "ds_kfac"
"""Entry of the optimizer's state, and first part of all names in a checkpoint."""

MANIFEST = f"{KEY}/manifest"
NUMBER = ":0d"
"""Ends the name of an entry without dimensions, which is saved with one."""

TRACKER = "latest_checkpointed_iteration.txt"
"""Names the latest iteration of a folder of checkpoints."""


def locate(path: Path) -> Path | None:
    """The folder of a ``torch_dist`` checkpoint.

    Args:
        path: That folder, or one that has checkpoints of several iterations.

    Returns:
        None where there is no such checkpoint.
    """
    candidates = [path]
    tracker = path / TRACKER
    if tracker.is_file():
        words = tracker.read_text(encoding="utf-8").strip()
        candidates.append(path / (f"iter_{int(words):07d}" if words.isdecimal() else words))
    return next((folder for folder in candidates if (folder / ".metadata").is_file()), None)


def read(folder: Path) -> tuple[Manifest, dict[str, dict[str, Tensor]]]:
    """Manifest and entries of all layers.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        StateError: It cannot be read (E301), or has no K-FAC state (E304).
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    try:
        known = reader.read_metadata().state_dict_metadata
        tensors = {
            key: torch.empty(found.size, dtype=found.properties.dtype)
            for key, found in known.items()
            if key.startswith(f"{KEY}/") and isinstance(found, TensorStorageMetadata)
        }
        if MANIFEST not in tensors:
            raise StateError("E304", f"no K-FAC state in the checkpoint {folder}")
        with warnings.catch_warnings():  # one process is what is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(tensors), storage_reader=reader, no_dist=True)
    except (OSError, RuntimeError, ValueError, CheckpointException) as error:
        raise StateError("E301", f"{folder} cannot be read: {error}") from error
    manifest = parse(bytes(tensors.pop(MANIFEST).numpy()), f"K-FAC's state in {folder}")
    layers: dict[str, dict[str, Tensor]] = {layer.name: {} for layer in manifest.layers}
    for key, value in tensors.items():
        layer, _, entry = key.removeprefix(f"{KEY}/").rpartition("/")
        if layer in layers:
            layers[layer][entry] = value
    return manifest, {name: plain(entries) for name, entries in layers.items()}


def plain(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries under the names and with the shapes that they had in the state."""
    return {
        name.removesuffix(NUMBER): value.reshape(()) if name.endswith(NUMBER) else value
        for name, value in entries.items()
    }

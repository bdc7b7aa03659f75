"""Write a state: every rank its tensors, then one manifest that makes them a checkpoint.

Files have names that no earlier save used, and nothing refers to them until the manifest is
replaced, in one move. Whatever happens before leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_kfac import __version__
from ds_kfac.checkpoint import disk
from ds_kfac.checkpoint.manifest import FILE, FILE_PATTERN, Manifest, StoredFile, StoredLayer
from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.vote import together
from ds_kfac.errors import KFACError, StateError
from ds_kfac.layers.spec import LayerSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Contents:
    """What one rank has to save.

    Attributes:
        layers: State of each owned layer by name.
        specs: The owned layers.
        counters: This rank's counts.
        header: The manifest's fields that are the same on all ranks.
    """

    layers: Mapping[str, Mapping[str, Any]]
    specs: Sequence[LayerSpec]
    counters: Mapping[str, int]
    header: Mapping[str, Any]


def write(folder: Path, contents: Contents, communicator: Communicator, *, leads: bool) -> str:
    """Save. A collective over all ranks of the model.

    Args:
        folder: Folder of the checkpoint, which may hold an earlier one.
        contents: This rank's share.
        communicator: All ranks of the model.
        leads: This rank writes the manifest: one of all, or one per node whose disk is its own.

    Returns:
        The save's id, the same on all ranks.

    Raises:
        StateError: Some rank could not write (E307), on all ranks; the earlier checkpoint stays.
    """
    save_id: str = communicator.gather_objects(secrets.token_hex(8))[0]
    step = contents.header["step"]
    path = folder / f"step{step}-{save_id}-rank{communicator.rank:05d}.safetensors"
    try:
        stored = _share(communicator, folder, lambda: _write_tensors(path, contents))
        everyone = communicator.gather_objects((stored, contents.specs, dict(contents.counters)))
        manifest = _share(communicator, folder, lambda: manifest_of(save_id, everyone, contents))
    except KFACError:
        disk.remove(path)
        raise
    if not leads:
        _share(communicator, folder, _nothing)
    else:
        _share(communicator, folder, lambda: _publish(folder, manifest))
    return save_id


def _write_tensors(path: Path, contents: Contents) -> StoredFile | None:
    """A rank without layers has no file."""
    disk.make_folder(path.parent)
    if not contents.layers:
        return None
    tensors: dict[str, Tensor] = {}
    for layer, state in contents.layers.items():
        for key, value in state.items():
            tensors[f"{layer}/{key}"] = torch.as_tensor(value)
    size, sha256 = disk.write_tensors(path, tensors)
    return StoredFile(name=path.name, bytes=size, sha256=sha256)


def manifest_of(save_id: str, everyone: Sequence[Any], contents: Contents) -> Manifest:
    """The manifest of a save.

    Args:
        save_id: The save's id.
        everyone: Of each rank its file (None if it has no layers), specs and counters.
        contents: This rank's share, for what is the same on all ranks.
    """
    files: list[StoredFile] = []
    layers: list[StoredLayer] = []
    for stored, specs, _ in everyone:
        if stored is not None:
            layers += [StoredLayer.of(spec, len(files)) for spec in specs]
            files.append(stored)
    return Manifest(
        save_id=save_id,
        library=__version__,
        counters=[counters for _, _, counters in everyone],
        files=files,
        layers=layers,
        **contents.header,
    )


def _publish(folder: Path, manifest: Manifest) -> None:
    disk.write_atomically(folder / FILE, manifest.dump())
    current = {file.name for file in manifest.files}
    for path in sorted(folder.iterdir()):  # of the checkpoint replaced, and of saves that failed
        if re.fullmatch(FILE_PATTERN, path.name) and path.name not in current:
            disk.remove(path)


def _nothing() -> None:
    """What ranks that do not lead have to do while one does."""


def _share(communicator: Communicator, folder: Path, work: Callable[[], T]) -> T:
    """Local work on all ranks; a failure becomes the same error everywhere."""

    def named() -> T:
        try:
            return work()
        except KFACError:
            raise
        except Exception as error:
            raise StateError(
                "E307",
                f"K-FAC state was not saved to {folder}: rank {communicator.rank}: "
                f"{type(error).__name__}: {error}",
            ) from error

    return together(communicator, named)

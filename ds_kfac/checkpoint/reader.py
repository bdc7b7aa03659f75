"""Find, verify and read a saved state; nothing that is in use is touched.

A rank reads the layers it owns now from whichever files have them, so that the number of ranks
may differ from that of the save. Of every file it needs it checks size and hash first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from torch import Tensor

from ds_kfac.checkpoint import disk
from ds_kfac.checkpoint.manifest import (
    FILE,
    MAX_BYTES,
    Manifest,
    StoredFile,
    StoredLayer,
    checksum,
    parse,
)
from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.vote import together
from ds_kfac.errors import StateError
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.restore import refuse


def find(folder: Path | None, communicator: Communicator) -> Manifest | None:
    """The manifest of a folder. A collective over all ranks of the model.

    Args:
        folder: The folder; None where this rank knows of none.
        communicator: All ranks of the model.

    Returns:
        None where there is no complete checkpoint.

    Raises:
        StateError: The manifest cannot be used (E301, E306, E308), or ranks do not see the same
            one (E301); on all ranks.
    """
    manifest = together(communicator, lambda: read_manifest(folder))
    mine = "none" if manifest is None else checksum(manifest.model_dump(mode="json"))[:16]
    seen = communicator.gather_objects((str(folder), mine))
    if len({text for _, text in seen}) > 1:
        listed = "; ".join(f"rank {i}: {text} in {path}" for i, (path, text) in enumerate(seen))
        raise StateError("E301", f"ranks see different manifests ({listed}): is the folder shared?")
    return manifest


def check_model(manifest: Manifest, specs: Sequence[LayerSpec], communicator: Communicator) -> None:
    """Compare a checkpoint's layers with the model's. A collective.

    Args:
        manifest: The checkpoint.
        specs: Layers of this rank's model or pipeline stage.
        communicator: All ranks of the model.

    Raises:
        StateError: Layers are missing, unknown or of other dims (E302), by name, on all ranks.
    """
    described = communicator.gather_objects([StoredLayer.of(spec) for spec in specs])
    refuse(manifest.misfits({layer.name: layer for part in described for layer in part}))


def read_layers(
    folder: Path, manifest: Manifest, names: Collection[str]
) -> dict[str, dict[str, Tensor]]:
    """Entries of some layers, on the host; local.

    Args:
        folder: Folder of the checkpoint.
        manifest: Its manifest.
        names: Layers to read.

    Raises:
        StateError: A file is missing or damaged (E301), or is no plain file (E306).
    """
    wanted = {layer.name: layer.file for layer in manifest.layers if layer.name in names}
    result: dict[str, dict[str, Tensor]] = {name: {} for name in wanted}
    for index in sorted(set(wanted.values())):
        path = folder / manifest.files[index].name
        _verify(path, manifest.files[index])
        keys, tensors = disk.read_tensors(path, lambda key: _layer_of(key) in wanted)
        found = {_layer_of(key) for key in keys}
        listed = {layer.name for layer in manifest.layers if layer.file == index}
        if found != listed:
            odd = ", ".join(sorted(found ^ listed)[:5])
            raise StateError("E306", f"{path} does not have the layers of its manifest: {odd}")
        for key, value in tensors.items():
            result[_layer_of(key)][key.rpartition("/")[2]] = value
    return result


def _layer_of(key: str) -> str:
    return key.rpartition("/")[0]


def read_manifest(folder: Path | None) -> Manifest | None:
    """The manifest of a folder as this process sees it; None where there is none.

    Raises:
        StateError: It cannot be used (E301, E306, E308).
    """
    if folder is None:
        return None
    path = folder / FILE
    try:
        data = disk.read_bytes(path, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError("E301", f"{path} cannot be read: {error}") from error
    return parse(data, str(path))


def _verify(path: Path, file: StoredFile) -> None:
    try:
        size, sha256 = disk.digest(path)
    except OSError as error:
        raise StateError("E301", f"{path} cannot be read: {error.strerror}") from error
    if size != file.bytes:
        word = "short" if size < file.bytes else "too long"
        raise StateError("E301", f"{path} is {abs(size - file.bytes)} bytes {word}")
    if sha256 != file.sha256:
        raise StateError("E301", f"{path} is damaged: its sha256 differs")

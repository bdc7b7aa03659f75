"""Files of a checkpoint: written durably, read without trust."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from torch import Tensor

from ds_kfac.errors import StateError

_CHUNK = 1 << 22


def tick(operation: str, path: Path) -> None:
    """Passed before every change on disk. Does nothing: tests make things go wrong here."""


def make_folder(path: Path) -> None:
    """Create a folder and its parents, if there is none."""
    tick("make folder", path)
    path.mkdir(parents=True, exist_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a safetensors file and force it to disk.

    Args:
        path: A name that no reader knows yet.
        tensors: Any device.

    Returns:
        Size in bytes and sha256 of what was written.
    """
    from safetensors.torch import save_file

    tick("write tensors", path)
    path.touch(exist_ok=False)
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)
    path.chmod(mode)  # the library makes files for their owner alone
    tick("flush tensors", path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return digest(path)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file: readers find the old content or the new one, also after a crash."""
    part = path.with_name(path.name + ".part")
    tick("open", part)
    with part.open("wb") as file:
        tick("write", part)
        file.write(data)
        tick("flush", part)
        file.flush()
        os.fsync(file.fileno())
    # The new content refers to files beside it: their names have to be on disk before it is.
    flush_folder(path.parent)
    tick("replace", path)
    part.replace(path)
    flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Force a folder's entries to disk."""
    tick("flush folder", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file if it can be removed."""
    with suppress(OSError):
        tick("remove", path)
        path.unlink()


def digest(path: Path) -> tuple[int, str]:
    """Size and sha256 of a regular file.

    Raises:
        StateError: A link, a pipe or anything else (E306).
        OSError: It cannot be read.
    """
    result, size = hashlib.sha256(), 0
    with _regular(path) as file:
        while chunk := file.read(_CHUNK):
            result.update(chunk)
            size += len(chunk)
    return size, result.hexdigest()


def read_bytes(path: Path, limit: int) -> bytes:
    """Content of a small regular file.

    Raises:
        StateError: It is larger than ``limit``, or not a regular file (E306).
        OSError: It cannot be read.
    """
    with _regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise StateError("E306", f"{path} is larger than {limit} bytes")
    return data


def read_tensors(path: Path, wanted: Callable[[str], bool]) -> tuple[list[str], dict[str, Tensor]]:
    """Names of all tensors in a safetensors file, and some of the tensors, on the host.

    Args:
        path: The file.
        wanted: Says of a name whether its tensor is asked for.

    Raises:
        StateError: It is not a valid safetensors file (E301).
    """
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            return names, {name: file.get_tensor(name) for name in names if wanted(name)}
    except Exception as error:  # whatever its content makes of the library
        raise StateError("E301", f"{path} is not a valid safetensors file: {error}") from error


@contextmanager
def _regular(path: Path) -> Iterator[IO[bytes]]:
    # Not blocking: opening a pipe would wait for somebody to write into it.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise StateError("E306", f"{path} is a symbolic link; copy the file") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise StateError("E306", f"{path} is not a regular file")
        yield file

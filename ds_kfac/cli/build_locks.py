"""Lock files of operator builds that were killed: whoever builds next waits for them for ever."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def extensions_folder() -> Path:
    """Where torch, and DeepSpeed through it, compiles operators."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    kind = "cpu"
    if torch.version.hip is not None:
        kind = f"rocm{torch.version.hip.replace('.', '')}"
    elif torch.version.cuda is not None:
        kind = f"cu{torch.version.cuda.replace('.', '')}"
    abi = getattr(sys, "abiflags", "")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{abi}"
    return Path(get_default_build_root(), f"{python}_{kind}")


def find(root: Path) -> tuple[list[Path], list[Path]]:
    """Lock files below a folder.

    A builder keeps its lock open until it is done, so that one which no process has open was
    left behind. Processes of other users and machines cannot be seen.

    Args:
        root: Folder of all operators, each in one of its own.

    Returns:
        Locks of builds under way, and those left behind.
    """
    locks = sorted(path for path in root.glob("*/lock") if path.is_file())
    if not locks:
        return [], []
    opened = _open_files()
    held = [path for path in locks if _identity(path) in opened]
    return held, [path for path in locks if path not in held]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _open_files() -> set[tuple[int, int] | None]:
    """Device and inode of every file that a process of this user has open."""
    return {_identity(path) for path in Path("/proc").glob("[0-9]*/fd/*")} - {None}

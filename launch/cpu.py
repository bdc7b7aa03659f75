"""Make DeepSpeed start quickly and safely on a machine without an accelerator.

DeepSpeed compiles a shared-memory collective when its first process group starts on a CPU. That
takes about a minute, leaves buffers in /dev/shm, and, if a build is ever killed, a lock file
behind which every later start waits for ever. Nothing here needs the operator: gloo does the work.
"""

import collections
import os
from pathlib import Path

import torch

EXTENSIONS = Path(__file__).resolve().parents[1] / ".torch_extensions"


def has_accelerator() -> bool:
    """Tell whether DeepSpeed will run on anything but the CPU."""
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen is not None:
        return chosen != "cpu"
    probe = getattr(torch, "accelerator", torch.cuda)  # torch.accelerator: torch 2.6 and later
    return bool(probe.is_available())


def prepare_environment() -> None:
    """Settings that DeepSpeed reads while it is imported; call this first.

    Keeps the compiled operators of this checkout apart from everybody else's.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(EXTENSIONS))
    if has_accelerator():
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    if "OMP_NUM_THREADS" not in os.environ:
        local = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1")
        threads = max(1, len(os.sched_getaffinity(0)) // local)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)  # torch is loaded already and has read the variable


def disable_native_operators() -> None:
    """Declare all compiled operators of DeepSpeed unavailable, if there is no accelerator.

    Call this after `import deepspeed` and before the first process group starts.
    """
    if has_accelerator():
        return
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = collections.defaultdict(bool)

"""DeepSpeed inside a pool worker, without compiling anything."""

from __future__ import annotations

import collections
import logging
import os
from typing import Any

# What the first engine of a process imports. Loaded into the forkserver it costs 2 s once instead
# of 3 s in every fresh worker; all of these start no threads, so forking after them is safe.
PRELOAD = (
    "deepspeed",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage3",
    "functorch.compile",
    "torch._dynamo.backends.inductor",
    "torch._inductor.compile_fx",
)


def prepare(*, fake_fp16: bool = False) -> Any:
    """Make DeepSpeed usable in this worker and adopt the pool's process group.

    On a CPU ``init_distributed`` would build a shared-memory op: a minute of compiling, and an
    endless wait if an earlier build was killed and left its lock file. An op table that says "not
    compatible" to every question avoids both, and the compiler probes too. Optimizers therefore
    need ``"torch_adam": true`` or SGD. Idempotent.

    Args:
        fake_fp16: Pretend that the CPU accelerator supports fp16, which DeepSpeed refuses.
            Process-global, so ask for it only in ``isolated=True`` jobs.

    Returns:
        The ``deepspeed`` module.

    Raises:
        ImportError: If DeepSpeed is not installed.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    deepspeed.ops.__dict__["__compatible_ops__"] = collections.defaultdict(bool)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if fake_fp16:
        get_accelerator().is_fp16_supported = lambda: True
    # torch.distributed is already running, so this only wraps it: no environment is read.
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed

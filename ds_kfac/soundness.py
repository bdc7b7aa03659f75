"""Is everything finite? Answered on the device, without waiting for it."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from ds_kfac.capture.session import Pending


def gradient_norm(views: Iterable[Tensor], device: torch.device) -> Tensor:
    """Norm of all gradients on this rank, 0-d fp64; non-finite if any element is.

    Args:
        views: Flat gradients; dtypes may differ.
        device: Device of the result: an offloaded optimizer keeps gradients on the CPU.
    """
    tensors = list(views)
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = functools.reduce(torch.promote_types, {t.dtype for t in tensors}, torch.float32)
    norms = torch._foreach_norm(tensors, 2, dtype=wide)
    total: Tensor = torch.stack(norms).double().norm()
    return total.to(device)


def is_finite(norm: Tensor, pending: Iterable[Pending]) -> Tensor:
    """Whether gradients and statistics of this rank are finite, 0-d bool.

    A NaN or Inf anywhere in a row makes its square on the diagonal non-finite: traces are
    enough.

    Args:
        norm: Norm of the gradients.
        pending: Statistics of the step.
    """
    traces = [block.diagonal().sum() for sums in pending for block in (*sums.a, *sums.g)]
    if not traces:
        return torch.isfinite(norm)
    return torch.isfinite(norm) & torch.isfinite(torch.stack(traces)).all()

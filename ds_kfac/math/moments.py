"""Sums of outer products, accumulated in place: the raw material of a Kronecker factor.

Rows are cast to the accumulator's dtype once and the products are formed in that dtype: bf16 or
fp16 products overflow or lose positive semi-definiteness long before the inputs do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Below these sizes one product for the whole square beats the block rows. Measured on one CPU core;
# on an accelerator a product has to be large to fill the device.
SYRK_MIN_SIZE = 1024
_SYRK_ROWS = 256
_SYRK_MIN_SIZE_CPU = 128
_SYRK_ROWS_CPU = 64


@torch.no_grad()
def add_outer_(total: Tensor, rows: Tensor, *, alpha: float | Tensor = 1.0) -> None:
    """Adds ``alpha * rows^T rows`` to ``total`` in place.

    For ``n >= SYRK_MIN_SIZE`` (on the CPU from 128 on) only block rows of the upper triangle are
    computed (0.57-0.8 of the time of the full product): **everything below the diagonal blocks is
    then left as it was**.
    Callers that need the full matrix pass through :func:`ds_kfac.math.packing.pack_upper` and
    ``unpack_upper``.

    Args:
        total: ``[n, n]``, fp32 or fp64.
        rows: ``[T, n]``, any float dtype and strides; ``T`` may be 0.
        alpha: scale; a 0-d tensor is applied without a host synchronisation.

    Raises:
        ValueError: if the shapes do not match.
    """
    if rows.dim() != 2 or total.shape != (rows.shape[1], rows.shape[1]):
        raise ValueError(
            f"rows of shape {tuple(rows.shape)} do not fit a total of shape {tuple(total.shape)}"
        )
    if rows.shape[0] == 0:
        return
    right = rows.to(total.dtype)
    left, scale = (right * alpha, 1.0) if isinstance(alpha, Tensor) else (right, alpha)
    n = total.shape[0]
    height = _block_height(total)
    for start in range(0, n, height):
        stop = min(start + height, n)
        total[start:stop, start:].addmm_(left[:, start:stop].t(), right[:, start:], alpha=scale)


def outer_flops(rows: int, n: int) -> float:
    """Operations of :func:`add_outer_` on an accelerator, for ``rows`` rows of length ``n``."""
    return float(rows) * n * (n + _SYRK_ROWS if n >= SYRK_MIN_SIZE else 2 * n)


def _block_height(total: Tensor) -> int:
    n = total.shape[0]
    if n >= SYRK_MIN_SIZE:
        return _SYRK_ROWS
    return _SYRK_ROWS_CPU if total.device.type == "cpu" and n >= _SYRK_MIN_SIZE_CPU else max(n, 1)


@torch.no_grad()
def add_outer_blocks_(
    totals: Sequence[Tensor],
    rows: Tensor,
    *,
    bounds: Sequence[tuple[int, int]],
    bias: bool,
    alpha: float | Tensor = 1.0,
) -> None:
    """Adds the diagonal blocks of ``alpha * rows^T rows`` to ``totals`` in place.

    With ``bias`` the rows are treated as if each ended in a constant 1. That column is never
    materialised (a concatenation copies all rows and misaligns the product): its entries are the
    column sums and the row count. Only its products with the last block are kept.

    Args:
        totals: one ``[k, k]`` fp32 or fp64 matrix per block. Each is valid as :func:`add_outer_`
            leaves it; the row and column of the constant 1 are always both complete.
        rows: ``[T, d]``, any float dtype and strides; ``T`` may be 0.
        bounds: consecutive ``(start, stop)`` column ranges from 0 to ``d``. With ``bias`` the last
            one may also end at ``d + 1``, counting the constant; its total has the constant's row
            and column in both cases.
        bias: whether the last block carries the constant 1 as its last row and column.
        alpha: scale of everything added; a 0-d tensor is applied without a host synchronisation.

    Raises:
        ValueError: if the number of blocks, the bounds or a shape do not match.
    """
    width = rows.shape[-1]
    ends = (width, width + 1) if bias else (width,)
    if not totals or len(totals) != len(bounds) or bounds[-1][1] not in ends:
        raise ValueError(
            f"{len(totals)} totals and bounds {list(bounds)} do not cut rows of width {width} "
            f"({'with' if bias else 'without'} a constant column)"
        )
    rows = rows.to(totals[0].dtype)
    for total, (start, stop) in zip(totals[:-1], bounds[:-1], strict=True):
        add_outer_(total, rows[:, start:stop], alpha=alpha)
    last = rows[:, bounds[-1][0] : width]
    if not bias:
        add_outer_(totals[-1], last, alpha=alpha)
        return
    if totals[-1].shape != (last.shape[1] + 1, last.shape[1] + 1):
        raise ValueError(
            f"the last block needs {last.shape[1]} columns and the constant, "
            f"got a total of shape {tuple(totals[-1].shape)}"
        )
    add_outer_(totals[-1][:-1, :-1], last, alpha=alpha)
    sums = last.sum(0) * alpha
    totals[-1][:-1, -1].add_(sums)
    totals[-1][-1, :-1].add_(sums)
    totals[-1][-1, -1].add_(alpha * rows.shape[0])

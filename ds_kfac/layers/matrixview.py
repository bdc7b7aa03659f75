"""Layer gradients as matrices: flat ``[weight, bias]`` to ``[d_out, d_in (+1)]`` and back.

The flat gradient of a layer that is cut over a tensor group is that of its shards one after
another, so that what a rank holds stays a slice of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_kfac.layers.kinds import KINDS
from ds_kfac.layers.shards import Shards
from ds_kfac.layers.spec import LayerSpec


def to_matrix(flat: Tensor, spec: LayerSpec, *, dtype: torch.dtype) -> Tensor:
    """Matrix view of a layer's flat gradient.

    Args:
        flat: ``[numel]``, weight first, then bias; any float dtype.
        spec: The layer.
        dtype: Dtype of the result; curvature work is done in fp32 (fp64 for fp64 models).

    Returns:
        ``[d_out, columns]``, a view of ``flat`` where neither dtype, bias nor shards forbid it.
    """
    matrix = _weight_matrix(flat[: spec.weight.numel], spec).to(dtype)
    if spec.bias is None:
        return matrix
    bias = flat[spec.bias.offset :]
    shards = _reordering(spec)
    if shards is not None and shards.rows:
        bias = shards.join(torch.split(bias, shards.widths), 0)
    return torch.cat([matrix, bias.to(dtype).unsqueeze(1)], dim=1)


def to_flat_(matrix: Tensor, spec: LayerSpec, out: Tensor) -> Tensor:
    """Write a matrix view back into flat form, casting to the dtype of ``out``.

    Args:
        matrix: ``[d_out, columns]``.
        spec: The layer.
        out: ``[numel]``; overwritten.
    """
    weight, shards = out[: spec.weight.numel], _reordering(spec)
    if shards is None:
        plain = KINDS[spec.kind].from_matrix(matrix[:, : spec.d_in], spec.weight.shape)
        weight.view(spec.weight.shape).copy_(plain)
    else:
        for rank, part in enumerate(_shard_views(weight, shards)):
            part.copy_(shards.take(matrix[:, : spec.d_in], rank, shards.dim))
    if spec.bias is not None:
        bias, column = out[spec.bias.offset :], matrix[:, spec.d_in]
        if shards is not None and shards.rows:
            column = torch.cat([shards.take(column, rank, 0) for rank in range(shards.size)])
        bias.copy_(column)
    return out


def to_flat(matrix: Tensor, spec: LayerSpec) -> Tensor:
    """Flat form of a matrix view, in its dtype; a view of it where layout and bias allow that.

    Args:
        matrix: ``[d_out, columns]``.
        spec: The layer.

    Returns:
        ``[numel]``, contiguous.
    """
    if spec.bias is None and _reordering(spec) is None:
        return KINDS[spec.kind].from_matrix(matrix, spec.weight.shape).reshape(-1)
    return to_flat_(matrix, spec, matrix.new_empty(spec.numel))


def _weight_matrix(flat: Tensor, spec: LayerSpec) -> Tensor:
    shards = _reordering(spec)
    if shards is None:
        return KINDS[spec.kind].to_matrix(flat.view(spec.weight.shape))
    return shards.join(_shard_views(flat, shards), shards.dim)


def _reordering(spec: LayerSpec) -> Shards | None:
    """A layer's shards, unless they lie in the order of the whole layer."""
    return None if spec.shards is None or spec.shards.in_order else spec.shards


def _shard_views(flat: Tensor, shards: Shards) -> list[Tensor]:
    """Every rank's shard in a flat weight, as a matrix."""
    sizes = shards.widths
    other = shards.d_in if shards.rows else shards.d_out
    parts = torch.split(flat, [size * other for size in sizes])
    return [
        part.view(size, other) if shards.rows else part.view(other, size)
        for part, size in zip(parts, sizes, strict=True)
    ]

"""Layer gradients as matrices: flat ``[weight, bias]`` to ``[d_out, d_in (+1)]`` and back."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_kfac.layers.kinds import KINDS
from ds_kfac.layers.spec import LayerSpec


def to_matrix(flat: Tensor, spec: LayerSpec, *, dtype: torch.dtype) -> Tensor:
    """Matrix view of a layer's flat gradient.

    Args:
        flat: ``[numel]``, weight first, then bias; any float dtype.
        spec: The layer.
        dtype: Dtype of the result; curvature work is done in fp32 (fp64 for fp64 models).

    Returns:
        ``[d_out, columns]``, a view of ``flat`` where neither dtype nor bias forbid it.
    """
    weight = flat[: spec.weight.numel].view(spec.weight.shape)
    matrix = KINDS[spec.kind].to_matrix(weight).to(dtype)
    if spec.bias is None:
        return matrix
    return torch.cat([matrix, flat[spec.bias.offset :].to(dtype).unsqueeze(1)], dim=1)


def to_flat_(matrix: Tensor, spec: LayerSpec, out: Tensor) -> Tensor:
    """Write a matrix view back into flat form, casting to the dtype of ``out``.

    Args:
        matrix: ``[d_out, columns]``.
        spec: The layer.
        out: ``[numel]``; overwritten.
    """
    weight = KINDS[spec.kind].from_matrix(matrix[:, : spec.d_in], spec.weight.shape)
    out[: spec.weight.numel].view(spec.weight.shape).copy_(weight)
    if spec.bias is not None:
        out[spec.bias.offset :].copy_(matrix[:, spec.d_in])
    return out


def to_flat(matrix: Tensor, spec: LayerSpec) -> Tensor:
    """Flat form of a matrix view, in its dtype; a view of it where layout and bias allow that.

    Args:
        matrix: ``[d_out, columns]``.
        spec: The layer.

    Returns:
        ``[numel]``, contiguous.
    """
    if spec.bias is None:
        return KINDS[spec.kind].from_matrix(matrix, spec.weight.shape).reshape(-1)
    return to_flat_(matrix, spec, matrix.new_empty(spec.numel))

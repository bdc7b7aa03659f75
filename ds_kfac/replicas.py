"""What owners send to the other gradient workers of their layers: bases, and moments after a load.

A replica of a layer has bases and moments but no factors. It sees the same gradients as its owner
and does the same with them, so that moments are sent only where a saved state is taken into use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_kfac.layers.blocks import Block
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.state import BlockBasis, LayerState, NextBases


def pack_bases(found: NextBases | None, spec: LayerSpec, solver: str, like: Tensor) -> Tensor:
    """Bases of a layer as one flat tensor.

    Per block: a flag (1 where there is a new basis; the rest is zero otherwise), the mean, the
    eigenvalues, and the matrix of eigenvectors or the inverse.

    Args:
        found: New bases; None for no block.
        spec: The layer.
        solver: ``eigen`` or ``cholesky``.
        like: Dtype and device.

    Returns:
        ``[basis_numel(spec, solver)]``, see :func:`ds_kfac.plan.program.basis_numel`.
    """
    parts = [
        pack_side(None if found is None else found.of(side)[0], blocks, solver, like)
        for side, blocks in (("a", spec.a_blocks), ("g", spec.g_blocks))
    ]
    return torch.cat(parts)


def pack_side(
    bases: Sequence[BlockBasis | None] | None, blocks: Sequence[Block], solver: str, like: Tensor
) -> Tensor:
    """Bases of one side of a layer, as :func:`pack_bases` writes them."""
    parts = []
    for basis, block in zip(bases or [None] * len(blocks), blocks, strict=True):
        if basis is None:
            parts.append(like.new_zeros(sum(_sizes(block.size, solver))))
            continue
        tensors = basis.inverse, basis.values, basis.vectors
        kept = [t for t in (like.new_ones(()), basis.mean, *tensors) if t is not None]
        parts += [t.reshape(-1) for t in kept]
    return torch.cat(parts)


def unpack_bases(flat: Tensor, spec: LayerSpec, solver: str, *, step: int) -> NextBases:
    """The inverse of :func:`pack_bases`; reads the flags.

    Args:
        flat: As packed.
        spec: The layer.
        solver: ``eigen`` or ``cholesky``.
        step: Applied step whose factors the bases are of.

    Returns:
        New bases in tensors of their own: products with a matrix may depend on where in memory
        it begins.
    """
    found = NextBases.none(step, len(spec.a_blocks), len(spec.g_blocks))
    border = sum(sum(_sizes(block.size, solver)) for block in spec.a_blocks)
    found.a = unpack_side(flat[:border], spec.a_blocks, solver)
    found.g = unpack_side(flat[border:], spec.g_blocks, solver)
    return found


def unpack_side(flat: Tensor, blocks: Sequence[Block], solver: str) -> list[BlockBasis | None]:
    """The inverse of :func:`pack_side`; see :func:`unpack_bases`."""
    bases: list[BlockBasis | None] = []
    start = 0
    for block in blocks:
        size = block.size
        sizes = _sizes(size, solver)
        flag, mean, *rest = torch.split(flat[start : start + sum(sizes)], sizes)
        start += sum(sizes)
        if not bool(flag):
            bases.append(None)
            continue
        matrix = rest[-1].clone().view(size, size)
        basis = BlockBasis(mean.clone().view(()))
        if solver == "eigen":
            basis.values, basis.vectors = rest[0].clone(), matrix
        else:
            basis.inverse = matrix
        bases.append(basis)
    return bases


def moments_numel(spec: LayerSpec, names: Sequence[str]) -> int:
    """Elements of a layer's packed moments."""
    return 1 + len(names) * (1 + spec.numel)


def pack_moments(state: LayerState, names: Sequence[str], like: Tensor) -> Tensor:
    """Update count and moments of a layer as one flat tensor.

    Args:
        state: The layer at its owner.
        names: Moments that the direction keeps.
        like: Dtype and device.
    """
    parts = [state.updates.to(like).reshape(1)]
    for name in names:
        moment = state.moments.get(name)
        parts.append(like.new_full((1,), float(moment is not None)))
        parts.append(like.new_zeros(state.spec.numel) if moment is None else moment.reshape(-1))
    return torch.cat(parts)


def unpack_moments(flat: Tensor, state: LayerState, names: Sequence[str]) -> None:
    """Write what :func:`pack_moments` has packed into a replica."""
    spec = state.spec
    state.updates.copy_(flat[0])
    state.moments = {}
    for name, part in zip(names, torch.split(flat[1:], 1 + spec.numel), strict=True):
        if bool(part[0]):
            state.moments[name] = part[1:].clone().view(spec.d_out, spec.columns)


def present_bases(state: LayerState) -> NextBases:
    """The bases in use, to be sent."""
    a, g = list(state.a.bases), list(state.g.bases)
    found = NextBases.none(state.refreshed_at, len(a), len(g))
    found.a, found.g = a, g
    return found


def zeros(specs: Mapping[int, LayerSpec], device: torch.device) -> dict[int, LayerState]:
    """Replicas that have seen nothing."""
    return {layer: LayerState.replica(spec, device) for layer, spec in specs.items()}


def _sizes(size: int, solver: str) -> list[int]:
    return [1, 1, *([size] if solver == "eigen" else []), size * size]

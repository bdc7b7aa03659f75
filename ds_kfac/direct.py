"""Owner's work every step: the direction of a layer from its gradient, bases and moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.math import directions
from ds_kfac.state import BlockBasis, LayerState


@dataclass(frozen=True)
class DirectionSettings:
    """Numbers in force in a step.

    Attributes:
        direction: ``natural``, ``ekfac``, ``eigen_adam`` or ``orthogonal``.
        damping: See ``absolute``.
        absolute: Damping is not multiplied by mean eigenvalues.
        momentum: Decay of the gradient average that is preconditioned; 0 is none.
        betas: Decay rates of Adam's moments.
        grafting: ``none``, ``rms`` or ``adam``.
    """

    direction: str
    damping: float
    absolute: bool
    momentum: float
    betas: tuple[float, float]
    grafting: str


def direction(
    state: LayerState,
    g: Tensor,
    settings: DirectionSettings,
    *,
    rates: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what replaces a layer's gradient, updating its moments.

    A layer whose gradient is zero everywhere was not used in this step: its direction is
    zero and nothing about it changes. Nothing is read back to the host.

    Args:
        state: The layer at its owner.
        g: ``[d_out, columns]`` gradient of the global objective, clipped, compute dtype.
        settings: Numbers in force.
        rates: Learning rates of weight and bias, if the modelled change is asked for: it takes a
            pass over the direction.

    Returns:
        The direction ``[d_out, columns]``, a new tensor, and 0-d fp64, the modelled change
        ``sum of rate^2 <direction, m>``, where m is the (averaged) gradient that was
        preconditioned; zero where nobody asked for it.
    """
    used = directions.largest(g) > 0
    state.updates += used
    m = _momentum(state, g, used, settings)
    d = _FORMULAS[settings.direction](state, g, m, used, settings)
    d = _replace_nonfinite(state, d, m, settings)
    d = _graft(state, d, g, used, settings)
    if settings.direction == "orthogonal":
        d = directions.orthogonalise(d, state.spec.parts)
    # Finite by now, so that a factor of zero clears it.
    d = d.mul(used.to(d.dtype))
    if rates is None:
        return d, torch.zeros((), dtype=torch.float64, device=d.device)
    return d, _modelled_change(d * m, rates, has_bias=state.spec.bias is not None)


def _modelled_change(products: Tensor, rates: tuple[float, float], *, has_bias: bool) -> Tensor:
    of_weight, of_bias = rates
    if not has_bias or of_bias == of_weight:
        return torch.sum(products, dtype=torch.float64) * of_weight**2
    columns = torch.sum(products, dim=0, dtype=torch.float64)  # the bias is the last one
    return columns[:-1].sum() * of_weight**2 + columns[-1] * of_bias**2


def _momentum(state: LayerState, g: Tensor, used: Tensor, settings: DirectionSettings) -> Tensor:
    beta = settings.momentum
    if beta == 0.0:
        return g
    buffer = state.moment("momentum", g)
    buffer.lerp_(g, used.to(g.dtype) * (1.0 - beta))
    if settings.direction == "eigen_adam":
        return directions.debias(buffer, beta, state.updates.clamp(min=1.0)).to(g.dtype)
    return directions.nesterov_blend(buffer, g, beta)


def _natural(
    state: LayerState, g: Tensor, m: Tensor, used: Tensor, settings: DirectionSettings
) -> Tensor:
    def tile(part: Tensor, basis_g: BlockBasis | None, basis_a: BlockBasis | None) -> Tensor:
        if basis_g is None or basis_a is None:
            return part
        if basis_g.inverse is not None and basis_a.inverse is not None:
            return directions.natural_inverse(part, basis_g.inverse, basis_a.inverse)
        qg, dg, qa, da = _eigen(basis_g, basis_a)
        lam: Tensor | float = settings.damping
        if not settings.absolute:
            lam = settings.damping * basis_g.mean * basis_a.mean
        return directions.natural_eigen(part, qg, dg, qa, da, lam)

    return _tilewise(state, m, tile)


def _whitened(
    state: LayerState, g: Tensor, m: Tensor, used: Tensor, settings: DirectionSettings
) -> Tensor:
    def tile(part: Tensor, basis_g: BlockBasis | None, basis_a: BlockBasis | None) -> Tensor:
        for basis, left in ((basis_g, True), (basis_a, False)):
            if basis is not None:
                part = _whiten(part, basis, settings, left=left)
        return part

    return _tilewise(state, m, tile)


def _whiten(part: Tensor, basis: BlockBasis, settings: DirectionSettings, *, left: bool) -> Tensor:
    """Multiply by mean times (factor + shift)^-1: the factor in units of its mean eigenvalue."""
    if basis.inverse is not None:
        whitened = basis.inverse @ part if left else part @ basis.inverse
        return whitened.mul_(basis.mean)
    q, values = basis.vectors, basis.values
    assert q is not None and values is not None
    shift = settings.damping if settings.absolute else settings.damping * basis.mean
    weights = basis.mean / (values + shift)
    if left:
        return q @ (weights.unsqueeze(1) * (q.mT @ part))
    return ((part @ q) * weights) @ q.mT


def _ekfac(
    state: LayerState, g: Tensor, m: Tensor, used: Tensor, settings: DirectionSettings
) -> Tensor:
    second = _second_moment(state, g, used, settings)

    def tile(part: Tensor, s: Tensor, basis_g: BlockBasis, basis_a: BlockBasis) -> Tensor:
        qg, _, qa, _ = _eigen(basis_g, basis_a)
        return directions.ekfac(
            part,
            s,
            state.updates.clamp(min=1.0),
            qg,
            qa,
            beta2=settings.betas[1],
            damping=settings.damping,
            absolute=settings.absolute,
        ).to(part.dtype)

    return _tilewise_with_moment(state, m, second, tile)


def _eigen_adam(
    state: LayerState, g: Tensor, m: Tensor, used: Tensor, settings: DirectionSettings
) -> Tensor:
    second = _second_moment(state, g, used, settings)

    def tile(part: Tensor, s: Tensor, basis_g: BlockBasis, basis_a: BlockBasis) -> Tensor:
        qg, _, qa, _ = _eigen(basis_g, basis_a)
        t = state.updates.clamp(min=1.0)
        beta2 = settings.betas[1]
        return directions.eigen_adam(part, s, t, qg, qa, beta2=beta2).to(part.dtype)

    return _tilewise_with_moment(state, m, second, tile)


def _second_moment(
    state: LayerState, g: Tensor, used: Tensor, settings: DirectionSettings
) -> Tensor:
    second = state.moment("second", g)
    for rows, columns, basis_g, basis_a in _tiles(state):
        if basis_g is None or basis_a is None:
            continue
        qg, _, qa, _ = _eigen(basis_g, basis_a)
        tile = second[rows, columns]
        # An unused layer decays by 1: nothing of its zero gradient gets in.
        beta2 = 1.0 - used.double() * (1.0 - settings.betas[1])
        new = directions.second_moment_rotated_update(tile, g[rows, columns], qg, qa, beta2)
        tile.copy_(new)
    return second


def _graft(
    state: LayerState, d: Tensor, g: Tensor, used: Tensor, settings: DirectionSettings
) -> Tensor:
    if settings.grafting == "none":
        return d
    if settings.grafting == "rms":
        return directions.graft_rms(d).to(d.dtype)
    m, v = state.moment("adam_m", g), state.moment("adam_v", g)
    t = state.updates.clamp(min=1.0)
    update = directions.adam_update_(g, m, v, t, settings.betas, used=used)
    return directions.graft_norm(d, directions.frobenius_norm(update)).to(d.dtype)


def _replace_nonfinite(
    state: LayerState, d: Tensor, m: Tensor, settings: DirectionSettings
) -> Tensor:
    """Fall back to the plain gradient for this step; the length rule follows."""
    finite = directions.largest(d) < torch.inf
    state.fallbacks += ~finite
    # Adam in an eigenbasis has no length rule after it: the gradient gets Adam's usual RMS.
    plain = directions.graft_rms(m).to(m.dtype) if settings.direction == "eigen_adam" else m
    if finite.device.type == "cpu":  # where a flag is read for free
        return d if finite else plain
    return torch.where(finite, d, plain)


def _tiles(
    state: LayerState,
) -> Iterator[tuple[slice, slice, BlockBasis | None, BlockBasis | None]]:
    for rows, basis_g in zip(state.g.blocks, state.g.bases, strict=True):
        for columns, basis_a in zip(state.a.blocks, state.a.bases, strict=True):
            yield slice(*rows), slice(*columns), basis_g, basis_a


def _tilewise(
    state: LayerState,
    m: Tensor,
    compute: Callable[[Tensor, BlockBasis | None, BlockBasis | None], Tensor],
) -> Tensor:
    tiles = list(_tiles(state))
    if len(tiles) == 1:
        return compute(m, tiles[0][2], tiles[0][3])
    result = torch.empty_like(m)
    for rows, columns, basis_g, basis_a in tiles:
        result[rows, columns] = compute(m[rows, columns], basis_g, basis_a)
    return result


def _tilewise_with_moment(
    state: LayerState,
    m: Tensor,
    second: Tensor,
    compute: Callable[[Tensor, Tensor, BlockBasis, BlockBasis], Tensor],
) -> Tensor:
    result = torch.empty_like(m, memory_format=torch.contiguous_format)
    for rows, columns, basis_g, basis_a in _tiles(state):
        part = m[rows, columns]
        if basis_g is None or basis_a is None:
            result[rows, columns] = part
        else:
            result[rows, columns] = compute(part, second[rows, columns], basis_g, basis_a)
    return result


def _eigen(basis_g: BlockBasis, basis_a: BlockBasis) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qg, dg, qa, da = basis_g.vectors, basis_g.values, basis_a.vectors, basis_a.values
    assert qg is not None and dg is not None and qa is not None and da is not None
    return qg, dg, qa, da


_Formula = Callable[[LayerState, Tensor, Tensor, Tensor, DirectionSettings], Tensor]
_FORMULAS: dict[str, _Formula] = {
    "natural": _natural,
    "orthogonal": _whitened,
    "ekfac": _ekfac,
    "eigen_adam": _eigen_adam,
}

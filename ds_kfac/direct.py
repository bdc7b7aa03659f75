"""Owner's work every step: the direction of a layer from its gradient, bases and moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.math import directions
from ds_kfac.state import IN_EIGENBASIS, BlockBasis, LayerState, momentum_name

_Rates = tuple[float, float]
"""Learning rates of weight and bias."""


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
    rates: _Rates | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what replaces a layer's gradient, updating its moments.

    A layer whose gradient is zero everywhere was not used in this step: its direction is
    zero and nothing about it changes. Nothing is read back from an accelerator.

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
    has_bias = state.spec.bias is not None
    used: Tensor | bool = _flag(directions.largest(g) > 0)
    if used is False:
        return torch.zeros_like(g), _modelled_change(g, g, None, has_bias=has_bias)
    state.updates += used
    in_basis = settings.direction in IN_EIGENBASIS
    x = _rotated(state, g, directions.to_basis) if in_basis else g
    m = _momentum(state, x, used, settings)
    d = _FORMULAS[settings.direction](state, x, m, used, settings)
    # A rotation changes no inner product, but it mixes the columns of weight and bias.
    split = in_basis and has_bias and rates is not None and rates[0] != rates[1]
    if split:
        d, m = (_rotated(state, part, directions.from_basis) for part in (d, m))
    change = _modelled_change(d, m, rates, has_bias=has_bias)
    if in_basis and not split:
        d = _rotated(state, d, directions.from_basis)
    d, change = _replace_nonfinite(state, d, change, g if in_basis else m, settings, rates)
    d = _graft(state, d, g, used, settings)
    if settings.direction == "orthogonal":
        d = directions.orthogonalise(d, state.spec.parts)
    if isinstance(used, Tensor):
        # Finite by now, so that a factor of zero clears it.
        d, change = d.mul(used.to(d.dtype)), change.mul(used)
    return d.clone() if d is g else d, change


def _modelled_change(d: Tensor, m: Tensor, rates: _Rates | None, *, has_bias: bool) -> Tensor:
    """``sum of rate^2 <d, m>``, 0-d fp64; zero without rates."""
    if rates is None:
        return torch.zeros((), dtype=torch.float64, device=d.device)
    of_weight, of_bias = rates
    products = d * m
    if not has_bias or of_bias == of_weight:
        # Rows in the dtype of the matrix: widening every element takes as long as the product.
        return products.sum(dim=1).sum(dtype=torch.float64) * of_weight**2
    columns = torch.sum(products, dim=0, dtype=torch.float64)  # the bias is the last one
    return columns[:-1].sum() * of_weight**2 + columns[-1] * of_bias**2


def _flag(condition: Tensor) -> Tensor | bool:
    """A condition as a bool where reading it is free; on an accelerator it stays there."""
    return bool(condition) if condition.device.type == "cpu" else condition


def _weight(used: Tensor | bool, weight: float, dtype: torch.dtype) -> Tensor | float:
    """The weight of a new value in an average, 0 for an unused layer's."""
    return used.to(dtype) * weight if isinstance(used, Tensor) else weight


def _momentum(
    state: LayerState, x: Tensor, used: Tensor | bool, settings: DirectionSettings
) -> Tensor:
    """The averaged gradient, in the coordinates of ``x``: a refresh moves those of a basis."""
    beta = settings.momentum
    if beta == 0.0:
        return x
    buffer = state.moment(momentum_name(settings.direction), x)
    buffer.lerp_(x, _weight(used, 1.0 - beta, x.dtype))
    if settings.direction == "eigen_adam":
        return directions.debias(buffer, beta, state.updates.clamp(min=1.0))
    return directions.nesterov_blend(buffer, x, beta)


def _natural(
    state: LayerState, x: Tensor, m: Tensor, used: Tensor | bool, settings: DirectionSettings
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
    state: LayerState, x: Tensor, m: Tensor, used: Tensor | bool, settings: DirectionSettings
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
    state: LayerState, x: Tensor, m: Tensor, used: Tensor | bool, settings: DirectionSettings
) -> Tensor:
    t = state.updates.clamp(min=1.0)

    def tile(part: Tensor, s: Tensor) -> Tensor:
        beta2, damping = settings.betas[1], settings.damping
        return directions.ekfac(
            part, s, t, beta2=beta2, damping=damping, absolute=settings.absolute
        )

    return _with_second_moment(state, x, m, used, settings, tile)


def _eigen_adam(
    state: LayerState, x: Tensor, m: Tensor, used: Tensor | bool, settings: DirectionSettings
) -> Tensor:
    t = state.updates.clamp(min=1.0)

    def tile(part: Tensor, s: Tensor) -> Tensor:
        return directions.eigen_adam(part, s, t, beta2=settings.betas[1])

    return _with_second_moment(state, x, m, used, settings, tile)


def _with_second_moment(
    state: LayerState,
    x: Tensor,
    m: Tensor,
    used: Tensor | bool,
    settings: DirectionSettings,
    compute: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Update the second moment of the rotated gradient ``x`` and divide ``m`` by it."""
    second = state.moment("second", x)
    # An unused layer decays by 1: nothing of its zero gradient gets in.
    beta2 = 1.0 - _weight(used, 1.0 - settings.betas[1], torch.float64)

    def tile(
        part: tuple[Tensor, Tensor, Tensor], basis_g: BlockBasis | None, basis_a: BlockBasis | None
    ) -> Tensor:
        xs, ms, seconds = part
        if basis_g is None or basis_a is None:
            return ms
        directions.second_moment_update_(seconds, xs, beta2)
        return compute(ms, seconds)

    tiles = list(_tiles(state))
    if len(tiles) == 1:
        return tile((x, m, second), *tiles[0][2:])
    result = torch.empty_like(m)
    for rows, columns, *bases in tiles:
        place = rows, columns
        result[place] = tile((x[place], m[place], second[place]), *bases)
    return result


def _rotated(
    state: LayerState, x: Tensor, turn: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Turn every tile that has both bases; the others are in plain coordinates throughout."""

    def tile(part: Tensor, basis_g: BlockBasis | None, basis_a: BlockBasis | None) -> Tensor:
        if basis_g is None or basis_a is None:
            return part
        qg, _, qa, _ = _eigen(basis_g, basis_a)
        return turn(part, qg, qa)

    return _tilewise(state, x, tile)


def _graft(
    state: LayerState, d: Tensor, g: Tensor, used: Tensor | bool, settings: DirectionSettings
) -> Tensor:
    if settings.grafting == "none":
        return d
    if settings.grafting == "rms":
        return directions.graft_rms(d).to(d.dtype)
    m, v = state.moment("adam_m", g), state.moment("adam_v", g)
    t = state.updates.clamp(min=1.0)
    gate = used if isinstance(used, Tensor) else None
    update = directions.adam_update_(g, m, v, t, settings.betas, used=gate)
    return directions.graft_norm(d, directions.frobenius_norm(update)).to(d.dtype)


def _replace_nonfinite(
    state: LayerState,
    d: Tensor,
    change: Tensor,
    plain: Tensor,
    settings: DirectionSettings,
    rates: _Rates | None,
) -> tuple[Tensor, Tensor]:
    """Fall back to the plain gradient for this step; the length rule follows.

    Args:
        state: Counts it.
        d: Direction.
        change: Modelled change.
        plain: Gradient, averaged where its average is at hand.
        settings: Numbers in force.
        rates: Learning rates of weight and bias for the modelled change.
    """
    finite = _flag(directions.largest(d) < torch.inf)
    if finite is True:
        return d, change
    state.fallbacks += ~finite if isinstance(finite, Tensor) else 1
    # Adam in an eigenbasis has no length rule after it: the gradient gets Adam's usual RMS.
    if settings.direction == "eigen_adam":
        plain = directions.graft_rms(plain).to(d.dtype)
    own = _modelled_change(plain, plain, rates, has_bias=state.spec.bias is not None)
    if isinstance(finite, Tensor):
        return torch.where(finite, d, plain), torch.where(finite, change, own)
    return plain, own


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


def _eigen(basis_g: BlockBasis, basis_a: BlockBasis) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qg, dg, qa, da = basis_g.vectors, basis_g.values, basis_a.vectors, basis_a.values
    assert qg is not None and dg is not None and qa is not None and da is not None
    return qg, dg, qa, da


_Formula = Callable[[LayerState, Tensor, Tensor, Tensor | bool, DirectionSettings], Tensor]
_FORMULAS: dict[str, _Formula] = {
    "natural": _natural,
    "orthogonal": _whitened,
    "ekfac": _ekfac,
    "eigen_adam": _eigen_adam,
}

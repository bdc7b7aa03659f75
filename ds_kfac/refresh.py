"""Owner's work on curvature: fold new statistics into averages, recompute bases."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.errors import NumericalError
from ds_kfac.math.directions import from_basis, move_second_moment
from ds_kfac.math.packing import unpack_upper, unpacked_size
from ds_kfac.math.solvers import damped_inverses, eigen_bases
from ds_kfac.plan.program import ReduceItem
from ds_kfac.state import BlockBasis, LayerState, NextBases

logger = logging.getLogger(__name__)

BATCH_NUMEL = 1 << 26
"""Elements decomposed in one batch: bounds the transient memory of a refresh."""


@dataclass(frozen=True)
class RefreshSettings:
    """Numbers in force at a refresh.

    Attributes:
        solver: ``eigen`` or ``cholesky``.
        damping: Relative to the mean eigenvalue unless ``absolute``.
        absolute: See ``damping``.
        per_factor: Each factor gets the whole damping (``orthogonal``); otherwise it is
            split between the two so that their product carries it once.
        max_failures: Consecutive failures of a block that are tolerated.
        on_cpu: Decompose on the host processor.
    """

    solver: str
    damping: float
    absolute: bool
    per_factor: bool
    max_failures: int
    on_cpu: bool


@dataclass(frozen=True)
class Snapshot:
    """A layer's factors at one step: all that its decomposition needs.

    Attributes:
        layer: Name of the layer.
        a: Per block of A its value, packed: a copy, so that folds may go on.
        g: The same for G.
    """

    layer: str
    a: list[Tensor]
    g: list[Tensor]

    @classmethod
    def of(cls, state: LayerState) -> Snapshot:
        """The present factors of a layer."""
        a, g = ([average.value() for average in side.averages] for _, side in state.sides())
        return cls(state.spec.name, a, g)


@dataclass(frozen=True)
class SideFactors:
    """The blocks of one side of a layer, ready to be decomposed on whichever rank.

    Attributes:
        packed: Per block its value, packed.
        shifts: Per block what is added to its diagonal before it is inverted, 0-d.
    """

    packed: list[Tensor]
    shifts: list[Tensor]


SideBases = tuple[list[BlockBasis | None], list[str]]
"""Per block its basis, None where the decomposition failed, and the reason in words."""


@dataclass(frozen=True)
class _Job:
    """One block to decompose, and where its basis goes."""

    packed: Tensor
    size: int
    shift: Tensor
    result: list[BlockBasis | None]
    reasons: list[str]
    index: int


def fold(
    states: dict[int, LayerState],
    sums: Iterable[tuple[ReduceItem, Tensor]],
    *,
    decay: float,
    step: int,
) -> None:
    """Add one step's reduced sums to the owner's averages.

    ``A = sum a a^T / rows`` and ``G = terms * sum gamma gamma^T``, both weighted by their
    counts. A layer that saw nothing is left as it was: its average must not decay to
    nothing while an expert is starved.

    Args:
        states: Owned layers by index.
        sums: Packed sums and counts from :func:`ds_kfac.comm.run.reduce_factors`.
        decay: Decay of the average per applied step.
        step: Applied-step counter.
    """
    items: dict[int, dict[tuple[str, int], Tensor]] = defaultdict(dict)
    for item, tensor in sums:
        items[item.layer][item.side, item.block] = tensor
    for layer, parts in items.items():
        state = states[layer]
        used, seen, terms = parts["counts", 0].double().unbind()
        # A share of few rows may be none of them: terms without rows say nothing about G either.
        terms = torch.where(used > 0, terms, 0.0)
        # Which step the last one was is known on the device alone: counts are not read back.
        elapsed = torch.where(state.folded_at < 0, 0, step - state.folded_at).double()
        rho = torch.where(used > 0, decay**elapsed, 1.0)
        # Subsampled rows stand for all rows; terms^2 turns gradients of the mean into
        # gradients per term and weights the batch by its terms.
        g_scale = terms * terms * torch.where(used > 0, seen / used.clamp(min=1.0), 0.0)
        for name, side in state.sides():
            scale, weight = (1.0, used) if name == "a" else (g_scale, terms)
            for index, average in enumerate(side.averages):
                average.decay_(rho)
                average.add_(parts[name, index] * scale, weight)
        state.folded_at.copy_(torch.where(used > 0, step, state.folded_at))


def refresh(
    states: Sequence[LayerState], settings: RefreshSettings, *, step: int
) -> list[NextBases]:
    """Recompute the bases of all blocks, batched over equal sizes.

    A block whose decomposition fails keeps its last good basis; failures are counted, see
    :func:`raise_if_hopeless`.

    Args:
        states: Owned layers.
        settings: Numbers in force.
        step: Applied-step counter.

    Returns:
        What was found, by layer.
    """
    found = decompose((Snapshot.of(state) for state in states), settings, step=step)
    for state, bases in zip(states, found, strict=True):
        take(state, bases)
    return found


def decompose(
    snapshots: Iterable[Snapshot],
    settings: RefreshSettings,
    *,
    step: int,
    pause: Callable[[], None] | None = None,
) -> list[NextBases]:
    """Decompose the factors of layers; no state is touched.

    Args:
        snapshots: Factors of the layers.
        settings: Numbers in force.
        step: Applied step whose factors they are.
        pause: Called between batches; what it raises ends the work. On the processor a batch is
            then one block: larger ones are no faster there.

    Returns:
        The new bases of every layer.
    """
    sides = [side for snapshot in snapshots for side in prepared(snapshot, settings).values()]
    solved = decompose_sides(sides, settings, pause=pause)
    return [
        NextBases(step, a, g, a_reasons, g_reasons)
        for (a, a_reasons), (g, g_reasons) in zip(solved[::2], solved[1::2], strict=True)
    ]


def decompose_sides(
    sides: Sequence[SideFactors],
    settings: RefreshSettings,
    *,
    pause: Callable[[], None] | None = None,
) -> list[SideBases]:
    """Decompose sides of layers, batched over equal sizes; see :func:`decompose`."""
    results: list[SideBases] = []
    by_size: dict[int, list[_Job]] = defaultdict(list)
    for side in sides:
        results.append(([None] * len(side.packed), [""] * len(side.packed)))
        for index, (packed, shift) in enumerate(zip(side.packed, side.shifts, strict=True)):
            size = unpacked_size(packed.numel())
            by_size[size].append(_Job(packed, size, shift, *results[-1], index))
    for size, jobs in by_size.items():
        chunk = max(1, BATCH_NUMEL // (size * size))
        if pause is not None and jobs[0].packed.device.type == "cpu":
            chunk = 1
        for start in range(0, len(jobs), chunk):
            if pause is not None:
                pause()
            _decompose(jobs[start : start + chunk], settings)
    return results


def take_upcoming(states: Iterable[LayerState]) -> None:
    """Take bases into use that were computed beside training, where there are any."""
    for state in states:
        if state.upcoming is not None:
            found, state.upcoming = state.upcoming, None
            take(state, found)


def take_sent(state: LayerState, found: NextBases) -> None:
    """Put bases that the owner has sent in place of a replica's; failures are the owner's."""
    old = list(state.a.bases), list(state.g.bases)
    for name, side in state.sides():
        sent = zip(found.of(name)[0], side.bases, strict=True)
        side.bases = [kept if new is None else new for new, kept in sent]
    _carry_moments(state, *old)


def take(state: LayerState, found: NextBases) -> None:
    """Put new bases in place of a layer's present ones, and move its moments along.

    A block without a new one keeps its last good basis, and the failure is counted.
    """
    old = list(state.a.bases), list(state.g.bases)
    for name, side in state.sides():
        bases, reasons = found.of(name)
        for index, (basis, reason) in enumerate(zip(bases, reasons, strict=True)):
            if basis is not None:
                side.bases[index] = basis
                side.failures[index] = 0
                continue
            side.failures[index] += 1
            logger.warning(
                "KFAC-W110 layer %s, factor %s, block %d: decomposition failed (%d in a row): %s; "
                "the last good basis stays",
                state.spec.name,
                name.upper(),
                index,
                side.failures[index],
                reason,
            )
    state.refreshed_at = found.step
    _carry_moments(state, *old)


def prepared(snapshot: Snapshot, settings: RefreshSettings) -> dict[str, SideFactors]:
    """Both sides of a layer with what damping adds to them."""
    # Unpacked for its diagonal and again in its batch: all layers unpacked take twice the memory.
    factors = {"a": snapshot.a, "g": snapshot.g}
    shifts = _shifts({name: [_unpack(f) for f in side] for name, side in factors.items()}, settings)
    return {name: SideFactors(side, shifts[name]) for name, side in factors.items()}


def _unpack(packed: Tensor) -> Tensor:
    size = unpacked_size(packed.numel())
    return unpack_upper(packed, packed.new_empty(size, size))


def _shifts(
    matrices: dict[str, list[Tensor]], settings: RefreshSettings
) -> dict[str, list[Tensor]]:
    """What is added to each block's diagonal before it is inverted.

    Relative damping r split over both factors is sqrt(r) times each block's own mean
    eigenvalue; absolute damping is split by pi, the square root of the ratio of the two
    factors' means (Martens & Grosse 2015, section 6.3).
    """
    means = {name: [m.diagonal().mean() for m in blocks] for name, blocks in matrices.items()}
    damping = settings.damping
    if settings.per_factor:
        return {
            name: [torch.full_like(m, damping) if settings.absolute else m * damping for m in side]
            for name, side in means.items()
        }
    if not settings.absolute:
        root = math.sqrt(damping)
        return {name: [m * root for m in side] for name, side in means.items()}
    whole = {
        name: torch.stack([m.trace() for m in side]).sum() / sum(m.shape[0] for m in side)
        for name, side in matrices.items()
    }
    alive = (whole["a"] > 0) & (whole["g"] > 0)
    one = torch.ones_like(whole["a"])
    pi = torch.where(alive, whole["a"] / torch.where(alive, whole["g"], one), one).sqrt()
    root = math.sqrt(damping)
    return {
        "a": [pi * root for _ in matrices["a"]],
        "g": [root / pi for _ in matrices["g"]],
    }


def _decompose(jobs: Sequence[_Job], settings: RefreshSettings) -> None:
    factors = torch.stack([_unpack(job.packed) for job in jobs])
    device = factors.device
    shift = torch.stack([job.shift for job in jobs])
    if settings.on_cpu:
        factors, shift = factors.cpu(), shift.cpu()
    bases, ok, reasons = _solve(factors, shift, settings.solver)
    for job, basis, good, reason in zip(jobs, bases, ok.tolist(), reasons, strict=True):
        if good:
            job.result[job.index] = _to(basis, device)
        job.reasons[job.index] = reason


def _solve(
    factors: Tensor, shift: Tensor, solver: str
) -> tuple[list[BlockBasis], Tensor, list[str]]:
    if solver == "eigen":
        eigen, ok, reasons = eigen_bases(factors)
        bases = [
            BlockBasis(mean, vectors=vectors, values=values)
            for mean, vectors, values in zip(eigen.mean, eigen.vectors, eigen.values, strict=True)
        ]
        return bases, ok, reasons
    inverses, ok, reasons = damped_inverses(factors, shift)
    means = factors.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    means = torch.where(means > 0, means, torch.ones_like(means))
    bases = [
        BlockBasis(mean, inverse=inverse)
        for mean, inverse in zip(means, inverses.inverse, strict=True)
    ]
    return bases, ok, reasons


def _to(basis: BlockBasis, device: torch.device) -> BlockBasis:
    """A basis on the compute device, its tensors independent of the batch they came from.

    Solvers return column-major matrices. A product with one may differ in its last bit from that
    with the row-major copy that a checkpoint brings back.
    """

    def own(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.to(device, copy=True, memory_format=torch.contiguous_format)

    mean = own(basis.mean)
    assert mean is not None
    return BlockBasis(mean, own(basis.vectors), own(basis.values), own(basis.inverse))


def _carry_moments(
    state: LayerState, old_a: list[BlockBasis | None], old_g: list[BlockBasis | None]
) -> None:
    """Move what lives in the eigenbasis into the new one, tile by tile."""
    second, momentum = (state.moments.get(name) for name in ("second", "rotated_momentum"))
    if second is None:
        return
    for rows, new_g, was_g in zip(state.g.blocks, state.g.bases, old_g, strict=True):
        for columns, new_a, was_a in zip(state.a.blocks, state.a.bases, old_a, strict=True):
            if new_g is was_g and new_a is was_a:
                continue
            if new_g is None or new_a is None:
                continue  # without both bases nothing was rotated in this tile
            # With one basis missing the tile was in plain coordinates on both sides.
            both = was_g is not None and was_a is not None
            turn_g = _rotation(new_g, was_g if both else None)
            turn_a = _rotation(new_a, was_a if both else None)
            tile = slice(*rows), slice(*columns)
            second[tile] = move_second_moment(second[tile], turn_g, turn_a)
            if momentum is not None:
                momentum[tile] = from_basis(momentum[tile], turn_g, turn_a)


def _rotation(new: BlockBasis, old: BlockBasis | None) -> Tensor:
    """``Q_new^T Q_old``; a missing basis is the identity."""
    assert new.vectors is not None, "these moments exist only in an eigenbasis"
    if old is None or old.vectors is None:
        return new.vectors.mT
    return new.vectors.mT @ old.vectors


def raise_if_hopeless(states: Sequence[LayerState], max_failures: int) -> None:
    """Stop where blocks failed too often.

    Raises:
        NumericalError: A block failed more often in a row than tolerated (E110).
    """
    for state in states:
        for name, side in state.sides():
            worst = max(side.failures)
            if worst > max_failures:
                raise NumericalError(
                    "E110",
                    f"layer {state.spec.name}: the decomposition of factor {name.upper()} failed "
                    f"{worst} times in a row (max_failures={max_failures}). Raise kfac.damping, or "
                    f"exclude the layer with kfac.skip_layers",
                )

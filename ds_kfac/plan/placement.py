"""Which rank owns a layer's factors, bases and direction.

Deterministic and the same on every rank: a function of the layer table, the gradient
layouts and the cost model, computed without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_kfac.layers.spec import LayerSpec
from ds_kfac.plan.cost import Work
from ds_kfac.plan.topology import Layout, WorkerGrid

MAX_IMBALANCE = 1.5
"""``zero_aligned`` moves layers only while the busiest rank exceeds this multiple of the mean."""


def place(
    specs: Sequence[LayerSpec],
    costs: Sequence[float],
    layouts: Mapping[str, Layout],
    *,
    size: int,
    strategy: str,
) -> tuple[int, ...]:
    """Choose the owner of every layer.

    Args:
        specs: Layers.
        costs: Work per step of each layer.
        layouts: Gradient layout of every parameter of the layers, by name.
        size: Ranks in the data group.
        strategy: ``memory`` balances the work; ``zero_aligned`` keeps a layer where its
            gradient is and balances only what is badly out of balance.

    Returns:
        The owner's data rank for each layer.
    """
    held = [_held(spec, layouts, size) for spec in specs]
    if strategy == "memory" or not any(any(shares) for shares in held):
        return balance(costs, size)
    homes = [_homes(spec, layouts, shares) for spec, shares in zip(specs, held, strict=True)]
    owners = [home[0] if len(home) == 1 else -1 for home in homes]
    loads = [0.0] * size
    for owner, cost in zip(owners, costs, strict=True):
        if owner >= 0:
            loads[owner] += cost
    for index in _by_cost(costs):
        if owners[index] < 0 and homes[index]:
            owners[index] = min(homes[index], key=lambda rank: (loads[rank], rank))
            loads[owners[index]] += costs[index]
    for index in _by_cost(costs):
        if owners[index] < 0:
            owners[index] = _argmin(loads)
            loads[owners[index]] += costs[index]
    _rebalance(owners, loads, costs, held)
    return tuple(owners)


def balance(costs: Sequence[float], size: int) -> tuple[int, ...]:
    """Longest processing time first: each layer, dearest first, to the least loaded rank."""
    owners = [0] * len(costs)
    loads = [0.0] * size
    for index in _by_cost(costs):
        owners[index] = _argmin(loads)
        loads[owners[index]] += costs[index]
    return tuple(owners)


def place_in_columns(work: Sequence[Work], grid: WorkerGrid) -> tuple[int, ...]:
    """Owners where several ranks compute each direction.

    Longest processing time first, twice: a column for every layer, whose ranks all compute its
    direction and share the decompositions of the column; then one of them to decompose it.

    Args:
        work: Work of each layer.
        grid: The columns.

    Returns:
        The owner of each layer.
    """
    columns = [0.0] * grid.columns
    ranks = [0.0] * grid.size
    owners = [0] * len(work)
    for index in _by_cost([item.direction + item.refresh / grid.workers for item in work]):
        column = _argmin(columns)
        columns[column] += work[index].direction + work[index].refresh / grid.workers
        owners[index] = min(grid.column(column), key=lambda rank: (ranks[rank], rank))
        ranks[owners[index]] += work[index].refresh
    return tuple(owners)


def place_sides(
    refresh: Sequence[tuple[float, float]], owners: Sequence[int], *, size: int
) -> tuple[tuple[int, int], ...]:
    """Ranks that decompose A and G of each layer: factor-wise distribution.

    Longest processing time first over all sides; among equally loaded ranks the owner, whose
    factor need not move.

    Args:
        refresh: Work of a decomposition of A and of G of each layer.
        owners: Owner of each layer.
        size: Ranks.
    """
    flat = [cost for pair in refresh for cost in pair]
    solvers = [0] * len(flat)
    loads = [0.0] * size
    for index in _by_cost(flat):
        owner, idlest = owners[index // 2], _argmin(loads)
        solvers[index] = owner if loads[owner] <= loads[idlest] else idlest
        loads[solvers[index]] += flat[index]
    return tuple(zip(solvers[::2], solvers[1::2], strict=True))


def _rebalance(
    owners: list[int],
    loads: list[float],
    costs: Sequence[float],
    held: Sequence[Sequence[int]],
) -> None:
    """Move layers off overloaded ranks, those that cost least to move per work gained."""
    limit = MAX_IMBALANCE * sum(loads) / len(loads)
    for _ in owners:
        busiest, idlest = _argmax(loads), _argmin(loads)
        if loads[busiest] <= limit:
            return
        movable = [
            index
            for index, owner in enumerate(owners)
            if owner == busiest and loads[idlest] + costs[index] < loads[busiest]
        ]
        if not movable:
            return
        chosen = min(
            movable,
            key=lambda i: ((held[i][busiest] - held[i][idlest]) / max(costs[i], 1.0), -costs[i], i),
        )
        owners[chosen] = idlest
        loads[busiest] -= costs[chosen]
        loads[idlest] += costs[chosen]


def _held(spec: LayerSpec, layouts: Mapping[str, Layout], size: int) -> list[int]:
    shares = [0] * size
    for slot in spec.slots:
        for pieces in layouts[slot.name].sets:
            for piece in pieces:
                shares[piece.rank] += piece.numel
    return shares


def _homes(spec: LayerSpec, layouts: Mapping[str, Layout], shares: Sequence[int]) -> list[int]:
    """Ranks that hold more of a layer than all others.

    None where its parameters are cut evenly, as under ZeRO 3. Several where each tensor rank
    has a shard of the same size: the first of equals would be given every layer.
    """
    even = sum(-(-slot.numel * len(layouts[slot.name].sets) // len(shares)) for slot in spec.slots)
    most = max(shares)
    return [rank for rank, share in enumerate(shares) if share == most] if most > even else []


def _by_cost(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: (-costs[index], index))


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda index: (values[index], -index))


def _argmin(values: Sequence[float]) -> int:
    return min(range(len(values)), key=lambda index: (values[index], index))

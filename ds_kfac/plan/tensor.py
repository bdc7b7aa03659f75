"""Tensor parallelism as plain data: shards as slices of whole layers, rows shared out.

The ranks that share the work on a layer are those of the data group times those of the tensor
group. To the exchange of gradients a shard is a slice like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ds_kfac.layers.shards import Shards
from ds_kfac.layers.spec import LayerSpec, ParamSlot
from ds_kfac.plan.topology import Layout, Piece

Grid = Sequence[Sequence[int]]
"""Rank in the work group, by tensor rank and data rank."""


def grid_of(places: Sequence[tuple[int, int]]) -> Grid:
    """The grid of a work group.

    Args:
        places: Per rank of the work group its tensor rank and its data rank.

    Raises:
        ValueError: Places are missing or taken twice.
    """
    rank_at = {place: rank for rank, place in enumerate(places)}
    tensor_size, data_size = (1 + max(place[i] for place in places) for i in (0, 1))
    if len(rank_at) != len(places) or len(places) != tensor_size * data_size:
        raise ValueError(f"(tensor rank, data rank) of the work group are no grid: {places}")
    return [[rank_at[t, d] for d in range(data_size)] for t in range(tensor_size)]


def joint_layouts(
    specs: Sequence[LayerSpec], by_tensor_rank: Sequence[Mapping[str, Layout]], grid: Grid
) -> dict[str, Layout]:
    """Where the elements of whole layers live in the work group.

    Args:
        specs: Layers.
        by_tensor_rank: Per tensor rank the layouts of its parameters in its data group.
        grid: Ranks of the work group.

    Returns:
        By parameter name, slices of all its shards one after another.
    """
    result = {}
    for spec in specs:
        for slot in spec.slots:
            layouts = [layouts[slot.name] for layouts in by_tensor_rank]
            sets = [
                tuple(piece for piece in pieces if piece.numel)
                for pieces in _sets(spec, slot, layouts, grid)
            ]
            result[slot.name] = Layout(pieces=sets[0], copies=tuple(sets[1:]))
    return result


def _sets(
    spec: LayerSpec, slot: ParamSlot, layouts: Sequence[Layout], grid: Grid
) -> list[list[Piece]]:
    if spec.shards is None or not spec.is_cut(slot):
        return [
            pieces
            for ranks, layout in zip(grid, layouts, strict=True)
            for pieces in _shifted(layout, ranks, 0, slot.numel)
        ]
    sets: list[list[Piece]] = []
    start, per_feature = 0, slot.numel // spec.shards.cut_size
    for rank, (ranks, layout) in enumerate(zip(grid, layouts, strict=True)):
        numel = spec.shards.width(rank) * per_feature
        for index, pieces in enumerate(_shifted(layout, ranks, start, numel)):
            while len(sets) <= index:
                sets.append([])
            sets[index] += pieces
        start += numel
    return sets


def _shifted(layout: Layout, ranks: Sequence[int], start: int, numel: int) -> Iterator[list[Piece]]:
    """One tensor rank's sets of slices, in ranks of the work group and elements of the whole."""
    if layout.replicated:
        for rank in ranks:
            yield [Piece(rank, start, numel)]
        return
    yield [Piece(ranks[p.rank], start + p.start, p.numel) for p in layout.pieces]


def row_shares(rows: int, size: int) -> list[int]:
    """How many of a call's rows each tensor rank works on, in order: balanced."""
    small, larger = divmod(rows, size)
    return [small + (rank < larger) for rank in range(size)]


def sent_rows_numel(shards: Shards, rows: int, rank: int) -> int:
    """Elements that a rank sends when it hands the others their rows of its features."""
    others = rows - row_shares(rows, shards.size)[rank]
    return others * shards.width(rank)

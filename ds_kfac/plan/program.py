"""The communication of a step as data: what each rank sends to whom, in which order.

Both sides of every transfer are derived from the same table, so that all ranks agree on
sizes and order without asking; the hash of the table is compared once, at attach.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_kfac.layers.blocks import Block
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.math.packing import packed_numel
from ds_kfac.plan.spread import Spread
from ds_kfac.plan.topology import Layout, WorkerGrid

MAX_PADDING = 2.0
"""Directions are handed on in equal shares where one padded all-gather sends more than this."""
COUNTS_PER_LAYER = 3  # rows used, rows seen, loss terms: they travel with the sums
REDUCE_BUFFER_NUMEL = 1 << 26
"""Elements of the reduction buffer of one round (256 MiB in fp32)."""


@dataclass(frozen=True)
class Segment:
    """A slice of a layer's flat gradient held by one rank.

    Attributes:
        layer: Index of the layer.
        param: Parameter name.
        holder: Data rank that holds the slice.
        start: First element in the layer's flat gradient.
        offset: First element in the flattened parameter.
        numel: Elements.
        source: The owner reads these elements here; other holders of the same elements only
            get the direction back.
    """

    layer: int
    param: str
    holder: int
    start: int
    offset: int
    numel: int
    source: bool = True


@dataclass(frozen=True)
class Exchange:
    """Gradients to owners and directions back, for one data group.

    Attributes:
        owners: Owner of each layer.
        segments: All slices of sharded layers; those of replicated ones are everywhere.
        replicated: Layers whose gradient every rank holds.
        numels: Elements of each layer's flat gradient.
        size: Ranks in the group.
        workers: Ranks that compute the direction of a layer, see :class:`WorkerGrid`. More than
            one only where every gradient is replicated.
    """

    owners: tuple[int, ...]
    segments: tuple[Segment, ...]
    replicated: frozenset[int]
    numels: tuple[int, ...]
    size: int
    workers: int = 1

    @property
    def grid(self) -> WorkerGrid:
        """Who computes and who receives."""
        return WorkerGrid(self.size, self.workers)

    def owned(self, rank: int) -> list[int]:
        """Layers owned by a rank, in table order."""
        return [layer for layer, owner in enumerate(self.owners) if owner == rank]

    def computed(self, rank: int) -> list[int]:
        """Layers whose direction a rank computes, in table order."""
        grid = self.grid
        column = grid.column_of(rank)
        return [layer for layer, o in enumerate(self.owners) if grid.column_of(o) == column]

    @cached_property
    def column_numels(self) -> tuple[int, ...]:
        """Elements of the directions that each column computes."""
        grid = self.grid
        numels = [0] * grid.columns
        for owner, numel in zip(self.owners, self.numels, strict=True):
            numels[grid.column_of(owner)] += numel
        return tuple(numels)

    def passed_numel(self, rank: int) -> int:
        """Elements of directions that a rank sends to the others of its row."""
        if self.workers == 1:
            return 0
        grid = self.grid
        return self.column_numels[grid.column_of(rank)] * (grid.columns - 1)

    def local(self, rank: int, *, sources_only: bool = False) -> list[Segment]:
        """Slices a rank holds of its own layers: they never travel."""
        return [
            s
            for s in self.segments
            if s.holder == rank == self.owners[s.layer] and (s.source or not sources_only)
        ]

    def outgoing(self, rank: int, *, sources_only: bool = False) -> list[list[Segment]]:
        """Per owner, the slices this rank holds of its layers, in table order.

        Args:
            rank: The holder.
            sources_only: Those that owners read; all of them get directions back.
        """
        parts: list[list[Segment]] = [[] for _ in range(self.size)]
        for segment in self.segments:
            owner = self.owners[segment.layer]
            if segment.holder == rank != owner and (segment.source or not sources_only):
                parts[owner].append(segment)
        return parts

    def incoming(self, rank: int, *, sources_only: bool = False) -> list[list[Segment]]:
        """Per holder, the slices of this rank's layers that are elsewhere, in table order.

        Args:
            rank: The owner.
            sources_only: Those that it reads; all of them get directions back.
        """
        parts: list[list[Segment]] = [[] for _ in range(self.size)]
        for segment in self.segments:
            if self.owners[segment.layer] == rank != segment.holder:
                if segment.source or not sources_only:
                    parts[segment.holder].append(segment)
        return parts

    @cached_property
    def moves_gradients(self) -> bool:
        """Whether owners read slices elsewhere: otherwise no gradient travels."""
        return any(s.source and s.holder != self.owners[s.layer] for s in self.segments)

    @cached_property
    def moves_shards(self) -> bool:
        """Whether any slice is not at its owner: otherwise no direction comes back that way."""
        return any(s.holder != self.owners[s.layer] for s in self.segments)

    def shared_numel(self, rank: int) -> int:
        """Elements of replicated layers whose direction this rank computes for everybody."""
        return sum(self.numels[layer] for layer in self.owned(rank) if layer in self.replicated)

    @cached_property
    def gather_numel(self) -> int:
        """Elements each rank contributes to the all-gather of replicated layers (padded)."""
        if self.size == 1 or self.workers > 1:
            return 0
        shared = [0] * self.size  # in one pass: thousands of ranks own hundreds of layers
        for layer in self.replicated:
            shared[self.owners[layer]] += self.numels[layer]
        return max(shared)

    @cached_property
    def spread(self) -> Spread | None:
        """Shares in which replicated directions are handed on, where owners are very unequal.

        None where one all-gather of every owner's layers will do: it is padded to the largest
        part, and one collective less.
        """
        if self.size == 1 or self.workers > 1 or self.segments or not self.replicated:
            return None
        spread = Spread.of(self)
        at_once = self.gather_numel * (self.size - 1)
        return spread if at_once > MAX_PADDING * spread.most_sent(self.gather_numel) else None

    def returned_numel(self, rank: int) -> int:
        """Elements of directions of replicated layers that a rank sends."""
        if self.spread is None:
            return self.gather_numel * (self.size - 1) + self.passed_numel(rank)
        return self.spread.sent_numels[rank]

    def sent_numel(self, rank: int) -> tuple[int, int]:
        """Elements a rank sends per step: gradients to owners, directions from owners."""
        out = sum(s.numel for part in self.outgoing(rank, sources_only=True) for s in part)
        back = sum(s.numel for part in self.incoming(rank) for s in part)
        return out, back + self.returned_numel(rank)


@dataclass(frozen=True)
class ReduceItem:
    """One packed block, or a layer's counts, in a reduction round.

    Attributes:
        layer: Index of the layer.
        side: ``"a"``, ``"g"`` or ``"counts"``.
        block: Index of the block on that side.
        numel: Elements.
        offset: Position in the owner's part of the round's buffer.
    """

    layer: int
    side: str
    block: int
    numel: int
    offset: int


@dataclass(frozen=True)
class ReduceRound:
    """One reduce-scatter: per owner its items, all parts padded to ``part_numel``."""

    items: tuple[tuple[ReduceItem, ...], ...]
    part_numel: int


@dataclass(frozen=True)
class Loan:
    """One side of a layer that another rank than its owner decomposes.

    Attributes:
        layer: Index of the layer.
        side: ``"a"`` or ``"g"``.
        owner: Rank that has the factor and gets the bases.
        solver: Rank that decomposes it.
        factor_numel: Elements of the packed blocks and their shifts.
        basis_numel: Elements of the bases, flags and means.
    """

    layer: int
    side: str
    owner: int
    solver: int
    factor_numel: int
    basis_numel: int


@dataclass(frozen=True)
class Program:
    """Everything that moves in one data group.

    Attributes:
        exchange: Gradients and directions.
        rounds: Statistics.
        basis_numels: Elements of each layer's bases as owners send them to other workers; empty
            where they do not.
        solvers: Ranks that decompose A and G of each layer; empty where owners do.
        solving: What owners send to these, and gets back to owners.
    """

    exchange: Exchange
    rounds: tuple[ReduceRound, ...]
    basis_numels: tuple[int, ...] = ()
    solvers: tuple[tuple[int, int], ...] = ()
    solving: tuple[Loan, ...] = ()

    @cached_property
    def stream_numels(self) -> tuple[int, ...]:
        """Elements of the bases that each rank sends to every other worker of its layers."""
        numels = [0] * self.exchange.size
        for owner, numel in zip(self.exchange.owners, self.basis_numels, strict=False):
            numels[owner] += numel
        return tuple(numels)

    @property
    def piece_numel(self) -> int:
        """Elements of bases that a rank sends to another one in one round."""
        return max(1, REDUCE_BUFFER_NUMEL // self.exchange.size)

    def fingerprint(self) -> str:
        """Hash compared between ranks at attach."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def build(
    specs: Sequence[LayerSpec],
    layouts: Mapping[str, Layout],
    owners: Sequence[int],
    *,
    size: int,
    workers: int = 1,
    solver: str = "eigen",
    solvers: Sequence[tuple[int, int]] = (),
) -> Program:
    """Derive the program of a data group.

    Args:
        specs: Layers.
        layouts: Gradient layout of every parameter, by name.
        owners: Owner of each layer.
        size: Ranks in the group.
        workers: Ranks that compute the direction of a layer.
        solver: ``eigen`` or ``cholesky``: what bases consist of.
        solvers: Ranks that decompose A and G of each layer; empty for owners.
    """
    segments, replicated = [], set()
    for layer, spec in enumerate(specs):
        for slot in spec.slots:
            layout = layouts[slot.name]
            if layout.replicated:
                replicated.add(layer)
            source = _source(layout, owners[layer])
            for index, pieces in enumerate(layout.sets):
                for piece in pieces:
                    segments.append(
                        Segment(
                            layer,
                            slot.name,
                            piece.rank,
                            slot.offset + piece.start,
                            piece.start,
                            piece.numel,
                            index == source,
                        )
                    )
    exchange = Exchange(
        tuple(owners),
        tuple(segments),
        frozenset(replicated),
        tuple(s.numel for s in specs),
        size,
        workers,
    )
    bases = [basis_numel(spec, solver) for spec in specs] if workers > 1 else []
    loans = [
        Loan(layer, side, owners[layer], at, *_loan_numels(blocks, solver))
        for layer, (spec, ranks) in enumerate(zip(specs, solvers, strict=False))
        for side, blocks, at in zip("ag", (spec.a_blocks, spec.g_blocks), ranks, strict=True)
        if at != owners[layer]
    ]
    rounds = _rounds(specs, owners, size)
    return Program(exchange, rounds, tuple(bases), tuple(solvers), tuple(loans))


def _loan_numels(blocks: Sequence[Block], solver: str) -> tuple[int, int]:
    sizes = [block.size for block in blocks]
    return sum(packed_numel(n) + 1 for n in sizes), _basis_numel(sizes, solver)


def basis_numel(spec: LayerSpec, solver: str) -> int:
    """Elements of a layer's bases on their way: each block's flag and mean come first."""
    return _basis_numel(spec.block_sizes, solver)


def _basis_numel(sizes: Sequence[int], solver: str) -> int:
    return sum(2 + n * n + (n if solver == "eigen" else 0) for n in sizes)


def _source(layout: Layout, owner: int) -> int:
    """The set of slices that an owner reads: the one it has most of itself."""
    held = [sum(p.numel for p in pieces if p.rank == owner) for pieces in layout.sets]
    return held.index(max(held))


def _rounds(
    specs: Sequence[LayerSpec], owners: Sequence[int], size: int
) -> tuple[ReduceRound, ...]:
    """Cut every owner's packed factors into rounds of a bounded buffer."""
    limit = max(1, REDUCE_BUFFER_NUMEL // size)
    parts: list[list[list[ReduceItem]]] = []  # [round][owner] -> items
    for owner in range(size):
        current, used = 0, 0
        for layer, side, block, numel in _reduce_order(specs, owners, owner):
            if used and used + numel > limit:
                current, used = current + 1, 0
            while len(parts) <= current:
                parts.append([[] for _ in range(size)])
            parts[current][owner].append(ReduceItem(layer, side, block, numel, used))
            used += numel
    return tuple(
        ReduceRound(
            tuple(tuple(items) for items in part),
            max(sum(item.numel for item in items) for items in part),
        )
        for part in parts
    )


def _reduce_order(
    specs: Sequence[LayerSpec], owners: Sequence[int], owner: int
) -> list[tuple[int, str, int, int]]:
    order = []
    for layer, spec in enumerate(specs):
        if owners[layer] != owner:
            continue
        for side, blocks in (("a", spec.a_blocks), ("g", spec.g_blocks)):
            order += [(layer, side, i, packed_numel(b.size)) for i, b in enumerate(blocks)]
        order.append((layer, "counts", 0, COUNTS_PER_LAYER))
    return order

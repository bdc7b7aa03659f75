"""Ranks and gradient layouts as plain integers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """This rank's place in the group that shares the work on a set of layers.

    Attributes:
        size: Ranks in the data group (those whose gradients are averaged).
        rank: This rank's index in it.
    """

    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class WorkerGrid:
    """Which ranks compute the direction of a layer, and who gets it from whom.

    Ranks are written in rows of ``size / workers``. A column computes the directions of the same
    layers (its ranks are the layers' gradient workers); each rank gets the others from those of
    its own row. One worker per layer is the memory-optimal end, ``size`` workers the
    communication-optimal one (KAISA, Pauloski et al. 2021, arXiv 2107.01739). Rows are of
    neighbouring ranks, for directions move in every step and bases seldom.

    Attributes:
        size: Ranks.
        workers: Ranks that compute the direction of a layer; a divisor of ``size``.
    """

    size: int
    workers: int = 1

    @property
    def columns(self) -> int:
        """Ranks in a row."""
        return self.size // self.workers

    def column_of(self, rank: int) -> int:
        """Index of a rank's column."""
        return rank % self.columns

    def column(self, rank: int) -> list[int]:
        """Ranks that compute the same directions as this one, itself among them."""
        return list(range(self.column_of(rank), self.size, self.columns))

    def row(self, rank: int) -> list[int]:
        """Ranks that get this one's directions, itself among them."""
        start = rank - self.column_of(rank)
        return list(range(start, start + self.columns))


@dataclass(frozen=True)
class Piece:
    """A slice of a flattened parameter's gradient and the data rank that holds it."""

    rank: int
    start: int
    numel: int


@dataclass(frozen=True)
class Layout:
    """Where a parameter's reduced gradient lives.

    Attributes:
        pieces: Disjoint slices that cover the parameter, one per rank at most; empty when
            ``replicated``.
        replicated: Every rank holds the whole gradient.
        copies: Further sets of slices that cover the parameter: under tensor parallelism some
            parameters are whole on every tensor rank, and sharded ones on every data rank.
    """

    pieces: tuple[Piece, ...] = ()
    replicated: bool = False
    copies: tuple[tuple[Piece, ...], ...] = ()

    @property
    def sets(self) -> tuple[tuple[Piece, ...], ...]:
        """All sets of slices, each of which covers the parameter."""
        return (self.pieces, *self.copies)

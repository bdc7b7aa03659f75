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

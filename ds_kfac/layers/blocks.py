"""Balanced cuts of a factor side into diagonal blocks."""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """Half-open range ``[start, end)`` of one side of a layer's matrix view."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of rows (or columns) in the block."""
        return self.end - self.start


def cut(dim: int, max_dim: int) -> tuple[Block, ...]:
    """Cut ``dim`` into the fewest consecutive blocks of at most ``max_dim``.

    Sizes differ by at most one, larger blocks first: equal sizes can be decomposed as
    one batch, and a small remainder block would waste the quality a large one has.
    """
    count = -(-dim // max_dim)
    small, larger = divmod(dim, count)
    sizes = [small + 1] * larger + [small] * (count - larger)
    ends = [sum(sizes[: i + 1]) for i in range(count)]
    return tuple(Block(end - size, end) for size, end in zip(sizes, ends, strict=True))

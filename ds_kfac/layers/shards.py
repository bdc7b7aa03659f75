"""How the weight of a layer is cut over a tensor-parallel group, whoever cut it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of rows or columns, in the order in which a rank stores them."""


@dataclass(frozen=True)
class Shards:
    """The cut of one layer's matrix ``[d_out, d_in]`` over the ranks of the tensor group.

    Attributes:
        d_out: Output features of the whole layer.
        d_in: Input features of the whole layer.
        rows: The output features are cut, and the bias with them (column parallel in
            Megatron's words); otherwise the input features are, and the bias is whole on every
            rank (row parallel).
        ranges: Per rank what it holds of the cut side. A rank with a slice of each of several
            fused matrices has several ranges; it may also have none.
        whole: Inputs and outputs of the module are whole on every rank: it gathers or cuts
            them itself.
        tokens: On the side whose features are whole every rank has its own, equal share of the
            rows, in the order of the ranks (sequence parallel).
    """

    d_out: int
    d_in: int
    rows: bool
    ranges: tuple[Ranges, ...]
    whole: bool = False
    tokens: bool = False

    @property
    def size(self) -> int:
        """Ranks in the tensor group."""
        return len(self.ranges)

    @property
    def dim(self) -> int:
        """Dimension of the matrix that is cut."""
        return 0 if self.rows else 1

    @property
    def cut_size(self) -> int:
        """Features of the cut side over all ranks."""
        return self.d_out if self.rows else self.d_in

    @property
    def missing_side(self) -> str | None:
        """The factor whose rows no rank sees as a whole: ``"a"``, ``"g"`` or None."""
        if self.whole:
            return None
        return "g" if self.rows else "a"

    def width(self, rank: int) -> int:
        """Features of the cut side that a rank holds."""
        return sum(end - start for start, end in self.ranges[rank])

    @property
    def widths(self) -> list[int]:
        """Features of the cut side by rank."""
        return [self.width(rank) for rank in range(self.size)]

    @property
    def in_order(self) -> bool:
        """Whether shards one after another are the whole matrix as it is stored."""
        pieces = [piece for ranges in self.ranges for piece in ranges]
        return self.rows and pieces == sorted(pieces)

    def problem(self) -> str | None:
        """Why these ranges are not a cut of the layer, or None."""
        pieces = sorted(piece for ranges in self.ranges for piece in ranges if piece[0] < piece[1])
        ends = [0] + [end for _, end in pieces]
        if ends[-1] != self.cut_size or any(
            start != end for (start, _), end in zip(pieces, ends, strict=False)
        ):
            return f"shards {self.ranges} do not cover {self.cut_size} features exactly once"
        return None

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Put what all ranks hold of the cut side into the order of the whole layer.

        Args:
            parts: Per rank, its features along ``dim``.
            dim: Dimension of the features.
        """
        pieces: list[tuple[int, Tensor]] = []
        for ranges, part in zip(self.ranges, parts, strict=True):
            offset = 0
            for start, end in ranges:
                if end > start:
                    pieces.append((start, part.narrow(dim, offset, end - start)))
                offset += end - start
        ordered = [piece for _, piece in sorted(pieces, key=lambda item: item[0])]
        return ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim)

    def take(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """What a rank holds of the cut side.

        Args:
            whole: All features along ``dim``.
            rank: Rank in the tensor group.
            dim: Dimension of the features.
        """
        parts = [whole.narrow(dim, start, end - start) for start, end in self.ranges[rank]]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)


@dataclass(frozen=True)
class TensorCut:
    """The part of a model that is cut over a tensor group.

    Attributes:
        modules: Modules whose weight is cut, by name.
        rank: This rank in the tensor group.
        blocks: Every rank's shard is a layer of its own; otherwise layers are whole ones.
        left_out: Modules that stay with the base optimizer because of the cut, and why.
    """

    modules: Mapping[str, Shards]
    rank: int
    blocks: bool
    left_out: Mapping[str, str] = field(default_factory=dict)

    def is_elsewhere(self, name: str) -> bool:
        """Whether a layer exists although this rank may hold nothing of it."""
        return name in self.modules and not self.blocks


def fused_ranges(widths: Sequence[Sequence[int]]) -> tuple[Ranges, ...]:
    """Ranges of a side that is made of fused parts, each cut into one slice per rank.

    Args:
        widths: Per fused part the width of every rank's slice.

    Returns:
        Per rank its ranges, one per part.
    """
    ranges: list[list[tuple[int, int]]] = [[] for _ in widths[0]]
    start = 0
    for part in widths:
        for rank, width in enumerate(part):
            ranges[rank].append((start, start + width))
            start += width
    return tuple(tuple(items) for items in ranges)

"""What an owner keeps of a layer: factors, bases, direction state. Nothing else is state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_kfac.layers.blocks import Block
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.math.average import WeightedAverage
from ds_kfac.math.packing import packed_numel, unpack_upper


@dataclass
class BlockBasis:
    """What a refresh computes from one factor block.

    Attributes:
        mean: 0-d, mean eigenvalue of the factor (1 for a dead layer's zero factor).
        vectors: ``[n, n]`` eigenvectors in columns, or None.
        values: ``[n]`` eigenvalues, not negative, or None.
        inverse: ``[n, n]`` damped inverse, or None.
    """

    mean: Tensor
    vectors: Tensor | None = None
    values: Tensor | None = None
    inverse: Tensor | None = None


@dataclass
class Side:
    """One factor (A or G) of a layer as its diagonal blocks.

    Attributes:
        blocks: Ranges of the blocks.
        averages: Per block the running average, packed upper triangle ``[n(n+1)/2]``.
        bases: Per block the last good basis, None before the first.
        failures: Per block, consecutive failed refreshes.
    """

    blocks: tuple[Block, ...]
    averages: list[WeightedAverage]
    bases: list[BlockBasis | None]
    failures: list[int]

    @classmethod
    def zeros(cls, blocks: tuple[Block, ...], device: torch.device, dtype: torch.dtype) -> Side:
        """Empty averages, no bases."""
        averages = [
            WeightedAverage(
                torch.zeros(packed_numel(block.size), device=device, dtype=dtype),
                torch.zeros((), device=device, dtype=torch.float64),
            )
            for block in blocks
        ]
        return cls(blocks, averages, [None] * len(blocks), [0] * len(blocks))

    def block_value(self, index: int) -> Tensor:
        """Current factor block as a full symmetric ``[n, n]`` matrix."""
        packed = self.averages[index].value()
        size = self.blocks[index].size
        return unpack_upper(packed, packed.new_empty(size, size))

    def dense(self) -> Tensor:
        """The whole block-diagonal factor, ``[n, n]``."""
        blocks: Sequence[Tensor] = [self.block_value(i) for i in range(len(self.blocks))]
        return torch.block_diag(*blocks)


@dataclass
class LayerState:
    """State of one layer at its owner.

    Attributes:
        spec: The layer.
        a: Input factor.
        g: Output-gradient factor.
        folded_at: Applied step of the last fold, -1 before the first.
        refreshed_at: Applied step of the last successful refresh, -1 before the first.
        updates: 0-d fp64, steps in which the layer had a gradient.
        fallbacks: 0-d int64, steps whose direction was not finite and was replaced.
        moments: Direction state by name, each ``[d_out, columns]``.
    """

    spec: LayerSpec
    a: Side
    g: Side
    updates: Tensor
    fallbacks: Tensor
    folded_at: int = -1
    refreshed_at: int = -1
    moments: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def zeros(cls, spec: LayerSpec, device: torch.device, dtype: torch.dtype) -> LayerState:
        """State of a layer that has seen nothing."""
        return cls(
            spec,
            Side.zeros(spec.a_blocks, device, dtype),
            Side.zeros(spec.g_blocks, device, dtype),
            torch.zeros((), device=device, dtype=torch.float64),
            torch.zeros((), device=device, dtype=torch.int64),
        )

    def moment(self, name: str, like: Tensor) -> Tensor:
        """A moment tensor by name, created as zeros like a matrix view."""
        if name not in self.moments:
            self.moments[name] = torch.zeros_like(like, memory_format=torch.contiguous_format)
        return self.moments[name]

    def sides(self) -> tuple[tuple[str, Side], tuple[str, Side]]:
        """Both factors with their names."""
        return ("a", self.a), ("g", self.g)

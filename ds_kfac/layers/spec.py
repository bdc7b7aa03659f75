"""Descriptions of layers as plain data: the same on every rank, comparable and printable."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ds_kfac.layers.blocks import Block
from ds_kfac.layers.shards import Shards


@dataclass(frozen=True)
class ParamSlot:
    """Where a parameter sits in the layer's flat gradient (weight first, then bias).

    Attributes:
        name: Qualified name in the model.
        shape: Full shape of the parameter.
        offset: Position of its first element in the layer's flat gradient.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count


@dataclass(frozen=True)
class LayerSpec:
    """One preconditioned layer.

    The matrix view is ``[d_out, columns]``; ``columns`` is ``d_in`` plus one when a
    trainable bias is appended as the last column.

    Attributes:
        name: Qualified module name.
        kind: Key of the layer kind (``linear``, ``conv1d``, ``conv2d``).
        d_in: Input features (for Conv2d: channels times kernel area).
        d_out: Output features.
        weight: Slot of the weight.
        bias: Slot of the bias, or None.
        parts: Matrices stacked along the rows (fused query/key/value: 3).
        a_blocks: Diagonal blocks of A over the columns.
        g_blocks: Diagonal blocks of G over the rows.
        shards: How the weight is cut over the tensor group, None where every rank has all of
            it. Dims, shapes and blocks are then those of the whole layer, and its flat gradient
            is that of the shards one after another: all weight shards, then all bias shards.
    """

    name: str
    kind: str
    d_in: int
    d_out: int
    weight: ParamSlot
    bias: ParamSlot | None
    parts: int
    a_blocks: tuple[Block, ...]
    g_blocks: tuple[Block, ...]
    shards: Shards | None = None

    @property
    def columns(self) -> int:
        """Columns of the matrix view."""
        return self.d_in + (self.bias is not None)

    @property
    def slots(self) -> tuple[ParamSlot, ...]:
        """Parameters in the order of the layer's flat gradient."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def numel(self) -> int:
        """Elements of the matrix view."""
        return self.d_out * self.columns

    def is_cut(self, slot: ParamSlot) -> bool:
        """Whether the ranks of the tensor group hold different elements of a parameter."""
        return self.shards is not None and (slot is self.weight or self.shards.rows)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Sizes of all factor blocks, A before G."""
        return tuple(block.size for block in (*self.a_blocks, *self.g_blocks))


FROZEN = "requires_grad=False"


@dataclass(frozen=True)
class LeftOut:
    """A module with parameters that the base optimizer keeps, and why."""

    name: str
    type_name: str
    reason: str
    numel: int


@dataclass(frozen=True)
class LayerTable:
    """All layers of a model, or of one pipeline stage: preconditioned ones and those left out.

    Attributes:
        layers: In the order of the model's modules.
        left_out: What stays with the base optimizer.
        unmatched: Patterns of settings that match nothing here, each with a hint.
    """

    layers: tuple[LayerSpec, ...]
    left_out: tuple[LeftOut, ...]
    unmatched: tuple[tuple[str, str], ...] = ()

    def frozen_weights(self) -> dict[str, str]:
        """Layers left out because they were frozen: name of the weight to name of the layer."""
        frozen = (item.name for item in self.left_out if item.reason == FROZEN)
        return {f"{name}.weight" if name else "weight": name for name in frozen}

    def fingerprint(self) -> str:
        """Hash that ranks compare at attach: equal tables give equal programs."""
        return hashlib.sha256(repr(self.layers).encode()).hexdigest()[:16]

    def coverage(self) -> str:
        """One line: what is preconditioned and what is not."""
        return coverage_line(
            [spec.numel for spec in self.layers], [item.numel for item in self.left_out]
        )


def coverage_line(inside: Sequence[int], outside: Sequence[int]) -> str:
    """What is preconditioned and what is not.

    Args:
        inside: Elements of every preconditioned layer.
        outside: Elements of every module that is left out.
    """
    share = 100.0 * sum(inside) / max(1, sum(inside) + sum(outside))
    return (
        f"K-FAC preconditions {len(inside)} layers with {sum(inside):,} of "
        f"{sum(inside) + sum(outside):,} trainable parameters ({share:.1f} %); "
        f"{len(outside)} modules stay with the base optimizer"
    )

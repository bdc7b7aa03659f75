"""What an owner keeps of a layer: factors, bases, direction state. Nothing else is state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ds_kfac.errors import StateError
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
            WeightedAverage.zeros(packed_numel(block.size), device=device, dtype=dtype)
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
        size = self.blocks[-1].end
        dense = self.averages[0].total.new_zeros(size, size)
        for index, block in enumerate(self.blocks):
            dense[block.start : block.end, block.start : block.end] = self.block_value(index)
        return dense


@dataclass
class LayerState:
    """State of one layer at its owner.

    Attributes:
        spec: The layer.
        a: Input factor.
        g: Output-gradient factor.
        folded_at: Applied step of the last fold, -1 before the first.
        refreshed_at: Applied step of the last refresh, -1 before the first; see ``failures``.
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

    def state_dict(self) -> dict[str, Any]:
        """Flat mapping of tensors and numbers; tensors are not copied."""
        result: dict[str, Any] = {name: getattr(self, name) for name in _SCALARS}
        result.update({f"moments.{name}": value for name, value in self.moments.items()})
        for name, side in self.sides():
            for index, (average, basis) in enumerate(zip(side.averages, side.bases, strict=True)):
                prefix = f"{name}.{index}."
                result[prefix + "total"] = average.total
                result[prefix + "weight"] = average.weight
                result[prefix + "failures"] = side.failures[index]
                for item in fields(BlockBasis) if basis is not None else ():
                    value = getattr(basis, item.name)
                    if value is not None:
                        result[f"{prefix}basis.{item.name}"] = value
        return result

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore, copying tensors to the layer's device and dtype."""
        like = self.a.averages[0].total
        for name in _SCALARS:
            current = getattr(self, name)
            value = state[name]
            if isinstance(current, Tensor):
                current.copy_(value)  # never the saved tensor itself, which may be in use
            else:
                setattr(self, name, int(value))
        self.moments = {
            key.removeprefix("moments."): value.to(like, copy=True)
            for key, value in state.items()
            if key.startswith("moments.")
        }
        for name, side in self.sides():
            for index in range(len(side.blocks)):
                prefix = f"{name}.{index}."
                side.averages[index].total.copy_(state[prefix + "total"])
                side.averages[index].weight.copy_(state[prefix + "weight"])
                side.failures[index] = int(state[prefix + "failures"])
                side.bases[index] = _load_basis(state, prefix + "basis.", like)


_SCALARS = ("updates", "fallbacks", "folded_at", "refreshed_at")


def check_layers(layers: Mapping[str, LayerState], saved: Any) -> None:
    """Check that saved states fit these layers, before any of them is used.

    Raises:
        StateError: Missing layers or entries, or tensors of another size (E302).
    """
    if not isinstance(saved, Mapping):
        raise StateError("E302", f"saved K-FAC state has no layers but {type(saved).__name__}")
    problems: list[str] = []
    for name, layer in layers.items():
        found = saved.get(name)
        if isinstance(found, Mapping):
            problems += [f"layer {name}: {text}" for text in _misfits(layer, found)]
        else:
            problems.append(f"layer {name}: missing")
    if problems:
        raise StateError("E302", "saved K-FAC state does not fit: " + "; ".join(problems[:20]))


def _misfits(layer: LayerState, saved: Mapping[str, Any]) -> list[str]:
    required, optional = _shapes(layer)
    problems = [f"{key} is missing" for key in required if key not in saved]
    for key, value in saved.items():
        matrix = (layer.spec.d_out, layer.spec.columns)
        expected = required.get(key, optional.get(key, matrix))
        if key not in required and key not in optional and not key.startswith("moments."):
            problems.append(f"{key} is unknown")
        elif tuple(getattr(value, "shape", ())) != expected:
            shape = tuple(getattr(value, "shape", ()))
            problems.append(f"{key} is {shape}, expected {expected}")
    return problems


def _shapes(layer: LayerState) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes of the entries that a saved layer has to have and of those that it may have."""
    required: dict[str, tuple[int, ...]] = dict.fromkeys(_SCALARS, ())
    optional: dict[str, tuple[int, ...]] = {}
    for name, side in layer.sides():
        for index, (block, average) in enumerate(zip(side.blocks, side.averages, strict=True)):
            prefix, n = f"{name}.{index}.", block.size
            required[prefix + "total"] = tuple(average.total.shape)
            required |= {prefix + "weight": (), prefix + "failures": ()}
            shapes = {"mean": (), "vectors": (n, n), "values": (n,), "inverse": (n, n)}
            optional |= {f"{prefix}basis.{key}": shape for key, shape in shapes.items()}
    return required, optional


def _load_basis(state: Mapping[str, Any], prefix: str, like: Tensor) -> BlockBasis | None:
    parts = {
        item.name: state[prefix + item.name].to(like, copy=True)
        for item in fields(BlockBasis)
        if prefix + item.name in state
    }
    return BlockBasis(**parts) if parts else None

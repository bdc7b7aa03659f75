"""What an owner keeps of a layer: factors, bases, direction state. Nothing else is state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

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
class NextBases:
    """New bases of a layer before they take the place of its present ones.

    Attributes:
        step: Applied step whose factors were decomposed.
        a: Per block of A its basis; None where the decomposition failed.
        g: The same for G.
        a_reasons: Per block of A why it failed, in words; not saved.
        g_reasons: The same for G.
    """

    step: int
    a: list[BlockBasis | None]
    g: list[BlockBasis | None]
    a_reasons: list[str]
    g_reasons: list[str]

    @classmethod
    def none(cls, step: int, a: int, g: int) -> NextBases:
        """No bases yet for this many blocks."""
        return cls(step, [None] * a, [None] * g, [_FORGOTTEN] * a, [_FORGOTTEN] * g)

    def of(self, name: str) -> tuple[list[BlockBasis | None], list[str]]:
        """Bases and reasons of side ``a`` or ``g``."""
        return (self.a, self.a_reasons) if name == "a" else (self.g, self.g_reasons)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of all bases."""
        for basis in (*self.a, *self.g):
            for item in fields(BlockBasis) if basis is not None else ():
                value = getattr(basis, item.name)
                if value is not None:
                    yield value


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
        refreshed_at: Applied step of the last refresh, -1 before the first; see ``failures``.
        updates: 0-d fp64, steps in which the layer had a gradient.
        fallbacks: 0-d int64, steps whose direction was not finite and was replaced.
        folded_at: 0-d int64, applied step of the last fold that saw any rows, -1 before the
            first.
        moments: Direction state by name, each ``[d_out, columns]``.
        upcoming: Bases that were computed beside training and wait for their step.
    """

    spec: LayerSpec
    a: Side
    g: Side
    updates: Tensor
    fallbacks: Tensor
    folded_at: Tensor
    refreshed_at: int = -1
    moments: dict[str, Tensor] = field(default_factory=dict)
    upcoming: NextBases | None = None

    @classmethod
    def zeros(cls, spec: LayerSpec, device: torch.device, dtype: torch.dtype) -> LayerState:
        """State of a layer that has seen nothing."""
        return cls(
            spec,
            Side.zeros(spec.a_blocks, device, dtype),
            Side.zeros(spec.g_blocks, device, dtype),
            *_counters(device),
        )

    @classmethod
    def replica(cls, spec: LayerSpec, device: torch.device) -> LayerState:
        """State of a layer at a rank that computes its direction without owning it.

        It has no averages, and counts no failures.
        """
        a, g = (
            Side(blocks, [], [None] * len(blocks), [0] * len(blocks))
            for blocks in (spec.a_blocks, spec.g_blocks)
        )
        return cls(spec, a, g, *_counters(device))

    def moment(self, name: str, like: Tensor) -> Tensor:
        """A moment tensor by name, created as zeros like a matrix view."""
        if name not in self.moments:
            self.moments[name] = torch.zeros_like(like, memory_format=torch.contiguous_format)
        return self.moments[name]

    def forget_bases(self) -> None:
        """Go on without bases, as before the first refresh."""
        self.upcoming = None
        for _, side in self.sides():
            side.bases = [None] * len(side.blocks)

    def sides(self) -> tuple[tuple[str, Side], tuple[str, Side]]:
        """Both factors with their names."""
        return ("a", self.a), ("g", self.g)

    def state_dict(self) -> dict[str, Any]:
        """Flat mapping of tensors and numbers; tensors are not copied."""
        result: dict[str, Any] = {name: getattr(self, name) for name in SCALARS}
        result.update({MOMENTS + name: value for name, value in self.moments.items()})
        upcoming = self.upcoming
        if upcoming is not None:
            result[UPCOMING] = upcoming.step
        for name, side in self.sides():
            for index, (average, basis) in enumerate(zip(side.averages, side.bases, strict=True)):
                prefix = f"{name}.{index}."
                result[prefix + "total"] = average.total
                result[prefix + "weight"] = average.weight
                result[prefix + "failures"] = side.failures[index]
                result |= _entries(f"{prefix}basis.", basis)
                if upcoming is not None:
                    result |= _entries(f"{prefix}next.", upcoming.of(name)[0][index])
        return result

    @classmethod
    def restored(
        cls, spec: LayerSpec, saved: Mapping[str, Any], device: torch.device, dtype: torch.dtype
    ) -> LayerState:
        """A new state with copies of what :meth:`state_dict` returned.

        Args:
            spec: The layer.
            saved: Entries that :func:`ds_kfac.restore.check_layers` has found to fit.
            device: Compute device.
            dtype: Compute dtype.
        """

        def own(value: Any, like: torch.dtype = dtype) -> Tensor:
            # Never the saved tensor itself, which may be in use; row-major like a fresh one.
            tensor = torch.as_tensor(value)
            return tensor.to(device, like, copy=True, memory_format=torch.contiguous_format)

        upcoming = None
        if UPCOMING in saved:
            count = len(spec.a_blocks), len(spec.g_blocks)
            upcoming = NextBases.none(int(saved[UPCOMING]), *count)
        sides = {}
        for name, blocks in (("a", spec.a_blocks), ("g", spec.g_blocks)):
            prefixes = [f"{name}.{index}." for index in range(len(blocks))]
            averages = [
                WeightedAverage(own(saved[p + "total"]), own(saved[p + "weight"], torch.float64))
                for p in prefixes
            ]
            bases = [_basis(saved, p + "basis.", own) for p in prefixes]
            if upcoming is not None:
                upcoming.of(name)[0][:] = [_basis(saved, p + "next.", own) for p in prefixes]
            failures = [int(saved[p + "failures"]) for p in prefixes]
            sides[name] = Side(blocks, averages, bases, failures)
        moments = {
            key.removeprefix(MOMENTS): own(value)
            for key, value in saved.items()
            if key.startswith(MOMENTS)
        }
        return cls(
            spec,
            sides["a"],
            sides["g"],
            own(saved["updates"], torch.float64),
            own(saved["fallbacks"], torch.int64),
            own(saved["folded_at"], torch.int64),
            int(saved["refreshed_at"]),
            moments,
            upcoming,
        )


def _counters(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Updates, fallbacks and the last fold of a layer that has seen nothing."""
    return (
        torch.zeros((), device=device, dtype=torch.float64),
        torch.zeros((), device=device, dtype=torch.int64),
        torch.full((), -1, device=device, dtype=torch.int64),
    )


def _entries(prefix: str, basis: BlockBasis | None) -> dict[str, Tensor]:
    """A basis as entries of a saved layer."""
    if basis is None:
        return {}
    parts = {item.name: getattr(basis, item.name) for item in fields(BlockBasis)}
    return {prefix + name: value for name, value in parts.items() if value is not None}


def _basis(
    saved: Mapping[str, Any], prefix: str, own: Callable[[Any], Tensor]
) -> BlockBasis | None:
    """A basis from entries of a saved layer."""
    names = [item.name for item in fields(BlockBasis) if prefix + item.name in saved]
    return BlockBasis(**{n: own(saved[prefix + n]) for n in names}) if names else None


MAX_COUNT = 2**53
"""Counts beyond it are none: in fp64, one more would be the same number."""
SCALARS = ("updates", "fallbacks", "folded_at", "refreshed_at")
MOMENTS = "moments."
UPCOMING = "next_step"
"""Entry of a saved layer: the step whose factors its next bases are of, if there are any."""
_FORGOTTEN = "it failed before the run was resumed"
IN_EIGENBASIS = ("ekfac", "eigen_adam")
"""Directions whose moments live in the eigenbasis."""


def momentum_name(direction: str) -> str:
    """Name of a direction's gradient average: in plain coordinates or in the eigenbasis."""
    return "rotated_momentum" if direction in IN_EIGENBASIS else "momentum"

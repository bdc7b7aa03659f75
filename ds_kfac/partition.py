"""Layers that one group of ranks shares the work on: what they own, what moves between them.

Most models have one partition. Experts have their own: their parameters live on fewer ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac import schedules
from ds_kfac.assembly import Assembly, PartitionPlan
from ds_kfac.comm.guard import Guard
from ds_kfac.comm.run import GradientExchange, reduce_factors
from ds_kfac.config import KFACConfig
from ds_kfac.owner import Owner
from ds_kfac.plan.program import ReduceItem
from ds_kfac.step_input import StepInput
from ds_kfac.telemetry.factors import gather_factors


@dataclass(frozen=True)
class Directions:
    """What a rank computed for the layers it owns.

    Attributes:
        flats: Flat direction of each owned layer, by index in the partition.
        change: 0-d fp64, this rank's modelled change.
        failed: These are zeros that stand in for what could not be computed.
    """

    flats: dict[int, Tensor]
    change: Tensor
    failed: bool = False


class Partition:
    """This rank's side of one group of ranks.

    Args:
        plan: Layers, group and program.
        assembly: Device and dtypes.
        config: Settings.
        momentum: Decay of the gradient average that is preconditioned.
        guard: Keeps errors of this rank's own work.
    """

    def __init__(
        self,
        plan: PartitionPlan,
        assembly: Assembly,
        config: KFACConfig,
        *,
        momentum: float,
        guard: Guard,
    ) -> None:
        self.layers = plan.layers
        self.program = plan.program
        self.communicator = plan.communicator
        self._config = config
        self._guard = guard
        self._device, self._dtype = assembly.device, assembly.dtype
        self.exchange = GradientExchange(
            plan.program.exchange,
            plan.communicator,
            wire_dtype=assembly.stored_dtype,
            dtype=assembly.dtype,
            device=assembly.device,
            guard=guard,
        )
        self.owner = Owner(
            plan.layers,
            self.exchange.owned,
            config,
            momentum=momentum,
            device=assembly.device,
            dtype=assembly.dtype,
            uncounted=assembly.uncounted,
        )

    @property
    def owners(self) -> dict[str, int]:
        """Owner of each layer by name, as a rank of the group."""
        owners = self.program.exchange.owners
        return {spec.name: owner for spec, owner in zip(self.layers, owners, strict=True)}

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """A layer's factors on every rank of the group. A collective."""
        return gather_factors(
            [spec.name for spec in self.layers].index(name),
            self.layers,
            self.program.exchange,
            self.owner.states,
            self.communicator,
            like=torch.empty(0, device=self._device, dtype=self._dtype),
        )

    def await_bases(self, number: int | None = None) -> None:
        """Wait for bases that are computed beside training; what went wrong there is kept.

        Args:
            number: Only if they are to be used in this step.
        """
        self._guard.run(lambda: self.owner.finish(step=number))

    def update_curvature(self, pack: Callable[[ReduceItem, Tensor], None], number: int) -> int:
        """Fold statistics and recompute bases, where the step calls for it. A collective.

        Args:
            pack: Writes this rank's statistics of an item.
            number: Applied-step counter.

        Returns:
            Blocks decomposed on this rank.
        """
        if schedules.is_due(self._config.factor_update_steps, number):
            sums = reduce_factors(
                self.program.rounds,
                self.communicator,
                lambda item, out: self._guard.run(lambda: pack(item, out)),
                dtype=self._dtype,
                device=self._device,
            )
            self._guard.run(lambda: self.owner.fold(sums, step=number))
        self._guard.run(lambda: self.owner.swap(step=number))
        if not schedules.is_due(self._config.inv_update_steps, number):
            return 0
        return self._guard.run(lambda: self.owner.refresh(step=number)) or 0

    def directions(self, step: StepInput, number: int, clip: Tensor | None) -> Directions:
        """Collect gradients and compute directions of owned layers. A collective.

        Args:
            step: The step; its gradients are as stored.
            number: Applied-step counter.
            clip: Clips the raw gradient; None leaves it as it is.
        """
        flats = self.exchange.to_owners(step.gradients.views)
        result = self._guard.run(lambda: self._compute(flats, step, number, clip))
        return self._nothing() if result is None else Directions(*result)

    def hand_back(self, directions: Directions, scale: Tensor | None) -> dict[str, Tensor]:
        """Scale directions and send them to where gradients are. A collective.

        Args:
            directions: Of owned layers; scaled in place.
            scale: KL clip of the whole model, if there is one.

        Returns:
            By parameter, what this rank holds of its direction, flat: a slice, or the whole.
        """
        if scale is not None and directions.flats and not directions.failed:
            torch._foreach_mul_(list(directions.flats.values()), scale)
        slices, shared = self.exchange.from_owners(directions.flats)
        values = {segment.param: value for segment, value in slices}
        for layer, flat in shared.items():
            for slot in self.layers[layer].slots:
                values[slot.name] = flat[slot.offset : slot.offset + slot.numel]
        return values

    def _compute(
        self, flats: dict[int, Tensor], step: StepInput, number: int, clip: Tensor | None
    ) -> tuple[dict[int, Tensor], Tensor]:
        stored = step.stored_scale
        for layer in self.exchange.owned:
            if layer not in flats:  # replicated: the whole gradient is here already
                flats[layer] = self._replicated(layer, step.gradients.views)
        return self.owner.directions(
            flats,
            step=number,
            scale=1.0 / stored if clip is None else (clip / stored).to(self._dtype),
            stored_scale=stored,
            learning_rates=step.learning_rates,
        )

    def _nothing(self) -> Directions:
        """Zeros in place of what failed: other ranks wait for them, and they move nothing."""
        zero = torch.zeros(1, device=self._device, dtype=self._dtype)
        flats = {layer: zero.expand(self.layers[layer].numel) for layer in self.exchange.owned}
        change = torch.zeros((), device=self._device, dtype=torch.float64)
        return Directions(flats, change, failed=True)

    def _replicated(self, layer: int, views: Mapping[str, Tensor]) -> Tensor:
        parts = [
            views[slot.name] if slot.name in views else torch.zeros(slot.numel, device=self._device)
            for slot in self.layers[layer].slots
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

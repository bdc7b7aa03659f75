"""Layers that one group of ranks shares the work on: what they own, what moves between them.

Most models have one partition. Experts have their own: their parameters live on fewer ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kfac.assembly import Assembly, PartitionPlan
from ds_kfac.comm.bases import Sharing
from ds_kfac.comm.guard import Guard
from ds_kfac.comm.run import GradientExchange, reduce_factors
from ds_kfac.config import KFACConfig
from ds_kfac.factorwise import FactorWise
from ds_kfac.owner import Owner, is_time
from ds_kfac.pace import Pace
from ds_kfac.plan.program import ReduceItem
from ds_kfac.replicas import moments_numel
from ds_kfac.state import LayerState
from ds_kfac.step_input import StepInput
from ds_kfac.telemetry.factors import gather_factors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Directions:
    """What a rank computed for the layers it owns, and with several workers per layer for more.

    Attributes:
        flats: Flat direction of each layer that it computes, by index in the partition.
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
        pace: Says what is due in a step.
    """

    def __init__(
        self,
        plan: PartitionPlan,
        assembly: Assembly,
        config: KFACConfig,
        *,
        momentum: float,
        guard: Guard,
        pace: Pace,
    ) -> None:
        self.layers = plan.layers
        self.program = plan.program
        self.communicator = plan.communicator
        self._pace = pace
        self._config = config
        self._guard = guard
        self._device, self._dtype = assembly.device, assembly.dtype
        self._names = [spec.name for spec in plan.layers]
        self.exchange = GradientExchange(
            plan.program.exchange,
            plan.communicator,
            wire_dtype=assembly.stored_dtype,
            dtype=assembly.dtype,
            device=assembly.device,
            guard=guard,
        )
        self._begun: int | None = None
        self._bases = self._sharing(plan.program.basis_numels, "bases")
        self._owned = [self._names[layer] for layer in self.exchange.owned]
        self.owner = Owner(
            plan.layers,
            self.exchange.owned,
            self.exchange.computed,
            config,
            pace=pace,
            momentum=momentum,
            device=assembly.device,
            dtype=assembly.dtype,
            uncounted=assembly.uncounted,
        )

        self.factorwise: FactorWise | None = None
        if plan.program.solving:
            self.factorwise = FactorWise(
                plan.program,
                plan.layers,
                self.owner,
                plan.communicator,
                config,
                guard=guard,
                dtype=assembly.dtype,
                device=assembly.device,
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

    def adopt(self, states: Mapping[int, LayerState]) -> None:
        """Put states in place of those in use, and bring replicas of them to who needs them.

        A collective where there are replicas.
        """
        self.owner.adopt(states)
        self._begun = None
        if self._bases is None:
            return
        self._begun = max(self.communicator.gather_objects(self.owner.begun))
        owner, number = self.owner, -1
        sent = self._bases.share(self._guard.run(owner.all_bases) or {})
        self._guard.run(lambda: owner.take_sent_bases(sent, step=number))
        names = owner.needs.moments
        moments = self._sharing([moments_numel(spec, names) for spec in self.layers], "restore")
        assert moments is not None
        sent_moments = moments.share(self._guard.run(owner.all_moments) or {})
        self._guard.run(lambda: owner.take_sent_moments(sent_moments))

    def _sharing(self, numels: Sequence[int], kind: str) -> Sharing | None:
        """What owners send to other ranks that compute with it; None where there are none."""
        exchange = self.program.exchange
        if exchange.workers == 1:
            return None
        return Sharing(
            exchange,
            numels,
            self.communicator,
            dtype=self._dtype,
            device=self._device,
            kind=kind,
            piece=self.program.piece_numel,
        )

    def await_bases(self, number: int | None = None) -> None:
        """Wait for bases that are computed beside training; what went wrong there is kept.

        Args:
            number: Only if they are to be used in this step.
        """
        self._guard.run(lambda: self.owner.finish(step=number))

    def update_curvature(
        self, pack: Callable[[ReduceItem, Tensor], None], number: int, *, first: bool
    ) -> int:
        """Fold statistics and recompute bases, where the step calls for it. A collective.

        Args:
            pack: Writes this rank's statistics of an item.
            number: Applied-step counter.
            first: No bases have been computed before: these are not computed beside training,
                for gradients would be used as they are meanwhile.

        Returns:
            Blocks decomposed on this rank.
        """
        if self._pace.captures(number):
            with self._pace.timed("reduce"):
                sums = reduce_factors(
                    self.program.rounds,
                    self.communicator,
                    lambda item, out: self._guard.run(lambda: pack(item, out)),
                    dtype=self._dtype,
                    device=self._device,
                    names=self._names,
                )
                self._guard.run(lambda: self.owner.fold(sums, step=number))
        with self._pace.timed("refresh"):
            return self._update_bases(number, first=first)

    def _update_bases(self, number: int, *, first: bool) -> int:
        """What is sent, and when, is the same on all ranks: a function of steps alone."""
        owner, blocks, changed = self.owner, 0, False
        if self._begun is not None and is_time(self._pace, self._begun, number):
            self._begun, changed = None, True
        self._guard.run(lambda: owner.swap(step=number))
        if self._pace.refreshes(number):
            at_once = first or not self._config.background_inverse
            self.communicator.progress.at("bases", self._owned)
            if self.factorwise is not None:
                blocks = self.factorwise.refresh(number)
            else:
                blocks = self._guard.run(lambda: owner.refresh(step=number, at_once=at_once)) or 0
            if at_once:
                changed = True
            else:
                self._begun = number
        if changed and self._bases is not None:
            self.communicator.progress.at("bases shared", self._names)
            sent = self._bases.share(self._guard.run(owner.changed_bases) or {})
            self._guard.run(lambda: owner.take_sent_bases(sent, step=number))
        return blocks

    def directions(self, step: StepInput, number: int, clip: Tensor | None) -> Directions:
        """Collect gradients and compute directions of owned layers. A collective.

        Args:
            step: The step; its gradients are as stored.
            number: Applied-step counter.
            clip: Clips the raw gradient; None leaves it as it is.
        """
        self.communicator.progress.at("gradients to owners", self._names)
        flats = self.exchange.to_owners(step.gradients.views)
        self.communicator.progress.at("directions", self._owned)
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
        self.communicator.progress.at("directions back", self._names)
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
        for layer in self.exchange.computed:
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
        flats = {layer: zero.expand(self.layers[layer].numel) for layer in self.exchange.computed}
        change = torch.zeros((), device=self._device, dtype=torch.float64)
        return Directions(flats, change, failed=True)

    def _replicated(self, layer: int, views: Mapping[str, Tensor]) -> Tensor:
        parts = [
            views[slot.name] if slot.name in views else torch.zeros(slot.numel, device=self._device)
            for slot in self.layers[layer].slots
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def warn_of_missing_statistics(partitions: Iterable[Partition]) -> None:
    """Say once which layers are trained without ever having been seen at work.

    Args:
        partitions: All of a rank, so that experts and dense layers are named together.
    """
    names = sorted(set().union(*(partition.owner.take_unseen() for partition in partitions)))
    if names:
        logger.warning(
            "KFAC-W113 %d layers have gradients but no statistics, so that there is nothing to "
            "precondition them with: %s. Are they called in eval mode, are their weights used "
            "without calling them, or has torch.compile run the model before K-FAC was attached?",
            len(names),
            ", ".join(names[:20]) + (", ..." if len(names) > 20 else ""),
        )

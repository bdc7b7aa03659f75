"""All layers that this rank owns: curvature and directions, with the settings of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_kfac import schedules
from ds_kfac.background import Background
from ds_kfac.config import KFACConfig
from ds_kfac.direct import DirectionSettings, direction
from ds_kfac.layers.matrixview import to_flat, to_matrix
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.pace import Pace
from ds_kfac.plan.program import ReduceItem
from ds_kfac.refresh import (
    RefreshSettings,
    Snapshot,
    decompose,
    fold,
    raise_if_hopeless,
    refresh,
    take,
    take_sent,
    take_upcoming,
)
from ds_kfac.replicas import (
    pack_bases,
    pack_moments,
    present_bases,
    unpack_bases,
    unpack_moments,
    zeros,
)
from ds_kfac.restore import Needs, has_foreign_bases, lacks_bases, signature
from ds_kfac.state import LayerState, NextBases

OWN_MOMENTUM = ("orthogonal", "eigen_adam")
DEFAULT_MOMENTUM = 0.95


class Owner:
    """The owner's side of a step.

    Args:
        specs: All layers.
        owned: Indices of the layers this rank owns.
        computed: Those whose direction it computes; others may own some of them.
        config: Settings.
        pace: Intervals in force.
        momentum: Decay of the gradient average that is preconditioned.
        device: Compute device.
        dtype: Compute dtype.
        uncounted: Names of layers whose change another rank counts.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        owned: Sequence[int],
        computed: Sequence[int],
        config: KFACConfig,
        *,
        pace: Pace,
        momentum: float,
        device: torch.device,
        dtype: torch.dtype,
        uncounted: frozenset[str] = frozenset(),
    ) -> None:
        self._uncounted = uncounted
        self.states = {i: LayerState.zeros(specs[i], device, dtype) for i in owned}
        self._config = config
        self._pace = pace
        self._momentum = momentum
        self._device = device
        self._dtype = dtype
        self._unseen: set[str] = set()
        self._background: Background[list[NextBases]] = Background(device)
        self._begun: int | None = None
        self._replicated = {i: specs[i] for i in computed if i not in self.states}
        self.replicas = zeros(self._replicated, device)
        self._changed: dict[int, NextBases] = {}
        self._solver = config.resolved_solver
        self._like = torch.empty(0, device=device, dtype=dtype)

    def fold(self, sums: Iterable[tuple[ReduceItem, Tensor]], *, step: int) -> None:
        """Add reduced sums to the averages."""
        decay = schedules.value_at(self._config.factor_decay, step)
        fold(self.states, sums, decay=decay, step=step)

    def refresh(self, *, step: int, at_once: bool = True) -> int:
        """Recompute all bases.

        Args:
            step: Applied-step counter.
            at_once: Before this returns; otherwise beside training, see :meth:`finish`.

        Returns:
            Blocks decomposed.

        Raises:
            NumericalError: A block failed too often in a row (E110).
        """
        settings = self.refresh_settings(step)
        states = list(self.states.values())
        if at_once:
            self._changed |= zip(self.states, refresh(states, settings, step=step), strict=True)
            raise_if_hopeless(states, settings.max_failures)
        elif states:
            snapshots = [Snapshot.of(state) for state in states]
            self._background.start(
                lambda pause: decompose(snapshots, settings, step=step, pause=pause)
            )
            self._begun = step
        return sum(len(state.spec.block_sizes) for state in states)

    def take(self, found: Mapping[int, NextBases]) -> None:
        """Use bases of owned layers that other ranks have helped to compute.

        Raises:
            NumericalError: A block failed too often in a row (E110).
        """
        for layer, bases in found.items():
            take(self.states[layer], bases)
        self._changed |= found
        raise_if_hopeless(list(self.states.values()), self._config.max_failures)

    def finish(self, *, step: int | None = None) -> None:
        """Wait for bases that are computed beside training.

        Args:
            step: Only if they are to be used in this step; None for a save.

        Raises:
            Exception: What went wrong there; the last good bases stay.
        """
        begun = self._begun
        if begun is None or (step is not None and not is_time(self._pace, begun, step)):
            return
        self._begun = None
        for state, found in zip(self.states.values(), self._background.finish(), strict=True):
            self._background.keep(found.tensors())
            state.upcoming = found

    def swap(self, *, step: int) -> None:
        """Take bases into use that were computed beside training, at the step that is theirs.

        Raises:
            NumericalError: A block failed too often in a row (E110).
        """
        due = {
            layer: state
            for layer, state in self.states.items()
            if state.upcoming is not None and is_time(self._pace, state.upcoming.step, step)
        }
        self._changed |= {n: s.upcoming for n, s in due.items() if s.upcoming is not None}
        take_upcoming(due.values())
        raise_if_hopeless(list(due.values()), self._config.max_failures)

    @property
    def begun(self) -> int:
        """Step of the bases that wait for theirs, -1 if there are none."""
        waiting = [state.upcoming.step for state in self.states.values() if state.upcoming]
        return max([-1 if self._begun is None else self._begun, *waiting])

    def adopt(self, states: Mapping[int, LayerState]) -> None:
        """Put states in place of the present ones; what is computed for these is dropped."""
        self.close()
        self.states.update(states)
        self.replicas = zeros(self._replicated, self._device)
        self._changed = {}

    def changed_bases(self) -> dict[int, Tensor]:
        """Bases that have changed since the last call, packed, of every owned layer."""
        changed, self._changed = self._changed, {}
        return self._packed(changed)

    def all_bases(self) -> dict[int, Tensor]:
        """Bases in use, packed, of every owned layer."""
        return self._packed({layer: present_bases(s) for layer, s in self.states.items()})

    def _packed(self, bases: Mapping[int, NextBases]) -> dict[int, Tensor]:
        return {
            layer: pack_bases(bases.get(layer), state.spec, self._solver, self._like)
            for layer, state in self.states.items()
        }

    def take_sent_bases(self, sent: Mapping[int, Tensor], *, step: int) -> None:
        """Use bases that their owners have sent for layers whose direction is computed here."""
        for layer, flat in sent.items():
            state = self.replicas[layer]
            take_sent(state, unpack_bases(flat, state.spec, self._solver, step=step))

    def all_moments(self) -> dict[int, Tensor]:
        """Moments, packed, of every owned layer."""
        names = self.needs.moments
        return {layer: pack_moments(s, names, self._like) for layer, s in self.states.items()}

    def take_sent_moments(self, sent: Mapping[int, Tensor]) -> None:
        """Use moments that their owners have sent."""
        for layer, flat in sent.items():
            unpack_moments(flat, self.replicas[layer], self.needs.moments)

    def close(self) -> None:
        """Stop what runs beside training."""
        self._background.cancel()
        self._begun = None

    def refresh_settings(self, step: int) -> RefreshSettings:
        """Numbers in force at a refresh."""
        return RefreshSettings(
            solver=self._config.resolved_solver,
            damping=schedules.value_at(self._config.resolved_damping, step),
            absolute=self._config.damping_mode == "absolute",
            per_factor=self._config.direction == "orthogonal",
            max_failures=self._config.max_failures,
            on_cpu=self._config.inverse_device == "cpu" and self._device.type != "cpu",
        )

    def take_unseen(self) -> set[str]:
        """Names, each told once, of layers that are trained but were never seen at work."""
        states = list(self.states.values())
        if not states:
            return set()
        trained = torch.stack([state.updates for state in states]) > 0
        seen = torch.stack([state.a.averages[0].weight for state in states]) > 0
        unseen = zip(states, (trained & ~seen).tolist(), strict=True)
        names = {state.spec.name for state, is_unseen in unseen if is_unseen} - self._unseen
        self._unseen |= names
        return names

    def directions(
        self,
        gradients: Mapping[int, Tensor],
        *,
        step: int,
        scale: Tensor | float,
        stored_scale: float,
        learning_rates: Mapping[str, float],
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Directions of all layers that are computed here.

        Args:
            gradients: Flat gradient of each of these layers, any float dtype.
            step: Applied-step counter.
            scale: Makes the stored gradient the clipped gradient of the objective.
            stored_scale: Given back to the direction: the host will divide by it.
            learning_rates: By parameter name; a missing one counts as 1.

        Returns:
            Flat directions by layer, and this rank's modelled change, 0-d fp64:
            the sum of ``lr^2 <direction, gradient>`` (zero without a KL clip).
        """
        settings = DirectionSettings(
            direction=self._config.direction,
            damping=schedules.value_at(self._config.resolved_damping, step),
            absolute=self._config.damping_mode == "absolute",
            momentum=self._momentum,
            betas=self._config.betas,
            grafting=self._config.grafting,
        )
        wants_change = self._config.uses_kl_clip and self._config.kl_clip is not None
        total = torch.zeros((), device=self._device, dtype=torch.float64)
        results: dict[int, Tensor] = {}
        for layer, state in (self.states | self.replicas).items():
            spec = state.spec
            g = to_matrix(gradients[layer], spec, dtype=self._dtype)
            if isinstance(scale, Tensor) or scale != 1.0:
                g = g * scale
            rates = _rates(spec, learning_rates) if wants_change else None
            d, change = direction(state, g, settings, rates=rates)
            results[layer] = to_flat(d if stored_scale == 1.0 else d * stored_scale, spec)
            if wants_change and layer in self.states and spec.name not in self._uncounted:
                total += change
        return results, total

    def state_dict(self) -> dict[str, Any]:
        """State of every owned layer by name."""
        return {state.spec.name: state.state_dict() for state in self.states.values()}

    @property
    def needs(self) -> Needs:
        """What saved states have to hold."""
        return Needs.of(self._config, self._momentum, self._dtype)

    def restored(
        self, saved: Mapping[str, Any], *, step: int, settings: Mapping[str, Any] | None
    ) -> tuple[dict[int, LayerState], int]:
        """Saved states of all owned layers, ready to take the place of the present ones.

        Factors are kept whatever they were decomposed with: bases that the configured solver
        has no use for are recomputed from them.

        Args:
            saved: States by layer name, which :func:`ds_kfac.restore.check_layers` has found to
                fit; others are left alone.
            step: Applied steps at that time.
            settings: What bases depended on then, see :func:`ds_kfac.restore.signature`.

        Returns:
            The states, and how many of them had bases that were recomputed.
        """
        needs = self.needs
        states = {
            index: LayerState.restored(
                state.spec, needs.kept(saved[state.spec.name]), self._device, self._dtype
            )
            for index, state in self.states.items()
        }
        same = settings is None or dict(settings) == signature(self._config)
        foreign = [
            state
            for state in states.values()
            if has_foreign_bases(state, needs, same_damping=same) or lacks_bases(state)
        ]
        for state in foreign:
            state.forget_bases()
        if foreign:
            refresh(foreign, self.refresh_settings(step), step=step)
        if not self._config.background_inverse:
            take_upcoming(states.values())  # saved in a run that had more to come
        return states, len(foreign)

    def blank(self) -> dict[int, LayerState]:
        """States of layers that have seen nothing."""
        return {
            index: LayerState.zeros(state.spec, self._device, self._dtype)
            for index, state in self.states.items()
        }


def is_time(pace: Pace, begun: int, step: int) -> bool:
    """Whether bases begun at a step are to be used: after half of the interval.

    A function of steps alone, so that runs repeat however long it takes, and ranks agree.

    Args:
        pace: Intervals in force.
        begun: Applied step whose factors they are of.
        step: Applied-step counter.
    """
    half = (schedules.interval_at(pace.inverse_steps, begun) + 1) // 2
    return step >= begun + half or (step > begun and pace.refreshes(step))


def _rates(spec: LayerSpec, learning_rates: Mapping[str, float]) -> tuple[float, float]:
    """Learning rates of a layer's weight and bias."""
    weight, bias = spec.slots[0], spec.slots[-1]
    return learning_rates.get(weight.name, 1.0), learning_rates.get(bias.name, 1.0)


def resolve_momentum(config: KFACConfig, *, own_optimizer: bool) -> float:
    """Decay of the gradient average: the setting, or what direction and optimizer call for.

    Args:
        config: Settings.
        own_optimizer: The base optimizer is ds_kfac's own, which has no momentum.
    """
    if config.momentum is not None:
        return float(config.momentum)
    averages = own_optimizer or config.direction in OWN_MOMENTUM
    return DEFAULT_MOMENTUM if averages else 0.0

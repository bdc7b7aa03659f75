"""The order of a step. No other file knows it.

One optimizer step, seen from here (collectives in brackets):

1. bases computed beside training are waited for in the step that takes them into use; vote on
   health: a bad step is dropped on every rank, a pending error raised on every
   rank [1 integer all-reduce];
2. norm of the raw gradient, which the host's clipping threshold refers to
   [1 scalar all-reduce when gradients are sharded];
3. if statistics are due: packed sums to their owners [1 reduce-scatter per bucket], folded
   into averages; if due: bases recomputed by their owners, at once or beside training;
4. gradients to owners [1 all-to-all, or nothing where owners hold them];
5. directions, scaled by the KL clip of the whole model [1 scalar all-reduce];
6. directions back [1 all-to-all or all-gather], written where the host keeps its gradients.

Each partition (experts are one of their own) has 3, 4 and 6 in its own group; votes and scalars
are those of the whole model.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_kfac import schedules
from ds_kfac.assembly import Communicators, assemble
from ds_kfac.capture.experts import TokenMasks, watch_experts
from ds_kfac.capture.hooks import install
from ds_kfac.capture.session import CaptureSession, Pending, packer
from ds_kfac.capture.tokens import add_up_tokens
from ds_kfac.checkpoint.stateful import Stateful
from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.guard import Guard
from ds_kfac.comm.ledger import Ledger
from ds_kfac.comm.progress import Progress
from ds_kfac.comm.vote import Verdict, health, raise_everywhere
from ds_kfac.comm.watchdog import watch
from ds_kfac.config import KFACConfig
from ds_kfac.errors import StateError, nearest
from ds_kfac.governor import Governor
from ds_kfac.layers.identity import Identity
from ds_kfac.layers.spec import LayerTable
from ds_kfac.math.directions import kl_scale
from ds_kfac.owner import resolve_momentum
from ds_kfac.pace import Pace
from ds_kfac.partition import Directions, Partition, warn_of_missing_statistics
from ds_kfac.state import LayerState
from ds_kfac.step_input import StepInput, read, refuse_nonfinite
from ds_kfac.telemetry.metrics import Counters, collect
from ds_kfac.telemetry.table import layer_table

if TYPE_CHECKING:
    from ds_kfac.hosts.base import Host

logger = logging.getLogger(__name__)


class KFAC(Stateful):
    """K-FAC attached to a host: ``engine.kfac``, or the result of ``ds_kfac.attach``.

    Args:
        host: The framework's adapter.
        config: Settings.
        own_optimizer: The base optimizer is ds_kfac's own, which has no momentum: the
            preconditioner averages the gradient for every direction.

    Raises:
        CoverageError: The model has nothing to precondition.
        DistributedError: Ranks disagree on model or configuration.
    """

    def __init__(self, host: Host, config: KFACConfig, *, own_optimizer: bool = False) -> None:
        self.config = config
        self.counters = Counters()
        self._host = host
        self._ledger = Ledger()
        self._progress = Progress()
        comms = Communicators.of(
            host.groups, self._ledger, self._progress, blocks=config.tensor_parallel == "block"
        )
        self._work, self._model, self._tensor = comms.work, comms.model, comms.tensor
        self._grad_norm: Tensor | None = None
        self._kl_scale: Tensor | None = None
        self._guard = Guard()
        self._on_detach: list[Callable[[], None]] = []
        watchdog = watch(self._model, config.watchdog_timeout)
        if watchdog is not None:
            self._on_detach.append(weakref.finalize(self, watchdog.stop))
        parts = assemble(host, config, comms)
        self._layers, self._device, self._coverage = parts.layers, parts.device, parts.coverage
        self._token_sides = parts.token_sides
        self._stored_names, self._tensor_cut = parts.stored_names, parts.tensor
        momentum = resolve_momentum(config, own_optimizer=own_optimizer)
        self._pace = Pace(config)
        self._partitions = [
            Partition(plan, parts, config, momentum=momentum, guard=self._guard, pace=self._pace)
            for plan in parts.partitions
        ]
        specs = self._layers.layers
        self._frozen = self._layers.frozen_weights()
        self._identity = Identity(host.model, specs)
        self._ours = {slot.name for spec in specs for slot in spec.slots}
        masks = TokenMasks(parts.experts, [spec.name for spec in specs])
        self._session = CaptureSession(
            {spec.name: spec for spec in specs},
            config.weight_sharing,
            parts.dtype,
            sharing=comms.row_sharing(),
            masks=masks,
        )
        self._handles = install(
            host.model,
            self._session,
            output_scale=host.output_scale,
            gradients_stay=host.gradients_stay_in_parameters(),
        )
        self._session.detach = self.detach
        if config.factor_micro_batches == "last":
            self._session.skips_rows = lambda: not host.micro_batch_is_last()
        self._handles += watch_experts(host.model, masks, wanted=lambda: self._session.active)
        self._governor = Governor(
            self._pace, config.max_overhead, self._device, self._model, self._guard, host.announce
        )
        self._begin_step()
        self._progress.outside()
        if self._work.rank == 0 and (self._model.rank == 0 or parts.is_stage):
            host.announce(self.table())

    # ------------------------------------------------------------------ for users

    @property
    def layers(self) -> LayerTable:
        """The layers and what was left out."""
        return self._layers

    @property
    def owners(self) -> dict[str, int]:
        """Owner of each layer by name: its rank in the group that shares the layer."""
        owners: dict[str, int] = {}
        for partition in self._partitions:
            owners |= partition.owners
        return {spec.name: owners[spec.name] for spec in self._layers.layers}

    @property
    def grad_norm(self) -> Tensor | None:
        """0-d, norm of the last step's raw gradient over the whole model."""
        return self._grad_norm

    @property
    def half_gradients(self) -> bool:
        """Whether layers have got fp16 gradients since attach."""
        return self._session.saw_half

    def table(self) -> str:
        """Printable table: name, kind, dims, blocks and owner, or the reason for being left out."""
        text = layer_table(self._layers, list(self.owners.values()))
        return text + self._governor.last_line()

    def pace(self) -> dict[str, Any]:
        """Intervals and row fraction since step 0, as settings that repeat them.

        In place of ``max_overhead`` in the JSON they give the same run, bit for bit.
        """
        return self._pace.settings()

    def coverage(self) -> str:
        """One line: what is preconditioned of the whole model and what is not."""
        return self._coverage

    def metrics(self) -> dict[str, float]:
        """Current counts and values of this rank, as floats (synchronises with the device)."""
        return self._governor.metrics() | collect(
            self.counters,
            self._states().values(),
            damping=schedules.value_at(self.config.resolved_damping, self.counters.steps),
            tensors={"grad_norm": self._grad_norm, "kl_scale": self._kl_scale},
        )

    def ledger(self) -> dict[str, Any]:
        """Bytes and calls by kind on this rank since the last reset, and the plan's prediction."""
        return self._ledger.report()

    def reset_ledger(self) -> None:
        """Start counting traffic anew."""
        self._ledger.reset()

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """A layer's current factors, on every rank. A collective: all ranks call it.

        Args:
            name: Layer name as in :meth:`table`.

        Returns:
            ``A [columns, columns]`` and ``G [d_out, d_out]``, full and symmetric; zeros before
            the first capture.

        Raises:
            StateError: The layer is not preconditioned (E310).
        """
        names = [spec.name for spec in self._layers.layers]
        if name not in names:
            raise StateError(
                "E310", f"no preconditioned layer {name!r};{nearest(name, names)} See kfac.table()"
            )
        partition = next(p for p in self._partitions if name in p.owners)
        return partition.factors(name)

    def detach(self) -> None:
        """Remove every hook and wrapper; the host trains on as if ds_kfac had never been there."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._session.active = False
        self._session.discard()
        for partition in self._partitions:
            partition.owner.close()
        for undo in reversed(self._on_detach):
            undo()
        self._on_detach = []

    # ------------------------------------------------------------------ for hosts

    @property
    def model_communicator(self) -> Communicator:
        """All ranks of the model."""
        return self._model

    def on_detach(self, undo: Callable[[], None]) -> None:
        """Register what a host has to undo at :meth:`detach`."""
        self._on_detach.append(undo)

    def before_step(self, prepare: Callable[[], None] | None = None) -> bool:
        """Replace the host's gradients by directions.

        Args:
            prepare: What the host has to do or check first, on this rank alone.

        Returns:
            Whether the step is healthy. If not, nothing was touched: the host sees its bad
            gradients and has to skip the step.

        Raises:
            KFACError: Any rank has a pending error; every rank raises the same.
        """
        self._progress.begin(self.counters.steps)
        try:
            return self._step(prepare)
        finally:
            self._progress.outside()

    def after_step(self, *, applied: bool) -> None:
        """Close the step; the host says whether its optimizer was applied."""
        if applied:
            self.counters.steps += 1
        else:
            self.counters.skipped += 1
            self._governor.drop()
        self._ledger.steps += 1
        self._begin_step()

    def discard_step(self) -> None:
        """Forget what was captured: the host dropped the step before ds_kfac saw it."""
        self.after_step(applied=False)

    def rescale_statistics(self, factor: float) -> None:
        """Multiply the step's output gradients by what hooks could not know yet."""
        self._session.rescale_gradients(factor)

    def discard_statistics(self) -> None:
        """Forget what was captured so far in this step: its gradients are thrown away."""
        self._session.discard()

    # ------------------------------------------------------------------ parts of a step

    def _step(self, prepare: Callable[[], None] | None) -> bool:
        number = self.counters.steps
        self._governor.enter(number)
        self._guard.keep(self._session.take_error())
        self._progress.at("bases awaited")
        with self._governor.waits():
            self._await_bases(number)
        self._progress.at("gradients read")
        step = self._guard.run(lambda: self._read(prepare))
        self._progress.at("vote")
        finite = torch.zeros((), device=self._device) if step is None else step.finite
        verdict = health(self._model, finite.bool(), error=self._guard.error is not None)
        if verdict is Verdict.ERROR:
            raise_everywhere(self._model, self._guard.take())
        assert step is not None
        if verdict is Verdict.NONFINITE:
            refuse_nonfinite(
                step,
                number,
                self._model,
                raises=self.config.on_nonfinite == "raise",
                speaks=self._model.rank == 0,
            )
            return False
        self._governor.voted(number)
        self._progress.at("gradient norm")
        clip = self._clip_coefficient(step)
        self._update_curvature(step.pending)
        step.pending.clear()
        self._replace_gradients(step, clip)
        self._governor.leave()
        if self._guard.error is not None:  # said now: this may have been the last step
            logger.error(
                "K-FAC failed on this rank; all ranks stop at the next step",
                exc_info=self._guard.error,
            )
        return True

    def _begin_step(self) -> None:
        step = self.counters.steps
        self._session.begin(
            active=self._pace.captures(step),
            fraction=self._pace.fraction(step),
            turn=self.counters.captures,
        )

    def _read(self, prepare: Callable[[], None] | None) -> StepInput:
        if prepare is not None:
            prepare()
        if self._session.active:
            self._identity.check()
        return read(
            self._host,
            self._session,
            self._device,
            frozen=self._frozen,
            wants_rates=self.config.uses_kl_clip,
        )

    def _states(self) -> dict[str, LayerState]:
        """State of every layer this rank owns, by name."""
        states = (s for p in self._partitions for s in p.owner.states.values())
        return {state.spec.name: state for state in states}

    def _clip_coefficient(self, step: StepInput) -> Tensor | None:
        norm = step.norm
        if step.gradients.partial:
            norm = self._model.sum_(norm.square(), "scalars").sqrt()
        self._grad_norm = norm / step.stored_scale
        if step.clip_threshold <= 0:
            return None
        return (step.clip_threshold / (self._grad_norm + 1e-6)).clamp(max=1.0)

    def _update_curvature(self, pending: dict[str, Pending]) -> None:
        step = self.counters.steps
        if self._token_sides and self._pace.captures(step):
            like = torch.empty(0, device=self._device, dtype=self._session.dtype)
            add_up_tokens(pending, self._layers.layers, self._token_sides, self._tensor, like=like)
        for partition in self._partitions:
            pack = packer(pending, partition.layers)
            first = self.counters.refreshes == 0
            blocks = partition.update_curvature(pack, step, first=first)
            self.counters.decompositions += blocks
        if self._pace.refreshes(step):
            self._guard.run(lambda: warn_of_missing_statistics(self._partitions))
        self.counters.captures += self._pace.captures(step)
        self.counters.refreshes += self._pace.refreshes(step)

    def _replace_gradients(self, step: StepInput, clip: Tensor | None) -> None:
        number = self.counters.steps
        found = [partition.directions(step, number, clip) for partition in self._partitions]
        self._progress.at("KL clip")
        scale = self._trust_scale(found)
        written: dict[str, Tensor] = {}
        for partition, directions in zip(self._partitions, found, strict=True):
            written |= partition.hand_back(directions, scale)
        self._progress.at("directions written")
        self._guard.run(lambda: self._write(written, clip))
        self.counters.preconditions += 1

    def _trust_scale(self, found: Sequence[Directions]) -> Tensor | None:
        """KL clip of the whole model: one scalar, reduced over all ranks that share it."""
        if not self.config.uses_kl_clip or self.config.kl_clip is None:
            return None
        change = torch.stack([directions.change for directions in found]).sum()
        total = self._model.sum_(change, "scalars")
        clip = schedules.value_at(self.config.kl_clip, self.counters.steps)
        self._kl_scale = kl_scale(total, clip)
        return self._kl_scale

    def _write(self, values: Mapping[str, Tensor], clip: Tensor | None) -> None:
        views = self._host.writable()
        for name, value in values.items():
            if name in views:
                views[name][: value.numel()].copy_(value)
        others = [view for name, view in views.items() if name not in self._ours]
        if clip is not None and others:
            torch._foreach_mul_(others, clip.to(others[0]))
        self._host.after_write()

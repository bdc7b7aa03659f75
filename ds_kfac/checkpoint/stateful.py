"""The part of a preconditioner that saves and restores its state."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ds_kfac.checkpoint import reader, writer
from ds_kfac.checkpoint.manifest import StoredTensor
from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.guard import Guard
from ds_kfac.comm.vote import agree, raise_everywhere, together
from ds_kfac.config import KFACConfig
from ds_kfac.errors import StateError
from ds_kfac.pace import Decision, Pace
from ds_kfac.pace import restored as restored_decisions
from ds_kfac.partition import Partition
from ds_kfac.restore import Past, check_layers, signature
from ds_kfac.state import LayerState
from ds_kfac.telemetry.metrics import Counters

if TYPE_CHECKING:
    from ds_kfac.capture.session import CaptureSession
    from ds_kfac.checkpoint.manifest import Manifest
    from ds_kfac.governor import Governor
    from ds_kfac.layers.shards import TensorCut
    from ds_kfac.layers.spec import LayerSpec, LayerTable

logger = logging.getLogger(__name__)

STATE_VERSION = 1


@dataclass(frozen=True)
class _Parts:
    """A saved state by its parts, none of them looked at yet."""

    counters: Any
    layers: Any
    settings: Mapping[str, Any] | None
    decisions: Sequence[Any] = ()

    @classmethod
    def of(cls, state: Any) -> _Parts:
        """From what :meth:`Stateful.state_dict` returned.

        Raises:
            StateError: It has another version, or none (E308), or a part of another type (E302).
        """
        version = state.get("version") if isinstance(state, Mapping) else type(state).__name__
        if version != STATE_VERSION:
            raise StateError("E308", f"K-FAC state of version {version!r}, expected 1")
        settings, decisions = state.get("settings"), state.get("decisions", ())
        if not isinstance(settings, Mapping | None) or not isinstance(decisions, list | tuple):
            found = f"settings {settings!r:.100} and decisions {decisions!r:.100}"
            raise StateError("E302", f"saved K-FAC state has wrong {found}")
        return cls(state.get("counters"), state.get("layers"), settings, decisions)


@dataclass(frozen=True)
class Staged:
    """A state that every rank has read and found to fit, not in use yet.

    Attributes:
        counters: Counts.
        states: Owned layers of each partition, by index.
        manifest: Of the checkpoint they were read from, if it was one.
        decisions: What the cost governor had decided.
    """

    counters: Counters
    states: Sequence[dict[int, LayerState]]
    manifest: Manifest | None = None
    decisions: tuple[Decision, ...] = ()


class Stateful:
    """Saving and restoring, for :class:`ds_kfac.preconditioner.KFAC`.

    Every method that changes state or touches a disk is a collective: all ranks of the model
    call it, and all of them succeed or raise the same error with nothing changed.
    """

    config: KFACConfig
    counters: Counters
    _work: Communicator
    _layers: LayerTable
    _model: Communicator
    _partitions: Sequence[Partition]
    _session: CaptureSession
    _stored_names: Mapping[str, str]
    _tensor_cut: TensorCut | None
    _guard: Guard
    _pace: Pace
    _governor: Governor

    def state_dict(self) -> dict[str, Any]:
        """Counters and the state of the layers this rank owns, as plain tensors and numbers.

        Tensors are copies: counters and tensors of a snapshot stay those of one step.
        Waits for bases that are computed beside training: they are part of it.
        """
        self._await_bases()
        return {
            "version": STATE_VERSION,
            "counters": dict(vars(self.counters)),
            "settings": signature(self.config),
            "layers": {name: _copied(layer) for name, layer in self._layer_states().items()},
            "decisions": [decision.saved() for decision in self._pace.decisions],
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore what :meth:`state_dict` returned for the same layers on the same ranks.

        A collective. Statistics of a step under way are discarded.

        Raises:
            StateError: Version, layers, shapes, dtypes or moments do not fit on some rank
                (E302, E308); nothing is changed on any rank then.
            DistributedError: Ranks bring states of different steps (E203).
        """
        self._adopt(self.stage_state(state))

    def stage_state(self, state: Any) -> Staged:
        """First half of :meth:`load_state_dict`, which changes nothing. A collective."""
        return self._stage(lambda: _Parts.of(state))

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        host_step: int | None = None,
        leads: bool | None = None,
    ) -> str:
        """Save to a folder, in place of what an earlier save left there. A collective.

        The state saved is that after the last step; statistics of a step under way are not part
        of it. A save that does not complete leaves the earlier one as it was.

        Args:
            path: Folder; created if there is none.
            host_step: The host's own step counter, to be compared when both are loaded.
            leads: Whether this rank writes the manifest. By default the first rank does; on
                disks that are not shared, one per disk has to.

        Returns:
            The save's id, the same on all ranks.

        Raises:
            StateError: Some rank could not write (E307); raised on all ranks.
            KFACError: A step went wrong on some rank, and what it left must not be saved.
        """
        with self._model.progress.during("checkpoint saved"):
            contents = self.contents(host_step)
            first = self._model.rank == 0
            return writer.write(
                Path(path), contents, self._model, leads=first if leads is None else leads
            )

    def contents(self, host_step: int | None = None) -> writer.Contents:
        """What this rank has to save, for hosts with files of their own. A collective.

        Args:
            host_step: The host's own step counter, to be compared when both are loaded.

        Raises:
            KFACError: A step went wrong on some rank, and what it left must not be saved.
        """
        self._guard.keep(self._session.take_error())
        self._await_bases()
        raise_everywhere(self._model, self._guard.take())
        layers = self._layer_states()
        self._warn_of_nonfinite(layers)
        return writer.Contents(
            layers={self._stored_names[name]: layer for name, layer in layers.items()},
            specs=[self._stored(spec) for spec in self._owned()],
            counters=vars(self.counters),
            header={
                "step": self.counters.steps,
                "host_step": host_step,
                "data_size": self._work.size,
                "settings": signature(self.config),
                "config": self.config.model_dump(mode="json"),
                "tensor": self._stored_tensor(),
                "decisions": [decision.saved() for decision in self._pace.decisions],
            },
        )

    def load(self, path: str | os.PathLike[str]) -> bool:
        """Restore what :meth:`save` wrote, on any number of ranks. A collective.

        What happens where there is no state is said by ``resume``: ``auto`` warns and starts
        anew, ``require`` raises, ``fresh`` starts anew whatever is there.

        Args:
            path: Folder given to :meth:`save`.

        Returns:
            Whether a state was restored.

        Raises:
            StateError: The state is damaged, unsafe, of another model or settings, or missing
                although required (E301 to E308); on all ranks, with nothing changed.
        """
        staged = self.stage(path)
        self.adopt(staged)
        return staged is not None

    def stage(self, path: str | os.PathLike[str] | None) -> Staged | None:
        """First half of :meth:`load`: read and check, without changing anything. A collective.

        Args:
            path: Folder, or None where the host has found no checkpoint.

        Returns:
            What :meth:`adopt` takes; None to start anew.
        """
        if self.config.resume == "fresh":
            if self._model.rank == 0:
                logger.info("K-FAC starts anew (resume: 'fresh')")
            return None
        with self._model.progress.during("checkpoint loaded"):
            return self._stage_folder(None if path is None else Path(path))

    def _stage_folder(self, folder: Path | None) -> Staged | None:
        manifest = reader.find(folder, self._model)
        if folder is None or manifest is None:
            self._refuse_absence(folder)
            return None
        return self.stage_from(manifest, lambda names: reader.read_layers(folder, manifest, names))

    def stage_from(
        self, manifest: Manifest, read: Callable[[Collection[str]], Mapping[str, Mapping[str, Any]]]
    ) -> Staged:
        """:meth:`stage` for hosts with files of their own. A collective.

        Args:
            manifest: Of the saved state; the same on all ranks.
            read: Returns the entries of the layers with these stored names, on this rank.
        """
        misfit = manifest.tensor_misfit(self._stored_tensor())
        if misfit is not None:
            raise StateError("E303", misfit)
        specs = [self._stored(spec) for spec in self._layers.layers]
        reader.check_model(manifest, specs, self._model)
        self._say_changed_settings(manifest)
        owned = {self._stored_names[spec.name]: spec.name for spec in self._owned()}
        staged = self._stage(
            lambda: _Parts(
                manifest.counters_of(self._model.rank, self._model.size),
                {owned[name]: layer for name, layer in read(owned).items()},
                manifest.settings,
                manifest.decisions,
            )
        )
        return dataclasses.replace(staged, manifest=manifest)

    def _stored_tensor(self) -> StoredTensor | None:
        """The layout of the whole model, of which a stage knows its own layers. A collective."""
        mine = StoredTensor.of(self._tensor_cut, [item.name for item in self._layers.left_out])
        return StoredTensor.joined(self._model.gather_objects(mine))

    def _stored(self, spec: LayerSpec) -> LayerSpec:
        """A layer as it is named in files, where layers of all ranks meet."""
        return dataclasses.replace(spec, name=self._stored_names[spec.name])

    def _await_bases(self, step: int | None = None) -> None:
        """Wait for bases that are computed beside training: all, or those for a step."""
        for partition in self._partitions:
            partition.await_bases(step)

    def stored_names(self) -> list[str]:
        """Names in files of the layers that this rank owns."""
        return [self._stored_names[spec.name] for spec in self._owned()]

    def _owned(self) -> list[LayerSpec]:
        """Layers that this rank owns."""
        return [state.spec for p in self._partitions for state in p.owner.states.values()]

    def _layer_states(self) -> dict[str, dict[str, Any]]:
        """State of every owned layer by name."""
        parts = [partition.owner.state_dict() for partition in self._partitions]
        return {name: state for part in parts for name, state in part.items()}

    def adopt(self, staged: Staged | None) -> None:
        """Second half of :meth:`load`: take a staged state into use, or start anew."""
        if staged is None:
            self.reset()
        else:
            self._adopt(staged)

    def reset(self) -> None:
        """Forget all statistics, bases, moments and counts, as after attach."""
        self._adopt(Staged(Counters(), [p.owner.blank() for p in self._partitions]))

    def _stage(self, parts: Callable[[], _Parts]) -> Staged:
        """Build the live states of saved ones on every rank."""
        recomputed = 0

        def build() -> Staged:
            nonlocal recomputed
            saved = parts()
            counters = Counters.restored(saved.counters)
            past = Past(counters.steps, counters.begun)
            check_layers(self._owned(), saved.layers, self._partitions[0].owner.needs, past)
            states = []
            for partition in self._partitions:
                layers, count = partition.owner.restored(
                    saved.layers, step=counters.steps, settings=saved.settings
                )
                states.append(layers)
                recomputed += count
            decisions = restored_decisions(saved.decisions, step=counters.steps)
            return Staged(counters, states, decisions=decisions)

        staged = together(self._model, build)
        # Schedules are functions of these: ranks that disagree would wait for each other.
        shared = {k: v for k, v in vars(staged.counters).items() if k != "decompositions"}
        agree(self._model, "the K-FAC state's counters", repr(shared))
        self._say_recomputed(sum(self._model.gather_objects(recomputed)))
        agree(self._model, "the cost governor's decisions", repr(staged.decisions))
        return staged

    def _adopt(self, staged: Staged) -> None:
        for errors in (self._guard.take, self._session.take_error):
            errors()  # of a step that is forgotten now
        for partition, states in zip(self._partitions, staged.states, strict=True):
            partition.adopt(states)
        self.counters = staged.counters
        self._governor.adopt(staged.decisions, staged.counters.steps)
        self._session.discard()
        self._begin_step()

    def _refuse_absence(self, folder: Path | None) -> None:
        where = "no checkpoint to resume from" if folder is None else f"no K-FAC state in {folder}"
        if self.config.resume == "require":
            raise StateError(
                "E304",
                f"{where}, and kfac.resume is 'require'. Set it to 'auto' to start K-FAC anew",
            )
        if self._model.rank == 0:
            logger.warning(
                "KFAC-W304 %s: K-FAC starts anew, with statistics and schedules of step 0. Set "
                "kfac.resume to 'require' to make this an error",
                where,
            )

    def _say_recomputed(self, layers: int) -> None:
        if layers and self._model.rank == 0:
            logger.warning(
                "KFAC-W302 %d layers were saved with bases of another kind, or converted: they are "
                "recomputed from the saved factors",
                layers,
            )

    def _say_changed_settings(self, manifest: Manifest) -> None:
        now = self.config.model_dump(mode="json")
        changed = [
            f"{key}: {manifest.config.get(key)!r} -> {value!r}"
            for key, value in now.items()
            if key != "resume" and manifest.config.get(key) != value
        ]
        if changed and self._model.rank == 0:
            logger.warning(
                "KFAC-W305 kfac settings have changed since the state was saved; the new ones "
                "hold: %s",
                "; ".join(changed),
            )

    def _warn_of_nonfinite(self, layers: Mapping[str, Mapping[str, Any]]) -> None:
        bad = [
            f"{name} ({key})"
            for name, state in layers.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and not bool(value.isfinite().all())
        ]
        if bad:
            logger.warning(
                "KFAC-W303 state that is not finite is saved, and will be refused when it is "
                "loaded: %s",
                ", ".join(bad[:20]),
            )

    def _begin_step(self) -> None:
        raise NotImplementedError


def _copied(layer: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in layer.items()}

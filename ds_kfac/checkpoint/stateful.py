"""The part of a preconditioner that saves and restores its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.vote import agree, together
from ds_kfac.config import KFACConfig
from ds_kfac.errors import StateError
from ds_kfac.owner import Owner
from ds_kfac.restore import signature
from ds_kfac.state import LayerState
from ds_kfac.telemetry.metrics import Counters

if TYPE_CHECKING:
    from ds_kfac.capture.session import CaptureSession

STATE_VERSION = 1


@dataclass(frozen=True)
class _Parts:
    """A saved state by its parts, none of them looked at yet."""

    counters: Any
    layers: Any
    settings: Mapping[str, Any] | None

    @classmethod
    def of(cls, state: Any) -> _Parts:
        """From what :meth:`Stateful.state_dict` returned.

        Raises:
            StateError: It has another version, or none (E308).
        """
        version = state.get("version") if isinstance(state, Mapping) else type(state).__name__
        if version != STATE_VERSION:
            raise StateError("E308", f"K-FAC state of version {version!r}, expected 1")
        return cls(state.get("counters"), state.get("layers"), state.get("settings"))


@dataclass(frozen=True)
class Staged:
    """A state that every rank has read and found to fit, not in use yet.

    Attributes:
        counters: Counts.
        states: Owned layers by index.
    """

    counters: Counters
    states: dict[int, LayerState]


class Stateful:
    """Saving and restoring, for :class:`ds_kfac.preconditioner.KFAC`.

    Every method that changes state or touches a disk is a collective: all ranks of the model
    call it, and all of them succeed or raise the same error with nothing changed.
    """

    config: KFACConfig
    counters: Counters
    _model: Communicator
    _owner: Owner
    _session: CaptureSession
    _error: Exception | None

    def state_dict(self) -> dict[str, Any]:
        """Counters and the state of the layers this rank owns, as plain tensors and numbers."""
        return {
            "version": STATE_VERSION,
            "counters": dict(vars(self.counters)),
            "settings": signature(self.config),
            "layers": self._owner.state_dict(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore what :meth:`state_dict` returned for the same layers on the same ranks.

        A collective. Statistics of a step under way are discarded.

        Raises:
            StateError: Version, layers, shapes, dtypes or moments do not fit on some rank
                (E302, E308); nothing is changed on any rank then.
            DistributedError: Ranks bring states of different steps (E203).
        """
        self._adopt(self._stage(lambda: _Parts.of(state)))

    def reset(self) -> None:
        """Forget all statistics, bases, moments and counts, as after attach."""
        self._adopt(Staged(Counters(), self._owner.blank()))

    def _stage(self, parts: Callable[[], _Parts]) -> Staged:
        """Build the live states of saved ones on every rank."""

        def build() -> Staged:
            saved = parts()
            counters = Counters.restored(saved.counters)
            states = self._owner.restored(
                saved.layers, step=counters.steps, settings=saved.settings
            )
            return Staged(counters, states)

        staged = together(self._model, build)
        # Schedules are functions of these: ranks that disagree would wait for each other.
        shared = {k: v for k, v in vars(staged.counters).items() if k != "decompositions"}
        agree(self._model, "the K-FAC state's counters", repr(shared))
        return staged

    def _adopt(self, staged: Staged) -> None:
        self._owner.states.update(staged.states)
        self.counters = staged.counters
        self._error = self._session.error = None  # of a step that is forgotten now
        self._session.discard()
        self._begin_step()

    def _begin_step(self) -> None:
        raise NotImplementedError

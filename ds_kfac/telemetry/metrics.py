"""Counts and values that a rank reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ds_kfac.errors import StateError
from ds_kfac.state import MAX_COUNT, LayerState


@dataclass
class Counters:
    """Host-side counts since attach.

    Attributes:
        steps: Steps applied; the argument of every schedule.
        skipped: Steps dropped because of non-finite numbers.
        captures: Steps whose statistics were folded.
        refreshes: Steps in which bases were recomputed.
        decompositions: Blocks this rank decomposed.
        preconditions: Times directions were computed.
    """

    steps: int = 0
    skipped: int = 0
    captures: int = 0
    refreshes: int = 0
    decompositions: int = 0
    preconditions: int = 0

    @classmethod
    def restored(cls, saved: Any) -> Counters:
        """Counts from a saved mapping.

        Raises:
            StateError: They are not exactly these counts, as whole numbers from 0 to
                ``MAX_COUNT``, or more was done than in the steps that are counted (E302).
        """
        fits = isinstance(saved, Mapping) and saved.keys() == vars(cls()).keys()
        if not fits or not all(type(n) is int and 0 <= n <= MAX_COUNT for n in saved.values()):
            raise StateError("E302", f"saved K-FAC state has wrong counters: {saved!r:.300}")
        counters = cls(**saved)
        once = (counters.captures, counters.refreshes, counters.preconditions)
        if max(once) > counters.begun:
            raise StateError(
                "E302",
                f"saved K-FAC state has wrong counters, more than one per step: {saved!r:.300}",
            )
        return counters

    @property
    def begun(self) -> int:
        """Steps that may have counted anything: a host can skip one that K-FAC found healthy."""
        return self.steps + self.skipped


def collect(
    counters: Counters,
    states: Iterable[LayerState],
    *,
    damping: float,
    tensors: Mapping[str, Tensor | None],
) -> dict[str, float]:
    """All metrics of a rank as floats; reads device values.

    Args:
        counters: Host-side counts.
        states: Layers owned by this rank.
        damping: Value in force.
        tensors: 0-d values by name; None when not measured yet.
    """
    states = list(states)
    values = {name: float(value) for name, value in vars(counters).items()}
    values["damping"] = damping
    values.update({name: float(value) for name, value in tensors.items() if value is not None})
    values["fallbacks"] = float(sum(int(state.fallbacks) for state in states))
    values["failing_blocks"] = float(
        sum(count > 0 for state in states for _, side in state.sides() for count in side.failures)
    )
    return values

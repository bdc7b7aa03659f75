"""What is due in a step: as the settings say, or as the cost governor has decided.

Decisions are evaluated as the schedules that they are printed as. Pasted into the settings of
another run, these cannot mean anything else there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from ds_kfac import schedules
from ds_kfac.config import KFACConfig
from ds_kfac.errors import StateError
from ds_kfac.plan.budget import Choice, Costs
from ds_kfac.state import MAX_COUNT


@dataclass(frozen=True)
class Decision:
    """What was chosen, and what it was chosen from.

    Attributes:
        step: First applied step that it holds for.
        choice: Intervals and rows.
        costs: As measured before, the same on all ranks.
    """

    step: int
    choice: Choice
    costs: Costs

    def saved(self) -> dict[str, int]:
        """As whole numbers by name."""
        costs = {f"cost_{name}": value for name, value in asdict(self.costs).items()}
        return {"step": self.step, **asdict(self.choice), **costs}

    @classmethod
    def restored(cls, saved: Any) -> Decision:
        """From what :meth:`saved` returned.

        Raises:
            StateError: It is not that (E302).
        """
        like = cls(1, Choice(1, 1, 1), Costs(1, 0, 0, 0, 0)).saved()
        fits = isinstance(saved, Mapping) and saved.keys() == like.keys()
        if fits and all(type(n) is int and 0 <= n <= MAX_COUNT for n in saved.values()):
            positive = [saved[name] for name in ("step", *asdict(Choice(1, 1, 1)), "cost_stride")]
            if min(positive) > 0 and saved["inverse"] % saved["factor"] == 0:
                costs = {n[5:]: value for n, value in saved.items() if n.startswith("cost_")}
                choice = Choice(saved["inverse"], saved["stride"], saved["factor"])
                return cls(saved["step"], choice, Costs(**costs))
        raise StateError("E302", f"saved K-FAC state has a wrong decision: {saved!r:.300}")


def restored(saved: Any, *, step: int) -> tuple[Decision, ...]:
    """Decisions of a saved state.

    Args:
        saved: A sequence of what :meth:`Decision.saved` returned.
        step: Applied steps at that time.

    Raises:
        StateError: They are malformed, not in order, or of later steps (E302).
    """
    decisions = tuple(Decision.restored(item) for item in saved)
    steps = [decision.step for decision in decisions]
    if steps != sorted(set(steps)) or (steps and steps[-1] > step):
        raise StateError("E302", f"saved K-FAC state of step {step} has decisions of steps {steps}")
    return decisions


def _no_stage(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class Pace:
    """Intervals and rows in force.

    Args:
        config: Settings.

    Attributes:
        decisions: In the order of their steps; empty as long as the settings hold.
        timed: Measures a stage of a step, by name.
    """

    def __init__(self, config: KFACConfig) -> None:
        self._config = config
        self.decisions: tuple[Decision, ...] = ()
        self.timed: Callable[[str], AbstractContextManager[None]] = _no_stage
        self.factor_steps: Any = config.factor_update_steps
        self.inverse_steps: Any = config.inv_update_steps
        self.token_fraction: Any = config.factor_token_fraction

    @property
    def start(self) -> Choice:
        """What the settings say at step 0."""
        config = self._config
        return Choice(
            inverse=schedules.interval_at(config.inv_update_steps, 0),
            stride=max(1, round(1 / schedules.value_at(config.factor_token_fraction, 0))),
            factor=schedules.interval_at(config.factor_update_steps, 0),
        )

    @property
    def current(self) -> Choice:
        """What was decided last."""
        return self.decisions[-1].choice if self.decisions else self.start

    def adopt(self, decisions: Sequence[Decision]) -> None:
        """Take the place of all decisions so far."""
        self.decisions = tuple(decisions)
        config, chosen = self._config, [d.choice for d in decisions]
        rows: Any = config.factor_token_fraction  # as it is written, where it has not changed
        self.factor_steps = self._schedule(config.factor_update_steps, [c.factor for c in chosen])
        self.inverse_steps = self._schedule(config.inv_update_steps, [c.inverse for c in chosen])
        self.token_fraction = self._schedule(
            rows, [rows if c.stride == self.start.stride else 1 / c.stride for c in chosen]
        )

    def captures(self, step: int) -> bool:
        """Whether statistics are due at an applied step."""
        return schedules.is_due(self.factor_steps, step)

    def refreshes(self, step: int) -> bool:
        """Whether bases are due at an applied step."""
        return schedules.is_due(self.inverse_steps, step)

    def fraction(self, step: int) -> float:
        """Share of the rows that statistics use at an applied step."""
        return schedules.value_at(self.token_fraction, step)

    def settings(self) -> dict[str, Any]:
        """The same as numbers and schedules for the ``kfac`` section of a JSON."""
        specs: dict[str, Any] = {
            "factor_update_steps": self.factor_steps,
            "inv_update_steps": self.inverse_steps,
            "factor_token_fraction": self.token_fraction,
        }
        if self._config.max_overhead is not None and isinstance(self.inverse_steps, int | float):
            # A schedule even if nothing has changed: owners are chosen as if it might.
            specs["inv_update_steps"] = schedules.StepsSchedule(
                type="steps", values=(self.inverse_steps,), boundaries=()
            )
        return {
            key: spec if isinstance(spec, int | float) else spec.model_dump(mode="json")
            for key, spec in specs.items()
        }

    def _schedule(self, first: Any, values: Sequence[int | float]) -> Any:
        """One number, or steps at the decisions that changed it."""
        kept, boundaries = [first], []
        for decision, value in zip(self.decisions, values, strict=True):
            if value != kept[-1]:
                kept.append(value)
                boundaries.append(decision.step)
        if not boundaries:
            return first
        return schedules.StepsSchedule(
            type="steps", values=tuple(kept), boundaries=tuple(boundaries)
        )

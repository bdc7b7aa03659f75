"""Schedules: a number as a pure function of the applied-step counter.

Every rank evaluates the same function of the same integer, so no communication is
needed to agree on a value, and a resumed run continues where it stopped.
"""

from __future__ import annotations

import bisect
import math
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    model_validator,
)


def _representable(value: int) -> int:
    try:
        float(value)
    except OverflowError:
        raise ValueError("larger than any float") from None
    return value


Number = Annotated[
    Annotated[StrictInt, AfterValidator(_representable)]
    | Annotated[StrictFloat, Field(allow_inf_nan=False)],
    Field(union_mode="left_to_right", description="a number"),
]
Count = Annotated[StrictInt, Field(ge=1, description="a whole number >= 1")]
Position = Annotated[StrictInt, Field(ge=0, description="a whole number >= 0")]


class _Schedule(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LinearSchedule(_Schedule):
    """Straight line from ``start`` to ``end`` over ``steps`` applied steps, constant outside."""

    type: Literal["linear"]
    start: Number
    end: Number
    steps: Count
    begin: Position = 0

    def value(self, step: int) -> float:
        """Value at an applied step."""
        return _between(self.start, self.end, _progress(step, self.begin, self.steps))

    def extremes(self) -> tuple[float, float]:
        """Smallest and largest value the schedule ever takes."""
        return min(self.start, self.end), max(self.start, self.end)


class CosineSchedule(_Schedule):
    """Half a cosine from ``start`` to ``end`` over ``steps`` applied steps, constant outside."""

    type: Literal["cosine"]
    start: Number
    end: Number
    steps: Count
    begin: Position = 0

    def value(self, step: int) -> float:
        """Value at an applied step."""
        share = 0.5 * (1.0 - math.cos(math.pi * _progress(step, self.begin, self.steps)))
        return _between(self.start, self.end, share)

    def extremes(self) -> tuple[float, float]:
        """Smallest and largest value the schedule ever takes."""
        return min(self.start, self.end), max(self.start, self.end)


class ExponentialSchedule(_Schedule):
    """``start * rate ** (step / every)``, never past ``end`` when that is given."""

    type: Literal["exponential"]
    start: Number
    rate: Annotated[Number, Field(gt=0, description="a number > 0")]
    every: Count = 1
    end: Annotated[Number | None, Field(description="a number, or null")] = None

    @model_validator(mode="after")
    def _check_end(self) -> ExponentialSchedule:
        # Growing in absolute value away from zero, or shrinking towards it.
        upwards = (self.rate > 1) == (self.start > 0)
        moves = self.rate != 1 and self.start != 0
        if moves and self.end is not None and (self.end > self.start) != upwards:
            if self.end != self.start:
                raise ValueError(
                    f"end {self.end} lies behind start {self.start}: with rate {self.rate} the "
                    "schedule moves away from it"
                )
        return self

    def value(self, step: int) -> float:
        """Value at an applied step."""
        # The exponent is bounded so that a run of any length stays inside the float range.
        exponent = max(-700.0, min(700.0, step / self.every * math.log(self.rate)))
        value = self.start * math.exp(exponent)
        if self.end is None:
            return value
        return min(max(value, min(self.start, self.end)), max(self.start, self.end))

    def extremes(self) -> tuple[float, float]:
        """Smallest and largest value the schedule ever takes."""
        if self.end is not None:
            return min(self.start, self.end), max(self.start, self.end)
        if self.rate == 1 or self.start == 0:
            return self.start, self.start
        limit = self.start * (math.exp(-700.0) if self.rate < 1 else math.inf)
        return min(self.start, limit), max(self.start, limit)


class StepsSchedule(_Schedule):
    """Piecewise constant: ``values[i]`` until applied step ``boundaries[i]`` is reached."""

    type: Literal["steps"]
    values: Annotated[
        tuple[Number, ...], Field(min_length=1, description="a list of at least one number")
    ]
    boundaries: Annotated[
        tuple[Annotated[StrictInt, Field(ge=1)], ...],
        Field(description="a list of whole numbers >= 1"),
    ]

    @model_validator(mode="after")
    def _check_lengths(self) -> StepsSchedule:
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"needs one value more than boundaries, got {len(self.values)} values and "
                f"{len(self.boundaries)} boundaries"
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"boundaries must increase, got {list(self.boundaries)}")
        return self

    def value(self, step: int) -> float:
        """Value at an applied step."""
        return self.values[sum(step >= boundary for boundary in self.boundaries)]

    def extremes(self) -> tuple[float, float]:
        """Smallest and largest value the schedule ever takes."""
        return min(self.values), max(self.values)


SCHEDULES: dict[str, type[BaseModel]] = {
    "linear": LinearSchedule,
    "cosine": CosineSchedule,
    "exponential": ExponentialSchedule,
    "steps": StepsSchedule,
}

Schedule = Annotated[
    LinearSchedule | CosineSchedule | ExponentialSchedule | StepsSchedule,
    Field(discriminator="type"),
]
Scheduled = Number | Schedule
"""A number, or a schedule of numbers over applied steps."""


def value_at(spec: Any, step: int) -> float:
    """Evaluate a number or schedule at an applied step."""
    return float(spec) if isinstance(spec, int | float) else float(spec.value(step))


def interval_at(spec: Any, step: int) -> int:
    """Evaluate an interval (whole steps, at least 1) at an applied step."""
    return max(1, round(value_at(spec, step)))


def is_due(spec: Any, step: int) -> bool:
    """Whether work with this interval is due at an applied step (always due at step 0).

    With a constant interval that is every multiple of it. An interval that moves all the time
    would make multiples fall anywhere or nowhere: there, the next time is the last one plus
    the interval in force then.
    """
    if isinstance(spec, int | float | StepsSchedule):
        return step % interval_at(spec, step) == 0
    due = _due_steps(spec)
    while due[-1] < step:
        due.append(due[-1] + interval_at(spec, due[-1]))
    return due[bisect.bisect_left(due, step)] == step


@lru_cache(maxsize=64)
def _due_steps(spec: Any) -> list[int]:
    """Steps at which work is due, as far as anybody has asked; a function of the schedule."""
    return [0]


def extremes(spec: Any) -> tuple[float, float]:
    """Smallest and largest value of a number or schedule."""
    return (float(spec), float(spec)) if isinstance(spec, int | float) else spec.extremes()


def _between(start: float, end: float, share: float) -> float:
    # Exact at both ends, and never outside: start + (end - start) * share may round past a small
    # end, and a damping of 1e-20 would become 0.
    value = start * (1.0 - share) + end * share
    return min(max(value, min(start, end)), max(start, end))


def _progress(step: int, begin: int, steps: int) -> float:
    return min(1.0, max(0.0, (step - begin) / steps))

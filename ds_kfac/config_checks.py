"""Checks that fields of the configuration share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import AfterValidator, Field

from ds_kfac.schedules import StepsSchedule, extremes


def in_range(allowed: Callable[[float, float], bool]) -> AfterValidator:
    """Check the smallest and largest value that a number or schedule ever takes."""

    def check(spec: Any) -> Any:
        if spec is not None and not allowed(*extremes(spec)):
            raise ValueError("out of range")
        return spec

    return AfterValidator(check)


def whole(spec: Any) -> Any:
    """Check that a number, or every value of a stepped schedule, is whole."""
    values = spec.values if isinstance(spec, StepsSchedule) else (spec,)
    if any(isinstance(value, float) and not value.is_integer() for value in values):
        raise ValueError("not whole")
    return spec


def pieces(*intervals: Any) -> list[int]:
    """Steps at which piecewise constant intervals begin; none if one of them is not."""
    if not all(isinstance(item, int | float | StepsSchedule) for item in intervals):
        return []
    stepped = [item for item in intervals if isinstance(item, StepsSchedule)]
    return sorted({0, *(step for item in stepped for step in item.boundaries)})


def value_of(interval: Any, step: int) -> Any:
    """Value of a piecewise constant interval, as it was written."""
    return interval.value(step) if isinstance(interval, StepsSchedule) else interval


def expected(text: str, **constraints: Any) -> Any:
    """A field whose description is what messages say is expected, and what editors show."""
    return Field(description=text, **constraints)

"""Schedules against numbers computed by hand, and their promised bounds."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from ds_kfac.config import KFACConfig
from ds_kfac.schedules import Scheduled, extremes, interval_at, is_due, value_at

_ADAPTER: TypeAdapter[Any] = TypeAdapter(Scheduled)


def schedule(**content: Any) -> Any:
    return _ADAPTER.validate_python(content)


LINEAR = {"type": "linear", "start": 1.0, "end": 0.2, "steps": 8, "begin": 2}
COSINE = {"type": "cosine", "start": 2.0, "end": 0.0, "steps": 6}
DECAY = {"type": "exponential", "start": 8.0, "rate": 0.5, "every": 10}
GROWTH = {"type": "exponential", "start": 1, "rate": 2, "end": 10}
STEPS = {"type": "steps", "values": [1, 5, 20], "boundaries": [3, 10]}


@pytest.mark.parametrize(
    ("content", "step", "expected"),
    [
        (LINEAR, 0, 1.0),
        (LINEAR, 2, 1.0),
        (LINEAR, 3, 0.9),
        (LINEAR, 6, 0.6),
        (LINEAR, 10, 0.2),
        (LINEAR, 11, 0.2),
        (LINEAR, 10**9, 0.2),
        (COSINE, 0, 2.0),
        (COSINE, 1, 1.0 + math.sqrt(3) / 2),
        (COSINE, 2, 1.5),
        (COSINE, 3, 1.0),
        (COSINE, 4, 0.5),
        (COSINE, 6, 0.0),
        (COSINE, 100, 0.0),
        (DECAY, 0, 8.0),
        (DECAY, 10, 4.0),
        (DECAY, 5, 8.0 / math.sqrt(2)),
        (DECAY, 30, 1.0),
        (GROWTH, 0, 1.0),
        (GROWTH, 3, 8.0),
        (GROWTH, 4, 10.0),
        (GROWTH, 10**6, 10.0),
        (STEPS, 0, 1),
        (STEPS, 2, 1),
        (STEPS, 3, 5),
        (STEPS, 9, 5),
        (STEPS, 10, 20),
        (STEPS, 10**9, 20),
    ],
)
def test_values_by_hand(content: dict[str, Any], step: int, expected: float) -> None:
    assert value_at(schedule(**content), step) == pytest.approx(expected, rel=1e-14, abs=1e-15)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (LINEAR, (0.2, 1.0)),
        (COSINE, (0.0, 2.0)),
        (DECAY, (8.0 * math.exp(-700), 8.0)),
        (GROWTH, (1, 10)),
        (STEPS, (1, 20)),
        ({"type": "exponential", "start": 1, "rate": 2}, (1, math.inf)),
        ({"type": "exponential", "start": -1, "rate": 2}, (-math.inf, -1)),
        ({"type": "exponential", "start": 3, "rate": 1}, (3, 3)),
        ({"type": "exponential", "start": 0, "rate": 2}, (0, 0)),
        ({"type": "exponential", "start": 4, "rate": 0.5, "end": 1}, (1, 4)),
    ],
)
def test_extremes_by_hand(content: dict[str, Any], expected: tuple[float, float]) -> None:
    assert extremes(schedule(**content)) == expected


def test_numbers_are_constant_schedules() -> None:
    assert value_at(3, 0) == value_at(3, 99) == 3.0
    assert extremes(0.5) == (0.5, 0.5)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_both_ends_are_reached_exactly(kind: str) -> None:
    """``start + (end - start) * 1.0`` is 0 for these numbers: a damping that vanishes."""
    spec = schedule(type=kind, start=1.0, end=1e-20, steps=7)
    assert value_at(spec, 0) == 1.0
    assert value_at(spec, 7) == 1e-20
    assert KFACConfig(damping={"type": kind, "start": 1.0, "end": 1e-20, "steps": 7})


_NUMBER = st.floats(-1e6, 1e6) | st.integers(-(10**6), 10**6) | st.floats(-1e300, 1e300)
_COUNT = st.integers(1, 10**6)


@st.composite
def _contents(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["linear", "cosine", "exponential", "steps"]))
    if kind == "steps":
        boundaries = sorted(draw(st.sets(_COUNT, max_size=4)))
        size = len(boundaries) + 1
        values = draw(st.lists(_NUMBER, min_size=size, max_size=size))
        return {"type": kind, "values": values, "boundaries": boundaries}
    if kind == "exponential":
        content = {"type": kind, "start": draw(_NUMBER), "rate": draw(st.floats(1e-6, 1e6))}
        content["every"] = draw(_COUNT)
        content["end"] = draw(st.none() | _NUMBER)
        return content
    numbers = {"start": draw(_NUMBER), "end": draw(_NUMBER)}
    return {"type": kind, **numbers, "steps": draw(_COUNT), "begin": draw(st.integers(0, 100))}


@settings(max_examples=200)
@given(_contents(), st.lists(st.integers(0, 10**7), max_size=8))
def test_extremes_bound_every_value(content: dict[str, Any], steps: list[int]) -> None:
    try:
        spec = schedule(**content)
    except ValidationError:
        assume(False)
    low, high = extremes(spec)
    marks = [0, 1, content.get("begin", 0), content.get("begin", 0) + content.get("steps", 0)]
    for step in [*steps, *marks, *content.get("boundaries", [])]:
        value = value_at(spec, step)
        assert not math.isnan(value)
        assert low <= value <= high


@given(start=_NUMBER, end=_NUMBER, rate=st.floats(1e-6, 1e6))
def test_ends_on_the_wrong_side_are_refused_not_ignored(
    start: float, end: float, rate: float
) -> None:
    """An end that the schedule moves away from would never be reached."""
    assume(start != 0 and rate != 1 and start != end)
    away = (end > start) != ((rate > 1) == (start > 0))
    try:
        spec = schedule(type="exponential", start=start, rate=rate, end=end)
    except ValidationError as error:
        assert away and "lies behind start" in str(error)
    else:
        assert not away
        assert min(start, end) <= value_at(spec, 10**9) <= max(start, end)


@pytest.mark.parametrize(
    ("spec", "due"),
    [
        (1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (3, [0, 3, 6, 9]),
        (5.0, [0, 5, 10]),
        (schedule(type="steps", values=[1, 4], boundaries=[3]), [0, 1, 2, 4, 8]),
        (schedule(type="linear", start=1, end=3, steps=4), [0, 1, 3, 5, 8, 11]),
    ],
)
def test_due_steps(spec: Any, due: list[int]) -> None:
    assert [step for step in range(12) if is_due(spec, step)] == due


@given(st.integers(1, 20), st.integers(1, 200), st.integers(1, 2000), st.integers(0, 3000))
def test_moving_intervals_starve_nothing(start: int, end: int, steps: int, step: int) -> None:
    """Multiples of an interval that grows fell nowhere for 383 steps, where it was at most 50."""
    spec = schedule(type="linear", start=start, end=end, steps=steps)
    longest = max(start, end)
    assert any(is_due(spec, later) for later in range(step, step + longest))
    due = [later for later in range(step, step + 3 * longest) if is_due(spec, later)]
    for first, second in pairwise(due):
        assert second - first == interval_at(spec, first)


@given(st.floats(1, 1e4), st.integers(0, 10**6))
def test_intervals_are_whole_and_at_least_one(start: float, step: int) -> None:
    spec = schedule(type="exponential", start=start, rate=0.5)
    assert interval_at(spec, step) >= 1
    assert isinstance(interval_at(spec, step), int)


def test_growing_intervals_need_an_end() -> None:
    """Without one the interval becomes infinite in the middle of a run."""
    growth = {"type": "exponential", "start": 10, "rate": 1.5, "every": 100}
    with pytest.raises(ValueError, match="factor_update_steps"):
        KFACConfig.parse({"factor_update_steps": growth})
    assert KFACConfig.parse({"factor_update_steps": {**growth, "end": 100}})

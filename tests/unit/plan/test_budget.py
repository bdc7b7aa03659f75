"""The cost governor's choice as a pure function: within the budget, the best there is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_kfac.plan.budget import (
    HEADROOM,
    MAX_FACTOR_STEPS,
    MAX_INVERSE_STEPS,
    MAX_STRIDE,
    Choice,
    Costs,
    choices,
    choose,
    review,
)

DEFAULT = Choice(inverse=10, stride=1, factor=10)
TIMES = st.integers(0, 10**6)
COSTS = st.builds(
    Costs, st.integers(1, 10**6), TIMES, TIMES, TIMES, TIMES, st.sampled_from([1, 2, 4, 8])
)
STARTS = st.builds(
    lambda factor, times, stride: Choice(factor * times, stride, factor),
    st.integers(1, 60),
    st.integers(1, 12),
    st.integers(1, 20),
)
BUDGETS = st.floats(1e-4, 5)


def test_costs_are_shares_of_a_step_without_kfac() -> None:
    costs = Costs(base=1000, fixed=20, capture=200, reduce=30, refresh=400, stride=2)
    choice = Choice(inverse=40, stride=4, factor=20)
    assert costs.floor == pytest.approx(0.02)
    assert costs.statistics(choice) == pytest.approx((200 * 2 / 4 + 30) / 20 / 1000)
    assert costs.bases(choice) == pytest.approx(400 / 40 / 1000)
    assert costs.total(choice) == pytest.approx(0.02 + 0.0065 + 0.01)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        # Cheap: as the settings say, never more often.
        ((1000, 0, 1, 1, 1), DEFAULT),
        # Too many rows: fewer of them, before bases get older.
        ((1000, 0, 800, 0, 10), Choice(10, 2, 10)),
        # Reduction costs the same however few rows: rarer captures, which bases wait for.
        ((1000, 0, 0, 800, 0), Choice(20, 1, 20)),
        # Decompositions: older bases, captures as before.
        ((1000, 0, 100, 0, 1150), Choice(30, 1, 10)),
        ((1000, 20, 200, 30, 400), Choice(20, 2, 20)),
    ],
)
def test_what_costs_least_quality_goes_first(
    times: tuple[int, int, int, int, int], chosen: Choice
) -> None:
    assert choose(Costs(*times), 0.05, DEFAULT) == chosen


def test_limits_hold_where_nothing_fits() -> None:
    heavy = Costs(base=1, fixed=1, capture=10**9, reduce=10**6, refresh=10**9)
    assert choose(heavy, 0.05, DEFAULT) == Choice(MAX_INVERSE_STEPS, MAX_STRIDE, MAX_FACTOR_STEPS)
    only_fixed = Costs(base=100, fixed=100, capture=0, reduce=0, refresh=0)
    assert choose(only_fixed, 0.05, DEFAULT) == DEFAULT  # nothing to be gained
    assert choose(Costs(0, 0, 0, 0, 0), 0.05, DEFAULT) == DEFAULT


def test_settings_beyond_the_limits_stay() -> None:
    start = Choice(inverse=400, stride=16, factor=200)
    assert set(choices(start)) == {start}


@given(COSTS, BUDGETS, STARTS)
def test_never_over_the_budget_when_that_can_be(costs: Costs, budget: float, start: Choice) -> None:
    chosen = choose(costs, budget, start)
    allowed = list(choices(start))
    assert chosen in allowed and allowed == sorted(allowed) and len(set(allowed)) == len(allowed)
    cheapest = min(costs.total(choice) for choice in allowed)
    assert costs.total(chosen) <= max(budget, cheapest)
    assert all(costs.total(better) > budget for better in allowed if better < chosen)
    if cheapest > budget:
        assert costs.total(chosen) == cheapest


@given(STARTS)
def test_bases_are_recomputed_from_statistics_of_their_step(start: Choice) -> None:
    for choice in choices(start):
        assert choice.inverse % choice.factor == 0
        assert choice.inverse % start.inverse == 0 == choice.factor % start.factor
        assert start.stride <= choice.stride <= max(start.stride, MAX_STRIDE)
        assert choice.factor <= max(start.factor, MAX_FACTOR_STEPS)
        assert choice.inverse <= max(start.inverse, MAX_INVERSE_STEPS)


@given(COSTS, BUDGETS, STARTS, st.floats(1, 3))
def test_more_budget_is_never_worse(
    costs: Costs, budget: float, start: Choice, more: float
) -> None:
    small, large = choose(costs, budget, start), choose(costs, budget * more, start)
    if costs.total(small) <= budget:
        assert large <= small
    assert costs.total(large) <= max(budget * more, costs.total(small))


@given(COSTS, BUDGETS, STARTS, st.sampled_from(["fixed", "capture", "reduce", "refresh"]), TIMES)
def test_higher_costs_are_never_met_with_more_work(
    costs: Costs, budget: float, start: Choice, name: str, extra: int
) -> None:
    dearer = Costs(**{**vars(costs), name: getattr(costs, name) + extra})
    chosen = choose(dearer, budget, start)
    if dearer.total(chosen) <= budget:
        assert choose(costs, budget, start) <= chosen


@settings(max_examples=300)
@given(COSTS, BUDGETS, STARTS, st.integers(0, 10**4), st.booleans())
def test_reviews_move_only_with_reason(
    costs: Costs, budget: float, start: Choice, index: int, may_relax: bool
) -> None:
    allowed = list(choices(start))
    current = allowed[index % len(allowed)]
    found = review(costs, budget, start, current, may_relax=may_relax)
    assert found in allowed
    total = costs.total(found)
    if costs.total(current) <= budget:
        assert total <= budget
        assert found == current or (may_relax and found < current and total <= HEADROOM * budget)
    elif total > budget:  # nothing fits: never more work than before
        assert found >= current
    # Asked again with the same costs, there is nothing left to change.
    assert review(costs, budget, start, found, may_relax=False) == found or total > budget

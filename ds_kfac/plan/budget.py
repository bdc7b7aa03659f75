"""Intervals that keep K-FAC's extra time within a share of a step: a pure function of costs.

What is given up first is what costs least quality: rows, then captures, then the age of bases.
Measured on a small language model (final loss; 2.70 with everything every step or three):
an eighth of the rows +0.025, captures every 10 steps +0.01 to 0.02, bases every 10 steps +0.03,
every 30 steps +0.28, every 100 steps +0.37.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MAX_FACTOR_STEPS = 50
"""Captures are never rarer, unless they are by the settings: averages would remember nothing."""
MAX_INVERSE_STEPS = 100
"""Bases never get older, unless they do by the settings."""
MAX_STRIDE = 8
"""Statistics never use fewer rows than one in so many, unless they do by the settings."""
HEADROOM = 0.9
"""Share of the budget that a denser choice has to fit into: noise must not move it to and fro."""


@dataclass(frozen=True, order=True)
class Choice:
    """How often, and from how many rows; the smaller, the better for quality.

    Attributes:
        inverse: Applied steps between two refreshes, a multiple of ``factor``.
        stride: Every so-manieth row is used.
        factor: Applied steps between two captures.
    """

    inverse: int
    stride: int
    factor: int


@dataclass(frozen=True)
class Costs:
    """Measured times; any one unit, here nanoseconds.

    Attributes:
        base: A step without K-FAC.
        fixed: What every step pays: health, exchange, directions.
        capture: Computing the statistics of a step, at ``stride``.
        reduce: Bringing them to their owners and folding them.
        refresh: Recomputing bases.
        stride: See ``capture``, which is taken to be proportional to the rows.
    """

    base: int
    fixed: int
    capture: int
    reduce: int
    refresh: int
    stride: int = 1

    @property
    def floor(self) -> float:
        """Share of a step that no interval changes."""
        return _share(self.fixed, self.base)

    def statistics(self, choice: Choice) -> float:
        """Share of a step that statistics take on average."""
        once = self.capture * (self.stride / choice.stride) + self.reduce
        return _share(once / choice.factor, self.base)

    def bases(self, choice: Choice) -> float:
        """Share of a step that refreshes take on average."""
        return _share(self.refresh / choice.inverse, self.base)

    def total(self, choice: Choice) -> float:
        """Share of a step that all of K-FAC takes on average."""
        return self.floor + self.statistics(choice) + self.bases(choice)


def choices(start: Choice) -> Iterator[Choice]:
    """All choices within the limits, from the best quality to the lowest cost.

    Args:
        start: The settings: nothing is ever done more often than they say.
    """
    inverses = range(start.inverse, max(start.inverse, MAX_INVERSE_STEPS) + 1, start.inverse)
    strides = [start.stride]
    while strides[-1] * 2 <= MAX_STRIDE:
        strides.append(strides[-1] * 2)
    for inverse in inverses:
        most = min(inverse, max(start.factor, MAX_FACTOR_STEPS))
        factors = [n for n in range(start.factor, most + 1, start.factor) if inverse % n == 0]
        for stride in strides:
            for factor in factors:
                yield Choice(inverse, stride, factor)


def choose(costs: Costs, budget: float, start: Choice) -> Choice:
    """The best choice within a budget; the cheapest one if none is.

    Args:
        costs: Measured.
        budget: Largest share of a step that K-FAC may add to it.
        start: See :func:`choices`.
    """
    allowed = list(choices(start))
    for choice in allowed:
        if costs.total(choice) <= budget:
            return choice
    return min(allowed, key=lambda choice: (costs.total(choice), choice))


def review(
    costs: Costs, budget: float, start: Choice, current: Choice, *, may_relax: bool
) -> Choice:
    """What to do from now on, given what the current choice costs.

    Args:
        costs: Measured under the current choice.
        budget: See :func:`choose`.
        start: See :func:`choices`.
        current: The choice in force.
        may_relax: A better choice may take its place, if it fits with room to spare.
    """
    if costs.total(current) > budget:
        found = choose(costs, budget, start)
        # Where nothing fits, what was given up already stays so: noise would give it back.
        return found if costs.total(found) <= budget else max(found, current)
    if not may_relax:
        return current
    better = choose(costs, HEADROOM * budget, start)
    fits = costs.total(better) <= HEADROOM * budget
    return better if fits and better < current else current


def _share(part: float, whole: int) -> float:
    return part / whole if whole > 0 else float("inf")

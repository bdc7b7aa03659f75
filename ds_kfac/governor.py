"""Cost governor: measures what K-FAC costs now and then, and chooses how often it works.

Times are taken from marks that are read at decisions only. The step in which a decision falls
depends on counted steps alone, so that all ranks reach its collective together, and what they
decide from is the same: the slowest rank's times.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.guard import Guard
from ds_kfac.pace import Decision, Pace
from ds_kfac.plan.budget import Choice, Costs, review
from ds_kfac.telemetry.clock import Clock, Mark

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 9
"""Applied steps before the first measurement: allocations, autotuning, compilation."""
REVIEW_STEPS = 1000
"""Applied steps between a choice that has been confirmed and its next measurement."""
PLAIN_STEPS, CAPTURES, REFRESHES = 3, 3, 2
"""How many of each a measurement has to see."""


@dataclass
class _Step:
    """Marks of a step under measurement."""

    voted: Mark
    captures: bool
    refreshes: bool
    stages: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    left: Mark | None = None


@dataclass(frozen=True)
class _Span:
    """From one health vote to the next; the host's work of both steps lies between."""

    first: _Step
    entered: Mark
    waited: tuple[Mark, Mark] | None
    voted: Mark
    captures: bool


class Governor:
    """Keeps K-FAC's extra time within a share of a step.

    Args:
        pace: What is due; decisions go there.
        budget: Largest share of a step without K-FAC that it may add; None governs nothing.
        device: Compute device.
        communicator: All ranks of the model.
        guard: Keeps errors of this rank's own work.
        announce: Shows a decision to users; called on one rank.
    """

    def __init__(
        self,
        pace: Pace,
        budget: float | None,
        device: torch.device,
        communicator: Communicator,
        guard: Guard,
        announce: Callable[[str], None],
    ) -> None:
        self.clock = Clock(device)
        self._pace = pace
        self._is_on = budget is not None
        self._budget = budget or 0.0
        self._device = device
        self._comm = communicator
        self._guard = guard
        self._announce = announce
        if self._is_on:
            pace.timed = self._timed
        self.resume(0)

    def resume(self, step: int) -> None:
        """Start where the decisions say, or anew in the middle of a measurement."""
        self._opens = max(_opens(self._pace), step) if self._is_on else sys.maxsize
        self._forget()

    def adopt(self, decisions: Sequence[Decision], step: int) -> None:
        """Go on with saved decisions; without a budget the settings hold."""
        if self._is_on:
            self._pace.adopt(decisions)
            self.resume(step)

    def _forget(self) -> None:
        self._entered: Mark | None = None
        self._waited: tuple[Mark, Mark] | None = None
        self._step: _Step | None = None
        self._spans: list[_Span] = []

    # ------------------------------------------------------------------ marks of a step

    def enter(self, step: int) -> None:
        """K-FAC's part of a step begins."""
        self._entered = self.clock.mark() if step >= self._opens else None
        self._waited = None

    @contextmanager
    def waits(self) -> Iterator[None]:
        """K-FAC waits for bases that are computed beside training."""
        start = self.clock.mark() if self._entered is not None else None
        yield
        if start is not None:
            self._waited = start, self.clock.mark()

    def voted(self, step: int) -> None:
        """All ranks agree that the step is healthy; decide if enough was measured. A collective."""
        if self._entered is None:
            return
        mark, captures = self.clock.mark(), self._pace.captures(step)
        if self._step is not None and self._step.left is not None:
            self._spans.append(_Span(self._step, self._entered, self._waited, mark, captures))
        if self._is_enough():
            self._decide(step + 1)
            return
        self._step = _Step(mark, captures, self._pace.refreshes(step))

    def leave(self) -> None:
        """K-FAC's part of a step ends."""
        if self._step is not None:
            self._step.left = self.clock.mark()

    def drop(self) -> None:
        """The step is not taken: its time means nothing."""
        self._step = None

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = self.clock.mark() if self._step is not None else None
        yield
        if self._step is not None:
            self._step.stages.append((stage, start, self.clock.mark()))

    # ------------------------------------------------------------------ decisions

    def _is_enough(self) -> bool:
        captures = sum(span.captures for span in self._spans)
        refreshes = sum(span.first.refreshes for span in self._spans)
        plain = len(self._spans) - captures
        return captures >= CAPTURES and refreshes >= REFRESHES and plain >= PLAIN_STEPS

    def _decide(self, step: int) -> None:
        times = self._guard.run(self._measured) or [0] * 5
        reduced = torch.tensor(times, dtype=torch.int64, device=self._device)
        base, fixed, capture, reduce, refresh = self._comm.max_(reduced, "times").tolist()
        pace, before = self._pace, self._pace.current
        costs = Costs(-base, fixed, capture, reduce, refresh, stride=before.stride)
        confirmed = _opens(pace) > (pace.decisions[-1].step if pace.decisions else 0)
        choice = review(
            costs, self._budget, pace.start, before, may_relax=bool(pace.decisions) and confirmed
        )
        pace.adopt([*pace.decisions, Decision(step, choice, costs)])
        self.resume(step)
        if self._comm.rank == 0:
            self._say(before)

    def _measured(self) -> list[int]:
        """This rank's times: minus the base, so that the largest of all ranks is the shortest."""
        nanoseconds = self.clock.nanoseconds
        fixed: list[int] = []
        stages: dict[str, list[int]] = {"reduce": [], "refresh": []}
        late = 0  # work on bases outside the steps that begin it
        rest: dict[bool, list[int]] = {False: [], True: []}
        for span in self._spans:
            inside = nanoseconds(span.first.voted, span.first.left)
            before = nanoseconds(span.entered, span.voted)
            waited = nanoseconds(*span.waited) if span.waited is not None else 0
            late += waited
            sums = dict.fromkeys(stages, 0)
            for name, start, end in span.first.stages:
                sums[name] += nanoseconds(start, end)
            if span.first.captures:
                stages["reduce"].append(sums["reduce"])
            if span.first.refreshes:
                stages["refresh"].append(sums["refresh"])
            else:
                late += sums["refresh"]
            fixed.append(inside - sum(sums.values()) + before - waited)
            whole = nanoseconds(span.first.voted, span.voted)
            rest[span.captures].append(whole - inside - before)
        # Whoever disturbs a measurement makes it longer, never shorter: of two, the lower one.
        plain = statistics.median_low(rest[False])
        capture = max(0, statistics.median_low(rest[True]) - plain)
        reduce, refresh = (statistics.median_low(stages[n] or [0]) for n in ("reduce", "refresh"))
        refresh += late // max(1, len(stages["refresh"]))
        return [-plain, statistics.median_low(fixed), capture, reduce, refresh]

    # ------------------------------------------------------------------ reports

    def metrics(self) -> dict[str, float]:
        """The choice in force, and what it is expected to cost."""
        if not self._is_on:
            return {}
        choice = self._pace.current
        values = {
            "factor_update_steps": float(choice.factor),
            "inv_update_steps": float(choice.inverse),
            "factor_token_fraction": 1.0 / choice.stride,
        }
        if self._pace.decisions:
            costs = self._pace.decisions[-1].costs
            values |= {"overhead": costs.total(choice), "overhead_floor": costs.floor}
        return values

    def last_line(self) -> str:
        """What ends the layer table: the choice in force and why, if anything is governed."""
        return f"\n{self._describe()}" if self._is_on else ""

    def _describe(self) -> str:
        decisions, choice = self._pace.decisions, self._pace.current
        if not decisions:
            return f"max_overhead {self._budget:g}: nothing measured yet; {_in_words(choice)}"
        costs = decisions[-1].costs
        return (
            f"max_overhead {self._budget:g}: from step {decisions[-1].step} {_in_words(choice)}; "
            f"{_percent(costs.total(choice))} of a step of {costs.base / 1e6:.3g} ms without K-FAC "
            f"(every step {_percent(costs.floor)}, statistics {_percent(costs.statistics(choice))}"
            f", bases {_percent(costs.bases(choice))})"
        )

    def _say(self, before: Choice) -> None:
        last = self._pace.decisions[-1]
        if last.choice == before:
            logger.info("K-FAC confirms its intervals: %s", self._describe())
        else:
            settings = json.dumps(self._pace.settings())
            self._announce(f"{self._describe()}\nas kfac settings, to repeat it: {settings}")
        over = last.costs.total(last.choice) - self._budget
        if over > 0:
            floor = last.costs.floor
            logger.warning(
                "KFAC-W118 max_overhead %g is exceeded by %s of a step with the rarest statistics "
                "and bases allowed; what every step pays (directions and their exchange) is %s "
                "alone. Raise max_overhead, take solver 'cholesky', give a step more tokens or "
                "ranks, or leave more layers out with skip_layers",
                self._budget,
                _percent(over),
                _percent(floor),
            )


def _opens(pace: Pace) -> int:
    """Step from which to measure: soon after a change, late after a confirmation."""
    if not pace.decisions:
        return WARM_UP_STEPS
    *earlier, last = pace.decisions
    before = earlier[-1].choice if earlier else pace.start
    return last.step + (REVIEW_STEPS if last.choice == before else 0)


def _in_words(choice: Choice) -> str:
    rows = "all rows" if choice.stride == 1 else f"one row in {choice.stride}"
    return f"statistics every {choice.factor} steps from {rows}, bases every {choice.inverse}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"

"""Steps to a baseline's final loss, from complete schedules only.

A loss in the middle of a longer run is never used: the rate is still high there. The length at
which a method reaches the target lies between two of its complete runs and is interpolated.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.convergence.cells import Cell, Record, Setting, by_length
from benchmarks.convergence.cost import Cost

Method = tuple[str, str, Setting]
"""Optimizer, options, setting."""


@dataclass(frozen=True)
class Reach:
    """Steps to a target.

    Attributes:
        steps: Interpolated number, or the longest or shortest run.
        bound: ``""``, ``"<="`` when the shortest run is below the target already, ``">"`` when
            the longest is still above.
    """

    steps: float
    bound: str = ""


def steps_to(target: float, losses: Mapping[int, float]) -> Reach:
    """Interpolate where complete runs cross a target.

    Args:
        target: Loss to reach.
        losses: Final losses by length.

    Raises:
        ValueError: There are no runs.
    """
    if not losses:
        raise ValueError("no runs")
    lengths = sorted(losses)
    if losses[lengths[0]] <= target:
        return Reach(lengths[0], "<=" if losses[lengths[0]] < target else "")
    for shorter, longer in zip(lengths, lengths[1:], strict=False):
        if losses[longer] <= target:
            share = (losses[shorter] - target) / (losses[shorter] - losses[longer])
            return Reach(shorter + share * (longer - shorter))
    return Reach(lengths[-1], ">")


@dataclass(frozen=True)
class Row:
    """A method beside the baseline.

    Attributes:
        method: Optimizer, options, setting.
        reaches: Steps to the baseline's final loss of the same seed, by seed.
        losses: Mean final losses over the seeds, by length.
        cost: Cost of a step in the baseline's; None if not measured.
        target_steps: Length of the baseline's schedule.
    """

    method: Method
    reaches: Mapping[int, Reach]
    losses: Mapping[int, float]
    cost: Cost | None
    target_steps: int

    @property
    def bound(self) -> str:
        """Bound that holds for the mean over the seeds; ``"?"`` if they contradict."""
        bounds = {reach.bound for reach in self.reaches.values()} - {""}
        return bounds.pop() if len(bounds) == 1 else "?" if bounds else ""

    @property
    def shares(self) -> list[float]:
        """Share of the baseline's steps, by seed."""
        return [reach.steps / self.target_steps for _, reach in sorted(self.reaches.items())]

    @property
    def steps(self) -> float:
        """Mean share of the baseline's steps."""
        return statistics.fmean(self.shares)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the shares over the seeds; None with a bound or a single seed."""
        return None if self.bound or len(self.reaches) < 2 else statistics.stdev(self.shares)

    @property
    def time(self) -> float | None:
        """Mean share of the baseline's processor time."""
        return None if self.cost is None else self.steps * self.cost.ratio


def rows(
    records: Iterable[Record],
    costs: Mapping[tuple[str, int, str, str, str], Cost],
    *,
    baseline: str,
    target_steps: int,
    seeds: Sequence[int],
) -> list[Row]:
    """Compare all methods of one task and batch size with a baseline.

    Args:
        records: Of one task and batch size.
        costs: By task, batch, baseline, optimizer and options.
        baseline: Name of the optimizer whose final loss is the target.
        target_steps: Length of its schedule.
        seeds: Which seeds count; methods without a run of each are left out.
    """
    found: dict[Method, dict[int, list[Record]]] = {}
    for record in records:
        cell = record.cell
        if cell.seed in seeds:
            method = (cell.optimizer, cell.options, cell.setting)
            found.setdefault(method, {}).setdefault(cell.seed, []).append(record)
    targets = _targets(found, baseline, target_steps, seeds)
    result = []
    for method, by_seed in sorted(found.items(), key=lambda pair: str(pair[0])):
        if set(by_seed) != set(seeds):
            continue
        runs = {seed: by_length(by_seed[seed]) for seed in seeds}
        reaches = {
            seed: steps_to(targets[seed], {n: r.loss for n, r in runs[seed].items()})
            for seed in seeds
        }
        cost = costs.get(_cost_key(next(iter(by_seed[seeds[0]])).cell, baseline))
        result.append(Row(method, reaches, _means(runs), cost, target_steps))
    return sorted(result, key=lambda row: row.steps)


def _targets(
    found: Mapping[Method, Mapping[int, list[Record]]],
    baseline: str,
    steps: int,
    seeds: Sequence[int],
) -> dict[int, float]:
    for (optimizer, _, _), by_seed in found.items():
        runs = {s: by_length(by_seed[s]).get(steps) for s in seeds if s in by_seed}
        complete = {seed: run.loss for seed, run in runs.items() if run is not None}
        if optimizer == baseline and set(complete) == set(seeds):
            return complete
    raise LookupError(f"no runs of {baseline} over {steps} steps with seeds {list(seeds)}")


def _cost_key(cell: Cell, baseline: str) -> tuple[str, int, str, str, str]:
    return cell.task, cell.batch, baseline, cell.optimizer, cell.options


def _means(runs: Mapping[int, Mapping[int, Record]]) -> dict[int, float]:
    """Mean losses at the lengths that every seed has."""
    lengths = set.intersection(*(set(by_steps) for by_steps in runs.values()))
    return {
        n: statistics.fmean(by_steps[n].loss for by_steps in runs.values()) for n in sorted(lengths)
    }

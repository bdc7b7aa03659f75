"""Governed runs: on a simulated clock, where every stage takes what the test says, and on the real.

The jobs run in any number of processes under DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests._harness import collectives
from tests.hosts import promise_jobs
from tests.unit.checkpoint.training import Run, assert_identical, make

SETTINGS: dict[str, Any] = {"max_factor_dim": 4, "direction": "ekfac", "kl_clip": None}
WIDTHS = (4, 6, 5, 3)


@dataclass
class Simulated:
    """A clock that stands still but for what a step is made to take, in nanoseconds.

    Attributes:
        capture: With all rows; fewer take less in proportion.
    """

    base: int = 1_000_000
    fixed: int = 20_000
    capture: int = 200_000
    reduce: int = 30_000
    refresh: int = 400_000
    now: int = 0

    def mark(self) -> int:
        return self.now

    def nanoseconds(self, start: int, end: int) -> int:
        return end - start

    def drive(self, run: Run) -> Run:
        """Make a run's stages take their time."""
        kfac = run.kfac
        kfac._governor.clock = self  # type: ignore[assignment]
        (partition,) = kfac._partitions
        for name, seconds in (
            ("fold", lambda: self.reduce),
            ("refresh", lambda: self.refresh),
            ("directions", lambda: self.fixed),
        ):
            self._slow(partition.owner, name, seconds)

        def forward(*_: object) -> None:
            session = kfac._session
            self.now += self.base // 2  # per micro-batch
            self.now += self.capture // 2 // session.stride if session.active else 0

        run.model.register_forward_pre_hook(forward)
        return run

    def _slow(self, owner: Any, name: str, seconds: Callable[[], int]) -> None:
        original = getattr(owner, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds()
            return original(*args, **kwargs)

        setattr(owner, name, slow)


def governed(clock: Simulated | None, size: int = 1, **settings: Any) -> Run:
    run = make({"max_overhead": 0.05, **SETTINGS, **settings}, widths=WIDTHS, size=size)
    return run if clock is None else clock.drive(run)


def train(run: Run, steps: range, rank: int = 0, size: int = 1) -> None:
    for step in steps:
        run.step(step, rank, size)


def repeated(rank: int, size: int, steps: int, simulated: bool, more: dict[str, Any]) -> Any:
    """A governed run, and one with the schedules that it printed; then both once more."""
    clock = Simulated(refresh=400_000 * (rank + 1)) if simulated else None
    run = governed(clock, size, **more)
    train(run, range(steps), rank, size)
    schedules = run.kfac.pace()
    decisions = [decision.saved() for decision in run.kfac._pace.decisions]
    again = make({**SETTINGS, **more, **schedules}, widths=WIDTHS, size=size)
    train(again, range(steps), rank, size)
    assert again.kfac.pace() == schedules
    assert again.kfac.owners == run.kfac.owners
    assert_identical(again.fingerprint(), run.fingerprint())
    for finished in (run, again):
        finished.kfac.detach()
    return schedules, decisions


def collectives_by_step(rank: int, size: int, steps: int, settings: dict[str, Any]) -> list[Any]:
    """What K-FAC calls in every step, and the ledger's kinds."""
    run = make({**SETTINGS, **settings}, widths=WIDTHS, size=size)
    if "max_overhead" in settings:
        Simulated().drive(run)
    log = []
    for step in range(steps):
        with collectives.recording() as records:
            run.step(step, rank, size)
        log.append([record.op for record in records])
    ledger = run.kfac.ledger()
    run.kfac.detach()
    return [log, ledger]


def repeated_engine(rank: int, size: int, stage: str, direction: str) -> Any:
    """The same under DeepSpeed, on the real clock."""
    start = {"direction": direction, "factor_update_steps": 2, "inv_update_steps": 4}
    weights, schedules, decisions = _trained_engine(
        rank, size, stage, start | {"max_overhead": 0.05}
    )
    again, same, none = _trained_engine(rank, size, stage, start | schedules)
    assert same == schedules and decisions and not none
    assert_identical(again, weights)
    return schedules, decisions


def _trained_engine(
    rank: int, size: int, stage: str, kfac: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any], list[dict[str, int]]]:
    engine = promise_jobs.deep_engine(4, stage, size, kfac)
    for step in range(40):
        promise_jobs.take_step(engine, rank, step)
    schedules = engine.kfac.pace()
    decisions = [decision.saved() for decision in engine.kfac._pace.decisions]
    weights = {n: torch.clone(p.detach()) for n, p in engine.module.named_parameters()}
    engine.destroy()
    return weights, schedules, decisions

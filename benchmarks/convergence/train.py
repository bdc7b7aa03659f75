"""Run one cell: a complete schedule on one processor."""

from __future__ import annotations

import math
import time

import torch

from benchmarks.convergence.cells import DIVERGED, Cell, Record
from benchmarks.convergence.optimizers import Bundle, build
from benchmarks.convergence.tasks import Task
from launch.schedule import scheduler

CURVE_POINTS = 10


class Trainer:
    """A model and its optimizer, ready to step.

    Args:
        task: Data, model and loss.
        cell: What to train.
    """

    def __init__(self, task: Task, cell: Cell) -> None:
        self.task, self.cell = task, cell
        self.model = task.model(cell.seed)
        self.bundle: Bundle = build(self.model, cell, task.skipped)
        start = scheduler(warmup=cell.setting.warmup, total=cell.steps)
        self._schedulers = [start(optimizer) for optimizer in self.bundle.optimizers]
        self.taken = 0

    def step(self) -> tuple[float, float]:
        """Take one step.

        Returns:
            The training loss, and processor seconds without drawing the batch.
        """
        inputs, targets = self.task.batch_at(self.taken, seed=self.cell.seed, size=self.cell.batch)
        begin = time.process_time()
        self.bundle.zero_grad()
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.task.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self.bundle.step()
        for schedule in self._schedulers:
            schedule.step()
        seconds = time.process_time() - begin
        self.taken += 1
        return loss.item(), seconds


def run_cell(task: Task, cell: Cell) -> Record:
    """Train a cell to its end; a run that diverges ends early with an infinite loss."""
    torch.set_num_threads(1)
    trainer = Trainer(task, cell)
    every = max(1, cell.steps // CURVE_POINTS)
    cpu = 0.0
    curve: list[tuple[int, float]] = []
    for taken in range(1, cell.steps + 1):
        loss, seconds = trainer.step()
        cpu += seconds
        if not math.isfinite(loss):
            return Record(cell, DIVERGED, DIVERGED, None, cpu, tuple(curve), task.description)
        if taken % every == 0 and taken < cell.steps:
            curve.append((taken, task.glance(trainer.model)))
    score = task.score(trainer.model)
    curve.append((cell.steps, score.loss))
    return Record(
        cell, score.select, score.loss, score.accuracy, cpu, tuple(curve), task.description
    )

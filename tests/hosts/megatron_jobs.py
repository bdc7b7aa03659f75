"""Jobs that train tiny GPTs of megatron-core with K-FAC, in the pool's workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.hosts import megatron_model as models
from tests.hosts.megatron_model import Cell, Shard

__all__ = ["Cell", "Report", "train"]


@dataclass
class Report:
    """What a rank has to say after training.

    Attributes:
        losses: Mean loss of every step's batch.
        norms: Gradient norms that the optimizer reported.
        applied: Whether each step was applied.
        weights: Its parameters by name in the whole model.
        factors: ``(A, G)`` of its layers.
        kl_scales: KL clip of every step.
        metrics: ``kfac.metrics()`` at the end.
        table: ``kfac.table()``.
        coverage: ``kfac.coverage()``.
        ledger: ``kfac.ledger()``.
    """

    losses: list[float]
    norms: list[float | None]
    applied: list[bool]
    weights: dict[str, tuple[Tensor, Shard]]
    factors: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    kl_scales: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    table: str = ""
    coverage: str = ""
    ledger: dict[str, Any] = field(default_factory=dict)


def train(rank: int, world_size: int, cell: Cell) -> Report:
    """All steps of a cell."""
    training, kfac = start(cell)
    scales = []
    for step in range(cell.steps):
        models.train_step(training, step)
        if kfac is not None:
            scales.append(kfac.metrics().get("kl_scale", 1.0))
    report = Report(training.losses, training.norms, training.applied, models.weights(training))
    if kfac is None:
        return report
    report.kl_scales = scales
    report.factors = {spec.name: kfac.factors(spec.name) for spec in kfac.layers.layers}
    report.metrics, report.table = kfac.metrics(), kfac.table()
    report.coverage, report.ledger = kfac.coverage(), kfac.ledger()
    return report


def start(cell: Cell) -> tuple[models.Training, Any]:
    """A model in training with its preconditioner."""
    training = models.build(cell)
    if cell.kfac is None:
        return training, None
    import ds_kfac.megatron

    return training, ds_kfac.megatron.attach(training.chunks, training.optimizer, cell.kfac)


def several(rank: int, world_size: int, cells: list[Cell]) -> list[Report]:
    """One cell after the other."""
    return [train(rank, world_size, cell) for cell in cells]


def all_whole(reports: list[Report]) -> dict[str, Tensor]:
    """The trained model, put together from the reports of all ranks."""
    return models.whole_weights([report.weights for report in reports])


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of a weight, relative to its parameter's largest element."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    worst = 0.0
    for name, value in expected.items():
        gap = (found[name].double() - value.double()).abs().max()
        worst = max(worst, float(gap / value.double().abs().max().clamp(min=1e-6)))
    return worst

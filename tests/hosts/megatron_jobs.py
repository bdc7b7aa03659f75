"""Jobs that train tiny GPTs of megatron-core with K-FAC, in the pool's workers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from tests.hosts import megatron_model as models
from tests.hosts.megatron_model import Cell, Shard

MAX_ATTEMPTS = 60

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
    while training.applied.count(True) < cell.steps and len(training.applied) < MAX_ATTEMPTS:
        models.train_step(training, training.applied.count(True))
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


def repeat(rank: int, world_size: int, cell: Cell) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights with every batch run once, and with every batch run twice."""
    found = []
    for passes in (1, 2):
        training, _ = start(cell)
        for step in range(cell.steps):
            for _ in range(passes - 1):
                models.forward_backward(training, step)
            models.train_step(training, step)
        found.append({name: value for name, (value, _) in models.weights(training).items()})
    return found[0], found[1]


def poisoned(rank: int, world_size: int, cell: Cell) -> dict[str, Any]:
    """Three steps, in the second of which the first rank's gradient is not finite."""
    training, kfac = start(cell)
    models.train_step(training, 0)
    models.forward_backward(training, 1)
    before = {name: value for name, (value, _) in models.weights(training).items()}
    if rank == 0:
        next(training.chunks[0].parameters()).main_grad.view(-1)[3] = float("nan")
    applied, norm, _ = training.optimizer.step()
    after = {name: value for name, (value, _) in models.weights(training).items()}
    training.applied.append(bool(applied))
    models.train_step(training, 1)
    return {
        "applied": training.applied,
        "metrics": kfac.metrics(),
        "unchanged": norm is None and all(before[name].equal(after[name]) for name in before),
    }


def detached(rank: int, world_size: int, cell: Cell) -> tuple[list[Any], list[Any], list[str]]:
    """Losses and norms after detaching, those without K-FAC, and what detaching has left."""
    runs, attributes, hooks = [], [], []
    for each in (cell, replace(cell, kfac=None)):
        training, kfac = start(each)
        if kfac is not None:
            kfac.detach()
        attributes.append([set(training.optimizer.__dict__), set(training.chunks[0].__dict__)])
        hooks.append(sum(len(m._forward_hooks) for m in training.chunks[0].modules()))
        for step in range(cell.steps):
            models.train_step(training, step)
        runs.append([training.losses, training.norms])
    leftovers = [name for a, b in zip(*attributes, strict=True) for name in a - b]
    return runs[0], runs[1], leftovers + ["forward hooks"] * (hooks[0] - hooks[1])


def losses_of(rank: int, world_size: int, cell: Cell) -> tuple[list[float], list[float | None]]:
    """Losses and norms where attaching may give nothing."""
    training, kfac = start(cell)
    assert kfac is None
    for step in range(cell.steps):
        models.train_step(training, step)
    return training.losses, training.norms

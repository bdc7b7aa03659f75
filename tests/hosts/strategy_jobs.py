"""Jobs with several gradient workers per layer."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_kfac import refresh
from ds_kfac.plan.program import Program
from tests.hosts import promise_jobs as promises
from tests.hosts import topology_jobs as jobs
from tests.hosts.topology_jobs import Cell


def loop(cell: Cell, size: int) -> Any:
    """Network, preconditioner, backward and step of a cell."""
    return (promises._ddp_loop if cell.host == "ddp" else promises._engine_loop)(cell, size)


def state_of(net: torch.nn.Module, kfac: Any) -> dict[str, Any]:
    """Weights, owned state and what is kept of other ranks' layers, by name."""
    found: dict[str, Any] = {n: p.detach().clone() for n, p in net.named_parameters()}
    for layer, state in kfac.state_dict()["layers"].items():
        found |= {f"{layer}/{key}": value for key, value in copied(state).items()}
    for partition in kfac._partitions:
        for replica in partition.owner.replicas.values():
            name, state = replica.spec.name, replica_dict(replica)
            found |= {f"replica of {name}/{key}": value for key, value in copied(state).items()}
    return found


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}


def replica_dict(replica: Any) -> dict[str, Any]:
    """Bases, moments and the count that bias corrections need."""
    result = {"updates": replica.updates}
    result |= {f"moments.{name}": value for name, value in replica.moments.items()}
    for name, side in replica.sides():
        for index, basis in enumerate(side.bases):
            if basis is not None:
                parts = {k: v for k, v in vars(basis).items() if v is not None}
                result |= {f"{name}.{index}.basis.{k}": v for k, v in parts.items()}
    return result


def train(
    rank: int, size: int, cell: Cell, failing: tuple[int, ...] = (), bad: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Train with some failing decompositions and extra bad steps; all state at the end."""
    net, kfac, backward, optimizer_step = loop(cell, size)
    originals = {name: getattr(refresh, name) for name in ("eigen_bases", "damped_inverses")}
    good = iter(range(jobs.STEPS + 2))
    try:
        for position in range(jobs.STEPS + 2 + len(bad)):
            step = 0 if position in bad else next(good)
            for name, original in originals.items():
                setattr(refresh, name, failing_first(original) if step in failing else original)
            ((x, y, factor),) = jobs.micro_batches(rank, size, cell, step)
            if position in bad and rank == size - 1:
                x = x * float("nan")
            backward(x, y, factor)
            optimizer_step()
        result = state_of(net, kfac)
        return result | {"metrics": kfac.metrics()}
    finally:
        for name, original in originals.items():
            setattr(refresh, name, original)
        kfac.detach()


def train_in_pieces(rank: int, size: int, cell: Cell, numel: int) -> list[dict[str, Any]]:
    """Train twice; the second time bases move in many small pieces."""
    train(rank, size, cell)  # DistributedDataParallel adds in another order in its first run
    results = [train(rank, size, cell)]
    with mock.patch.object(Program, "piece_numel", numel):
        results.append(train(rank, size, cell))
    return results


def failing_first(original: Any) -> Any:
    """Decompositions of the first layer's A fail."""

    def solve(factors: Tensor, *rest: Any) -> Any:
        bases, ok, reasons = original(factors, *rest)
        if factors.shape[-1] == jobs.FEATURES + 1:
            ok, reasons = torch.zeros_like(ok), ["made to fail"] * len(reasons)
        return bases, ok, reasons

    return solve


def stopped(
    rank: int, size: int, cell: Cell, stop: int, path: str, resumed_as: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A straight run, and one that was saved, built anew with other settings and resumed."""
    net, kfac, backward, optimizer_step = loop(cell, size)

    def run(steps: range) -> None:
        for step in steps:
            ((x, y, factor),) = jobs.micro_batches(rank, size, cell, step)
            backward(x, y, factor)
            optimizer_step()

    optimizer = optimizer_step.__self__
    run(range(stop))
    kfac.save(path)
    saved = {n: p.detach().clone() for n, p in net.named_parameters()}
    momenta = {k: v.clone() for k, v in tensors_of(optimizer).items()}
    run(range(stop, stop + 5))
    straight = state_of(net, kfac)
    kfac.detach()
    other = Cell(cell.host, {**cell.kfac, **resumed_as}, own=cell.own)
    net, kfac, backward, optimizer_step = loop(other, size)
    optimizer = optimizer_step.__self__
    run(range(1))  # the optimizer has its state, the preconditioner another one
    with torch.no_grad():
        for name, param in net.named_parameters():
            param.copy_(saved[name])
        for key, value in tensors_of(optimizer).items():
            value.copy_(momenta[key])
    assert kfac.load(path)
    run(range(stop, stop + 5))
    resumed = state_of(net, kfac)
    kfac.detach()
    return straight, resumed


def tensors_of(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Tensor]:
    """The optimizer's own state."""
    return {
        (index, key): value
        for index, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def traffic(rank: int, size: int, host: str, kfac: dict[str, Any]) -> dict[str, Any]:
    """Ledger and recorded collectives of seven steps of a deep chain."""
    settings = {"factor_update_steps": 1, "inv_update_steps": 3, "max_factor_dim": 7, **kfac}
    engine = promises.deep_engine(5, host, size, settings)
    logs, ledgers = [], []
    for step in range(7):
        engine.kfac.reset_ledger()
        with promises.only_ours(engine) as log:
            promises.take_step(engine, rank, step)
        logs.append(log)
        ledgers.append(engine.kfac.ledger()["kinds"])
    metrics = engine.kfac.metrics()
    engine.destroy()
    return {"ledgers": ledgers, "collectives": logs, "metrics": metrics}

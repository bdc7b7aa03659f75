"""Jobs that measure what ``ds-kfac plan`` predicts: owners, bytes and memory of real runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_kfac
from ds_kfac.cli import plan, plan_source
from ds_kfac.plan.estimate import Estimate
from ds_kfac.plan.traffic import run_bytes
from tests._harness import deepspeed_cpu
from tests.hosts import promise_jobs
from tests.hosts import topology_jobs as jobs
from tests.hosts.topology_jobs import Cell

DEPTH, STEPS, INTERVAL = 5, 4, 3
CAPTURES = -(-STEPS // INTERVAL)


def cell(
    stage: str, direction: str, own: bool, more: dict[str, Any] | None = None, **extra: Any
) -> Cell:
    """A way to train with two captures in four steps."""
    kfac = {
        "direction": direction,
        "factor_update_steps": INTERVAL,
        "inv_update_steps": INTERVAL,
        "max_factor_dim": 7,
        **(more or {}),
    }
    return Cell(stage, kfac, own=own, **extra)


def measure(rank: int, size: int, cells: list[Cell]) -> list[dict[str, Any]]:
    """Of every cell: bytes by kind, a hash of owners and slices, and bytes of state."""
    return [_measure_cell(rank, size, item) for item in cells]


def replica_bytes(kfac: Any) -> int:
    """Bytes of bases, moments and counters of layers that other ranks own."""
    total = 0
    for partition in kfac._partitions:
        for state in partition.owner.replicas.values():
            bases = [b for _, side in state.sides() for b in side.bases if b is not None]
            tensors = [state.updates, state.fallbacks, state.folded_at, *state.moments.values()]
            tensors += [t for basis in bases for t in vars(basis).values() if t is not None]
            total += sum(t.untyped_storage().nbytes() for t in tensors)
    return total


def _measure_cell(rank: int, size: int, item: Cell) -> dict[str, Any]:
    deepspeed_cpu.prepare()
    torch.manual_seed(3)
    net = promise_jobs.Deep(DEPTH)
    engine, *_ = ds_kfac.initialize(
        model=net, model_parameters=net.parameters(), config=jobs.deepspeed_config(item, size)
    )
    for step in range(STEPS):
        promise_jobs.take_step(engine, rank, step)
    kfac = engine.kfac
    result = {
        "bytes": sent(kfac),
        "program": [partition.program.fingerprint() for partition in kfac._partitions],
        "state": state_bytes(kfac) + replica_bytes(kfac),
    }
    engine.destroy()
    return result


def sent(kfac: Any) -> dict[str, int]:
    """Bytes by kind in the ledger, kinds without traffic left out."""
    kinds = kfac.ledger()["kinds"]
    return {kind: entry["bytes"] for kind, entry in kinds.items() if entry["bytes"]}


def state_bytes(kfac: Any) -> int:
    """Bytes of memory behind the tensors of all layers that this rank owns."""
    tensors = [
        value
        for layer in kfac.state_dict()["layers"].values()
        for value in layer.values()
        if isinstance(value, Tensor)
    ]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def planned(item: Cell, size: int, folder: Path) -> tuple[Estimate, list[dict[str, int]]]:
    """The plan of a cell as the command makes it, and every rank's bytes after all steps."""
    file = folder / "deepspeed.json"
    file.write_text(json.dumps(jobs.deepspeed_config(item, size)))
    with torch.device("meta"):
        model = promise_jobs.Deep(DEPTH)
    settings = plan_source.read_settings(file, None)
    _, result, _ = plan.run(model, settings, options(ranks=size))
    # Those of the last step would be used later, if they are computed beside training.
    refreshes = 1 if item.kfac.get("background_inverse") else CAPTURES
    totals = [
        run_bytes(
            ordinary,
            result.capture,
            steps=STEPS,
            captures=CAPTURES,
            per_refresh=refresh,
            refreshes=refreshes,
        )
        for ordinary, refresh in zip(result.ordinary, result.refresh, strict=True)
    ]
    return result, totals


def options(**given: Any) -> argparse.Namespace:
    """Arguments of the command, those left out at their defaults."""
    defaults = {"tokens_per_rank": None, "flops": None, "bandwidth": None}
    return argparse.Namespace(**{**defaults, **given})


class Wide(nn.Module):
    """More layers of mixed dims than ranks, side by side, so that all have gradients."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(4 + 5 * (i % 7), 6 + 3 * (i % 5), bias=i % 3 > 0) for i in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([f(x[:, : f.in_features]).square().mean() for f in self.layers]).sum()


def simulated(rank: int, size: int, count: int, config: dict[str, Any]) -> dict[str, Any]:
    """One process plays one rank of many: collectives return at once, with its own numbers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        torch.manual_seed(rank)
        model = Wide(count)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        kfac = ds_kfac.attach(
            model,
            optimizer,
            {**config, "watchdog_timeout": 0},  # the fake store keeps nothing
            groups=ds_kfac.Groups(data=dist.group.WORLD),
        )
        assert kfac is not None
        pending = 0
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(40, 40)).backward()
            sums = kfac._session.pending.values()
            pending = max(pending, sum(t.nbytes for p in sums for t in (*p.a, *p.g)))
            optimizer.step()
        return {
            "state": state_bytes(kfac),
            "statistics": pending,
            "owners": tuple(kfac.owners.values()),
            "bytes": sent(kfac),
        }
    finally:
        dist.destroy_process_group()

"""A few steps of a tiny model on two processes: whether K-FAC works on this machine at all.

Started as ``python -m ds_kfac.hosts.dry_run RANK SIZE FOLDER`` by ``ds-kfac doctor``. Nothing is
downloaded, compiled or left behind; gloo does the communication, on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 4
RESULT = "result.json"
_COLLECTIVE_TIMEOUT = timedelta(seconds=30)


def backends() -> dict[str, bool]:
    """Communication backends of this torch, by name, and whether they are there."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def main(arguments: list[str]) -> None:
    """Train, compare the ranks, and let the first one write ``result.json``.

    Args:
        arguments: Rank, number of ranks, and a folder that they share.
    """
    rank, size, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").absolute().as_uri(),
        rank=rank,
        world_size=size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    result = _train(rank)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, result)
    if rank == 0:
        first, last = result["losses"][0], result["losses"][-1]
        problem = ""
        if any(other["weights"] != result["weights"] for other in everyone):
            problem = "ranks ended with different weights"
        elif not last < first:
            problem = f"the loss went from {first:.4f} to {last:.4f}"
        (folder / RESULT).write_text(json.dumps({**result, "problem": problem}), encoding="utf-8")
    dist.destroy_process_group()


def _train(rank: int) -> dict[str, Any]:
    import ds_kfac

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"factor_update_steps": 1, "inv_update_steps": 2, "skip_layers": []}
    kfac = ds_kfac.attach(model, optimizer, settings)
    assert kfac is not None
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return {"losses": losses, "weights": hashlib.sha256(weights).hexdigest()}


if __name__ == "__main__":
    main(sys.argv[1:])

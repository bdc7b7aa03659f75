"""Jobs that save, damage, reshard and load K-FAC state under DistributedDataParallel."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from tests.unit.checkpoint.training import assert_identical, make

WIDTHS = (4, 6, 5, 6, 3, 4)
RESHARDED = {
    "direction": "ekfac",
    "grafting": "adam",
    "kl_clip": None,
    "momentum": 0.9,
    "factor_update_steps": 2,
    "inv_update_steps": 4,
    "max_factor_dim": 4,
}


def load_damaged_on_one_rank(rank: int, size: int, what: str) -> None:
    """One rank's state is wrong: nothing may change anywhere, and nobody may wait."""
    settings = {"factor_update_steps": 1, "inv_update_steps": 1}
    run = make(settings, widths=(4, 6, 5, 3), size=size)
    run.step(0, rank, size)
    state = copy.deepcopy(run.kfac.state_dict())
    run.step(1, rank, size)
    if rank == size - 1:
        if what == "version":
            state["version"] = 9
        elif what == "step":
            state["counters"]["steps"] += 1
        else:
            layer = next(iter(state["layers"].values()))
            layer["a.0.total"] = layer["a.0.total"][:-1]
    before = run.fingerprint()
    try:
        run.kfac.load_state_dict(state)
    finally:
        assert_identical(run.fingerprint(), before)
        run.kfac.detach()


def train_and_save(rank: int, size: int, folder: str) -> dict[str, Tensor]:
    """Five steps, a save, two more steps; the weights at the end."""
    run = make(RESHARDED, widths=WIDTHS, size=size)
    for step in range(5):
        run.step(step, rank, size, rows=24)
    run.kfac.save(f"{folder}/{size}")
    if rank == 0:
        torch.save(run.host_state(), f"{folder}/{size}.pt")
    for step in range(5, 7):
        run.step(step, rank, size, rows=24)
    run.kfac.detach()
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def load_and_save(rank: int, size: int, folder: str, names: list[str]) -> list[dict[str, Tensor]]:
    """Load every checkpoint, save it again as ``name-size``, then train on."""
    results = []
    for name in names:
        run = make(RESHARDED, widths=WIDTHS, size=size)
        run.load_host_state(torch.load(f"{folder}/{name[0]}.pt", weights_only=True))
        assert run.kfac.load(f"{folder}/{name}")
        assert run.kfac.counters.steps == 5
        run.kfac.save(f"{folder}/{name}-{size}")
        for step in range(5, 7):
            run.step(step, rank, size, rows=24)
        run.kfac.detach()
        results.append({n: value.clone() for n, value in run.model.state_dict().items()})
    return results

"""Jobs that save and load K-FAC states under AutoTP with different degrees."""

from __future__ import annotations

from typing import Any

import torch

from ds_kfac.errors import KFACError
from tests.hosts import autotp_jobs as jobs
from tests.hosts.autotp_jobs import Cell

SETTINGS = {"direction": "orthogonal", "max_factor_dim": 12, **jobs.INTERVALS}


def cell_of(mode: str) -> Cell:
    return Cell({**SETTINGS, "tensor_parallel": mode}, model="llama", stage=1)


def save(rank: int, size: int, tensor: int, mode: str, folder: str) -> None:
    """Three steps, then a checkpoint."""
    cell = cell_of(mode)
    engine = jobs.make_engine(cell, tensor)
    for step in range(3):
        jobs.take_step(engine, cell, size, tensor, step)
    engine.kfac.save(folder)
    engine.destroy()


def load_all(rank: int, size: int, tensor: int, cases: list[tuple[str, str]]) -> list[Any]:
    """Outcome of each mode and folder; a process has one tensor degree for good."""
    return [_load(size, tensor, mode, folder) for mode, folder in cases]


def _load(size: int, tensor: int, mode: str, folder: str) -> Any:
    """The error, or this rank's state after the load, and whether training goes on."""
    cell = cell_of(mode)
    engine = jobs.make_engine(cell, tensor)
    try:
        assert engine.kfac.load(folder)
    except KFACError as error:
        engine.destroy()
        return str(error)
    state = engine.kfac.state_dict()["layers"]
    names = engine.kfac._stored_names
    found = {
        f"{names[name]}/{key}": torch.as_tensor(value).clone()
        for name, layer in state.items()
        for key, value in layer.items()
    }
    jobs.take_step(engine, cell, size, tensor, 3)
    assert all(bool(param.isfinite().all()) for param in engine.module.parameters())
    assert engine.kfac.counters.steps == 4
    engine.destroy()
    return found

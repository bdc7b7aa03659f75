"""Jobs that stop DeepSpeed engines, resume them, and compare with the run that never stopped."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from tests.hosts import pipeline_jobs
from tests.hosts import topology_jobs as jobs
from tests.hosts.topology_jobs import Cell

STOP, END = 5, 9
SETTINGS = {"factor_update_steps": 2, "inv_update_steps": 4}


def fingerprint(engine: Any) -> dict[str, Any]:
    """Weights, and every bit of K-FAC's state."""
    result: dict[str, Any] = dict(jobs.full_weights(engine))
    state = engine.kfac.state_dict()
    result.update(state["counters"])
    for name, layer in state["layers"].items():
        result.update({f"{name}/{key}": value for key, value in layer.items()})
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in result.items()}


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Names of what is not equal to the last bit."""
    odd = sorted(first.keys() ^ second.keys())
    for name in first.keys() & second.keys():
        one, other = first[name], second[name]
        same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        if not same:
            odd.append(name)
    return odd


def train(engine: Any, rank: int, size: int, cell: Cell, until: int) -> None:
    """Train to a number of applied steps; the data of a step is a function of it alone."""
    for _ in range(60):
        step = engine.kfac.counters.steps
        if step == until:
            return
        for x, y, factor in jobs.micro_batches(rank, size, cell, step):
            output = engine(x.to(jobs.DTYPES[cell.dtype]))
            engine.backward(jobs.loss_sum(output, y, integers=cell.integers) * factor)
            engine.step()
    raise AssertionError("too many skipped steps")


def resume(rank: int, size: int, cells: list[Cell], folder: str) -> list[list[str]]:
    """Differences between the straight and the resumed run of each cell."""
    gc.collect()
    gc.freeze()
    return [_resume(rank, size, c, f"{folder}/{i}") for i, c in enumerate(cells)]


def _resume(rank: int, size: int, cell: Cell, folder: str) -> list[str]:
    engine = jobs.make_engine(cell, size)
    train(engine, rank, size, cell, STOP)
    engine.save_checkpoint(folder, client_state={"mine": 3})
    train(engine, rank, size, cell, END)
    straight = fingerprint(engine)
    skipped = engine.skipped_steps
    engine.destroy()
    engine = jobs.make_engine(cell, size)
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None and client_state["mine"] == 3 and "ds_kfac" not in client_state
    assert engine.kfac.counters.steps == STOP
    train(engine, rank, size, cell, END)
    resumed = fingerprint(engine)
    odd = differences(straight, resumed)
    if engine.skipped_steps != skipped:
        odd.append("skipped_steps")
    engine.destroy()
    return odd


def train_pipeline(engine: Any, cell: pipeline_jobs.Cell, steps: range) -> None:
    grid = engine.grid
    place = grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()
    for step in steps:
        engine.train_batch(data_iter=iter(pipeline_jobs.micro_batches(cell, step, *place)))


def resume_pipeline(
    rank: int, size: int, cells: list[pipeline_jobs.Cell], folder: str
) -> list[list[str]]:
    """Differences between the straight and the resumed run of each pipeline, on this stage."""
    results = []
    for index, cell in enumerate(cells):
        path = f"{folder}/{index}"
        engine = pipeline_jobs.make_engine(cell, size)
        train_pipeline(engine, cell, range(STOP))
        engine.save_checkpoint(path)
        train_pipeline(engine, cell, range(STOP, END))
        straight = fingerprint(engine)
        engine.destroy()
        engine = pipeline_jobs.make_engine(cell, size)
        engine.load_checkpoint(path)
        train_pipeline(engine, cell, range(STOP, END))
        results.append(differences(straight, fingerprint(engine)))
        engine.destroy()
    return results


def load_pipeline(rank: int, size: int, cell: pipeline_jobs.Cell, folder: str) -> dict[str, Tensor]:
    """K-FAC's state on this rank after a load by another number of stages and copies."""
    engine = pipeline_jobs.make_engine(cell, size)
    engine.load_checkpoint(folder)
    loaded = {
        f"{name}/{key}": torch.as_tensor(value).clone()
        for name, layer in engine.kfac.state_dict()["layers"].items()
        for key, value in layer.items()
    }
    train_pipeline(engine, cell, range(STOP, END))
    engine.destroy()
    return loaded

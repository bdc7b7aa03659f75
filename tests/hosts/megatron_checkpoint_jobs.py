"""Jobs that save K-FAC's state in Megatron's checkpoints and go on from there."""

from __future__ import annotations

import copy
import multiprocessing.spawn
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.hosts import megatron_jobs as jobs
from tests.hosts import megatron_model as models
from tests.hosts.megatron_model import Cell

STEPS = 3
Weights = dict[str, tuple[torch.Tensor, models.Shard]]


def save_and_go_on(rank: int, size: int, cell: Cell, folder: str, format: str) -> Weights:
    """Train, save, train as much again."""
    training, _ = jobs.start(cell)
    _train(training, 0)
    _write(training, Path(folder), format, rank)
    _train(training, STEPS)
    return models.weights(training)


def resume(
    rank: int, size: int, cell: Cell, folder: str, format: str
) -> tuple[Weights, dict[str, float]]:
    """Load, and train as long as :func:`save_and_go_on` after its save."""
    training, kfac = jobs.start(cell)
    _train(training, 7)  # other batches: what is not restored makes a difference
    _read(training, Path(folder), format, rank)
    if kfac is not None and kfac.counters.steps:
        assert kfac.counters.steps == STEPS
    _train(training, STEPS)
    return models.weights(training), {} if kfac is None else kfac.metrics()


def refusal(rank: int, size: int, cell: Cell, folder: str) -> str:
    """What loading a checkpoint says."""
    training, _ = jobs.start(cell)
    try:
        _read(training, Path(folder), "torch_dist", rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def degrees(rank: int, size: int, cell: Cell, folder: str) -> str:
    """What the optimizer says to the file of a rank of another layout."""
    training, _ = jobs.start(cell)
    state = torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False)
    try:
        training.optimizer.load_state_dict(state["optimizer"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _train(training: models.Training, first: int) -> None:
    for step in range(first, first + STEPS):
        models.train_step(training, step)


def _content(training: models.Training, *, is_loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    content: dict[str, Any] = {
        f"model{index}": models.bare(chunk).sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(training.chunks)
    }
    content["optimizer"] = training.optimizer.sharded_state_dict(
        dict(content), is_loading=is_loading, metadata=metadata
    )
    return content


def _write(training: models.Training, folder: Path, format: str, rank: int) -> None:
    from megatron.core import dist_checkpointing

    if format == "torch":
        chunks = [models.bare(chunk).state_dict() for chunk in training.chunks]
        state = {"model": chunks, "optimizer": training.optimizer.state_dict()}
        torch.save(copy.deepcopy(state), folder / f"rank{rank}.pt")
    else:
        with _children():
            dist_checkpointing.save(_content(training, is_loading=False), str(folder))


@contextmanager
def _children() -> Iterator[None]:
    """Megatron writes in processes of its own, which the pool's workers may not have."""
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["daemon"] = False
    original = multiprocessing.spawn.get_preparation_data
    multiprocessing.spawn.get_preparation_data = lambda name: {
        key: value for key, value in original(name).items() if not key.startswith("init_main")
    }
    try:
        yield
    finally:
        config["daemon"] = True
        multiprocessing.spawn.get_preparation_data = original


def _read(training: models.Training, folder: Path, format: str, rank: int) -> None:
    from megatron.core import dist_checkpointing

    from launch import megatron_repairs

    megatron_repairs.apply()
    for inner in training.optimizer.chained_optimizers:
        if inner.init_state_fn is None:
            inner.init_state_fn = lambda *args: None
    if format == "torch":
        state = torch.load(folder / f"rank{rank}.pt", weights_only=False)
        for chunk, saved in zip(training.chunks, state["model"], strict=True):
            models.bare(chunk).load_state_dict(saved)
    else:
        state = dist_checkpointing.load(_content(training, is_loading=True), str(folder))
        for index, chunk in enumerate(training.chunks):
            models.bare(chunk).load_state_dict(state[f"model{index}"])
    training.optimizer.load_state_dict(state["optimizer"])


def fresh(cell: Cell, **changes: Any) -> Cell:
    """The same cell with other settings of K-FAC."""
    return replace(cell, kfac={**(cell.kfac or {}), **changes})

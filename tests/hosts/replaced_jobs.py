"""Jobs in which gradients of a step are replaced: statistics have to follow them."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

import ds_kfac
from tests.hosts import topology_jobs as jobs
from tests.hosts.topology_jobs import Cell


def train(rank: int, size: int, cells: list[tuple[Cell, str]]) -> list[dict[str, Tensor]]:
    """Whole weights of each cell, some of whose steps begin with passes that do not count."""
    return [_train(rank, size, cell, how) for cell, how in cells]


def _train(rank: int, size: int, cell: Cell, how: str) -> dict[str, Tensor]:
    engine = jobs.make_engine(cell, size)
    for step in range(jobs.STEPS):
        if how and step % 2:
            _bad_pass(engine, rank, size, cell)
            if how == "zero_grad":
                engine.optimizer.zero_grad()
        for x, y, factor in jobs.micro_batches(rank, size, cell, step):
            engine.backward(jobs.loss_sum(engine(x), y, integers=False) * factor)
            engine.step()
    weights = jobs.full_weights(engine)
    engine.destroy()
    return weights


def _bad_pass(engine: Any, rank: int, size: int, cell: Cell) -> None:
    """A backward pass of the last micro-batch, of which no step is taken."""
    for x, y, factor in jobs.micro_batches(rank, size, cell, 99):
        engine.backward(jobs.loss_sum(engine(9 * x), y, integers=False) * factor)


def follow(rank: int, size: int, cells: list[Cell]) -> list[tuple[dict[str, Tensor], list[str]]]:
    """Whole weights of each cell, and what is said, where an engine before it was given up."""
    found = []
    for cell in cells:
        earlier = jobs.make_engine(cell, size)
        x, y, factor = jobs.micro_batches(rank, size, cell, 99)[0]
        earlier.backward(jobs.loss_sum(earlier(x), y, integers=False) * factor)
        net = earlier.module
        texts: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, texts=texts: texts.append(record.getMessage())  # type: ignore[method-assign,misc]
        logging.getLogger("ds_kfac").addHandler(handler)
        engine, *_ = ds_kfac.initialize(
            model=net,
            model_parameters=net.parameters(),
            config=jobs.deepspeed_config(cell, size),
        )
        logging.getLogger("ds_kfac").removeHandler(handler)
        for step in range(jobs.STEPS):
            for x, y, factor in jobs.micro_batches(rank, size, cell, step):
                engine.backward(jobs.loss_sum(engine(x), y, integers=False) * factor)
                engine.step()
        found.append((jobs.full_weights(engine), texts))
        engine.destroy()
        earlier.destroy()
    return found

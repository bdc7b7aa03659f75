"""Decompositions beside training on real hosts: topology, errors, engines that are taken down."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_kfac import refresh
from tests._harness import world
from tests.hosts import promise_jobs as promises
from tests.hosts import topology_jobs as jobs
from tests.hosts import topology_table as table
from tests.hosts.topology_jobs import Cell

pytestmark = pytest.mark.dist

SETTINGS = {**table.INTERVALS, "factor_decay": 0.5, "background_inverse": True}
DIRECTIONS = ("natural", "orthogonal", "ekfac", "eigen_adam")


def _cells(host: str) -> list[Cell]:
    return [
        Cell(host, {"direction": direction, **SETTINGS}, 2, True, integers=True)
        for direction in DIRECTIONS
    ]


def _weights(size: int, host: str) -> list[dict[str, Tensor]]:
    return world(size).run(jobs.train, _cells(host))[0]


@pytest.mark.parametrize("size", [1, 2])
def test_topologies_agree_to_the_last_bit(size: int) -> None:
    """Which rank decomposes, and how long it takes there, makes no difference."""
    baseline = _weights(1, "ddp")
    at_once = [
        Cell("ddp", {**cell.kfac, "background_inverse": False}, 2, True, integers=True)
        for cell in _cells("ddp")
    ]
    for found, others in zip(baseline, world(1).run(jobs.train, at_once)[0], strict=True):
        assert any(not torch.equal(value, others[name]) for name, value in found.items())
    for host in table.HOSTS if size > 1 else ("0", "2"):
        for expected, found in zip(baseline, _weights(size, host), strict=True):
            for name, value in expected.items():
                assert torch.equal(found[name], value), (host, name)


def _failing_thread(rank: int, size: int, host: str) -> int:
    """On rank 1 the work beside training fails; returns the step after which all stop."""
    kfac = {"direction": "natural", **SETTINGS, "inv_update_steps": 4}
    loop = promises._ddp_loop if host == "ddp" else promises._engine_loop
    _, attached, backward, optimizer_step = loop(Cell(host, kfac), size)
    original = refresh.eigen_bases
    step = -1
    try:
        for step in range(8):
            if rank == 1 and step == 4:
                refresh.eigen_bases = promises._fail
            ((x, y, factor),) = jobs.micro_batches(rank, size, Cell(host, kfac), step)
            backward(x, y, factor)
            optimizer_step()
    except Exception as error:
        assert "rank 1 failed: MemoryError: no memory for statistics" in str(error)
        return step
    finally:
        refresh.eigen_bases = original
        attached.detach()
    return -1


@pytest.mark.parametrize("host", table.HOSTS)
def test_an_error_of_one_thread_stops_all_ranks_at_the_swap(host: str) -> None:
    assert world(2).run(_failing_thread, host) == [6, 6]


def _destroyed_meanwhile(rank: int, size: int, stage: str) -> list[str]:
    engine = promises.deep_engine(3, stage, size, {"direction": "natural", **SETTINGS})
    for step in range(3):
        promises.take_step(engine, rank, step)
    owner: Any = engine.kfac._partitions[0].owner
    assert owner._background.is_running
    engine.destroy()
    return [thread.name for thread in threading.enumerate() if thread.name == "ds_kfac-background"]


@pytest.mark.parametrize("stage", ("0", "2"))
def test_an_engine_may_be_destroyed_meanwhile(stage: str) -> None:
    assert world(2).run(_destroyed_meanwhile, stage) == [[], []]

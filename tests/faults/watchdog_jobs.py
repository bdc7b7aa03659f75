"""Jobs in which a rank is stopped, killed or late at one collective of ds_kfac."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.progress import Progress, Waiting
from ds_kfac.errors import KFACError
from tests.hosts import topology_jobs
from tests.hosts.engine_checkpoint_jobs import train
from tests.hosts.topology_jobs import Cell
from tests.launch.processes import free_port
from tests.unit.checkpoint.training import Run, make

TIMEOUT = 1.5
SETTINGS = {"factor_update_steps": 1, "inv_update_steps": 1, "watchdog_timeout": TIMEOUT}
SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}


def before_each(happen: Callable[[str, str], None]) -> None:
    """Call ``happen(kind, place)`` before every collective of ds_kfac; isolated jobs only."""
    original = Progress.wait

    def wait(self: Progress, ranks: tuple[int, ...], kind: str) -> Waiting:
        if self.waits is None:
            happen(kind, self.place)
        return original(self, ranks, kind)

    Progress.wait = wait  # type: ignore[method-assign]


def program(rank: int, size: int, make_run: Callable[[int], Any]) -> list[tuple[str, str]]:
    """Kind and place of the collectives of the second step."""
    passed: list[tuple[str, str]] = []
    run = make_run(size)
    run.step(0, rank, size)
    before_each(lambda kind, place: passed.append((kind, place)))
    run.step(1, rank, size)
    run.close()
    return passed


def struck(
    rank: int, size: int, make_run: Callable[[int], Any], victim: int, number: int, how: str
) -> None:
    """A rank is hit by a signal just before the n-th collective of the second step."""
    run = make_run(size)
    run.step(0, rank, size)
    count = 0

    def happen(kind: str, place: str) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), SIGNALS[how])

    if rank == victim:
        before_each(happen)
    run.step(1, rank, size)


class PlainRun:
    """DistributedDataParallel: replicated gradients."""

    def __init__(self, size: int) -> None:
        self._run: Run = make(SETTINGS, size=size)
        self.kfac = self._run.kfac

    def step(self, step: int, rank: int, size: int) -> None:
        self._run.step(step, rank, size)

    def close(self) -> None:
        self._run.kfac.detach()


class ZeroRun:
    """DeepSpeed under ZeRO 2: gradients are partitioned, and the engine waits too."""

    def __init__(self, size: int) -> None:
        section = {"direction": "natural", "kl_clip": 0.01, **SETTINGS}
        self._cell = Cell("2", section, own=True)
        self._engine = topology_jobs.make_engine(self._cell, size)

    def step(self, step: int, rank: int, size: int) -> None:
        train(self._engine, rank, size, self._cell, step + 1)

    def close(self) -> None:
        self._engine.kfac.detach()


def with_the_store_in_rank_0(
    rank: int, size: int, make_run: Callable[[int], Any], how: str
) -> None:
    """As under the deepspeed launcher, whose first rank hosts the key-value store."""
    timeout = timedelta(seconds=30)
    port = [free_port()] if rank == 0 else [""]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    address = f"tcp://127.0.0.1:{port[0]}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=size, timeout=timeout
    )
    struck(rank, size, make_run, 0, 1, how)


def late_and_stopped(rank: int, size: int) -> None:
    """Rank 1 is busy with something of the script's own, rank 2 is stopped; others wait."""
    run = PlainRun(size)
    run.step(0, rank, size)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1:
        time.sleep(60)
    run.kfac.save("/nonexistent/never-reached")


def slow_but_coming(rank: int, size: int) -> int:
    """Late by less than the timeout, again and again: nothing happens."""
    run = PlainRun(size)
    for step in range(4):
        if rank == 1:
            before = Progress.wait
            before_each(lambda kind, place: time.sleep(0.4) if kind == "vote" else None)
            run.step(step, rank, size)
            Progress.wait = before  # type: ignore[method-assign]
        else:
            run.step(step, rank, size)
    run.close()
    steps: int = run.kfac.counters.steps
    return steps


def saving(rank: int, size: int, folder: str) -> None:
    """A rank is stopped while all save."""
    run = PlainRun(size)
    run.step(0, rank, size)
    if rank == 1:
        from ds_kfac.checkpoint import disk

        disk.tick = lambda operation, path: os.kill(os.getpid(), signal.SIGSTOP)
    run.kfac.save(folder)


def lost_in_a_call(rank: int, size: int) -> str:
    """The process group is gone: the backend's own words, with the place in the program."""
    run = PlainRun(size)
    run.step(0, rank, size)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Connection closed by peer\nand a long stack of C++")

    Communicator.sum_ = broken  # type: ignore[method-assign]
    dist.all_reduce = broken  # type: ignore[assignment]
    try:
        run.kfac.before_step()
    except KFACError as error:
        return str(error)
    return "nothing"

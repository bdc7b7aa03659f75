"""Jobs in which saving goes wrong: at any change on disk, on any rank, in any way."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_kfac.checkpoint import disk
from ds_kfac.errors import KFACError
from tests.unit.checkpoint.training import Run, assert_identical, make

SETTINGS = {"factor_update_steps": 1, "inv_update_steps": 1}


def at_tick(number: int, happen: Callable[[], None]) -> list[str]:
    """Arm a fault; returns the list to which passed ticks are added."""
    passed: list[str] = []

    def tick(operation: str, path: Path) -> None:
        passed.append(operation)
        if len(passed) == number:
            happen()

    disk.tick = tick
    return passed


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def trained(rank: int, size: int, steps: int) -> Run:
    run = make(SETTINGS, size=size)
    for step in range(steps):
        run.step(step, rank, size)
    return run


def _loaded(run: Run, folder: str) -> str:
    """What a load does: the error, which changes nothing, or that there was none."""
    before = run.fingerprint()
    try:
        run.kfac.load(folder)
    except KFACError as error:
        assert_identical(run.fingerprint(), before)
        return str(error)
    finally:
        run.kfac.detach()
    return "loaded"


def count_ticks(rank: int, size: int, folder: str) -> list[str]:
    """The changes on disk of a save that replaces an earlier one."""
    run = trained(rank, size, 1)
    run.kfac.save(folder)
    original = disk.tick
    passed = at_tick(0, no_space)
    try:
        run.kfac.save(folder)
    finally:
        disk.tick = original
        run.kfac.detach()
    return passed


def killed(rank: int, size: int, folder: str, victim: int, number: int) -> None:
    """The process is gone in the middle of the second save."""
    run = trained(rank, size, 1)
    run.kfac.save(folder)
    run.step(1, rank, size)
    if rank == victim:
        at_tick(number, lambda: os._exit(9))
    try:
        run.kfac.save(folder)
    except Exception:
        os._exit(5)  # an error, at once: the survivor neither waits nor believes in the save


def failing(rank: int, size: int, folder: str, ticks: list[list[str]]) -> list[str]:
    """A full disk at every tick of every rank in turn; the error's texts."""
    run = trained(rank, size, 1)
    texts = []
    original = disk.tick
    run.kfac.save(folder)
    for victim, operations in enumerate(ticks):
        for number, operation in enumerate(operations, start=1):
            before = run.fingerprint()
            if rank == victim:
                at_tick(number, no_space)
            try:
                run.kfac.save(folder)
                texts.append(f"{operation}: saved")
            except KFACError as error:
                texts.append(f"{operation}: {error}")
            disk.tick = original
            assert_identical(run.fingerprint(), before)
            assert run.kfac.load(folder)  # whatever happened, there is a complete one
            assert_identical(run.fingerprint(), before)
    run.step(1, rank, size)
    run.kfac.save(folder)
    run.kfac.detach()
    return texts


def small_files_only(rank: int, size: int, folder: str) -> str:
    """The kernel refuses to let the last rank's file grow: a real failing write."""
    run = trained(rank, size, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if rank == size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        run.kfac.save(folder)
    except KFACError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        run.kfac.detach()
    return "saved"


def pending_error(rank: int, size: int, folder: str) -> None:
    """A step failed on one rank, whose factors may be half updated."""
    run = trained(rank, size, 1)
    if rank == 1:
        run.kfac._guard.keep(ValueError("made up"))
    try:
        run.kfac.save(folder)
    finally:
        run.kfac.detach()


def damaged(rank: int, size: int, folder: str, forge: Any) -> str:
    """Somebody damages the last rank's file: no rank may load anything."""
    run = trained(rank, size, 1)
    run.kfac.save(folder)
    run.step(1, rank, size)
    if rank == 0:
        forge(Path(folder))
    run.kfac._model.gather_objects(None)
    return _loaded(run, folder)


def different_folders(rank: int, size: int, folder: str) -> str:
    """Every rank loads from a folder of its own; only that of rank 0 has a checkpoint."""
    run = trained(rank, size, 1)
    run.kfac.save(f"{folder}/0")
    return _loaded(run, f"{folder}/{rank}")

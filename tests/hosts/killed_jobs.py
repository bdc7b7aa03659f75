"""Jobs whose process is gone at some point of ``engine.save_checkpoint``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ds_kfac.checkpoint import disk
from ds_kfac.errors import KFACError
from tests.hosts import topology_jobs as jobs
from tests.hosts.engine_checkpoint_jobs import SETTINGS, differences, fingerprint, train
from tests.hosts.topology_jobs import Cell

CELL = Cell("2", {"direction": "ekfac", **SETTINGS}, own=True)
GONE = 9


class Points:
    """Names of the places that a save passes, in order; the process ends at one of them."""

    def __init__(self, deadly: int | None) -> None:
        self.passed: list[str] = []
        self._deadly = deadly

    def reach(self, name: str) -> None:
        self.passed.append(name)
        if len(self.passed) == self._deadly:
            os._exit(GONE)

    def install(self) -> None:
        """Our changes on disk, by the file's or folder's name, and DeepSpeed's files; for good."""
        save = torch.save

        def tick(operation: str, path: Path) -> None:
            label = "latest " if path.name.startswith("latest") else ""
            self.reach(("kfac " if "kfac" in path.parts else label) + operation)

        def torch_save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            self.reach("deepspeed " + Path(str(file)).name.rpartition("_")[2])
            save(value, file, *args, **kwargs)

        disk.tick = tick
        torch.save = torch_save


def save_twice(
    rank: int, size: int, folder: str, victim: int, deadly: int | None, tag: str | None
) -> list[str]:
    """Two checkpoints; the process of one rank may be gone in the middle of the second."""
    engine = jobs.make_engine(CELL, size)
    train(engine, rank, size, CELL, 2)
    engine.save_checkpoint(folder, tag)
    train(engine, rank, size, CELL, 3)
    points = Points(deadly if rank == victim else None)
    points.install()
    engine.save_checkpoint(folder, tag)
    points.reach("done")
    return points.passed


def load_all(
    rank: int, size: int, folders: list[str]
) -> tuple[list[tuple[str, int]], list[list[str]]]:
    """What a fresh engine makes of each folder, and how it differs from a run that went on."""
    straight: dict[int, dict[str, Any]] = {}
    engine = jobs.make_engine(CELL, size)
    for step in (2, 3):
        train(engine, rank, size, CELL, step)
        straight[step] = fingerprint(engine)
    outcomes, odd = [], []
    for folder in folders:
        engine.kfac.reset()
        try:
            path, _ = engine.load_checkpoint(folder)
            assert path is not None
            outcomes.append(("loaded", engine.global_steps))
            odd.append(differences(fingerprint(engine), straight[engine.global_steps]))
        except KFACError as error:
            outcomes.append((str(error), engine.global_steps))
            odd.append([])
    engine.destroy()
    return outcomes, odd

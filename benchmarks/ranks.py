"""Several ranks on one machine, and what their measurements are together."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

T = TypeVar("T")

WALL = "wall"
"""Key of a step's wall time, whatever clock measures its parts."""


class Ranks:
    """The processes that train together; a single one needs no ``torch.distributed``.

    Args:
        rank: Of this process.
        size: How many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def everyones(self, value: T) -> list[T]:
        """The value of every rank, in their order; waits for all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(self, steps: Sequence[dict[str, float]]) -> list[dict[str, float]]:
        """Steps of all ranks as steps of the job.

        Args:
            steps: Seconds of this rank's steps by name.

        Returns:
            Per step the mean over the ranks, of wall time the longest, and each rank's own
            total as ``rank 0``, ``rank 1``, ...
        """
        return [combine(step) for step in zip(*self.everyones(list(steps)), strict=True)]


def combine(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """One step of all ranks: see :meth:`Ranks.together`."""
    result = {key: statistics.fmean(step[key] for step in ranks) for key in ranks[0]}
    result[WALL] = max(step[WALL] for step in ranks)
    return result | {rank_key(rank): step["total"] for rank, step in enumerate(ranks)}


def rank_key(rank: int) -> str:
    """Name of a rank's own total."""
    return f"rank {rank}"


def start(work: Callable[[Ranks, Any], None], argument: Any, size: int) -> None:
    """Run a function in every rank and wait for all of them.

    Args:
        work: A function of a module, for new processes import it by name.
        argument: Its second argument, which can be pickled.
        size: How many ranks; a single one is this process.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank failed; the others are ended.
    """
    if size == 1:
        work(Ranks(), argument)
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(_member, (work, argument, size, Path(folder)), nprocs=size)  # type: ignore[no-untyped-call]


def _member(
    rank: int, work: Callable[[Ranks, Any], None], argument: Any, size: int, folder: Path
) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    try:
        work(Ranks(rank, size), argument)
    finally:
        dist.destroy_process_group()

"""Collectives over one process group, each counted by the ledger.

A group of one rank needs no ``torch.distributed``: every operation is then local.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_kfac.comm.ledger import Ledger
from ds_kfac.comm.progress import Progress, Waiting
from ds_kfac.plan.topology import Topology

_SCALAR_BYTES = 8
"""One integer or one fp64 number: that is all that most all-reduces move."""


class Communicator:
    """One process group, handed over by the host.

    Args:
        group: The group, or None for a single process.
        ledger: Counts what is sent.
        progress: Notes where this rank is, for messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ledger: Ledger,
        progress: Progress | None = None,
    ) -> None:
        self._group = group
        self.ledger = ledger
        self.progress = Progress() if progress is None else progress
        self._ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        size = 1 if group is None else dist.get_world_size(group)
        self.topology = Topology(size, 0 if group is None else dist.get_rank(group))

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.topology.size

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        return self.topology.rank

    @property
    def timeout(self) -> float:
        """Seconds after which the group's own backend gives up."""
        if self._group is not None:
            with suppress(Exception):  # torch has no public way to ask
                name = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
                backend = self._group._get_backend(torch.device(name))
                return float(backend.options._timeout.total_seconds())
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())

    def waiting(self, kind: str) -> Waiting:
        """Context in which this rank waits for the others of the group.

        Args:
            kind: What is moved.

        Raises:
            DistributedError: The backend has lost other ranks (E122).
        """
        return self.progress.wait(self._ranks, kind)

    def sum_(self, values: Tensor, kind: str, planned_bytes: int = _SCALAR_BYTES) -> Tensor:
        """All-reduce a tensor in place (sum): one fp64 number, if its size is not planned."""
        return self._all_reduce_(values, kind, dist.ReduceOp.SUM, planned_bytes)

    def max_(self, values: Tensor, kind: str) -> Tensor:
        """All-reduce integers in place (max).

        Integers only: a MAX over floats can lose a NaN, depending on which rank holds it.
        """
        if values.is_floating_point():
            raise TypeError("votes are integers")
        return self._all_reduce_(values, kind, dist.ReduceOp.MAX, _SCALAR_BYTES * values.numel())

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], kind: str
    ) -> Tensor:
        """Exchange slices of a flat buffer.

        Args:
            send: ``[sum(send_sizes)]``, parts ordered by destination rank.
            send_sizes: Elements for each rank.
            receive_sizes: Elements from each rank.
            kind: Ledger entry.

        Returns:
            ``[sum(receive_sizes)]``, parts ordered by source rank.
        """
        received = send.new_empty(sum(receive_sizes))
        sizes = list(receive_sizes), list(send_sizes)
        with self.waiting(kind):
            dist.all_to_all_single(received, send, *sizes, group=self._group)
        sent = sum(send_sizes) - send_sizes[self.rank]
        self.ledger.record(kind, sent * send.element_size())
        return received

    def all_gather(self, part: Tensor, kind: str) -> Tensor:
        """Gather equal parts: ``[n]`` on every rank to ``[size, n]``."""
        gathered = part.new_empty(self.size * part.numel())
        with self.waiting(kind):
            _renamed("all_gather_single", "all_gather_into_tensor")(
                gathered, part, group=self._group
            )
        self.ledger.record(kind, part.numel() * part.element_size() * (self.size - 1))
        return gathered.view(self.size, part.numel())

    def reduce_scatter(self, buffer: Tensor, kind: str) -> Tensor:
        """Sum ``[size, n]`` over ranks; rank r keeps row r."""
        part = buffer.new_empty(buffer.shape[1])
        with self.waiting(kind):
            _renamed("reduce_scatter_single", "reduce_scatter_tensor")(
                part, buffer.view(-1), group=self._group
            )
        others = buffer.numel() - buffer.shape[1]
        self.ledger.record(kind, others * buffer.element_size())
        return part

    def broadcast_(self, values: Tensor, source: int, kind: str) -> Tensor:
        """Broadcast from a rank of the group, in place."""
        if self.size > 1:
            assert self._group is not None
            with self.waiting(kind):
                dist.broadcast(values, dist.get_global_rank(self._group, source), group=self._group)
            sent = values.numel() * values.element_size() * (self.rank == source)
            self.ledger.record(kind, sent * (self.size - 1))
            self.ledger.plan(kind, sent * (self.size - 1))  # asked for by the user, in no program
        return values

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's object on every rank. Rare paths only: attach and errors."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.waiting("objects"):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def _all_reduce_(
        self, values: Tensor, kind: str, op: Any, planned_bytes: int = _SCALAR_BYTES
    ) -> Tensor:
        if self.size > 1:
            with self.waiting(kind):
                dist.all_reduce(values, op=op, group=self._group)
            share = values.numel() * values.element_size() * (self.size - 1)
            self.ledger.record(kind, 2 * share // self.size)
            self.ledger.plan(kind, 2 * planned_bytes * (self.size - 1) // self.size)
        return values


def _renamed(now: str, before: str) -> Callable[..., Any]:
    """A function of ``torch.distributed``; its former name warns at every first use."""
    function: Callable[..., Any] = getattr(dist, now, None) or getattr(dist, before)
    return function

"""Agreement between ranks: the health vote of every step, and errors raised everywhere."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ds_kfac.comm.communicator import Communicator
from ds_kfac.errors import DistributedError, KFACError

T = TypeVar("T")


class Verdict(enum.IntEnum):
    """Outcome of a health vote, the worst of all ranks."""

    GOOD = 0
    NONFINITE = 1
    ERROR = 2


def health(communicator: Communicator, finite: Tensor, *, error: bool) -> Verdict:
    """Agree on the health of a step.

    Args:
        communicator: All ranks of the model.
        finite: 0-d bool tensor on the compute device: everything local is finite.
        error: This rank has a pending error.

    Returns:
        The worst verdict of any rank, the same everywhere. Reading it is the one
        host-device synchronisation of a step.
    """
    code = torch.where(finite, int(Verdict.GOOD), int(Verdict.NONFINITE)).to(torch.int64)
    if error:
        code = torch.full_like(code, int(Verdict.ERROR))
    with communicator.waiting("vote"):  # until it is read: on a device the call alone is no wait
        return Verdict(int(communicator.max_(code.reshape(1), "vote").item()))


def raise_everywhere(communicator: Communicator, error: Exception | None) -> None:
    """Raise the first pending error on every rank, with the same text.

    Args:
        communicator: All ranks of the model; every one of them calls this.
        error: This rank's pending error.

    Raises:
        KFACError: Some rank had an error: its own type when it is a ``KFACError``,
            otherwise a :class:`DistributedError` that names rank, type and text.
    """
    reports = communicator.gather_objects(_portable(error, communicator.rank))
    first = next((report for report in reports if report is not None), None)
    if first is None:
        return
    if error is not None and error is not first and communicator.rank == reports.index(first):
        raise first from error
    raise first


def together(communicator: Communicator, work: Callable[[], T]) -> T:
    """Do local work on every rank; if it fails on any, all ranks raise.

    Args:
        communicator: All ranks of the model; every one of them calls this.
        work: Makes no collective calls: it may end early on some ranks.

    Returns:
        This rank's result, once all ranks have theirs.

    Raises:
        KFACError: As :func:`raise_everywhere`.
    """
    error: Exception | None = None
    results: list[T] = []
    try:
        results.append(work())
    except Exception as caught:
        error = caught
    raise_everywhere(communicator, error)
    return results[0]


def agree(communicator: Communicator, what: str, value: str) -> None:
    """Check that a value is the same on all ranks.

    Raises:
        DistributedError: It is not (E203); the text lists the values by rank.
    """
    values = communicator.gather_objects(value)
    if len(set(values)) > 1:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(values))
        raise DistributedError("E203", f"{what} differs between ranks: {listed}")


def _portable(error: Exception | None, rank: int) -> KFACError | None:
    if error is None or isinstance(error, KFACError):
        return error
    text = f"rank {rank} failed: {type(error).__name__}: {error}"
    return DistributedError("E121", text)

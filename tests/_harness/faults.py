"""Fault injection for job functions: arm faults, then pass named points of the code under test.

Usage in a job function::

    faults.arm(Fault(rank=1, step=2, point="before_step", kind="nan"))
    for step in range(4):
        loss.backward()
        faults.maybe("before_step", rank, step, parameter.grad)
        optimizer.step()
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Kind = Literal["nan", "inf", "raise", "sleep", "sigkill", "sigstop"]
_KINDS = get_args(Kind)


class InjectedFaultError(RuntimeError):
    """Raised by a fault of kind ``raise``."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where and when.

    Attributes:
        rank: Rank that is hit; None hits every rank.
        step: Step that is hit; None hits every step.
        point: Name of the place in the job.
        kind: nan or inf poison the tensor of the point, raise raises, sleep stalls for `seconds`,
            sigkill and sigstop send the signal to the own process.
        seconds: Duration of a sleep.
    """

    rank: int | None
    step: int | None
    point: str
    kind: Kind
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"unknown fault kind {self.kind!r}, known: {_KINDS}")


_armed: list[Fault] = []


def arm(*faults: Fault) -> None:
    """Add faults; the harness disarms all of them between jobs."""
    _armed.extend(faults)


def disarm() -> None:
    """Forget all faults."""
    _armed.clear()


def maybe(point: str, rank: int, step: int, tensor: torch.Tensor | None = None) -> None:
    """Let every armed fault of this place happen; does nothing otherwise."""
    for fault in _armed:
        hit = fault.rank in (None, rank) and fault.step in (None, step)
        if hit and fault.point == point:
            _happen(fault, f"{point}, rank {rank}, step {step}", tensor)


def poison_(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Set the first element of `tensor` to NaN or infinity, in place; returns `tensor`."""
    value = {"nan": float("nan"), "inf": float("inf")}[kind]
    with torch.no_grad():
        # Through an index, not view(-1): gradients may be non-contiguous.
        tensor[(0,) * tensor.dim()] = value
    return tensor


def _happen(fault: Fault, where: str, tensor: torch.Tensor | None) -> None:
    if fault.kind in ("nan", "inf"):
        if tensor is None:
            raise ValueError(f"fault {fault.kind!r} at {where} needs a tensor")
        poison_(tensor, fault.kind)
    elif fault.kind == "raise":
        raise InjectedFaultError(f"injected at {where}")
    elif fault.kind == "sleep":
        time.sleep(fault.seconds)
    else:
        number = signal.SIGKILL if fault.kind == "sigkill" else signal.SIGSTOP
        os.kill(os.getpid(), number)

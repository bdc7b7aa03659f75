"""Slow checks of solver results, shared by the tests of right and of lying solvers."""

from __future__ import annotations

import torch
from torch import Tensor


def rebuilt(vectors: Tensor, values: Tensor) -> Tensor:
    """Sum of values times outer products, one eigenpair at a time."""
    n = len(values)
    total = torch.zeros(n, n, dtype=torch.float64)
    for k in range(n):
        total += values[k].double() * torch.outer(vectors[:, k], vectors[:, k]).double()
    return total


def assert_identity(found: Tensor) -> None:
    assert torch.equal(found, torch.eye(found.shape[-1], dtype=found.dtype))

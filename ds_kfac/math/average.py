"""A running average whose weight travels with its value.

The idea is kfac-jax's ``WeightedMovingAverage``: with the weight beside the sum, bias correction,
uneven batches, empty batches and merging of ranks are one formula instead of special cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class WeightedAverage:
    """Exponentially decayed weighted mean of matrices, kept as sum and weight.

    Attributes:
        total: Decayed sum of the matrices, each already multiplied by its weight: ``[n, n]``, or
            packed ``[n(n+1)/2]`` as an owner keeps it.
        weight: 0-d fp64, decayed sum of the weights (fp32 stops counting rows at ``2**24``).
    """

    total: Tensor
    weight: Tensor

    @classmethod
    def zeros(
        cls, *shape: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> WeightedAverage:
        """Returns the empty average of tensors of this shape; the first batch initialises it."""
        return cls(
            total=torch.zeros(*shape, device=device, dtype=dtype),
            weight=torch.zeros((), device=device, dtype=torch.float64),
        )

    def decay_(self, rho: float | Tensor) -> None:
        """Multiplies sum and weight by ``rho``; the value stays what it was."""
        self.total.mul_(rho)
        self.weight.mul_(rho)

    def add_(self, total: Tensor, weight: float | Tensor) -> None:
        """Adds a batch.

        Args:
            total: shaped like the sum: weight times mean of the batch (the plain sum, when rows
                have weight 1).
            weight: number or 0-d tensor; 0 with a zero ``total`` changes nothing.
        """
        self.total.add_(total)
        self.weight.add_(weight)

    def value(self) -> Tensor:
        """Returns the mean as a new tensor, zeros while nothing was added.

        Nothing is read back to the host. A non-finite sum stays visible in the result.
        """
        empty = self.weight == 0
        return self.total / torch.where(empty, torch.ones_like(self.weight), self.weight)

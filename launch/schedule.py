"""The learning-rate schedule: linear warm-up, then a cosine to zero."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(step: int, *, warmup: int, total: int) -> float:
    """Factor on the learning rate in a step.

    The warm-up is a number of steps, not a share of the run: a share would shorten it for the
    shorter of two compared runs, which hurts Adam-like optimizers most.

    Args:
        step: steps already taken.
        warmup: steps until the factor is 1.
        total: steps of the complete schedule; the factor would be 0 in step `total`.
    """
    if step < warmup:
        return (step + 1) / warmup
    if step >= total:
        return 0.0
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def fit_warmup(warmup: int, total: int) -> int:
    """Shorten a warm-up that would take more than half of a (very short) run."""
    return min(warmup, total // 2)


def scheduler(*, warmup: int, total: int) -> Callable[[Optimizer], LambdaLR]:
    """Return what DeepSpeed expects as `lr_scheduler`: a function of the optimizer."""

    def build(optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup=warmup, total=total))

    return build

"""Which base optimizers a direction can feed."""

from __future__ import annotations

import torch

from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError, UnsupportedError
from ds_kfac.optimizer import KFACOptimizer

# They reduce or compress gradients inside their own step, or are matrix optimizers themselves.
_REFUSED = {
    "OnebitAdam": "communicates compressed gradients inside its step",
    "OnebitLamb": "communicates compressed gradients inside its step",
    "ZeroOneAdam": "communicates compressed gradients inside its step",
    "Muon": "orthogonalises its input itself: use optimizer type KFAC with direction 'orthogonal'",
    "MuonWithAuxAdam": "orthogonalises its input itself: use optimizer type KFAC",
    "LBFGS": "evaluates the loss inside its step",
}


def is_own_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether directions are applied by ds_kfac's own element-wise optimizer."""
    return isinstance(optimizer, KFACOptimizer)


def check_base_optimizer(optimizer: torch.optim.Optimizer, config: KFACConfig) -> None:
    """Refuse combinations that fight each other.

    Raises:
        UnsupportedError: The optimizer cannot consume directions (E153).
        ConfigError: The direction has its own momentum or scaling, and so has the
            optimizer (E205).
    """
    name = type(optimizer).__name__
    if name in _REFUSED:
        raise UnsupportedError("E153", f"base optimizer {name} {_REFUSED[name]}")
    if config.direction not in ("orthogonal", "eigen_adam") or is_own_optimizer(optimizer):
        return
    plain_sgd = isinstance(optimizer, torch.optim.SGD) and not any(
        group.get("momentum") for group in optimizer.param_groups
    )
    if not plain_sgd:
        momentum = " with momentum" if isinstance(optimizer, torch.optim.SGD) else ""
        raise ConfigError(
            "E205",
            f"direction {config.direction!r} has its own momentum and length rule, base optimizer "
            f"{name}{momentum} would average and rescale it again. Use optimizer type 'KFAC', SGD "
            "without momentum, or direction 'natural' or 'ekfac'",
        )

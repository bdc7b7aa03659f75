"""NVIDIA Apex, told apart from the unrelated PyPI package that is also named ``apex``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from ds_kfac.errors import ConfigError

ApexStatus = Literal["absent", "unrelated", "nvidia"]


def apex_status() -> ApexStatus:
    """Which ``apex`` is installed, found out without importing it.

    The package named apex on PyPI is a web-login toolkit; importing it runs its code. Only
    NVIDIA's has ``apex/optimizers/fused_adam.py`` beside ``apex/multi_tensor_apply``.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "absent"
    for folder in spec.submodule_search_locations or ():
        root = Path(folder)
        optimizer = root / "optimizers" / "fused_adam.py"
        if optimizer.is_file() and (root / "multi_tensor_apply").is_dir():
            return "nvidia"
    return "unrelated"


def fused_adam(params: dict[str, Any]) -> Callable[[Any], torch.optim.Optimizer]:
    """Factory of ``apex.optimizers.FusedAdam`` for DeepSpeed's ``optimizer`` argument.

    Args:
        params: Keyword arguments of the optimizer, from the JSON.

    Returns:
        A function from parameters (or groups) to the optimizer.

    Raises:
        ConfigError: NVIDIA Apex is not installed (E211).
    """
    status = apex_status()
    if status != "nvidia":
        found = {
            "absent": "no package apex is installed",
            "unrelated": "the installed package apex is the unrelated one of that name on PyPI",
        }[status]
        raise ConfigError(
            "E211",
            f"optimizer type FusedAdam is NVIDIA Apex's, but {found}. Build Apex from NVIDIA's "
            "repository, or use optimizer type Adam or AdamW (DeepSpeed's own fused version)",
        )
    optimizers = importlib.import_module("apex.optimizers")

    def build(parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = optimizers.FusedAdam(parameters, **params)
        return optimizer

    return build

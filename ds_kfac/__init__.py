"""K-FAC for DeepSpeed and plain PyTorch.

Importing this package imports nothing else: names are loaded when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ds_kfac.config import KFACConfig
    from ds_kfac.errors import KFACError
    from ds_kfac.hosts.base import Groups
    from ds_kfac.hosts.deepspeed import initialize
    from ds_kfac.hosts.plain import attach
    from ds_kfac.optimizer import KFACOptimizer
    from ds_kfac.preconditioner import KFAC

_HOMES = {
    "KFAC": "ds_kfac.preconditioner",
    "KFACConfig": "ds_kfac.config",
    "KFACError": "ds_kfac.errors",
    "KFACOptimizer": "ds_kfac.optimizer",
    "Groups": "ds_kfac.hosts.base",
    "attach": "ds_kfac.hosts.plain",
    "initialize": "ds_kfac.hosts.deepspeed",
}

__all__ = [
    "KFAC",
    "Groups",
    "KFACConfig",
    "KFACError",
    "KFACOptimizer",
    "__version__",
    "attach",
    "initialize",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "megatron":  # a module of its own, because it has an ``attach`` of its own
        return import_module("ds_kfac.megatron")
    if name not in _HOMES:
        raise AttributeError(f"module 'ds_kfac' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

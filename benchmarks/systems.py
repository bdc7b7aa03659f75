"""The systems under comparison: the same model behind AdamW, ds_kfac and kfac-pytorch."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ds_kfac
import ds_kfac.partition
from benchmarks.parts import Wrapped
from ds_kfac.capture.session import CaptureSession
from ds_kfac.comm.run import GradientExchange
from ds_kfac.config import split_optimizer_params
from ds_kfac.layers.discover import discover
from ds_kfac.optimizer import KFACOptimizer, param_groups
from ds_kfac.owner import Owner
from launch.model import GPT, GPTConfig, next_byte_loss

LR = 1e-3
SKIPPED = "head"
"""Left to AdamW in every system, as the configurations of this repository do."""

FACTOR_INTERVAL, INVERSE_INTERVAL = 2, 4
NATURAL: dict[str, dict[str, Any]] = {
    "eigen": {"solver": "eigen"},
    "cholesky": {"solver": "cholesky"},
    "cholesky, 1/4 rows": {"solver": "cholesky", "factor_token_fraction": 0.25},
}
"""Settings of direction ``natural`` by name; the last subsamples rows as ``configs/`` do."""

PEERS: dict[str, dict[str, Any]] = {
    "eigen": {"method": "eigen"},
    "inverse": {"method": "inverse"},
}
"""Settings of kfac-pytorch by name."""

DISTRIBUTED_PEERS: dict[str, dict[str, Any]] = {
    "eigen, MEM_OPT": {"method": "eigen", "strategy": "MEM_OPT"}
}
"""With several ranks: by default each of them computes every direction, here only its own."""

OWN_DIRECTIONS = ("orthogonal", "ekfac", "eigen_adam")
"""Measured with optimizer type KFAC; ``natural`` runs beside AdamW, as kfac-pytorch does."""

CYCLE = ("refresh", "plain", "capture", "plain")
"""What the steps of a cycle do at these intervals; ``refresh`` steps also capture."""

BASELINE = "AdamW"
DS_KFAC = f"ds_kfac natural {ds_kfac.KFACConfig().resolved_solver}"
PEER = "kfac-pytorch eigen"
"""What the goal compares: the defaults of both, beside AdamW."""


@dataclass
class System:
    """A way to train the model.

    Attributes:
        name: Label in tables.
        model: Its own copy of the model.
        optimizer: What applies the step.
        precondition: Called between backward and the optimizer's step (kfac-pytorch); ds_kfac
            works in the optimizer's hooks.
        functions: What to wrap to see its parts.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    precondition: Callable[[], None] | None = None
    functions: Sequence[Wrapped] = ()

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One training step.

        Args:
            inputs: ``[batch, time]`` int64.
            targets: ``[batch, time]`` int64.
        """
        self.optimizer.zero_grad(set_to_none=True)
        next_byte_loss(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if self.precondition is not None:
            self.precondition()
        self.optimizer.step()


def build(
    sizes: GPTConfig,
    *,
    kfac_pytorch: Path | None,
    distributed: bool = False,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[System]:
    """Build every system, AdamW first.

    Args:
        sizes: The model's sizes.
        kfac_pytorch: Checkout of kfac-pytorch's repository, if it takes part.
        distributed: Train under DistributedDataParallel in the default process group.
        device: Where the models are.
        dtype: Of weights and gradients.

    Raises:
        ImportError: There is no kfac-pytorch at the path.
    """
    section = {
        "factor_update_steps": FACTOR_INTERVAL,
        "inv_update_steps": INVERSE_INTERVAL,
        "skip_layers": [SKIPPED],
    }

    def model() -> nn.Module:
        bare = GPT(sizes).to(device, dtype)
        return DistributedDataParallel(bare) if distributed else bare

    systems = [_adamw(BASELINE, model())]
    systems += [_natural(name, model(), {**section, **more}) for name, more in NATURAL.items()]
    systems += [_own_optimizer(model(), {**section, "direction": d}) for d in OWN_DIRECTIONS]
    if kfac_pytorch is not None:
        package = import_kfac_pytorch(kfac_pytorch)
        settings = {**PEERS, **(DISTRIBUTED_PEERS if distributed else {})}
        systems += [
            _kfac_pytorch(f"kfac-pytorch {name}", model(), package, **more)
            for name, more in settings.items()
        ]
    return systems


def _adamw(name: str, model: nn.Module) -> System:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    return System(name, model, optimizer)


def _natural(name: str, model: nn.Module, section: dict[str, Any]) -> System:
    """The kfac section beside AdamW."""
    system = _adamw(f"ds_kfac natural {name}", model)
    ds_kfac.attach(model, system.optimizer, {**section, "direction": "natural"})
    system.functions = _ds_kfac_functions()
    return system


def _own_optimizer(model: nn.Module, params: dict[str, Any]) -> System:
    """Optimizer type KFAC, put together as the DeepSpeed host does it."""
    settings, rest = split_optimizer_params({"lr": LR, "weight_decay": 0.1, **params})
    config = ds_kfac.KFACConfig.parse(rest)
    bare = _bare(model)
    layers = discover(bare, config).layers
    inside = {slot.name for spec in layers for slot in spec.slots}
    optimizer = KFACOptimizer(param_groups(bare.named_parameters(), inside, settings), settings)
    ds_kfac.attach(model, optimizer, config)
    name = f"ds_kfac {config.direction}"
    return System(name, model, optimizer, functions=_ds_kfac_functions())


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _ds_kfac_functions() -> list[Wrapped]:
    return [
        Wrapped("capture", CaptureSession, "input_sums"),
        Wrapped("capture", CaptureSession, "add"),
        Wrapped("reduce", ds_kfac.partition, "reduce_factors"),
        Wrapped("reduce", Owner, "fold"),
        Wrapped("refresh", Owner, "refresh"),
        Wrapped("exchange", GradientExchange, "to_owners"),
        Wrapped("exchange", GradientExchange, "from_owners"),
        Wrapped("direction", Owner, "directions"),
    ]


def import_kfac_pytorch(checkout: Path) -> Any:
    """Import kfac-pytorch from its repository, which need not be installed.

    Raises:
        ImportError: There is no such package at the path.
    """
    if not (checkout / "kfac" / "preconditioner.py").is_file():
        raise ImportError(f"{checkout} is no checkout of kfac-pytorch (no kfac/preconditioner.py)")
    version = importlib.metadata.version

    def version_or_unknown(name: str) -> str:
        return "0+checkout" if name == "kfac-pytorch" else version(name)

    sys.path.insert(0, str(checkout))
    try:
        # It asks for its own version; Apex and DeepSpeed, which it warns about, are optional.
        with (
            mock.patch.object(importlib.metadata, "version", version_or_unknown),
            warnings.catch_warnings(action="ignore"),
        ):
            return importlib.import_module("kfac.preconditioner")
    finally:
        sys.path.remove(str(checkout))


def _kfac_pytorch(
    name: str, model: nn.Module, package: Any, *, method: str, strategy: str | None = None
) -> System:
    """kfac-pytorch with its defaults beside AdamW, but for what is given."""
    system = _adamw(name, model)
    more = {}
    if strategy is not None:
        more["grad_worker_fraction"] = package.DistributedStrategy[strategy]
    preconditioner = package.KFACPreconditioner(
        _bare(model),
        factor_update_steps=FACTOR_INTERVAL,
        inv_update_steps=INVERSE_INTERVAL,
        lr=LR,
        compute_method=method,
        skip_layers=[f"^{SKIPPED}$"],
        loglevel=logging.DEBUG,
        **more,
    )
    layer = package.KFACEigenLayer if method == "eigen" else package.KFACInverseLayer
    base = package.KFACBaseLayer
    system.precondition = preconditioner.step
    system.functions = [
        *(Wrapped("capture", base, n) for n in ("save_layer_input", "save_layer_grad_output")),
        *(Wrapped("reduce", base, n) for n in ("update_a_factor", "update_g_factor")),
        *(Wrapped("reduce", base, n) for n in ("reduce_a_factor", "reduce_g_factor")),
        *(Wrapped("refresh", layer, n) for n in ("compute_a_inv", "compute_g_inv")),
        *(Wrapped("exchange", layer, n) for n in ("broadcast_a_inv", "broadcast_g_inv")),
        Wrapped("exchange", base, "broadcast_grad"),
        Wrapped("direction", layer, "preconditioned_grad"),
        Wrapped("direction", package.KFACPreconditioner.__mro__[1], "_compute_grad_scale"),
        Wrapped("direction", base, "update_grad"),
    ]
    return system

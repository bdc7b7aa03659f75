"""The optimizers under comparison, each behind the same small interface.

All of them train the hidden layers at ``lr`` and leave the rest (embeddings, head, norms) to AdamW
at ``aux_lr``; AdamW itself gets the same two rates. Weight decay and the averages are the same
wherever a method has them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ds_kfac
from benchmarks.convergence.cells import Cell
from ds_kfac.config import split_optimizer_params
from ds_kfac.layers.discover import discover
from ds_kfac.optimizer import KFACOptimizer, param_groups

WEIGHT_DECAY = 0.1
SGD_WEIGHT_DECAY = 5e-4
BETAS = (0.9, 0.95)
MOMENTUM = 0.95
FUSED = {"*qkv*": 3}
"""Weights whose rows hold several matrices; Muon and K-FAC orthogonalise them one by one."""

KFAC_PARAMS: dict[str, Any] = {
    "direction": "orthogonal",
    "damping": 0.1,
    "factor_decay": 0.95,
    "factor_update_steps": 10,
    "inv_update_steps": 20,
    "factor_token_fraction": 0.25,
    "momentum": MOMENTUM,
}
"""As ``configs/zero2_kfac.json``."""

SOAP_PARAMS: dict[str, Any] = {"betas": (0.95, 0.95), "precondition_frequency": 10}


@dataclass
class Bundle:
    """Everything that steps together.

    Attributes:
        optimizers: In the order of their steps.
        before: Called before they step.
    """

    optimizers: Sequence[Optimizer]
    before: Callable[[], None] = field(default=lambda: None)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Apply one step."""
        self.before()
        for optimizer in self.optimizers:
            optimizer.step()


def split(model: nn.Module, skipped: Iterable[str]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Linear and convolution weights outside ``skipped`` by name, and all other parameters."""
    hidden = {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        and not any(fnmatch(name, pattern) for pattern in skipped)
    }
    inside = set(map(id, hidden.values()))
    return dict(hidden), [p for p in model.parameters() if id(p) not in inside]


class Matrices:
    """Matrix parameters that share memory with a model's weights.

    Convolutions are flattened and fused weights cut, for optimizers that take one matrix each.

    Args:
        weights: By name.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights: list[tuple[Tensor, list[nn.Parameter]]] = []
        for name, weight in weights.items():
            parts = next((n for pattern, n in FUSED.items() if fnmatch(name, pattern)), 1)
            rows = weight.detach().flatten(1).chunk(parts)
            self._weights.append((weight, [nn.Parameter(part) for part in rows]))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer gets."""
        return [part for _, parts in self._weights for part in parts]

    def take_gradients(self) -> None:
        """Hand the gradients over; the model's weights keep none."""
        for weight, parts in self._weights:
            if weight.grad is None:
                continue
            for part, grad in zip(parts, weight.grad.flatten(1).chunk(len(parts)), strict=True):
                part.grad = grad
            weight.grad = None


def build(model: nn.Module, cell: Cell, skipped: tuple[str, ...]) -> Bundle:
    """Build a cell's optimizer.

    Args:
        model: What it trains.
        cell: Its name, rates and further settings.
        skipped: Patterns of layers left to the auxiliary AdamW.

    Raises:
        KeyError: There is no such optimizer.
        ImportError: SOAP's package is missing.
    """
    return BUILDERS[cell.optimizer](model, cell, skipped)


def _aux(params: list[Tensor], cell: Cell) -> Optimizer:
    return torch.optim.AdamW(
        params, lr=cell.setting.aux_lr, betas=BETAS, weight_decay=WEIGHT_DECAY, foreach=True
    )


def _adamw(model: nn.Module, cell: Cell, skipped: tuple[str, ...]) -> Bundle:
    hidden, rest = split(model, skipped)
    groups = [
        {"params": list(hidden.values()), "lr": cell.setting.lr},
        {"params": rest, "lr": cell.setting.aux_lr},
    ]
    options = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, **cell.more}
    return Bundle([torch.optim.AdamW(groups, foreach=True, **options)])


def _sgd(model: nn.Module, cell: Cell, skipped: tuple[str, ...]) -> Bundle:
    return Bundle([_plain_sgd(model, cell, skipped)])


def _plain_sgd(model: nn.Module, cell: Cell, skipped: tuple[str, ...]) -> Optimizer:
    hidden, rest = split(model, skipped)
    groups = [
        {"params": list(hidden.values()), "lr": cell.setting.lr},
        {"params": rest, "lr": cell.setting.aux_lr},
    ]
    return torch.optim.SGD(groups, momentum=0.9, weight_decay=SGD_WEIGHT_DECAY)


def _muon(model: nn.Module, cell: Cell, skipped: tuple[str, ...]) -> Bundle:
    hidden, rest = split(model, skipped)
    matrices = Matrices(hidden)
    muon = torch.optim.Muon(
        matrices.parameters,
        lr=cell.setting.lr,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        adjust_lr_fn="match_rms_adamw",
        **cell.more,
    )
    return Bundle([muon, _aux(rest, cell)], matrices.take_gradients)


def _soap(model: nn.Module, cell: Cell, skipped: tuple[str, ...]) -> Bundle:
    hidden, rest = split(model, skipped)
    soap = importlib.import_module("pytorch_optimizer").SOAP
    options = {**SOAP_PARAMS, "weight_decay": WEIGHT_DECAY, **cell.more}
    optimizer = soap(list(hidden.values()), lr=cell.setting.lr, **options)
    return Bundle([optimizer, _aux(rest, cell)])


def _kfac(model: nn.Module, cell: Cell, skipped: tuple[str, ...]) -> Bundle:
    """Optimizer type KFAC, put together as the DeepSpeed host does it."""
    aux = {"lr": cell.setting.aux_lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
    params = {"lr": cell.setting.lr, "weight_decay": WEIGHT_DECAY, "aux": aux, **KFAC_PARAMS}
    settings, rest = split_optimizer_params({**params, "skip_layers": list(skipped), **cell.more})
    config = ds_kfac.KFACConfig.parse(rest)
    inside = {slot.name for spec in discover(model, config).layers for slot in spec.slots}
    optimizer = KFACOptimizer(param_groups(model.named_parameters(), inside, settings), settings)
    ds_kfac.attach(model, optimizer, config)
    return Bundle([optimizer])


def _kfac_sgd(model: nn.Module, cell: Cell, skipped: tuple[str, ...]) -> Bundle:
    """The ``kfac`` section beside SGD with momentum."""
    optimizer = _plain_sgd(model, cell, skipped)
    ds_kfac.attach(model, optimizer, {"skip_layers": list(skipped), **cell.more})
    return Bundle([optimizer])


BUILDERS: dict[str, Callable[[nn.Module, Cell, tuple[str, ...]], Bundle]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "muon": _muon,
    "soap": _soap,
    "kfac": _kfac,
    "kfac_sgd": _kfac_sgd,
}

"""A small training run in plain PyTorch that saves, stops and resumes anywhere."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ds_kfac
from ds_kfac.optimizer import KFACOptimizer
from ds_kfac.preconditioner import KFAC

DIRECTIONS = ("natural", "ekfac", "eigen_adam", "orthogonal")


@dataclass
class Run:
    """One training run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    kfac: KFAC
    wrapped: nn.Module

    def step(self, step: int, rank: int = 0, size: int = 1, *, rows: int = 8) -> None:
        """Two micro-batches and one optimizer step."""
        self.optimizer.zero_grad()
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(step))
        for part in x.chunk(size)[rank].chunk(2):
            (self.wrapped(part).square().mean() / 2).backward()
        self.optimizer.step()

    def host_state(self) -> Any:
        """What users save themselves."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load_host_state(self, state: Any) -> None:
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])

    def fingerprint(self) -> dict[str, Any]:
        """Every bit of the run: weights, optimizer, counters, factors, bases, moments, ages."""
        flat: dict[str, Any] = dict(self.model.state_dict())
        for index, state in enumerate(self.optimizer.state_dict()["state"].values()):
            flat.update({f"optimizer.{index}.{key}": value for key, value in state.items()})
        saved = self.kfac.state_dict()
        flat.update(saved["counters"])
        for name, layer in saved["layers"].items():
            flat.update({f"{name}/{key}": value for key, value in layer.items()})
        return copy.deepcopy(flat)


def make(settings: dict[str, Any], *, widths: tuple[int, ...] = (4, 6, 3), size: int = 1) -> Run:
    """A fresh run; the same settings give the same run."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for wide, narrow in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    model = nn.Sequential(*layers)
    wrapped: nn.Module = model
    if size > 1:
        # DDP rearranges its buckets after a process's first backward, and with more than two
        # ranks sums them in another order then; not where it looks for unused parameters.
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer: torch.optim.Optimizer
    if settings.get("direction") in ("orthogonal", "eigen_adam"):
        optimizer = own_optimizer(model)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = ds_kfac.attach(wrapped, optimizer, settings)
    assert kfac is not None
    return Run(model, optimizer, kfac, wrapped)


def own_optimizer(model: nn.Module) -> KFACOptimizer:
    from ds_kfac.config import OptimizerConfig
    from ds_kfac.optimizer import param_groups

    config = OptimizerConfig(lr=0.02, weight_decay=0.01)
    names = {name for name, _ in model.named_parameters()}
    return KFACOptimizer(param_groups(model.named_parameters(), names, config), config)


def assert_identical(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Equal to the last bit, and nothing missing."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        other = second[name]
        same = torch.equal(value, other) if isinstance(value, Tensor) else value == other
        assert same, f"{name}: {value} != {other}"

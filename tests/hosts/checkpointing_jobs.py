"""Jobs that train the same network with every kind of activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

import ds_kfac
from tests._harness import deepspeed_cpu

FEATURES, WIDTH, ROWS, POSITIONS = 5, 8, 3, 2  # per rank and micro-batch
ACCUMULATION, STEPS = 2, 3
SETTINGS = {"direction": "natural", "damping": 0.3, "factor_update_steps": 1, "inv_update_steps": 1}
LAYERS = ("first", "blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "last")


def _torch_reentrant(block: nn.Module, x: Tensor) -> Any:
    return torch_checkpoint.checkpoint(block, x, use_reentrant=True)


def _torch_non_reentrant(block: nn.Module, x: Tensor) -> Any:
    return torch_checkpoint.checkpoint(block, x, use_reentrant=False)


def _deepspeed_reentrant(block: nn.Module, x: Tensor) -> Any:
    import deepspeed

    return deepspeed.checkpointing.checkpoint(block, x)


def _deepspeed_non_reentrant(block: nn.Module, x: Tensor) -> Any:
    import deepspeed

    return deepspeed.checkpointing.non_reentrant_checkpoint(block, x)


MODES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "none": lambda block, x: block(x),
    "torch, reentrant": _torch_reentrant,
    "torch, non-reentrant": _torch_non_reentrant,
    "DeepSpeed, reentrant": _deepspeed_reentrant,
    "DeepSpeed, non-reentrant": _deepspeed_non_reentrant,
}


class Net(nn.Module):
    """Blocks that are checkpointed between layers that are not; dropout shows a wrong replay."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
            )
            for _ in range(2)
        )
        self.last = nn.Linear(WIDTH, 2)
        self._run = MODES[mode]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + self._run(block, x)
        return self.last(x)


@dataclass(frozen=True)
class Cell:
    """A ZeRO stage and a kind of checkpointing."""

    stage: int
    mode: str


def train(rank: int, size: int, cells: list[Cell]) -> list[dict[str, Any]]:
    """Counts, factors and weights of every cell."""
    return [train_cell(rank, size, cell) for cell in cells]


def train_cell(rank: int, size: int, cell: Cell) -> dict[str, Any]:
    """Train one cell for a few steps with accumulation."""
    deepspeed = deepspeed_cpu.prepare()
    torch.manual_seed(5)
    net = Net(cell.mode)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": cell.stage},
        "kfac": SETTINGS,
        "steps_per_print": 10**9,
    }
    engine, *_ = ds_kfac.initialize(model=net, model_parameters=net.parameters(), config=config)
    deepspeed.checkpointing.configure(None, deepspeed_config=config)
    torch.manual_seed(9)  # of the dropout
    counts: list[dict[str, Any]] = []
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x = torch.randn(ROWS, POSITIONS, FEATURES, generator=generator)
            engine.backward(engine(x).square().mean())
            if micro == ACCUMULATION - 1:
                pending = engine.kfac._session.pending
                counts.append({name: sums.counts() for name, sums in pending.items()})
            engine.step()
    report = {
        "counts": counts,
        "counters": dict(vars(engine.kfac.counters)),
        "factors": {name: engine.kfac.factors(name) for name in LAYERS},
    }
    engine.destroy()
    return report

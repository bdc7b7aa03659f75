"""megatron-core trains on CPU ranks: what the tests of its host stand on."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests._harness import World
from tests.hosts import megatron_model as models

# Not imported here: workers import this module, and CUDA has to be answered for before.
pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")


def train(rank: int, world_size: int, cell: models.Cell) -> tuple[list[float], Any]:
    training = models.build(cell)
    for step in range(cell.steps):
        models.train_step(training, step)
    return training.losses, models.weights(training)


def test_a_tiny_gpt_trains(megatron_world: Callable[[int], World]) -> None:
    ((losses, weights),) = megatron_world(1).run(train, models.Cell(steps=2))
    assert len(losses) == 2
    assert all(torch.tensor(losses).isfinite())
    assert "decoder.layers.1.mlp.linear_fc2.weight" in weights

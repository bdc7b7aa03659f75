"""The guide's examples start engines that train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_kfac
from tests._harness import deepspeed_cpu, world
from tests.hosts import moe_jobs, ulysses_jobs

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]


def example(word: str) -> str:
    """The guide's only example with a word in it, with paths that hold everywhere."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/guide/deepspeed.md").read_text(), re.S
    )
    (text,) = [block for block in blocks if word in block]
    return text.replace('"configs/', f'"{ROOT}/configs/')


class Sequences(nn.Module):
    """The cut attention layer of the tests with an output head, which the JSON leaves out."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.net = ulysses_jobs.Net()
        self.net.attention = attention
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


class Tokens(nn.Module):
    """A layer of experts with an output head."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.enter = nn.Linear(moe_jobs.WIDTH, moe_jobs.WIDTH)
        self.experts = experts
        self.head = nn.Linear(moe_jobs.WIDTH, moe_jobs.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts(torch.tanh(self.enter(x)))[0])


def start(rank: int, size: int, text: str, kind: str) -> tuple[int, list[str]]:
    """Run an example and train two steps; applied steps and the layers of K-FAC."""
    deepspeed_cpu.prepare()
    torch.manual_seed(0)
    names: dict[str, Any] = {"ds_kfac": ds_kfac}
    if kind == "sequences":
        names |= {"build": Sequences, "attention": ulysses_jobs.Attend()}
        shape: tuple[int, ...] = (16, ulysses_jobs.LENGTH // size, ulysses_jobs.WIDTH)
    else:
        names |= {"build": Tokens, "expert": moe_jobs.Expert()}
        shape = (16 // size, moe_jobs.WIDTH)
    exec(text, names)
    engine = names["engine"]
    for _ in range(2):
        engine.backward(engine(torch.randn(shape)).square().mean())
        engine.step()
    steps, layers = engine.kfac.counters.steps, list(engine.kfac.owners)
    engine.destroy()
    return steps, layers


@pytest.mark.parametrize(
    ("word", "kind", "layer"),
    [
        ("DistributedAttention", "sequences", "net.query"),
        ("MoE(", "tokens", "experts.deepspeed_moe.experts.deepspeed_experts.1.down"),
    ],
)
def test_the_example_trains(word: str, kind: str, layer: str) -> None:
    """On two ranks, with the JSON it names."""
    for steps, layers in world(2).run(start, example(word), kind, isolated=True, timeout=120):
        assert steps == 2 and layer in layers

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
from tests.hosts import moe_jobs, pipeline_jobs, ulysses_jobs

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


class Head(nn.Module):
    """The last stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(pipeline_jobs.WIDTH, pipeline_jobs.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class Batches:
    """As many batches as are asked for."""

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        return torch.randn(2, pipeline_jobs.WIDTH), torch.randn(2, pipeline_jobs.WIDTH)


def build_under_zero_init(attention: Any) -> nn.Module:
    """As large models are: before there is an ``mpu``, the JSON alone says who shares sequences."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=str(ROOT / "configs/zero3_kfac_ulysses.json")):
        return Sequences(attention)


def start(rank: int, size: int, text: str, kind: str) -> tuple[int, list[str]]:
    """Run an example and train two steps; applied steps and the layers of K-FAC."""
    deepspeed_cpu.prepare()
    torch.manual_seed(0)
    names: dict[str, Any] = {"ds_kfac": ds_kfac, "attention": ulysses_jobs.Attend()}
    names |= {"Embed": pipeline_jobs.Block, "Block": pipeline_jobs.Block, "Head": Head}
    names |= {"loss": pipeline_jobs.loss, "batches": Batches(), "expert": moe_jobs.Expert()}
    names["build"] = Tokens if kind == "tokens" else build_under_zero_init
    exec(text, names)
    engine = names["engine"]
    shape = (16, ulysses_jobs.LENGTH // size, ulysses_jobs.WIDTH)
    for _ in range(2 - engine.global_steps):  # that of pipelines trains a step itself
        if kind == "stages":
            engine.train_batch(names["batches"])
            continue
        x = torch.randn(shape if kind == "sequences" else (16 // size, moe_jobs.WIDTH))
        engine.backward(engine(x).square().mean())
        engine.step()
    steps, layers = engine.kfac.counters.steps, [spec.name for spec in engine.kfac.layers.layers]
    assert engine.train_batch_size() == 16
    engine.destroy()
    return steps, layers


@pytest.mark.parametrize(
    ("word", "kind", "layers"),
    [
        ("DistributedAttention", "sequences", ["net.query"]),
        ("PipelineModule", "stages", ["1.linear", "2.linear"]),
        ("MoE(", "tokens", ["experts.deepspeed_moe.experts.deepspeed_experts.1.down"]),
    ],
)
def test_the_example_trains(word: str, kind: str, layers: list[str]) -> None:
    """On two ranks, with the JSON it names; both stages of a pipeline have layers."""
    found = world(2).run(
        *(start, example(word), kind),
        isolated=True,
        timeout=120,
        compare_collectives=kind != "stages",
    )
    for rank, (steps, names) in enumerate(found):
        assert steps == 2 and layers[rank % len(layers)] in names
        assert not any("head" in name for name in names)

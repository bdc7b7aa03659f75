"""A real ZeRO engine runs inside the pool, in the pool's own process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests._harness import deepspeed_cpu

pytest.importorskip("deepspeed")


def _train(rank, world_size, stage):
    deepspeed = deepspeed_cpu.prepare()
    deepspeed_cpu.prepare()  # may be called again
    group = dist.group.WORLD
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,  # plain SGD is not on DeepSpeed's list
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    data = torch.arange(2 * world_size * 6, dtype=torch.float32).reshape(-1, 6).sin()
    losses = []
    for _ in range(2):
        loss = engine(data[2 * rank : 2 * rank + 2]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    assert dist.group.WORLD is group
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    engine.destroy()
    return losses, weights


def _train_plainly():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(24, dtype=torch.float32).reshape(-1, 6).sin()
    for _ in range(2):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_engine_trains_in_the_pool(run_world, stage):
    results = run_world(2, _train, stage)
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][1], _train_plainly())

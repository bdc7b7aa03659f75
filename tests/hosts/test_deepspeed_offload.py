"""Optimizer offload to the CPU under ZeRO 1, 2 and 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests._harness import world
from tests.hosts import deepspeed_cells as cells
from tests.hosts import topology_jobs as jobs
from tests.hosts.deepspeed_cells import cell
from tests.hosts.topology_jobs import Cell

pytestmark = pytest.mark.dist

OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
PARAMS = {**OFFLOAD, "offload_param": {"device": "cpu", "pin_memory": False}}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_match_the_oracle(size: int) -> None:
    """All stages; optimizer type KFAC and plain SGD; accumulation; parameters offloaded too."""
    variants, items = [], []
    for stage in "123":
        items.append(cell("natural/sgd", stage, zero=OFFLOAD))
        items.append(cell("natural", stage, accumulation=4, uneven=True, zero=OFFLOAD))
        variants += ["natural/sgd", "natural"]
    items.append(cell("orthogonal", "3", zero={**PARAMS, "sub_group_size": 50}))
    items.append(cell("eigen_adam", "2", zero={**OFFLOAD, "round_robin_gradients": True}))
    variants += ["orthogonal", "eigen_adam"]
    found = world(size).run(cells.reports, items, timeout=240)[0]
    cells.assert_close(size, items, variants, found)


def cached_norms(rank: int, size: int, items: list[Cell]) -> list[tuple[float, float, float]]:
    """Per cell: the norm the optimizer remembers, that of its buffers, and the engine's."""
    results = []
    for item in items:
        engine = jobs.make_engine(item, size)
        optimizer, seen = engine.optimizer, []
        step = optimizer.step

        def spying_step(*args: Any, opt: Any = optimizer, run: Any = step, **kw: Any) -> Any:
            seen.append((_remembered(opt), _of_buffers(opt)))  # noqa: B023
            return run(*args, **kw)

        optimizer.step = spying_step
        for x, y, factor in jobs.micro_batches(rank, size, item, 0):
            engine.backward(jobs.loss_sum(engine(x), y, integers=False) * factor)
            engine.step()
        results.append((*seen[0], float(engine.get_global_grad_norm())))
        engine.destroy()
    return results


def _remembered(optimizer: Any) -> float:
    """The global norm as the optimizer will compute it, from the norms it remembers."""
    if hasattr(optimizer, "scaled_global_norm"):
        return float(optimizer.scaled_global_norm())
    return float(torch.stack([n.float() for n in optimizer._get_norm_groups()]).norm())


def _of_buffers(optimizer: Any) -> float:
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
    flats = optimizer.fp32_partitioned_groups_flat if flats is None else flats
    total = sum(flat.grad.double().square().sum() for flat in flats)
    torch.distributed.all_reduce(total)
    return float(total.sqrt())


def test_remembered_norms_are_those_of_the_directions() -> None:
    """Stale ones would make clipping and overflow checks look at another vector."""
    items = [cell("natural/sgd", stage, zero=OFFLOAD) for stage in "123"]
    items.append(cell("natural/sgd", "2"))
    raw = {round(engine, 5) for *_, engine in world(2).run(_raw_norms, items)[0]}
    for remembered, buffers, engine in world(2).run(cached_norms, items[:3])[0]:
        assert remembered == pytest.approx(buffers, rel=1e-5)
        assert abs(remembered - engine) > 0.01 * engine  # a direction is not a gradient
        assert round(engine, 5) in raw


def _raw_norms(rank: int, size: int, items: list[Cell]) -> list[tuple[float, float]]:
    """The engine's norm after one step without ds_kfac."""
    import deepspeed

    from tests._harness import deepspeed_cpu

    deepspeed_cpu.prepare()
    results = []
    for item in items:
        net = jobs.make_net(item)
        config = jobs.deepspeed_config(item, size)
        engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[
            0
        ]
        for x, y, factor in jobs.micro_batches(rank, size, item, 0):
            engine.backward(jobs.loss_sum(engine(x), y, integers=False) * factor)
            engine.step()
        results.append((0.0, float(engine.get_global_grad_norm())))
        engine.destroy()
    return results


def bad_gradients(rank: int, size: int, stages: list[str]) -> list[dict[str, Any]]:
    """A step with NaN on the last rank between two good ones; buffers are kept across steps."""
    results = []
    for stage in stages:
        item = cell("natural", stage, zero=OFFLOAD)
        engine = jobs.make_engine(item, size)
        history, step = [], 0
        for bad in (False, True, False):
            for x, y, factor in jobs.micro_batches(rank, size, item, step):
                scale = float("nan") if bad and rank == size - 1 else factor
                engine.backward(jobs.loss_sum(engine(x), y, integers=False) * scale)
                engine.step()
            step += not bad
            history.append(jobs.full_weights(engine))
        results.append({"history": history, "counters": dict(vars(engine.kfac.counters))})
        engine.destroy()
    return results


def test_a_bad_step_leaves_no_trace() -> None:
    """fp32, where DeepSpeed looks for NaN only in the norms that it remembers."""
    stages = ["1", "2", "3"]
    bad = world(2).run(bad_gradients, stages)[0]
    for stage, result in zip(stages, bad, strict=True):
        first, second, third = result["history"]
        for name, value in first.items():
            assert torch.equal(value, second[name]), (stage, name)
            assert torch.isfinite(third[name]).all(), (stage, name)
            assert not torch.equal(value, third[name]), (stage, name)
        assert result["counters"]["skipped"] == 1
        assert result["counters"]["steps"] == 2

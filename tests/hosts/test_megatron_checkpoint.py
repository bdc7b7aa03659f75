"""K-FAC state in Megatron's checkpoints: exact resume, other layouts, states that are not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests._harness import World
from tests.hosts import megatron_checkpoint_jobs as checkpoints
from tests.hosts.megatron_cells import cell

pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.dist,
]
Worlds = Callable[[int], World]
# Old statistics have to be there after the resume: they are used until the fourth step.
SPARSE = {"factor_update_steps": 2, "inv_update_steps": 4}
LAYOUTS = {
    "dp2": (2, cell(kfac=SPARSE)),
    "dp2_distopt": (2, cell(kfac=SPARSE, distributed=True, optimizer="adam")),
    "tp2_exact": (2, cell(kfac=SPARSE, tp=2)),
    "tp2_block": (2, cell(kfac={**SPARSE, "tensor_parallel": "block"}, tp=2)),
    "pp2": (2, cell(kfac=SPARSE, pp=2)),
}


def same(left: checkpoints.Weights, right: checkpoints.Weights) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name][0], right[name][0]) for name in left
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_resume_is_exact(name: str, megatron_world: Worlds, tmp_path: Path) -> None:
    ranks, of = LAYOUTS[name]
    world = megatron_world(ranks)
    arguments = (of, str(tmp_path), "torch_dist")
    compare = of.pp == 1
    whole = world.run(checkpoints.save_and_go_on, *arguments, compare_collectives=compare)
    resumed = world.run(checkpoints.resume, *arguments, compare_collectives=compare)
    for before, (after, _) in zip(whole, resumed, strict=True):
        assert same(before, after)


def test_format_torch_of_ranks_that_own_everything(megatron_world: Worlds, tmp_path: Path) -> None:
    of = cell(kfac={**SPARSE, "tensor_parallel": "block"}, tp=2)
    arguments = (of, str(tmp_path), "torch")
    whole = megatron_world(2).run(checkpoints.save_and_go_on, *arguments)
    for before, (after, _) in zip(
        whole, megatron_world(2).run(checkpoints.resume, *arguments), strict=True
    ):
        assert same(before, after)


def test_another_number_of_data_parallel_ranks(megatron_world: Worlds, tmp_path: Path) -> None:
    _, of = LAYOUTS["dp2"]
    arguments = (of, str(tmp_path), "torch_dist")
    whole = megatron_world(2).run(checkpoints.save_and_go_on, *arguments)
    ((alone, _),) = megatron_world(1).run(checkpoints.resume, *arguments)
    for name, (value, _) in models_whole(whole).items():
        torch.testing.assert_close(alone[name][0], value, rtol=1e-4, atol=1e-6)


def models_whole(reports: list[checkpoints.Weights]) -> checkpoints.Weights:
    """Data-parallel ranks hold the same."""
    assert same(reports[0], reports[1])
    return reports[0]


def test_states_that_are_not_there(megatron_world: Worlds, tmp_path: Path) -> None:
    _, of = LAYOUTS["dp2"]
    world, plain = megatron_world(2), replace(of, kfac=None)
    world.run(checkpoints.save_and_go_on, plain, str(tmp_path), "torch_dist")
    for _, metrics in world.run(checkpoints.resume, of, str(tmp_path), "torch_dist"):
        assert metrics["steps"] == checkpoints.STEPS  # anew, with resume: "auto"
    required = checkpoints.fresh(of, resume="require")
    for text in world.run(checkpoints.refusal, required, str(tmp_path)):
        assert "E304" in text and "'require'" in text


def test_a_state_may_be_left_behind(megatron_world: Worlds, tmp_path: Path) -> None:
    _, of = LAYOUTS["dp2"]
    world = megatron_world(2)
    world.run(checkpoints.save_and_go_on, of, str(tmp_path), "torch_dist")
    world.run(checkpoints.resume, replace(of, kfac=None), str(tmp_path), "torch_dist")
    anew = checkpoints.fresh(of, resume="fresh")
    for _, metrics in world.run(checkpoints.resume, anew, str(tmp_path), "torch_dist"):
        assert metrics["steps"] == checkpoints.STEPS


def test_another_model_is_refused_by_name(megatron_world: Worlds, tmp_path: Path) -> None:
    _, of = LAYOUTS["dp2"]
    world = megatron_world(2)
    world.run(checkpoints.save_and_go_on, of, str(tmp_path), "torch_dist")
    other = checkpoints.fresh(of, skip_layers=["*linear_fc1"])
    for text in world.run(checkpoints.refusal, other, str(tmp_path)):
        assert "E302" in text and "linear_fc1: not preconditioned in this model" in text

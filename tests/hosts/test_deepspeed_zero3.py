"""ZeRO 3: weights in slices on every rank, gradients of whole layers on none but the owner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests._harness import world
from tests.hosts import deepspeed_cells as cells
from tests.hosts import topology_table as table
from tests.hosts import zero3_jobs as jobs
from tests.hosts.deepspeed_cells import cell
from tests.hosts.topology_jobs import Cell
from tests.reference.dense_kfac import DenseKFAC

pytestmark = pytest.mark.dist

OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
ALL_CUT = {"stage3_param_persistence_threshold": 0}  # small parameters are cut as well
SUB_GROUPS = {"sub_group_size": 50}  # a sub-group per parameter or two


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_weights_match_the_oracle(size: int) -> None:
    """Persistent and cut small parameters, sub-groups, ``zero.Init``, uneven accumulation."""
    variants, items = [], []
    for variant in ("natural", "natural/sgd", "orthogonal", "eigen_adam"):
        items.append(cell(variant, "3", zero={**ALL_CUT, **SUB_GROUPS}, zero_init=True))
        variants.append(variant)
    for variant in ("natural", "orthogonal"):
        items.append(cell(variant, "3", accumulation=4, uneven=True))
        variants.append(variant)
    if size == 4:  # weights are kept twice, gradients are not
        items.append(cell("natural", "3", zero={**ALL_CUT, "zero_hpz_partition_size": 2}))
        variants.append("natural")
    found = world(size).run(cells.reports, items, timeout=240)[0]
    assert {report.wrapper for report in found} == {"DeepSpeedZeroOptimizer_Stage3"}
    cells.assert_close(size, items, variants, found)


@pytest.mark.parametrize("size", [2, 4])
def test_exact_sums_give_identical_weights(size: int) -> None:
    """With integer data the cut does not change a bit, against one process without ZeRO."""
    settings = {**table.INTERVALS, "factor_decay": 0.5}
    plain, sharded = (
        [
            Cell(host, {"direction": direction, **settings}, integers=True)
            for direction in ("orthogonal", "ekfac")
        ]
        for host in ("0", "3")
    )
    expected = world(1).run(cells.reports, plain)[0]
    found = world(size).run(cells.reports, sharded)[0]
    for one, other in zip(expected, found, strict=True):
        cells.assert_identical(one, other)


def reference(kind: str) -> dict[str, torch.Tensor]:
    """Weights of the fp64 oracle for the odd network."""
    net = jobs.build(kind).double()
    linear = [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    ]
    trainable = [param for param in net.parameters() if param.requires_grad]
    oracle = DenseKFAC(net, linear, damping=0.3, optimizer=torch.optim.SGD(trainable, lr=0.1))
    for step in range(jobs.STEPS):
        x = jobs.odd_batch(step).double()
        oracle.step(lambda x=x: jobs.objective(net(x)) / jobs.ROWS)
    return {name: param.detach() for name, param in net.named_parameters()}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_odd_dimensions_frozen_parameters_and_adapters(size: int) -> None:
    """A 5x7 weight on 2, 3 and 4 ranks; frozen layers and biases; LoRA adapters."""
    kinds = ["plain", "frozen", "lora"]
    expected = {kind: reference(kind) for kind in kinds}
    for zero in ({}, {**ALL_CUT, **SUB_GROUPS}):
        found = world(size).run(jobs.train_odd, kinds, zero)
        for kind, result in zip(kinds, found[0], strict=True):
            measured = cells.difference(result["weights"], expected[kind])
            assert measured < 1e-5, (kind, zero, measured)
        assert found[0][0]["layers"] == ["0", "2"]
        assert found[0][1]["layers"] == ["2"]
        assert found[0][2]["layers"] == ["0.down", "0.up", "2.down", "2.up"]


def test_adapters_of_peft() -> None:
    """Hugging Face's LoRA: wrapped layers, frozen weights, adapters are what is preconditioned."""
    pytest.importorskip("peft")
    (found,) = world(2).run(jobs.train_odd, ["peft"], {**ALL_CUT, **SUB_GROUPS})[0]
    assert cells.difference(found["weights"], reference("peft")) < 1e-5
    assert len(found["layers"]) == 4
    assert all("lora_" in name for name in found["layers"])


def test_sub_groups_keep_the_learning_rate_of_their_group() -> None:
    """The KL clip weighs layers by learning rate; sub-groups outnumber parameter groups."""
    expected = world(2).run(jobs.grouped, 0, {})[0]
    found = world(2).run(jobs.grouped, 3, {**ALL_CUT, **SUB_GROUPS})[0]
    assert cells.difference(found, expected) < 1e-5


@pytest.mark.parametrize("zero", [{}, OFFLOAD], ids=["device", "offload"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_without_gradient_stays_where_it_is(stage: int, zero: dict[str, Any]) -> None:
    """DeepSpeed's buffers still hold the last gradient, which it would apply again."""
    uses = [True, False, False, True]
    expected = world(2).run(jobs.branches, 0, {}, {}, uses)[0]
    found = world(2).run(jobs.branches, stage, zero, {}, uses)[0]
    for name in ("sometimes.weight", "sometimes.bias", "scale"):
        assert not torch.equal(found[0][name], found[1][name]), name
        assert torch.equal(found[1][name], found[2][name]), name
        assert torch.equal(found[2][name], found[3][name]), name
    assert cells.difference(found[-1], expected[-1]) < 1e-5


@pytest.mark.parametrize("zero", [{}, OFFLOAD], ids=["device", "offload"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_late_micro_batch_does_not_add_to_an_old_gradient(
    stage: int, zero: dict[str, Any]
) -> None:
    """Used in the second micro-batch alone: its gradient is added to whatever is there."""
    expected = world(2).run(jobs.late_branch, 0, {})[0]
    found = world(2).run(jobs.late_branch, stage, zero)[0]
    assert cells.difference(found[-1], expected[-1]) < 1e-5


def test_hooks_gather_nothing() -> None:
    """Released weights stay released: as many all-gathers as without ds_kfac."""
    for found, plain in zip(
        world(2).run(jobs.gathers, True), world(2).run(jobs.gathers, False), strict=True
    ):
        assert found["gathers"] == plain["gathers"] > 0
        assert found["external"] == 0
        assert found["statuses"] == {"NOT_AVAILABLE"}


@pytest.mark.parametrize("direction", ["natural", "ekfac"])
def test_no_rank_holds_a_whole_gradient(direction: str) -> None:
    """Memory and bytes of an ordinary step on four ranks.

    What ds_kfac allocates at once stays below one gradient of the model, no buffer is larger
    than the layers of one owner, and at most 2/dp of the gradient's bytes travel each way.
    """
    size = 4
    for found in world(size).run(jobs.memory, direction):
        share = found["gradient"] / size
        print(
            f"\npeak {found['peak'] / share:.2f}, largest {found['largest'] / share:.2f} of a "
            f"rank's share of the gradient, {found['owned']} of 16 layers owned"
        )
        assert found["applied"]
        assert found["owned"] == 4
        assert found["largest"] <= share
        assert found["peak"] < found["gradient"]
        for kind in ("gradients", "directions"):
            sent = found["ledger"]["kinds"][kind]
            assert sent["calls"] == 1
            assert 0 < sent["bytes"] == sent["planned_bytes"] <= 2 * share, (kind, sent)

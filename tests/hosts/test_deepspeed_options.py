"""DeepSpeed options that change where a gradient is and when; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_kfac
from ds_kfac.errors import UnsupportedError
from tests._harness import deepspeed_cpu, world
from tests.hosts import deepspeed_cells as cells
from tests.hosts import topology_table as table
from tests.hosts.deepspeed_cells import Report, cell
from tests.hosts.topology_jobs import Cell

pytestmark = pytest.mark.dist

# Sections of zero_optimization, by the stages that read them.
ZERO_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("12", {"round_robin_gradients": True}),
    ("12", {"parameter_alignment": True}),
    ("2", {"round_robin_gradients": True, "parameter_alignment": True}),
    ("23", {"contiguous_gradients": False}),
    ("123", {"overlap_comm": True}),
    ("2", {"overlap_comm": False, "contiguous_gradients": True}),
    ("23", {"reduce_scatter": False}),
    ("12", {"use_multi_rank_bucket_allreduce": False}),
    ("3", {"sub_group_size": 50, "contiguous_gradients": False}),
]
# Sections beside it.
OTHER_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("0123", {"prescale_gradients": True}),
    ("0123", {"prescale_gradients": True, "gradient_predivide_factor": 2.0}),
    ("0123", {"managed_gradient_accumulation": False}),
    ("0123", {"communication_data_type": "fp32"}),
]


def option_cells() -> list[Cell]:
    items = [cell("natural", s, zero=zero) for stages, zero in ZERO_OPTIONS for s in stages]
    for stages, extra in OTHER_OPTIONS:
        unmanaged = "managed_gradient_accumulation" in extra
        for stage in stages:
            zero = {"reduce_scatter": False} if stage != "0" and "prescale" in str(extra) else None
            accumulation = 4 if unmanaged else 1
            items.append(cell("natural", stage, accumulation=accumulation, zero=zero, extra=extra))
    return items


@pytest.mark.parametrize("size", [2, 3])
def test_weights_match_the_oracle(size: int) -> None:
    """Every option on every stage that reads it, clipping of the raw gradient included."""
    items = option_cells()
    found = world(size).run(cells.reports, items, timeout=240)[0]
    cells.assert_close(size, items, ["natural"] * len(items), found)


def test_the_engines_norm_is_that_of_the_raw_gradient() -> None:
    """``get_global_grad_norm()``: unclipped, unscaled, the same under every stage."""
    clipped = [cell("natural", stage) for stage in "0123"]
    items = [*clipped, *(cell("natural", stage, clipping=0.0) for stage in "0123")]
    found: list[Report] = world(2).run(cells.reports, items)[0]
    exact = found[0].norms
    assert max(exact) > table.CLIPPING, "clipping never happened"
    for report in found[:4]:
        assert report.norms == pytest.approx(exact, rel=1e-4)
    for report in found[4:]:  # the first gradient is the same, clipped or not
        assert report.norms[0] == pytest.approx(exact[0], rel=1e-5)
        assert cells.difference(report.weights, found[0].weights) > 1e-3


def test_summed_gradients() -> None:
    """``gradient_allreduce_op: sum`` with a loss divided by the ranks is the mean again."""
    items = [cell("natural", stage, extra={"gradient_allreduce_op": "sum"}) for stage in "012"]
    found = world(2).run(summed_reports, items)[0]
    cells.assert_close(2, items, ["natural"] * 3, found)


def summed_reports(rank: int, size: int, items: list[Cell]) -> list[Report]:
    """As ``reports``, with every loss divided by the number of ranks."""
    from tests.hosts import topology_jobs

    original = topology_jobs.loss_sum

    def shared(*args: Any, **kwargs: Any) -> torch.Tensor:
        return original(*args, **kwargs) / size

    topology_jobs.loss_sum = shared
    try:
        return cells.reports(rank, size, items)
    finally:
        topology_jobs.loss_sum = original


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stage": 4}}, "stage=4"),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
        "use 'cpu'",
    ),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param"),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "super_offload": True},
            }
        },
        "super_offload",
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"topk_ratio": 0.1},
            }
        },
        "zenflow",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "ratio",
    ),
    ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "quantized"),
    ({"compile": {"deepcompile": True}}, "deepcompile"),
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "master"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "master"),
]


def refusals(rank: int, size: int, sections: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Code and text of each refusal."""
    deepspeed_cpu.prepare()
    found = []
    for section in sections:
        net = torch.nn.Linear(3, 3)
        config = {"train_batch_size": size, "optimizer": {"type": "KFAC", "params": {"lr": 0.1}}}
        try:
            ds_kfac.initialize(
                model=net, model_parameters=net.parameters(), config={**config, **section}
            )
            found.append(("", "was not refused"))
        except UnsupportedError as error:
            found.append((error.code, str(error)))
    return found


def test_what_is_not_supported_is_refused() -> None:
    """Before DeepSpeed builds anything, on every rank, with the setting and the alternative."""
    for found in world(2).run(refusals, [section for section, _ in REFUSED]):
        for (code, text), (section, words) in zip(found, REFUSED, strict=True):
            assert code == "E150", (section, text)
            assert words in text, (section, text)

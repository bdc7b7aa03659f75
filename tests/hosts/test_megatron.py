"""K-FAC in megatron-core's step, at every kind of parallelism, against the dense fp64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests._harness import World
from tests.hosts import megatron_cells as cells
from tests.hosts import megatron_jobs as jobs
from tests.hosts.megatron_cells import NATURAL, cell

# Not imported here: workers import this module, and CUDA has to be answered for before.
pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.dist,
]
Worlds = Callable[[int], World]


def train(worlds: Worlds, ranks: int, of: jobs.Cell) -> list[jobs.Report]:
    # Stages make different calls; everything else is compared between ranks.
    return worlds(ranks).run(
        jobs.train, of, compare_collectives=of.pp == 1, isolated=of.wrappers, timeout=120
    )


def applied_norms(report: jobs.Report) -> list[float | None]:
    """Norms of the steps that were applied."""
    return [norm for norm, ok in zip(report.norms, report.applied, strict=True) if ok]


@pytest.mark.parametrize("name", cells.CI)
def test_weights_are_those_of_one_process(name: str, megatron_world: Worlds) -> None:
    ranks, of = cells.CI[name]
    reports, want = train(megatron_world, ranks, of), cells.expected(of)
    assert jobs.difference(jobs.all_whole(reports), want.weights) <= cells.tolerance(of)
    fp32 = of.dtype == "fp32"
    trained = sum(v.numel() for k, v in want.weights.items() if not any(f in k for f in of.freeze))
    for report in reports:
        # Whatever part of the model a rank has, cut embeddings and tied copies count once.
        assert f" of {trained:,} trainable parameters" in report.coverage
        # What was clipped is the raw gradient, by the same factor everywhere.
        assert applied_norms(report) == pytest.approx(want.norms, rel=1e-5 if fp32 else 2e-2)
        assert applied_norms(report) == pytest.approx(applied_norms(reports[0]), rel=1e-12)
        assert report.kl_scales[-1] == pytest.approx(want.kl_scale, rel=1e-5 if fp32 else 2e-2)
        assert report.metrics["steps"] == of.steps
        assert report.metrics["skipped"] == len(report.applied) - of.steps
        assert report.ledger["bytes"] == report.ledger["planned_bytes"]


def test_work_is_done_once(megatron_world: Worlds) -> None:
    """Every factor block is decomposed by one rank of all that share its layer."""
    of = cell(tp=2, sp=True, steps=1)
    counts = [r.metrics["decompositions"] for r in train(megatron_world, 4, of)]
    assert sum(counts) == 2 * 4 * 2  # A and G of four matrices in two layers
    assert max(counts) < sum(counts)


def test_layers_have_the_names_of_the_whole_model(megatron_world: Worlds) -> None:
    of = cell(pp=2, vp=2, layers=4, steps=1)
    first, last = (r.table for r in train(megatron_world, 2, of))
    for number, table, other in ((0, first, last), (2, first, last), (1, last, first)):
        assert f"decoder.layers.{number}.mlp.linear_fc1 " in table
        assert f"decoder.layers.{number}.mlp" not in other
    assert "embedding.word_embeddings (VocabParallelEmbedding" in first
    assert "output_layer (ColumnParallelLinear" in last
    assert "output layer: its G would have the vocabulary's size" in last


def blocks_of(name: str, part: int) -> tuple[slice, slice]:
    """Rows and columns of a layer's matrix that one of two tensor ranks has."""
    rows = "linear_qkv" in name or "linear_fc1" in name
    half = {"linear_qkv": 24, "linear_fc1": 12, "linear_proj": 8, "linear_fc2": 12}
    size = half[name.rsplit(".", 1)[-1]]
    cut = slice(part * size, (part + 1) * size)
    return (cut, slice(None)) if rows else (slice(None), cut)


@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (2, {"sp": True}), (4, {"sp": True})])
def test_block_mode_has_the_blocks_of_the_whole_factors(
    ranks: int, options: dict[str, Any], megatron_world: Worlds
) -> None:
    of = cell(tp=2, kfac={**NATURAL, "tensor_parallel": "block"}, steps=1, **options)
    reports = train(megatron_world, ranks, of)
    (whole,) = train(megatron_world, 1, cell(steps=1))
    for rank, report in enumerate(reports):
        for name, (found_a, found_g) in report.factors.items():
            rows, columns = blocks_of(name, rank % 2)
            want_a, want_g = whole.factors[name]
            if rows == slice(None):  # the bias is left out: every rank has all of it
                want_a = want_a[:-1, :-1]
            for found, want, cut in ((found_a, want_a, columns), (found_g, want_g, rows)):
                gap = (found - want[cut, cut]).abs().max() / want.abs().max()
                assert gap < 1e-5, (name, rank)
        assert report.ledger["bytes"] == report.ledger["planned_bytes"]
        assert ("tokens" in report.ledger["kinds"]) == bool(options)


def test_block_mode_does_not_depend_on_the_layout_of_tokens(megatron_world: Worlds) -> None:
    block = {**NATURAL, "tensor_parallel": "block"}
    plain = jobs.all_whole(train(megatron_world, 2, cell(tp=2, kfac=block)))
    tokens = jobs.all_whole(train(megatron_world, 4, cell(tp=2, sp=True, kfac=block)))
    assert jobs.difference(tokens, plain) <= cells.FP32
    exact = jobs.all_whole(train(megatron_world, 2, cell(tp=2)))
    assert jobs.difference(exact, plain) > 1e-4


def test_shared_experts_are_dense_layers(megatron_world: Worlds) -> None:
    """They are cut over the tensor group although the experts beside them are not."""
    of = cell(model="moe", extra={"moe_shared_expert_intermediate_size": 24})
    (alone,) = train(megatron_world, 1, of)
    reports = train(megatron_world, 2, replace(of, ep=2, tp=2, sp=True))
    assert "mlp.shared_experts.linear_fc1 " in reports[0].table
    want = {name: value for name, (value, _) in alone.weights.items()}
    assert jobs.difference(jobs.all_whole(reports), want) <= 3 * cells.FP32


def test_a_batch_that_is_run_again_counts_once(megatron_world: Worlds) -> None:
    of = cell(per_token=True)
    once, twice = megatron_world(2).run(jobs.repeat, of)[0]
    assert jobs.difference(twice, once) == 0.0


def test_a_bad_step_leaves_no_trace(megatron_world: Worlds) -> None:
    """A NaN on one rank of two, without a loss scaler that would look for it."""
    for report in megatron_world(2).run(jobs.poisoned, cell()):
        assert report["applied"] == [True, False, True]
        assert report["metrics"]["steps"] == 2
        assert report["metrics"]["skipped"] == 1
        assert report["unchanged"]


def test_detach_leaves_no_trace(megatron_world: Worlds) -> None:
    for distributed in (False, True):
        options = {"distributed": True, "optimizer": "adam"} if distributed else {}
        of = cell(**options, clip=0.3, overlap=True)
        detached, plain, leftovers = megatron_world(2).run(jobs.detached, of)[0]
        assert leftovers == []
        assert detached == plain


def test_disabled_is_no_kfac(megatron_world: Worlds) -> None:
    of = replace(cell(), kfac={"enabled": False})
    without = train(megatron_world, 2, replace(of, kfac=None))
    found = megatron_world(2).run(jobs.losses_of, of)
    assert found == [(report.losses, report.norms) for report in without]


def test_tables_of_ci_and_of_all_cells_agree() -> None:
    assert set(cells.CI) <= set(cells.TABLE)
    assert all(torch.tensor(ranks) >= of.tp * of.pp * of.cp for ranks, of in cells.TABLE.values())

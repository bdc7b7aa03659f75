"""DeepSpeed's mixture of experts: every cut trains as one process with all experts does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests._harness import world
from tests.hosts import moe_jobs as jobs
from tests.hosts import moe_refusal_jobs as refusals
from tests.hosts.moe_jobs import Cell
from tests.hosts.test_checkpoint_ranks import assert_same, stored
from tests.reference.dense_kfac import DenseKFAC
from tests.reference.state import AuxOptions

pytestmark = pytest.mark.dist

INTERVALS = {"factor_update_steps": 1, "inv_update_steps": 2, "factor_decay": 0.9}
NATURAL = {"direction": "natural", "damping": 0.3, "kl_clip": 0.01, **INTERVALS}
ORTHOGONAL = {"direction": "orthogonal", "damping": 0.1, "max_factor_dim": 5, **INTERVALS}
CLIPPING = 0.5

# By number of ranks.
CELLS = {
    1: [Cell(2, 1, 0, NATURAL), Cell(4, 1, 2, ORTHOGONAL, top=2, capacity=0.5)],
    2: [
        Cell(2, 2, 0, NATURAL, clipping=CLIPPING),
        Cell(2, 2, 1, ORTHOGONAL, capacity=0.75),
        Cell(4, 2, 2, NATURAL, own=False, top=2, clipping=CLIPPING),
        Cell(2, 1, 0, ORTHOGONAL, top=2, capacity=0.5),
        Cell(4, 1, 1, NATURAL, clipping=CLIPPING, split=True),
        Cell(4, 2, 2, ORTHOGONAL, starved=True),
    ],
    4: [
        Cell(4, 2, 0, NATURAL, top=2, capacity=0.5, clipping=CLIPPING),
        Cell(4, 2, 1, NATURAL, clipping=CLIPPING, starved=True),
        Cell(2, 2, 2, ORTHOGONAL, starved=True),
        Cell(2, 1, 2, NATURAL, own=False, capacity=0.75),
    ],
}


@functools.cache
def oracle(cell: Cell) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
    """Weights, norms and factors with all experts in one process, float64."""
    net = jobs.Whole(cell).double()
    layers = [*jobs.DENSE]
    layers += [f"experts.{i}.{part}" for i in range(cell.experts) for part in ("up", "down")]
    optimizer = None
    if not cell.own:
        optimizer = torch.optim.AdamW(
            net.parameters(), lr=jobs.LR, weight_decay=jobs.DECAY, eps=jobs.EPS
        )
    reference = DenseKFAC(
        net,
        layers,
        momentum=0.95 if cell.own else 0.0,
        optimizer=optimizer,
        lr=jobs.LR,
        weight_decay=jobs.DECAY,
        gradient_clipping=cell.clipping,
        aux=AuxOptions(lr=jobs.AUX_LR, betas=(0.9, 0.95), weight_decay=jobs.DECAY),
        **{"kl_clip": None, **cell.kfac},
    )
    norms = []
    for step in range(jobs.STEPS):
        x, y = jobs.batch(cell, step)
        reference.step(lambda x=x, y=y: jobs.objective(*net(x.double()), y.double()))
        norms.append(reference.raw_norm)
    weights = {name: param.detach() for name, param in net.named_parameters()}
    return weights, norms, {name: reference.factors(name) for name in layers}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_weights_factors_and_norms_match_the_oracle(size: int) -> None:
    """{1, 2, 4} ranks x {2, 4} experts on {1, 2} ranks x ZeRO 0 to 2; top 1, 2; drops; starved."""
    cells = CELLS[size]
    found = world(size).run(jobs.train, cells, timeout=240)
    for index, cell in enumerate(cells):
        weights, norms, factors = oracle(cell)
        # Adam divides by the root of its own average, which is small for experts' directions; a
        # gradient from a few tokens has low rank, and orthogonalising it amplifies rounding.
        limit = 1e-5 if cell.own and cell.kfac is NATURAL else 1e-4 * (1 + 4 * cell.starved)
        seen: dict[str, Tensor] = {}
        for reports in found:
            report = reports[index]
            for name, value in report["weights"][-1].items():
                assert torch.equal(seen.setdefault(name, value), value), (cell, name)
                assert difference(value, weights[name]) < limit, (cell, name)
            for name, both in report["factors"][-1].items():
                for mine, theirs in zip(both, factors[name], strict=True):
                    assert difference(mine, theirs) < 10 * limit, (cell, name)
            assert report["norms"] == pytest.approx(norms, rel=1e-5), cell
            assert "without calling" in report["left out"][f"{jobs.PREFIX}.gate.wg"]
        assert seen.keys() == weights.keys()


def test_a_starved_expert_rests() -> None:
    """No token on any rank: factors stay to the last bit, the weights see weight decay alone."""
    cell = Cell(4, 2, 1, NATURAL, starved=True)
    for report in world(4).run(jobs.train_cell, cell):
        starved = [name for name in report["factors"][0] if name.startswith("experts.3")]
        for name in starved:
            history = [step[name] for step in report["factors"]]
            weights = [step[f"{name}.weight"] for step in report["weights"]]
            assert not history[0][0].any() and history[1][0].any()
            for before, after in zip(history[1], history[2], strict=True):
                assert torch.equal(before, after)
            rested = weights[1] * (1 - jobs.LR * jobs.DECAY)
            assert torch.allclose(weights[2], rested, rtol=1e-6, atol=0)
            assert not torch.allclose(weights[3], weights[2], rtol=1e-3)
        assert report["counters"]["steps"] == jobs.STEPS


def test_collectives_of_an_ordinary_step() -> None:
    """Five in the group of dense layers, two in a group of experts, starved or not."""
    natural = {**NATURAL, "factor_update_steps": 3, "inv_update_steps": 3}
    for zero in (0, 2):
        found = world(4).run(jobs.train_cell, Cell(4, 2, zero, natural, starved=True))
        everyone = (0, 1, 2, 3)
        for rank, report in enumerate(found):
            capture, *ordinary = report["calls"][:3]
            same = (0, 2) if rank % 2 == 0 else (1, 3)
            assert capture.keys() == {everyone, same}
            for calls in ordinary:
                assert calls[everyone] <= 5 and calls[same] <= 2, (zero, calls)
            for kind, entry in report["ledger"]["kinds"].items():
                assert entry["bytes"] == entry["planned_bytes"], (zero, kind)


def test_a_bad_token_of_one_rank_stops_the_step_everywhere() -> None:
    """Also on ranks whose experts have not seen it."""
    found = world(4).run(jobs.train_cell, Cell(4, 2, 2, NATURAL, poisoned=True))
    for report in found:
        assert report["counters"]["skipped"] == 1 and report["counters"]["steps"] == 3
        for name, value in report["weights"][0].items():
            assert torch.equal(value, report["weights"][1][name]), name
            assert torch.isfinite(report["weights"][-1][name]).all()
            assert not torch.equal(value, report["weights"][-1][name]), name


def test_half_precision_moves_weights_as_the_oracle_does() -> None:
    """Error of the total movement, where routes are so clear that rounding does not flip them."""
    limits = {"bf16": 6e-2, "fp16": 2e-2}
    cells = [Cell(2, 2, 2, NATURAL, starved=True, dtype=dtype) for dtype in limits]
    exact = oracle(Cell(2, 2, 2, NATURAL, starved=True))[0]
    start = {n: p.detach().double() for n, p in jobs.Whole(cells[0]).named_parameters()}
    for reports in world(2).run(jobs.train, cells, isolated=True):
        for report, limit in zip(reports, limits.values(), strict=True):
            weights = {n: value.double() for n, value in report["weights"][-1].items()}
            error = sum(float((value - exact[n]).square().sum()) for n, value in weights.items())
            moved = sum(float((exact[n] - start[n]).square().sum()) for n in weights)
            print(f"{limit}: {(error / moved) ** 0.5:.1e}")
            assert (error / moved) ** 0.5 < limit


def test_engines_resume_exactly(tmp_path: Path) -> None:
    """Between a capture and a refresh, a starved expert among them: every bit on every rank.

    Experts have the same names on all ranks; under these, ranks would load each other's.
    """
    lazy = {"factor_update_steps": 2, "inv_update_steps": 4}
    cells = [
        Cell(4, 2, 0, {**NATURAL, **lazy}, clipping=CLIPPING),
        Cell(4, 2, 1, {**lazy, "direction": "ekfac", "resume": "require"}, starved=True),
        Cell(2, 2, 2, {**ORTHOGONAL, **lazy}, top=2),
        Cell(4, 2, 1, {**NATURAL, **lazy}, own=False),
    ]
    assert world(4).run(jobs.resume, cells, str(tmp_path)) == [[[]] * len(cells)] * 4


def test_warnings_cover_dense_layers_and_experts_at_once(tmp_path: Path) -> None:
    """KFAC-W302 and W113 came once per group of ranks, with the number of its own layers."""
    cell = Cell(2, 2, 1, NATURAL)
    first, second = world(2).run(jobs.warnings_of_changed_solver, cell, str(tmp_path))
    recomputed = [text for text in first + second if "KFAC-W302" in text]
    assert len(recomputed) == 1 and "KFAC-W302 6 layers" in recomputed[0]
    for texts in (first, second):  # each rank speaks of the layers it owns, experts included
        (unseen,) = [text for text in texts if "KFAC-W113" in text]
        assert "deepspeed_experts" in unseen


def test_states_do_not_depend_on_where_experts_are(tmp_path: Path) -> None:
    """Each ``(ranks, expert-parallel ranks)`` loads what the one before it has saved."""
    world(4).run(jobs.resume, [Cell(4, 2, 1, NATURAL)], str(tmp_path))
    source = tmp_path / "0" / f"global_step{jobs.STOP}" / "kfac"
    expected = stored(source)[0]
    names = {key.rpartition("/")[0] for key in expected}
    inside = f"{jobs.PREFIX}.experts.deepspeed_experts"
    experts = {f"{inside}.{index}.{part}" for index in range(4) for part in ("up", "down")}
    assert names == {*jobs.DENSE, *experts}
    for ranks, expert_parallel in ((4, 4), (2, 1), (1, 1), (2, 2), (4, 1), (4, 2)):
        target = tmp_path / f"{ranks}-{expert_parallel}"
        cell = Cell(4, expert_parallel, 1, NATURAL)
        world(ranks).run(jobs.load_and_save, cell, str(source), str(target))
        assert_same(stored(target)[0], expected)
        source = target


@pytest.mark.parametrize(
    ("build", "reason", "alternative"),
    [
        (refusals.pipeline, "a stage's copies hold different experts", "without PipelineModule"),
        (refusals.sequences, "has not been verified", "keep sequences whole"),
        (refusals.auto_ep, "in one tensor for all experts", "use deepspeed.moe.layer.MoE"),
        (refusals.slices, "two kinds of groups", "autotp_size to 1"),
        (refusals.auto_tp, "two kinds of groups", "autotp_size to 1"),
        (refusals.parameters, "DeepSpeed cuts no experts", "stage 1 or 2"),
        (refusals.offload, "has not been verified", "remove zero_optimization.offload_optimizer"),
        (refusals.unfused, "FP16_UnfusedOptimizer", "use fp32, or ZeRO 1 or 2"),
        (refusals.fp32_sums, "BF16_Optimizer", "use fp32, or ZeRO 1 or 2"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-",
)
def test_what_experts_do_not_go_with_is_refused(build: Any, reason: str, alternative: str) -> None:
    """By real engines, alike on all ranks, with one problem each.

    Of a pipeline it was said that it has tensor parallelism too, whose degree DeepSpeed gives as
    its number of stages.
    """
    # DeepSpeed keeps a pipeline's or a caller's groups, and degrees, for the whole process.
    alike = (refusals.parameters, refusals.offload, refusals.unfused, refusals.fp32_sums)
    isolated = build not in alike
    first, second = world(2).run(refusals.refused, build, isolated=isolated)
    assert first == second
    assert first.startswith("KFAC-E150") and reason in first and alternative in first, first
    assert first.count("MoE layers") + first.count("AutoEP") == 1, first


def test_ranks_that_hold_different_experts_raise_together() -> None:
    """Those of the other experts would start to train and wait for ever."""
    messages = world(4).run(jobs.refuse, [(Cell(4, 2, 0, NATURAL, odd=2), {})])
    assert len({message for (message,) in messages}) == 1
    assert "E203" in messages[0][0] and "the set of layers differs" in messages[0][0]


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-12))

"""DeepSpeed pipelines on 2 and 4 stages against the oracle that sees the model in one piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_kfac.errors import UnsupportedError
from ds_kfac.hosts import deepspeed_support
from tests.hosts import pipeline_jobs as jobs
from tests.hosts.pipeline_jobs import Cell
from tests.reference import DenseKFAC
from tests.reference.state import AuxOptions

pytest.importorskip("deepspeed")

EVERY_STEP = {"factor_update_steps": 1, "inv_update_steps": 1}
NATURAL = {"direction": "natural", "damping": 0.3, "kl_clip": 0.001, **EVERY_STEP}
ORTHOGONAL = {"direction": "orthogonal", "damping": 0.3, **EVERY_STEP}
LAYERS = {
    "holes": ["4", "5.linear", "6.linear", "7"],
    "tied": ["1.linear", "4.linear", "5", "6.linear"],
}

# Each line is trained with ZeRO 0 and 1 on 2 ranks (one pipeline of 2 stages) and on 4 (two
# pipelines of 2 stages, one of 4).
VARIANTS = {
    "section": Cell("holes", 2, 0, NATURAL),
    "own": Cell("holes", 2, 0, ORTHOGONAL, own=True),
    "tied": Cell("tied", 2, 0, NATURAL, clipping=0.2),
    "tied own": Cell("tied", 2, 0, NATURAL, own=True, clipping=0.2),
}
CUTS = {(2, 2): "2 stages", (4, 2): "2 stages x 2", (4, 4): "4 stages"}  # (ranks, stages)


def cells(ranks: int) -> dict[tuple[str, int, int], Cell]:
    """All cells of a world, by (variant, stages, ZeRO stage)."""
    return {
        (name, stages, zero): replace(cell, stages=stages, zero=zero)
        for name, cell in VARIANTS.items()
        for size, stages in CUTS
        if size == ranks
        for zero in (0, 1)
    }


FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
AUTOCAST_BF16 = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
AUTOCAST_FP16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
FIXED_SCALE = {"fp16": {"loss_scale": 64.0}}
LARGE_SCALE = {"fp16": {"initial_scale_power": 32, "hysteresis": 1, "loss_scale_window": 2}}
EXTRAS = {
    "reentrant": Cell("tied", 2, 0, NATURAL, clipping=0.2, checkpointing=1),
    "non-reentrant": Cell("tied", 2, 1, NATURAL, clipping=0.2, checkpointing=2, reentrant=False),
    "bf16 zero 0": Cell("tied", 2, 0, NATURAL, own=True, clipping=0.2, dtype="bf16"),
    "bf16 zero 1": Cell("tied", 2, 1, NATURAL, clipping=0.2, dtype="bf16"),
    "bf16 summed in fp32": Cell("tied", 2, 1, NATURAL, clipping=0.2, dtype="bf16", extra=FP32_SUMS),
    "fp16 zero 0": Cell(
        "tied", 2, 0, NATURAL, own=True, clipping=0.2, dtype="fp16", extra=FIXED_SCALE
    ),
    "fp16 zero 1": Cell("tied", 2, 1, NATURAL, clipping=0.2, dtype="fp16", extra=FIXED_SCALE),
    "fp16 overflows": Cell("tied", 2, 1, NATURAL, clipping=0.2, dtype="fp16", extra=LARGE_SCALE),
    "bf16 holes": Cell("holes", 2, 0, NATURAL, own=True, dtype="bf16"),
    "fp16 holes": Cell("holes", 2, 0, NATURAL, own=True, dtype="fp16", extra=FIXED_SCALE),
    "autocast bf16 zero 0": Cell("tied", 2, 0, NATURAL, clipping=0.2, extra=AUTOCAST_BF16),
    "autocast bf16 zero 1": Cell("holes", 2, 1, NATURAL, extra=AUTOCAST_BF16),
    "poisoned": Cell("holes", 2, 0, NATURAL, poison=1),
    "poisoned zero 1": Cell("holes", 2, 1, NATURAL, poison=1),
    "without kfac": Cell("tied", 2, 1, None, clipping=0.2),  # stage 0 reports no norm
    "skips one": Cell("holes", 2, 0, {**NATURAL, "skip_layers": ["7"]}),
}


@pytest.fixture(scope="module")
def runs(world: Callable[[int], Any]) -> dict[int, dict[Any, list[dict[str, Any]]]]:
    """Reports of every cell, by world size and cell, one per rank."""
    results: dict[int, dict[Any, list[dict[str, Any]]]] = {}
    for ranks in (2, 4):
        chosen: dict[Any, Cell] = {**cells(ranks), **(EXTRAS if ranks == 2 else {})}
        if ranks == 4:
            chosen["copies without kfac"] = EXTRAS["without kfac"]
        # Stages send to their neighbours, so that ranks differ in what they call. DeepSpeed
        # remembers a pipeline's groups for the rest of the process: no other test may meet it.
        by_rank = world(ranks).run(
            jobs.train,
            list(chosen.values()),
            timeout=150,
            compare_collectives=False,
            isolated=True,
        )
        results[ranks] = {
            key: [by_rank[rank][index] for rank in range(ranks)] for index, key in enumerate(chosen)
        }
    return results


@pytest.fixture(scope="module")
def oracles() -> Callable[[str], tuple[DenseKFAC, list[float], list[float]]]:
    """Oracle of a variant with its gradient norms and KL scales, made once."""
    made: dict[str, tuple[DenseKFAC, list[float], list[float]]] = {}

    def oracle(variant: str) -> tuple[DenseKFAC, list[float], list[float]]:
        if variant not in made:
            made[variant] = run_oracle(VARIANTS[variant])
        return made[variant]

    return oracle


def run_oracle(cell: Cell) -> tuple[DenseKFAC, list[float], list[float]]:
    model = jobs.Whole(cell.model).double()
    settings = dict(cell.kfac or {})
    for key in EVERY_STEP:
        settings.pop(key)
    options: dict[str, Any] = {"lr": jobs.LR, "weight_decay": jobs.DECAY, "momentum": 0.95}
    options["aux"] = AuxOptions(lr=jobs.AUX_LR, weight_decay=jobs.DECAY)
    if not cell.own:
        options = {"optimizer": sgd(model)}
    reference = DenseKFAC(
        model, LAYERS[cell.model], gradient_clipping=cell.clipping, **settings, **options
    )
    norms, scales = [], []
    for step in range(jobs.STEPS):
        x, y = jobs.batch(cell.model, step)
        reference.step(lambda x=x, y=y: 0.5 * (model(x) - y).square().sum() / jobs.ROWS)
        norms.append(reference.raw_norm)
        scales.append(reference.kl_scale)
    return reference, norms, scales


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=jobs.LR, momentum=0.9, weight_decay=jobs.DECAY)


def difference(reports: list[dict[str, Any]], reference: DenseKFAC) -> float:
    """Largest relative difference of a weight on any rank; every weight is somewhere."""
    expected = dict(reference.model.named_parameters())
    seen = {name for report in reports for name in report["weights"]}
    assert seen == set(expected)
    return max(
        float((weight - expected[name].detach()).norm() / expected[name].detach().norm())
        for report in reports
        for name, weight in report["weights"].items()
    )


CASES = [(ranks, *key) for ranks in (2, 4) for key in cells(ranks)]


@pytest.mark.parametrize(
    ("ranks", "variant", "stages", "zero"),
    CASES,
    ids=[f"{variant}, {CUTS[r, s]}, ZeRO {zero}" for r, variant, s, zero in CASES],
)
def test_pipeline_equals_the_whole_model(
    runs: Any, oracles: Any, ranks: int, variant: str, stages: int, zero: int
) -> None:
    """Weights, factors, raw gradient norm and KL scale, the last two the same on all ranks."""
    reports = runs[ranks][variant, stages, zero]
    reference, norms, scales = oracles(variant)
    assert difference(reports, reference) < 1e-5
    for report in reports:
        assert report["norms"] == pytest.approx(norms, rel=1e-5)
        assert report["norms"] == reports[0]["norms"]
        assert report["scales"] == reports[0]["scales"]
        if VARIANTS[variant].kfac is NATURAL:
            assert report["scales"] == pytest.approx(scales, rel=1e-4)
        for name, factors in report["factors"].items():
            for got, expected in zip(factors, reference.factors(name), strict=True):
                torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("ranks", "stages"), CUTS, ids=CUTS.values())
def test_layers_keep_their_index_in_the_whole_model(runs: Any, ranks: int, stages: int) -> None:
    for variant, cell in VARIANTS.items():
        reports = runs[ranks][variant, stages, 1]
        by_stage = {report["stage"]: report["layers"] for report in reports}
        names = [name for stage in sorted(by_stage) for name in by_stage[stage]]
        assert names == LAYERS[cell.model]


def test_stage_without_layers_takes_part(runs: Any) -> None:
    """It votes, scales its gradients and counts steps; it decomposes nothing."""
    empty = [r for r in runs[4]["section", 4, 0] if not r["layers"]]
    assert [report["stage"] for report in empty] == [0, 1]
    for report in empty:
        counters = report["counters"]
        assert counters["steps"] == counters["preconditions"] == jobs.STEPS
        assert counters["decompositions"] == 0
        assert "K-FAC preconditions 0 layers" in report["table"]


def test_layers_are_shared_out_among_the_copies_of_a_stage(runs: Any) -> None:
    owners = runs[4]["section", 2, 0][-1]["owners"]
    assert set(owners.values()) == {0, 1}


def test_tied_layers_are_left_out_with_the_reason(runs: Any) -> None:
    for ranks, stages in CUTS:
        for report in runs[ranks]["tied", stages, 0]:
            if "tied_modules.projection" in report["weights"]:
                reason = report["left out"]["tied_modules.projection"]
                assert reason == "tied between pipeline layers (TiedLayerSpec 'projection')"


def test_tied_copies_stay_equal(runs: Any) -> None:
    for ranks, stages in CUTS:
        for zero in (0, 1):
            copies = [
                report["weights"]["tied_modules.projection.weight"]
                for report in runs[ranks]["tied own", stages, zero]
                if "tied_modules.projection.weight" in report["weights"]
            ]
            assert len(copies) == 2 * ranks // stages
            assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_norm_is_the_one_that_deepspeed_reports(runs: Any) -> None:
    """Parameters tied between stages count once; in the first step the gradients agree."""
    first = runs[2]["tied", 2, 0][0]["norms"][0]
    for ranks, key in ((2, "without kfac"), (4, "copies without kfac")):
        for report in runs[ranks][key]:
            assert report["norms"][0] == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_activation_checkpointing_counts_once(runs: Any, oracles: Any, mode: str) -> None:
    reports = runs[2][mode]
    assert difference(reports, oracles("tied")[0]) < 1e-5
    for report, plain in zip(reports, runs[2]["tied", 2, 0], strict=True):
        assert report["factors"].keys() == plain["factors"].keys()
        for name, factors in report["factors"].items():
            for got, expected in zip(factors, plain["factors"][name], strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("key", [key for key in EXTRAS if key[:4] in ("bf16", "fp16", "auto")])
def test_half_precision_follows_the_oracle(runs: Any, key: str) -> None:
    """Weights of 8 or 11 bits: what training changed is right to a few per cent of it.

    fp16: every stage holds gradients of the scaled loss, and drops the same steps. Holes: a stage
    without layers has fewer parameter groups, and the wrapper's norm waited for the missing one.
    """
    cell = EXTRAS[key]
    bits = 11 if cell.dtype == "fp16" else 8
    # Without ZeRO the wrapper decays weights once while it is built, undone for type KFAC alone.
    reference, norms, _ = run_oracle(cell)
    start = dict(jobs.Whole(cell.model).named_parameters())
    expected = dict(reference.model.named_parameters())
    for report in runs[2][key]:
        applied = [norm for norm in report["norms"] if norm < float("inf")]
        assert applied == pytest.approx(norms, rel=0.03)
        skipped = len(report["norms"]) - len(applied)
        assert report["counters"]["skipped"] == skipped
        assert (skipped > 5) == (key == "fp16 overflows")
        for name, weight in report["weights"].items():
            moved = float((expected[name] - start[name]).detach().norm())
            rounding = 2.0**-bits * float(weight.norm())
            assert float((weight - expected[name].detach()).norm()) < 0.1 * moved + rounding, name


@pytest.mark.parametrize("key", ["poisoned", "poisoned zero 1"])
def test_bad_step_of_the_last_stage_is_dropped_on_all(runs: Any, key: str) -> None:
    reports = runs[2][key]
    for report in reports:
        assert report["counters"]["skipped"] == 1
        assert report["counters"]["steps"] == jobs.STEPS - 1
        assert all(torch.isfinite(weight).all() for weight in report["weights"].values())
    # The dropped step left no trace: the same batches without it give the same weights.
    cell = EXTRAS[key]
    model = jobs.Whole(cell.model).double()
    reference = DenseKFAC(
        model,
        LAYERS[cell.model],
        optimizer=sgd(model),
        **{name: value for name, value in NATURAL.items() if name not in EVERY_STEP},
    )
    for step in range(jobs.STEPS):
        if step != cell.poison:
            x, y = jobs.batch(cell.model, step)
            reference.step(lambda x=x, y=y: 0.5 * (model(x) - y).square().sum() / jobs.ROWS)
    assert difference(reports, reference) < 1e-5


def test_pattern_that_only_another_stage_matches_is_fine(runs: Any) -> None:
    reports = runs[2]["skips one"]
    assert [name for report in reports for name in report["layers"]] == [
        "4",
        "5.linear",
        "6.linear",
    ]
    assert "matches skip_layers" in reports[1]["left out"]["7"]


def test_coverage_is_judged_over_all_stages(world: Any) -> None:
    cells = [
        Cell("nothing", 2, 0, NATURAL),
        Cell("nothing", 2, 0, NATURAL, own=True),
        Cell("holes", 2, 0, {**NATURAL, "skip_layers": ["5.liner"]}),
        Cell("holes", 2, 0, {**NATURAL, "skip_layers": ["5.liner"]}, own=True),
    ]
    first, second = world(2).run(jobs.refuse, cells, compare_collectives=False, isolated=True)
    assert first == second
    for message in first[:2]:
        assert message.startswith("KFAC-E132 no layer of this model can be preconditioned")
        assert "0: Gain is not supported" in message  # of the first stage
        assert "3: Gain is not supported" in message  # and of the last
    for message in first[2:]:
        assert message.startswith("KFAC-E134 skip_layers pattern '5.liner' matches no module")
        assert "did you mean '5.linear'?" in message


def test_last_micro_batch_is_no_notion_of_pipelines(world: Any) -> None:
    cells = [Cell("holes", 2, 0, {**NATURAL, "factor_micro_batches": "last"})]
    first, second = world(2).run(jobs.refuse, cells, compare_collectives=False, isolated=True)
    assert first == second
    assert first[0].startswith("KFAC-E155 factor_micro_batches='last' is not available in pipe")


def test_pipeline_with_tensor_slicing_is_refused() -> None:
    grid = type("Grid", (), {"model_parallel_size": 2})()
    engine = type("PipelineEngine", (), {"grid": grid})()
    with pytest.raises(UnsupportedError, match=r"axis 'model'.*use the axes 'pipe' and 'data'"):
        deepspeed_support.check_engine(engine)


def test_pipeline_with_scaled_autocast_is_refused(world: Any) -> None:
    """Stages but the last failed in their first step, and the last one waited for ever."""
    for zero in (0, 1):
        cell = Cell("holes", 2, zero, NATURAL, extra=AUTOCAST_FP16)
        for messages in world(2).run(jobs.refuse, [cell], compare_collectives=False, isolated=True):
            assert "KFAC-E150 torch_autocast.dtype='float16' in a pipeline" in messages[0]
            assert "use 'bfloat16', or fp16.enabled" in messages[0]


def test_other_pipeline_engines_are_refused() -> None:
    engine = type("DualPipeVEngine", (), {})()
    with pytest.raises(UnsupportedError, match="engine DualPipeVEngine is not supported"):
        deepspeed_support.check_engine(engine)

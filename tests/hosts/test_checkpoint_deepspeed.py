"""DeepSpeed engines whose checkpoints carry K-FAC state: exact resume on every kind of engine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests._harness import world
from tests.hosts import engine_checkpoint_jobs as jobs
from tests.hosts import engine_policy_jobs as policy_jobs
from tests.hosts import pipeline_jobs
from tests.hosts.test_checkpoint_ranks import assert_same, stored
from tests.hosts.topology_jobs import Cell

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
    ),
]


def settings(direction: str, **changes: Any) -> dict[str, Any]:
    return {"direction": direction, **jobs.SETTINGS, **changes}


OFFLOAD = {
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}
CELLS = {
    "ZeRO 0": Cell("0", settings("natural"), own=False),
    "ZeRO 1, accumulation": Cell("1", settings("ekfac"), accumulation=2),
    "ZeRO 2, uneven, clipping": Cell(
        "2", settings("eigen_adam"), accumulation=2, uneven=True, clipping=0.5
    ),
    "ZeRO 3": Cell("3", settings("orthogonal", resume="require")),
    "offload, grafting": Cell(
        "2", settings("natural", grafting="adam", kl_clip=None), extra=OFFLOAD
    ),
    "ZeRO 0, bf16": Cell("0", settings("orthogonal"), dtype="bf16"),
    "ZeRO 1, bf16, BF16_Optimizer": Cell(
        "1",
        settings("natural"),
        dtype="bf16",
        extra={"data_types": {"grad_accum_dtype": "fp32"}},
    ),
}


def test_engines_resume_exactly(tmp_path: Path) -> None:
    """Between a capture and a refresh: weights, factors, bases, moments, counters, every bit.

    Without K-FAC state the resumed run went on with a first batch's statistics.
    """
    results = world(2).run(jobs.resume, list(CELLS.values()), str(tmp_path), timeout=120)
    assert [dict(zip(CELLS, found, strict=True)) for found in results] == [
        dict.fromkeys(CELLS, [])
    ] * 2


def test_fp16_resumes_exactly(tmp_path: Path) -> None:
    """A dynamic loss scale that overflows before and after: its state, and the skipped steps."""
    scale = {"fp16": {"initial_scale_power": 18, "loss_scale_window": 2}}
    cells = [
        Cell(stage, settings("natural"), dtype="fp16", extra=scale) for stage in ("0", "2", "3")
    ]
    found = world(2).run(jobs.resume, cells, str(tmp_path), isolated=True, timeout=120)
    assert found == [[[]] * len(cells)] * 2


def test_pipelines_resume_exactly(tmp_path: Path) -> None:
    """Stages with and without layers write one checkpoint, which any cut into stages reads."""
    kfac = settings("ekfac", kl_clip=0.01)
    cells = [
        pipeline_jobs.Cell("holes", 2, 0, kfac),
        pipeline_jobs.Cell("tied", 2, 1, settings("orthogonal"), own=True),
    ]
    found = world(2).run(
        jobs.resume_pipeline, cells, str(tmp_path), isolated=True, compare_collectives=False
    )
    assert found == [[[], []]] * 2
    loaded = world(4).run(
        jobs.load_pipeline,
        pipeline_jobs.Cell("holes", 2, 0, kfac),
        str(tmp_path / "0"),
        isolated=True,
        compare_collectives=False,
    )
    together = {key: value for part in loaded for key, value in part.items()}
    assert_same(together, stored(tmp_path / "0" / f"global_step{jobs.STOP}" / "kfac")[0])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One engine on two ranks, whose checkpoints are loaded in every way."""
    folder = str(tmp_path_factory.mktemp("policies"))
    both = world(2).run(policy_jobs.policies, folder, timeout=120)
    # The first rank alone warns, and it alone moves ``latest``: when others look is up to them.
    own = {"warning": None, "order": None}
    assert {**both[0], **own} == {**both[1], **own}
    found: dict[str, Any] = both[0]
    return found


def test_latest_moves_after_the_state_is_complete(outcomes: dict[str, Any]) -> None:
    """A tag that ``latest`` names has K-FAC state, whenever the job is killed."""
    assert outcomes["order"][:2] == [(True, True)] * 2


def test_the_latest_or_a_named_tag_is_restored(outcomes: dict[str, Any]) -> None:
    """In the engine that saved them, back and forth."""
    assert outcomes["latest"] == "loaded 5" and outcomes["latest state"] == []
    assert outcomes["tag"] == outcomes["right one"] == "loaded 3"
    assert outcomes["tag state"] == []


def test_the_state_belongs_to_the_optimizers(outcomes: dict[str, Any]) -> None:
    """Weights loaded alone leave K-FAC as it is, like every other optimizer state."""
    assert outcomes["module only"] == outcomes["without optimizer"] == "loaded 7"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("fresh", "loaded 0"),
        ("require present", "loaded 3"),
        ("require absent", r"KFAC-E304 no K-FAC state in .*/b/kfac, and kfac.resume is 'require'"),
        ("require nothing", "KFAC-E304 no checkpoint to resume from"),
        ("auto absent", "loaded 0"),
        ("auto nothing", "nothing 3"),
        ("other step", "KFAC-E305 .* saved at step 5 of the engine, which has loaded step 3"),
        ("other save", "KFAC-E305 .* was not saved together with the engine's"),
        ("damaged", "KFAC-E301 .* sha256 differs"),
        ("damaged, fresh", "loaded 0"),
    ],
)
def test_resume_says_what_happens(outcomes: dict[str, Any], case: str, expected: str) -> None:
    """No silent restart, no state of another step; on every rank alike."""
    assert re.match(expected, outcomes[case]), outcomes[case]


def test_a_missing_state_is_said(outcomes: dict[str, Any]) -> None:
    """The first sign was a bent loss curve."""
    (text,) = outcomes["warning"]
    assert re.match("KFAC-W304 no K-FAC state in .*/b/kfac: K-FAC starts anew", text)


def test_a_save_that_fails_leaves_latest_alone(outcomes: dict[str, Any]) -> None:
    """Neither rank has written anything of DeepSpeed's by then."""
    text, latest, has_models = outcomes["full disk"]
    assert text.startswith("KFAC-E307") and "rank 1: OSError" in text
    assert latest != "full" and not has_models


def test_detached_engines_save_as_deepspeed_does(outcomes: dict[str, Any]) -> None:
    assert outcomes["detached"] == [] and outcomes["without"] is False
    assert outcomes["signature"] is True  # which Hugging Face's Trainer looks at


def test_deepspeeds_tools_work_beside_the_state(tmp_path: Path) -> None:
    """``zero_to_fp32`` and the universal conversion; a run on one rank goes on from the latter.

    The conversion copies no K-FAC state: it is found beside the universal folder.
    """
    stages = ["1", "3", "1 KFAC", "2 KFAC", "3 KFAC"]
    straight = world(2).run(policy_jobs.convert, str(tmp_path), stages, timeout=120)[0]
    loaded = world(1).run(policy_jobs.load_universal, str(tmp_path), stages, timeout=120)[0]
    for stage, expected, (state, weights) in zip(stages, straight, loaded, strict=True):
        assert_same(state, stored(tmp_path / stage / "global_step5" / "kfac")[0])
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)

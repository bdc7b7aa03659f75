"""DeepSpeed engines whose checkpoints carry K-FAC state: exact resume on every kind of engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests._harness import world
from tests.hosts import engine_checkpoint_jobs as jobs
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

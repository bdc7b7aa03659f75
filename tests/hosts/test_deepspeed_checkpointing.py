"""Activation checkpointing in DeepSpeed engines: each call counts once, factors stay the same.

Checkpointing runs a block's forward twice. A hook that adds to A in every forward counts its
rows twice, which shifts every average that is weighted by rows (pytorch#81296, #134310).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hosts import checkpointing_jobs as jobs
from tests.hosts.checkpointing_jobs import Cell

pytest.importorskip("deepspeed")

RANKS = 2
CELLS = [Cell(stage, mode) for stage in (0, 2) for mode in jobs.MODES]


@pytest.fixture(scope="module")
def runs(world: Any) -> dict[Cell, list[dict[str, Any]]]:
    # DeepSpeed's checkpointing keeps process-wide settings, which pipelines change.
    by_rank = world(RANKS).run(jobs.train, CELLS, isolated=True, timeout=120)
    return {cell: [reports[i] for reports in by_rank] for i, cell in enumerate(CELLS)}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"ZeRO {cell.stage}, {cell.mode}")
def test_every_call_counts_once(runs: dict[Cell, list[dict[str, Any]]], cell: Cell) -> None:
    rows = float(jobs.ROWS * jobs.POSITIONS * jobs.ACCUMULATION)
    for report in runs[cell]:
        assert report["counters"]["captures"] == jobs.STEPS
        for counts in report["counts"]:
            assert counts == dict.fromkeys(jobs.LAYERS, (rows, rows, rows))


@pytest.mark.parametrize(
    "cell",
    [cell for cell in CELLS if cell.mode != "none"],
    ids=lambda cell: f"ZeRO {cell.stage}, {cell.mode}",
)
def test_factors_are_those_without(runs: dict[Cell, list[dict[str, Any]]], cell: Cell) -> None:
    """After several steps, so that weights agree too; dropout is replayed."""
    plain = runs[Cell(cell.stage, "none")][0]["factors"]
    for name, factors in runs[cell][0]["factors"].items():
        for got, expected in zip(factors, plain[name], strict=True):
            assert float(expected.norm()) > 0
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)

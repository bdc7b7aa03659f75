"""``ds-kfac plan`` says what real runs then do: bytes on the wire, owners, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_kfac.cli import plan
from ds_kfac.cli.plan_source import Settings
from ds_kfac.config import KFACConfig
from ds_kfac.plan.traffic import run_bytes
from tests._harness import world
from tests.hosts import plan_jobs
from tests.hosts.plan_jobs import cell

pytestmark = pytest.mark.dist

STAGES = ("0", "1", "2", "3")
MANY = 1024


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": settings}


CELLS = [
    *(cell(stage, "natural", False) for stage in STAGES),
    *(cell(stage, "orthogonal", True) for stage in STAGES),
    cell("3", "ekfac", True),
    cell("0", "ekfac", True, {"background_inverse": True}),
    cell("2", "orthogonal", True, {"background_inverse": True}),
    cell("2", "eigen_adam", True, extra=zero(round_robin_gradients=True)),
    *(
        cell("0", direction, True, {"strategy": strategy, "background_inverse": background})
        for direction, strategy, background in (
            ("natural", "communication", False),
            ("eigen_adam", "hybrid", False),
            ("orthogonal", "communication", True),
        )
    ),
    cell("0", "ekfac", True, {"strategy": "communication", "distribute": "factor"}),
    cell("2", "natural", False, {"distribute": "factor"}),
    cell("3", "orthogonal", True, {"distribute": "factor"}),
    cell("1", "natural", False, extra=zero(parameter_alignment=True)),
    *(
        cell(stage, "natural", True, dtype="bf16", extra=zero(offload_optimizer={"device": "cpu"}))
        for stage in ("2", "3")
    ),
    *(cell(stage, "orthogonal", True, dtype="bf16") for stage in STAGES),
    *(
        cell(
            stage,
            "natural",
            False,
            dtype="bf16",
            extra={"data_types": {"grad_accum_dtype": "fp32"}},
        )
        for stage in ("1", "2")
    ),
]


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_owners_and_memory_are_those_of_real_engines(size: int, tmp_path: Path) -> None:
    """P3, predicted without a process: every kind, on every rank, to the byte."""
    found = world(size).run(plan_jobs.measure, CELLS, isolated=True, timeout=180)
    for index, item in enumerate(CELLS):
        result, totals = plan_jobs.planned(item, size, tmp_path)
        for rank in range(size):
            real = found[rank][index]
            assert real["program"] == [result.program.fingerprint()], item
            assert real["bytes"] == totals[rank], item
            memory = result.memory[rank]
            # Bases of the last step are waiting for theirs.
            waiting = memory.bases if item.kfac.get("background_inverse") else 0
            assert real["state"] == memory.state + waiting, item
            assert memory.background >= waiting


@pytest.mark.parametrize(
    "config",
    [
        {"direction": "natural", "solver": "cholesky", "max_factor_dim": 16},
        {"direction": "ekfac", "momentum": 0.9, "grafting": "adam"},
    ],
)
def test_a_thousand_ranks(config: dict[str, Any]) -> None:
    """One process plays a few of 1024 ranks, with more layers than ranks."""
    count = MANY + 300
    parsed = KFACConfig.parse(config)
    settings = Settings(parsed, float(parsed.momentum or 0.0))
    with torch.device("meta"):
        model = plan_jobs.Wide(count)
    _, result, _ = plan.run(model, settings, plan_jobs.options(ranks=MANY))
    owned = [result.program.exchange.owned(rank) for rank in range(MANY)]
    assert {len(layers) for layers in owned} >= {1, 2}
    for rank in (0, 513, MANY - 1):
        real = plan_jobs.simulated(rank, MANY, count, config)
        assert real["owners"] == result.program.exchange.owners
        memory = result.memory[rank]
        assert real["state"] == pytest.approx(memory.state, rel=0.1)
        assert real["state"] == memory.state  # the promise above is 10 %; it is exact
        assert real["statistics"] == memory.statistics
        assert real["bytes"] == run_bytes(
            result.ordinary[rank], result.capture, steps=2, captures=1
        )

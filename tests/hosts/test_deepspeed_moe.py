"""DeepSpeed's mixture of experts: every cut trains as one process with all experts does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests._harness import world
from tests.hosts import moe_jobs as jobs
from tests.hosts.moe_jobs import Cell
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
        Cell(4, 1, 1, NATURAL, clipping=CLIPPING),
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
    """{1, 2, 4} ranks x {2, 4} experts on {1, 2} ranks x ZeRO 0 to 2, top 1 and 2, drops, starved."""
    cells = CELLS[size]
    found = world(size).run(jobs.train, cells, timeout=240)
    for index, cell in enumerate(cells):
        weights, norms, factors = oracle(cell)
        limit = 1e-5 if cell.kfac is NATURAL else 1e-4
        seen: dict[str, Tensor] = {}
        for reports in found:
            report = reports[index]
            for name, value in report["weights"].items():
                assert torch.equal(seen.setdefault(name, value), value), (cell, name)
                assert difference(value, weights[name]) < limit, (cell, name)
            for name, both in report["factors"].items():
                for mine, theirs in zip(both, factors[name], strict=True):
                    assert difference(mine, theirs) < 1e-5, (cell, name)
            assert report["norms"] == pytest.approx(norms, rel=1e-5), cell
        assert seen.keys() == weights.keys()


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-12))

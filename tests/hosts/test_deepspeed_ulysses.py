"""Ulysses sequence parallelism: a cut sequence trains as the whole one does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests._harness import world
from tests.hosts import ulysses_jobs as jobs
from tests.hosts.ulysses_jobs import Cell
from tests.reference.dense_kfac import DenseKFAC
from tests.reference.state import AuxOptions

pytestmark = pytest.mark.dist

INTERVALS = {"factor_update_steps": 1, "inv_update_steps": 2, "factor_decay": 0.9}
NATURAL = {"direction": "natural", "damping": 0.3, "kl_clip": 0.01, **INTERVALS}
ORTHOGONAL = {"direction": "orthogonal", "damping": 0.1, "max_factor_dim": 6, **INTERVALS}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
CLIPPING = 0.4  # of the raw gradient: in force in the first steps


def cells(copies: int) -> list[Cell]:
    natural = [Cell(zero, NATURAL, own=zero % 2 == 0, clipping=CLIPPING) for zero in range(4)]
    orthogonal = [Cell(zero, ORTHOGONAL, accumulation=2) for zero in range(4)]
    return natural + orthogonal if copies == 1 else [*natural[1::2], *orthogonal[::2]]


@functools.cache
def oracle(direction: str, own: bool, scale: float) -> tuple[dict[str, Tensor], list[float], Any]:
    """Weights, norms and factors of whole sequences in one process, float64."""
    net = jobs.make_net().double()
    settings = {"kl_clip": None, **(NATURAL if direction == "natural" else ORTHOGONAL)}
    optimizer = None
    if not own:
        optimizer = torch.optim.SGD(
            net.parameters(), lr=jobs.LR, momentum=0.9, weight_decay=jobs.DECAY
        )
    reference = DenseKFAC(
        net,
        jobs.LAYERS,
        momentum=0.95 if own else 0.0,
        optimizer=optimizer,
        lr=jobs.LR,
        weight_decay=jobs.DECAY,
        gradient_clipping=CLIPPING if direction == "natural" else 0.0,
        aux=AuxOptions(lr=jobs.AUX_LR, betas=(0.9, 0.95), weight_decay=jobs.DECAY),
        **settings,
    )
    norms = []
    for step in range(jobs.STEPS):
        x, y = jobs.batch(step)
        reference.step(lambda x=x, y=y: scale * jobs.loss(net(x.double()), y.double()))
        norms.append(reference.raw_norm)
    weights = {name: param.detach() for name, param in net.named_parameters()}
    return weights, norms, {name: reference.factors(name) for name in jobs.LAYERS}


@pytest.mark.parametrize("copies", [1, 2])
def test_weights_factors_and_norms_are_those_of_whole_sequences(copies: int) -> None:
    """2 sequence ranks x {1, 2} copies, ZeRO 0 to 3, against the float64 oracle.

    Ranks use the mean over their own positions as loss; DeepSpeed divides the sum of their
    gradients by the number of copies (ZeRO 0, 1, 2), by all ranks under ZeRO 3.
    """
    chosen = cells(copies)
    found = world(2 * copies).run(jobs.train, 2, chosen, isolated=True, timeout=240)
    for reports in found[1:]:
        for first, other in zip(found[0], reports, strict=True):
            for name, value in first["weights"].items():
                assert torch.equal(value, other["weights"][name]), name
    for cell, report in zip(chosen, found[0], strict=True):
        scale = 1.0 if cell.zero == 3 else 2.0
        weights, norms, factors = oracle(str(cell.kfac["direction"]), cell.own, scale)
        limit = 1e-5 if cell.kfac is NATURAL else 1e-4
        differences = {n: _difference(report["weights"][n], v) for n, v in weights.items()}
        assert max(differences.values()) < limit, (cell, differences)
        assert report["norms"] == pytest.approx(norms, rel=1e-5), cell
        for name, both in factors.items():
            for mine, theirs in zip(report["factors"][name], both, strict=True):
                assert _difference(mine, theirs) < 1e-4, (cell, name)
        assert len(set(report["owners"].values())) == min(2 * copies, 4)


def test_what_cannot_be_right_is_refused() -> None:
    """A mean over positions on several ranks, and what DeepSpeed itself does not average alike.

    With a device mesh it leaves sequence ranks out of its reduction, and copies drift apart. With
    ``BF16_Optimizer`` one rank failed in its first step and the other one waited.
    """
    expected = {
        "weight_sharing='reduce'": Cell(1, {"weight_sharing": "reduce"}),
        "gradient_predivide_factor": Cell(1, {}, extra={"gradient_predivide_factor": 2.0}),
        "BF16_Optimizer": Cell(1, {}, dtype="bf16", extra=FP32_SUMS),
        "reduce_scatter=false": Cell(3, {}, extra={"zero_optimization": {"reduce_scatter": False}}),
    }
    found = world(2).run(jobs.refuse, list(expected.values()), isolated=True)
    for messages in found:
        for words, message in zip(["parallel_state_sp", *expected], messages, strict=True):
            assert "E150" in message and words in message, message


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())

"""Decompositions that fail: the last good basis stays, then all ranks stop together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_kfac import refresh
from tests._harness import world
from tests.hosts import promise_jobs as promises
from tests.hosts import topology_jobs as jobs
from tests.hosts.topology_jobs import Cell

pytestmark = pytest.mark.dist


def _train_with_failures(
    rank: int, size: int, failing: list[int], max_failures: int, direction: str = "natural"
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Train while the decompositions of the first layer's A fail at some refreshes."""
    settings = {"direction": direction, "factor_update_steps": 1, "inv_update_steps": 1}
    cell = Cell("2", {**settings, "max_failures": max_failures})
    engine = jobs.make_engine(cell, size)
    original = refresh.eigen_bases
    history = []
    for step in range(6):
        refresh.eigen_bases = _failing(original) if step in failing else original
        ((x, y, factor),) = jobs.micro_batches(rank, size, cell, step)
        engine.backward(jobs.loss_sum(engine(x), y, integers=False) * factor)
        try:
            engine.step()
        finally:
            refresh.eigen_bases = original
        kfac = engine.kfac
        ages = {name: float(s.refreshed_at) for name, s in kfac._states().items()}
        history.append((kfac.metrics(), ages))
    engine.destroy()
    return history


def _failing(original: Any) -> Any:
    """A solver that reports failure for every factor with seven columns (the first layer's A)."""

    def solve(factors: torch.Tensor) -> Any:
        bases, ok, reasons = original(factors)
        if factors.shape[-1] == jobs.FEATURES + 1:
            ok = torch.zeros_like(ok)
            reasons = ["made to fail"] * len(reasons)
        return bases, ok, reasons

    return solve


def test_failed_decomposition_keeps_the_last_basis_and_is_counted() -> None:
    """Training goes on; the counter goes back to zero with the next success."""
    histories = world(2).run(_train_with_failures, [2, 3], 3)
    per_step = [sum(h[step][0]["failing_blocks"] for h in histories) for step in range(6)]
    assert per_step == [0, 0, 1, 1, 0, 0]
    assert all(h[-1][0]["steps"] == 6 for h in histories)


def test_all_ranks_stop_together_after_max_failures() -> None:
    """The owner alone sees the failure; a raise on it alone would leave its peers hanging."""
    errors = world(2).run_expecting_errors(_train_with_failures, [1, 2, 3, 4, 5], 2)
    for error in errors:
        assert error is not None
        assert "KFAC-E110 layer first: the decomposition of factor A failed 3 times" in error.text
    assert errors[0].same_error == errors[1].same_error


@pytest.mark.parametrize("direction", ["natural", "ekfac", "eigen_adam"])
def test_failing_first_basis_uses_the_plain_gradient(direction: str) -> None:
    """No basis yet: that side acts as the identity instead of stopping the run.

    Failing twice stopped ekfac and eigen_adam: their second moments had no basis to move to.
    """
    histories = world(2).run(_train_with_failures, [0, 1], 3, direction)
    assert sum(h[1][0]["failing_blocks"] for h in histories) == 1
    assert all(h[-1][0]["failing_blocks"] == 0 for h in histories)


def _huge_damping_range(rank: int, size: int) -> dict[str, float]:
    """Damping 1e-30 on rank-one factors: the inverse overflows fp32."""
    settings = {"direction": "natural", "damping": 1e-30, "damping_mode": "absolute"}
    settings |= {"kl_clip": None, "factor_update_steps": 1, "inv_update_steps": 1}
    cell = Cell("1", settings)
    net, kfac, backward, step = promises._engine_loop(cell, size)
    x = torch.ones(4, jobs.FEATURES) * 1e-12
    y = torch.zeros(4, jobs.CLASSES)
    for _ in range(3):
        backward(x, y, 1.0)
        step()
    assert all(torch.isfinite(p).all() for p in net.parameters())
    return dict(kfac.metrics())


def test_overflowing_direction_never_reaches_the_weights() -> None:
    """kfac-jax#183: NaN weights when the damping is too small for a rank-deficient factor."""
    for metrics in world(2).run(_huge_damping_range):
        assert metrics["steps"] == 3

"""A run that was stopped and resumed is the run that was not, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ds_kfac
from ds_kfac import refresh
from tests.unit.checkpoint.training import DIRECTIONS, Run, assert_identical, make

STEPS = 26
# Captures every 3 steps, from step 12 on every 2; refreshes every 6 and 4; damping falls.
SETTINGS: dict[str, Any] = {
    "factor_update_steps": {"type": "steps", "values": [3, 2], "boundaries": [12]},
    "inv_update_steps": {"type": "steps", "values": [6, 4], "boundaries": [12]},
    "damping": {"type": "linear", "start": 1.0, "end": 0.1, "steps": 20},
    "max_factor_dim": 4,
}
FAILING = range(6, 17)


def settings(direction: str) -> dict[str, Any]:
    grafting = "none" if direction == "orthogonal" else "adam"
    return {**SETTINGS, "direction": direction, "momentum": 0.9, "kl_clip": None} | (
        {"grafting": grafting}
    )


class FailingSolvers:
    """Decompositions of one size fail between two steps: counts of failures are state too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step = 0
        for name in ("eigen_bases", "damped_inverses"):
            original = getattr(refresh, name)
            monkeypatch.setattr(refresh, name, lambda *a, o=original: self._solve(o, *a))

    def _solve(self, original: Any, factors: torch.Tensor, *rest: Any) -> Any:
        bases, ok, reasons = original(factors, *rest)
        if self.step in FAILING and factors.shape[-1] == 4:
            ok = torch.zeros_like(ok)
            reasons = ["made to fail"] * len(reasons)
        return bases, ok, reasons

    def train(self, run: Run, steps: range) -> None:
        for self.step in steps:
            run.step(self.step)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_stopped_at_every_step(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step counts, failure counts and ages were lost in other libraries, and the curve bent.

    Two micro-batches per step, blocks, schedules, failing decompositions, grafting.
    """
    solvers = FailingSolvers(monkeypatch)
    straight = make(settings(direction))
    hosts, prints = [], []
    for step in range(STEPS + 1):
        hosts.append(straight.host_state())
        prints.append(straight.fingerprint())
        straight.kfac.save(tmp_path / str(step))
        solvers.train(straight, range(step, step + 1))
    failures = [max(v for k, v in p.items() if "failures" in str(k)) for p in prints]
    assert 2 in failures and failures[-1] == 0
    for stop in range(1, STEPS):  # 1 to 25
        resumed = make(settings(direction))
        resumed.load_host_state(hosts[stop])
        assert resumed.kfac.load(tmp_path / str(stop))
        assert_identical(resumed.fingerprint(), prints[stop])
        end = min(STEPS, stop + 7)  # past the next capture and the next refresh
        solvers.train(resumed, range(stop, end))
        assert_identical(resumed.fingerprint(), prints[end])


def test_with_a_gradient_scaler(tmp_path: Path) -> None:
    """Scale and growth count are the user's to save; K-FAC's counts of skipped steps are ours."""

    def start() -> tuple[Run, torch.amp.GradScaler]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        run = make({"factor_update_steps": 2, "inv_update_steps": 2})
        run.kfac.detach()
        kfac = ds_kfac.attach(run.model, run.optimizer, run.kfac.config, grad_scaler=scaler)
        assert kfac is not None
        run.kfac = kfac
        return run, scaler

    def step(run: Run, scaler: torch.amp.GradScaler, index: int) -> None:
        run.optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(index))
        loss = run.model(x).square().mean() * (float("inf") if index == 4 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()

    straight, scaler = start()
    saved = []
    for index in range(12):
        straight.kfac.save(tmp_path / str(index))
        saved.append((straight.host_state(), scaler.state_dict(), straight.fingerprint()))
        step(straight, scaler, index)
    assert saved[-1][2]["skipped"] == 1
    for stop in range(1, 11):
        resumed, scaler = start()
        host, scale, fingerprint = saved[stop]
        resumed.load_host_state(host)
        scaler.load_state_dict(scale)
        resumed.kfac.load(tmp_path / str(stop))
        assert_identical(resumed.fingerprint(), fingerprint)
        for index in range(stop, 11):
            step(resumed, scaler, index)
        assert_identical(resumed.fingerprint(), saved[11][2])


def test_a_save_during_accumulation_is_of_the_last_step(tmp_path: Path) -> None:
    """Half a step's statistics would be counted twice: the resumed run repeats the step."""
    every = {"factor_update_steps": 1, "inv_update_steps": 1}
    straight, resumed = make(every), make(every)
    straight.step(0)
    host = straight.host_state()
    straight.wrapped(torch.randn(4, 4)).sum().backward()  # of a step that is not finished
    straight.kfac.save(tmp_path)
    straight.optimizer.zero_grad()
    straight.step(1)
    resumed.load_host_state(host)
    resumed.kfac.load(tmp_path)
    resumed.step(1)
    assert_identical(resumed.fingerprint(), straight.fingerprint())


def test_a_float64_model_and_a_dead_layer(tmp_path: Path) -> None:
    """Its state is float64, and a layer that never had a gradient has one too."""
    runs = []
    for _ in range(2):
        run = make({"factor_update_steps": 1, "inv_update_steps": 1, "direction": "ekfac"})
        run.kfac.detach()
        model = run.model.double()
        with torch.no_grad():
            model[2].weight.zero_()
        kfac = ds_kfac.attach(model, run.optimizer, run.kfac.config)
        assert kfac is not None
        run.kfac = kfac
        runs.append(run)
    straight, resumed = runs

    def step(run: Run, index: int) -> None:
        run.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        run.model(x).square().mean().backward()
        run.optimizer.step()

    step(straight, 0)
    straight.kfac.save(tmp_path)
    resumed.load_host_state(straight.host_state())
    resumed.kfac.load(tmp_path)
    step(straight, 1)
    step(resumed, 1)
    assert_identical(resumed.fingerprint(), straight.fingerprint())

"""Decompositions beside training: the same numbers, later, in the same step of every run."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_kfac import refresh
from ds_kfac.background import Background
from ds_kfac.errors import DistributedError, NumericalError
from tests.unit.checkpoint.training import DIRECTIONS, Run, assert_identical, make

INTERVALS = {"factor_update_steps": 2, "inv_update_steps": 6, "background_inverse": True}
STEPS = 22


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("ds_kfac"):
            thread.join(timeout=10)
            assert not thread.is_alive()


def settings(direction: str, **more: Any) -> dict[str, Any]:
    grafting = "none" if direction == "orthogonal" else "adam"
    base = {"direction": direction, "momentum": 0.9, "kl_clip": None, "grafting": grafting}
    return {**base, "max_factor_dim": 4, **INTERVALS, **more}


def train(run: Run, steps: range) -> Run:
    for step in steps:
        run.step(step)
    return run


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for name in ("eigen_bases", "damped_inverses"):
        original = getattr(refresh, name)

        def solve(*args: Any, original: Any = original) -> Any:
            time.sleep(seconds)
            return original(*args)

        monkeypatch.setattr(refresh, name, solve)


def ages(run: Run) -> set[int]:
    return {state.refreshed_at for state in run.kfac._states().values()}


def test_bases_change_at_fixed_steps_and_are_those_of_the_factors_then() -> None:
    """The first ones at once; then half an interval after their factors."""
    run = make(settings("natural"))
    background = {}
    seen = []
    for step in range(STEPS):
        run.step(step)
        seen.append(ages(run))
        if step % 6 == 0:
            # What a refresh in this step would have found: folds go on below.
            for name, state in run.kfac._states().items():
                background[step, name] = refresh.Snapshot.of(state)
        for name, state in run.kfac._states().items():
            ((snapshot),) = [background[state.refreshed_at, name]]
            owner = run.kfac._partitions[0].owner
            (expected,) = refresh.decompose([snapshot], owner.refresh_settings(step), step=step)
            for side, bases in (("a", state.a.bases), ("g", state.g.bases)):
                for basis, other in zip(bases, expected.of(side)[0], strict=True):
                    assert torch.equal(basis.vectors, other.vectors)
                    assert torch.equal(basis.values, other.values)
    expected_ages = [0] * 9 + [6] * 6 + [12] * 6 + [18]
    assert seen == [{age} for age in expected_ages[:STEPS]]
    metrics = run.kfac.metrics()
    assert (metrics["refreshes"], metrics["captures"]) == (4, 11)
    blocks = sum(len(state.spec.block_sizes) for state in run.kfac._states().values())
    assert metrics["decompositions"] == 4 * blocks


@pytest.mark.parametrize(
    "interval", [1, 2, 3, {"type": "steps", "values": [6, 2], "boundaries": [7]}]
)
def test_every_interval_has_its_step(interval: Any) -> None:
    """At the latest where the next ones begin, also where a schedule shortens the interval."""
    run = make(settings("natural", factor_update_steps=1, inv_update_steps=interval))
    seen = [ages(train(run, range(step, step + 1))) for step in range(12)]
    expected = {
        1: [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        2: [0, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10],
        3: [0, 0, 0, 0, 0, 3, 3, 3, 6, 6, 6, 9],
    }.get(interval if isinstance(interval, int) else 0, [0] * 8 + [6, 8, 8, 10])
    assert seen == [{age} for age in expected]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_runs_repeat_however_long_it_takes(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = train(make(settings(direction)), range(STEPS)).fingerprint()
    slow_down(monkeypatch, 0.005)
    assert_identical(train(make(settings(direction)), range(STEPS)).fingerprint(), fast)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_stopped_at_every_step(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save waits for what is being computed and holds it, failures among it."""
    for name in ("eigen_bases", "damped_inverses"):
        original = getattr(refresh, name)
        monkeypatch.setattr(refresh, name, lambda *a, o=original: fail_some(o, *a))
    straight = make(settings(direction))
    hosts, prints = [], []
    for step in range(STEPS + 1):
        hosts.append(straight.host_state())
        prints.append(straight.fingerprint())
        straight.kfac.save(tmp_path / str(step))
        train(straight, range(step, step + 1))
    assert any("next_step" in str(key) for key in prints[8])
    assert max(v for p in prints for k, v in p.items() if "failures" in str(k)) > 0
    for stop in range(1, STEPS, 1 if direction == "ekfac" else 4):
        resumed = make(settings(direction))
        resumed.load_host_state(hosts[stop])
        assert resumed.kfac.load(tmp_path / str(stop))
        assert_identical(resumed.fingerprint(), prints[stop])
        end = min(STEPS, stop + 7)
        train(resumed, range(stop, end))
        assert_identical(resumed.fingerprint(), prints[end])


def fail_some(original: Any, factors: torch.Tensor, *rest: Any) -> Any:
    """Some decompositions fail: a function of the factor, whichever thread solves it."""
    bases, ok, reasons = original(factors, *rest)
    for index, factor in enumerate(factors):
        if int(float(factor.diagonal().sum()) * 1e5) % 4 == 0:
            ok[index], reasons[index] = False, "made to fail"
    return bases, ok, reasons


def test_a_save_does_not_change_the_run(tmp_path: Path) -> None:
    quiet, saving = make(settings("eigen_adam")), make(settings("eigen_adam"))
    train(quiet, range(STEPS))
    for step in range(STEPS):
        train(saving, range(step, step + 1))
        saving.kfac.state_dict()
    assert_identical(saving.fingerprint(), quiet.fingerprint())


@pytest.mark.parametrize("direction", ["natural", "ekfac"])
def test_moments_move_at_the_swap(direction: str) -> None:
    """Between start and swap nothing but the usual updates happens to them."""
    run = train(make(settings(direction)), range(8))
    state = next(iter(run.kfac._states().values()))
    old = [basis.vectors for basis in state.g.bases]
    second = {name: value.clone() for name, value in state.moments.items()}
    run.kfac._partitions[0].owner.finish()
    upcoming = copy.deepcopy(state.upcoming)
    assert upcoming is not None
    assert all(a is b.vectors for a, b in zip(old, state.g.bases, strict=True))
    run.kfac._partitions[0].owner.swap(step=8)
    assert state.upcoming is not None  # not its step yet
    run.kfac._partitions[0].owner.swap(step=9)
    assert state.upcoming is None and state.refreshed_at == 6
    moved = {n for n, value in state.moments.items() if not torch.equal(value, second[n])}
    assert moved == ({"second", "rotated_momentum"} if direction == "ekfac" else set())


def test_switched_off_at_a_load_the_finished_bases_are_used_at_once() -> None:
    saved = copy.deepcopy(train(make(settings("natural")), range(8)).kfac.state_dict())
    assert all(layer["next_step"] == 6 for layer in saved["layers"].values())
    run = make(settings("natural", background_inverse=False))
    run.kfac.load_state_dict(saved)
    assert ages(run) == {6}
    assert not any("next" in key for key in run.fingerprint())


def test_a_load_drops_what_is_being_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(make(settings("natural")), range(4))
    host, saved = run.host_state(), copy.deepcopy(run.kfac.state_dict())
    train(run, range(4, 7))
    assert run.kfac._partitions[0].owner._background.is_running
    run.load_host_state(host)
    run.kfac.load_state_dict(saved)
    assert not run.kfac._partitions[0].owner._background.is_running
    train(run, range(4, STEPS))
    straight = train(make(settings("natural")), range(STEPS))
    assert_identical(run.fingerprint(), straight.fingerprint())


@pytest.mark.parametrize("stop", [8, 9])
def test_a_bad_step_leaves_no_trace(stop: int) -> None:
    """Also the step in which bases change."""
    clean, dirty = make(settings("ekfac")), make(settings("ekfac"))
    train(clean, range(STEPS))
    train(dirty, range(stop))
    dirty.optimizer.zero_grad()
    (dirty.wrapped(torch.randn(4, 4)).sum() * float("nan")).backward()
    momenta = copy.deepcopy(dirty.host_state())
    dirty.optimizer.step()
    dirty.load_host_state(momenta)  # the plain host applies its bad gradients
    train(dirty, range(stop, STEPS))
    found = dirty.fingerprint()
    assert found["skipped"] == 1
    assert_identical({**found, "skipped": 0}, clean.fingerprint())


def test_an_error_there_reaches_the_vote_of_the_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(make(settings("natural")), range(6))
    monkeypatch.setattr(refresh, "eigen_bases", out_of_memory)
    train(run, range(6, 9))
    with pytest.raises(DistributedError, match="rank 0 failed: MemoryError: no room"):
        run.step(9)
    monkeypatch.undo()
    assert ages(run) == {0}  # the last good bases stay
    train(run, range(9, 16))
    assert ages(run) == {12}


def test_an_error_there_reaches_a_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = train(make(settings("natural")), range(6))
    monkeypatch.setattr(refresh, "eigen_bases", out_of_memory)
    train(run, range(6, 7))
    with pytest.raises(DistributedError, match="no room"):
        run.kfac.save(tmp_path)
    run.kfac.save(tmp_path)


def out_of_memory(*_: Any) -> Any:
    raise MemoryError("no room")


def test_failures_are_counted_at_the_swap_and_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(make(settings("natural", max_failures=1)), range(6))
    original = refresh.eigen_bases

    def failing(factors: torch.Tensor) -> Any:
        bases, ok, _ = original(factors)
        return bases, torch.zeros_like(ok), ["made to fail"] * len(factors)

    monkeypatch.setattr(refresh, "eigen_bases", failing)
    train(run, range(6, 9))
    assert run.kfac.metrics()["failing_blocks"] == 0
    train(run, range(9, 10))
    assert run.kfac.metrics()["failing_blocks"] > 0
    assert "KFAC-W110 layer 0, factor A, block 0: decomposition failed (1 in a row)" in caplog.text
    train(run, range(10, 16))
    with pytest.raises(NumericalError, match="E110 layer 0: .* failed 2 times"):
        run.step(16)


def test_detach_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(make(settings("natural")), range(6))
    slow_down(monkeypatch, 0.2)
    train(run, range(6, 7))
    started = time.perf_counter()
    run.kfac.detach()
    assert time.perf_counter() - started < 2.0  # one block, not all of them
    assert not any(t.name.startswith("ds_kfac") for t in threading.enumerate())
    run.optimizer.step()


SCRIPT = """
import time, torch
from ds_kfac import refresh
from tests.unit.checkpoint.training import make
run = make({"factor_update_steps": 1, "inv_update_steps": 4, "background_inverse": True})
for step in range(4):
    run.step(step)
original = refresh.eigen_bases
def slow(factors):
    time.sleep(0.2)
    return original(factors)
refresh.eigen_bases = slow
run.step(4)
"""


@pytest.mark.parametrize("end", ["", "raise KeyError('x')"])
def test_the_interpreter_may_end_meanwhile(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + end],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == (1 if end else 0)
    assert ("KeyError" in done.stderr) == ("KeyError" in end)
    assert "ds_kfac" not in done.stderr


def test_it_takes_as_many_threads_as_training() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            torch.set_num_threads(threads)
            background: Background[int] = Background(torch.device("cpu"))
            background.start(lambda pause: torch.get_num_threads())
            assert background.finish() == threads
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_gradients_are_not_recorded_there() -> None:
    background: Background[bool] = Background(torch.device("cpu"))
    background.start(lambda pause: torch.is_grad_enabled())
    assert background.is_running
    with pytest.raises(RuntimeError, match="has not been finished"):
        background.start(lambda pause: True)
    assert background.finish() is False
    assert not background.is_running
    background.cancel()

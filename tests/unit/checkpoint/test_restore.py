"""What ``load_state_dict`` accepts, refuses and migrates, in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ds_kfac.errors import StateError
from ds_kfac.state import momentum_name
from tests.unit.checkpoint.training import DIRECTIONS, assert_identical, make

EVERY_STEP = {"factor_update_steps": 1, "inv_update_steps": 1}


def state_after(steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    run = make(settings)
    for step in range(steps):
        run.step(step)
    return copy.deepcopy(run.kfac.state_dict())


@pytest.mark.parametrize("direction", ["ekfac", "eigen_adam"])
def test_cholesky_state_is_refused_where_second_moments_need_an_eigenbasis(direction: str) -> None:
    """It was loaded, and the first step on every owner failed on an assertion."""
    state = state_after(3, {"direction": "natural", "solver": "cholesky", **EVERY_STEP})
    run = make({"direction": direction, "momentum": 0.0, **EVERY_STEP})
    before = run.fingerprint()
    with pytest.raises(StateError, match=r"E302 .*layer 0: holds Cholesky inverses.*'fresh'"):
        run.kfac.load_state_dict(state)
    assert_identical(run.fingerprint(), before)


@pytest.mark.parametrize("direction", ["natural", "orthogonal"])
@pytest.mark.parametrize(("saved", "now"), [("eigen", "cholesky"), ("cholesky", "eigen")])
def test_another_solver_keeps_factors_and_recomputes_bases(
    direction: str, saved: str, now: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A changed solver went on with bases of the other kind, mixed with its own after a failure."""
    every = {"direction": direction, **EVERY_STEP}
    state = state_after(3, {**every, "solver": saved})
    run = make({**every, "solver": now})
    run.kfac.load_state_dict(state)
    loaded = run.fingerprint()
    assert "KFAC-W302 2 layers" in caplog.text
    for name, layer in state["layers"].items():
        for key in ("a.0.total", "g.0.total", "a.0.weight", "updates"):
            assert torch.equal(loaded[f"{name}/{key}"], layer[key])
    run.kfac._partitions[0].owner.refresh(step=3)  # as if it were due now
    assert_identical(run.fingerprint(), loaded)
    assert ("0/a.0.basis.inverse" in loaded) == (now == "cholesky")
    run.step(3)
    assert all(torch.isfinite(param).all() for param in run.model.parameters())


def test_inverses_with_another_kind_of_damping_are_recomputed() -> None:
    """Natural's inverse has the root of the damping on either side, orthogonal's all of it."""
    state = state_after(3, {"direction": "natural", "solver": "cholesky", "momentum": 0.95})
    run = make({"direction": "orthogonal", "damping": 1.0})
    run.kfac.load_state_dict(state)
    layer, saved = run.kfac.state_dict()["layers"]["0"], state["layers"]["0"]
    total, weight = saved["a.0.total"], saved["a.0.weight"]
    assert torch.equal(layer["a.0.total"], total) and torch.equal(layer["a.0.weight"], weight)
    factor = run.kfac.factors("0")[0].double()
    shifted = factor + factor.diagonal().mean() * torch.eye(len(factor))
    expected = torch.linalg.inv(shifted).float()
    torch.testing.assert_close(layer["a.0.basis.inverse"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_moments_that_the_settings_keep_must_be_there(direction: str) -> None:
    """Bias correction divided fresh moments as if they were hundreds of steps old."""
    kept = {"direction": direction, "momentum": 0.9, "kl_clip": None}
    if direction != "orthogonal":
        kept["grafting"] = "adam"
    state = state_after(2, kept)
    names = [key for key in state["layers"]["0"] if key.startswith("moments.")]
    assert "moments." + momentum_name(direction) in names
    for name in names:
        damaged = copy.deepcopy(state)
        del damaged["layers"]["0"][name]
        with pytest.raises(StateError, match=f"E302 .*layer 0: {name} missing"):
            make(kept).kfac.load_state_dict(damaged)


def test_moments_without_use_are_dropped() -> None:
    """Momentum switched off at resume: its buffer would be kept and saved for ever."""
    state = state_after(2, {"momentum": 0.9})
    run = make({"momentum": 0.0})
    run.kfac.load_state_dict(state)
    assert not [key for key in run.kfac.state_dict()["layers"]["0"] if "moments" in key]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("a.0.total", torch.full((15,), float("nan")), "a.0.total is not finite"),
        ("a.0.total", torch.zeros(15, dtype=torch.float64), "float64, expected torch.float32"),
        ("a.0.total", torch.zeros(15, dtype=torch.int32), "int32, expected torch.float32"),
        ("a.0.weight", torch.tensor(float("inf"), dtype=torch.float64), "a.0.weight is not finite"),
        ("a.0.weight", torch.tensor(-1.0, dtype=torch.float64), "a.0.weight is below 0"),
        ("updates", torch.tensor(-1.0, dtype=torch.float64), "updates is below 0"),
        ("updates", 3.0, "expected a tensor|expected \\(\\)"),
        ("folded_at", -2, "folded_at is below -1"),
        ("folded_at", "3", "folded_at is '3'|expected \\(\\)"),
        ("g.0.failures", -1, "g.0.failures is below 0"),
        ("a.0.basis.values", -torch.ones(5), "a.0.basis.values is below 0"),
        ("a.0.basis.inverse", torch.eye(5), "a.0.basis has only inverse, mean, values, vectors"),
        ("moments.bogus", torch.zeros(6, 5), "moments.bogus is unknown"),
        ("folded_at", torch.tensor(3), "folded_at is 3, above 2: the state is of step 2"),
        ("folded_at", torch.tensor(2**62), "folded_at is 4611686018427387904, above 2"),
        ("refreshed_at", 3, "refreshed_at is 3, above 2"),
        ("refreshed_at", 2**70, "refreshed_at is 1180591620717411303424, above 2"),
        ("refreshed_at", -(2**70), "refreshed_at is below -1"),
        ("next_step", 3, "next_step is 3, above 2"),
        ("updates", torch.tensor(3.0, dtype=torch.float64), "updates is 3.0, above 2"),
        ("updates", torch.tensor(1e300, dtype=torch.float64), r"updates is 1e\+300, above 2"),
        ("fallbacks", torch.tensor(3), "fallbacks is 3, above 2"),
        ("g.0.failures", 2**53 + 1, "g.0.failures is 9007199254740993, above 9007199254740992"),
        ("a.0.weight", torch.tensor(5e-324, dtype=torch.float64), "total over a.0.weight is not"),
    ],
)
def test_values_that_no_run_can_have_are_refused(key: str, value: Any, text: str) -> None:
    """A factor with NaN stayed NaN for ever; a float64 one was rounded without a word.

    One that was folded in the future was multiplied by ``0.95 ** -1000000``: infinite, and the
    step after the load gave every rank bases of it.
    """
    state = state_after(2, EVERY_STEP)
    state["layers"]["0"][key] = value
    run = make(EVERY_STEP)
    before = run.fingerprint()
    with pytest.raises(StateError, match=f"E302 .*({text})"):
        run.kfac.load_state_dict(state)
    assert_identical(run.fingerprint(), before)


@pytest.mark.parametrize(
    "part",
    [
        {"counters": {"steps": 2**53 + 1}},
        {"counters": {"skipped": 2**60}},
        {"counters": {"decompositions": -1}},
        {"counters": {"captures": 3}},
        {"counters": {"refreshes": 2**40}},
        {"counters": {"preconditions": 3}},
        {"counters": {"steps": 1}},  # the layers have seen two
        {"counters": {"steps": 2.0}},
        {"settings": 3},
        {"decisions": None},
        {"decisions": [{"step": 2**60}]},
    ],
)
def test_counts_of_a_future_are_refused(part: dict[str, Any]) -> None:
    """Beyond 2**53 one more step is the same number in fp64, and schedules stand still."""
    state = state_after(2, EVERY_STEP)
    for key, value in part.items():
        state[key] = {**state[key], **value} if isinstance(value, dict) else value
    run = make(EVERY_STEP)
    before = run.fingerprint()
    with pytest.raises(StateError, match="E302"):
        run.kfac.load_state_dict(state)
    assert_identical(run.fingerprint(), before)


def test_layers_of_another_model_are_named() -> None:
    """Four layers' state loaded into the two it shares names with: the rest was dropped."""
    run = make(EVERY_STEP, widths=(4, 6, 3, 3, 3))
    state = copy.deepcopy(run.kfac.state_dict())
    with pytest.raises(StateError, match="layer 4: not one of this rank's.*layer 6: not one of"):
        make(EVERY_STEP).kfac.load_state_dict(state)


def test_loading_forgets_a_step_under_way_and_its_error() -> None:
    """Statistics and an error from before the load joined the first step after it."""
    straight, resumed = make(EVERY_STEP), make(EVERY_STEP)
    for step in range(2):
        straight.step(step)
    host, saved = straight.host_state(), copy.deepcopy(straight.kfac.state_dict())
    resumed.model(torch.randn(4, 4)).sum().backward()
    resumed.kfac._guard.keep(RuntimeError("of a step that is forgotten"))
    resumed.load_host_state(host)
    resumed.kfac.load_state_dict(saved)
    straight.step(2)
    resumed.step(2)
    assert_identical(resumed.fingerprint(), straight.fingerprint())


def test_reset_is_a_fresh_start() -> None:
    run, fresh = make(EVERY_STEP), make(EVERY_STEP)
    host = run.host_state()
    run.step(0)
    run.kfac.reset()
    run.load_host_state(host)
    assert_identical(run.fingerprint(), fresh.fingerprint())

"""The cost governor: decisions from measured times, the same everywhere, repeatable without it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import ds_kfac
from ds_kfac import governor
from ds_kfac.errors import StateError
from ds_kfac.plan.budget import Choice, choose
from tests._harness import world
from tests.hosts import governor_jobs as jobs
from tests.hosts.governor_jobs import Simulated, governed, train
from tests.unit.checkpoint.training import assert_identical, make

CHOSEN = Choice(inverse=20, stride=2, factor=20)
"""What the simulated times lead to, see tests/unit/plan/test_budget.py."""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "REVIEW_STEPS", 50)


def test_decides_from_the_times_of_every_stage() -> None:
    clock = Simulated()
    run = governed(clock)
    assert "nothing measured yet" in run.kfac.table()
    train(run, range(30))
    assert run.kfac.metrics()["inv_update_steps"] == 10 and not run.kfac._pace.decisions
    train(run, range(30, 31))
    (decision,) = run.kfac._pace.decisions
    assert decision.step == 31 and decision.choice == CHOSEN
    costs = vars(decision.costs)
    names = ("base", "fixed", "capture", "reduce", "refresh")
    assert costs == {name: getattr(clock, name) for name in names} | {"stride": 1}
    metrics = run.kfac.metrics()
    assert metrics["overhead"] == pytest.approx(0.0465) and metrics["overhead_floor"] == 0.02
    assert metrics["factor_update_steps"] == metrics["inv_update_steps"] == 20
    assert metrics["factor_token_fraction"] == 0.5
    line = run.kfac.table().splitlines()[-1]
    assert line == (
        "max_overhead 0.05: from step 31 statistics every 20 steps from one row in 2, bases every "
        "20; 4.7 % of a step of 1 ms without K-FAC (every step 2.0 %, statistics 0.7 %, bases "
        "2.0 %)"
    )


def test_what_was_promised_is_what_is_paid() -> None:
    """The share of all steps after the decision, by the same clock."""
    clock = Simulated()
    run = governed(clock)
    train(run, range(31))
    begin = clock.now
    train(run, range(31, 231))
    assert clock.now - begin <= 200 * clock.base * 1.05


def test_reviews_follow_a_change_of_times(soon: None, caplog: pytest.LogCaptureFixture) -> None:
    clock = Simulated()
    run = governed(clock)
    with caplog.at_level(logging.INFO, "ds_kfac"):
        train(run, range(110))  # confirmed once: three captures after the decision
        assert [d.step for d in run.kfac._pace.decisions] == [31, 81]
        assert "confirms its intervals" in caplog.text
        clock.refresh *= 2
        train(run, range(110, 300))
    assert [d.choice.inverse for d in run.kfac._pace.decisions] == [20, 20, 30, 30]
    assert run.kfac._pace.decisions[2].step == 181  # measured from 131, 50 after the confirmation
    clock.refresh = clock.capture = 1
    train(run, range(300, 450))
    assert run.kfac._pace.current == Choice(10, 1, 10)
    settings = run.kfac.pace()
    assert settings["inv_update_steps"] == {
        "type": "steps",
        "values": [10, 20, 30, 10],
        "boundaries": [31, 181, 391],
    }
    shown = [text for text in caplog.messages if "to repeat it" in text]
    assert json.loads(shown[0].rpartition("repeat it: ")[2])["inv_update_steps"] == {
        "type": "steps",
        "values": [10, 20],
        "boundaries": [31],
    }


def test_says_by_how_much_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    run = governed(Simulated(fixed=100_000))
    with caplog.at_level(logging.WARNING, "ds_kfac"):
        train(run, range(31))
    (decision,) = run.kfac._pace.decisions
    assert decision.choice == choose(decision.costs, 0.0, Choice(10, 1, 10))
    (text,) = caplog.messages
    assert "KFAC-W118 max_overhead 0.05 is exceeded by 5.5 %" in text
    assert "is 10.0 % alone" in text


def test_dropped_steps_are_not_measured() -> None:
    clock = Simulated()
    run = governed(clock)
    train(run, range(12))
    for _ in range(3):
        clock.now += 10**9
        run.optimizer.zero_grad()
        (run.model(run.model[0].weight.new_full((2, 4), float("nan")))).sum().backward()
        run.optimizer.step()
    train(run, range(12, 40))
    assert run.kfac.metrics()["skipped"] == 3
    (decision,) = run.kfac._pace.decisions
    assert decision.choice == CHOSEN and decision.costs.base == clock.base


@pytest.mark.parametrize("stop", [5, 20, 31, 40, 101, 120])
def test_a_resumed_run_goes_on_with_what_was_decided(stop: int, tmp_path: Path, soon: None) -> None:
    """To the last bit where no measurement was under way; one that was begins anew."""
    straight = governed(Simulated())
    train(straight, range(stop))
    straight.kfac.save(tmp_path)
    host, decisions = straight.host_state(), straight.kfac._pace.decisions
    resumed = governed(Simulated())
    resumed.load_host_state(host)
    assert resumed.kfac.load(tmp_path)
    assert resumed.kfac._pace.decisions == decisions
    end = stop + 30 if decisions else stop + 10
    for run in (straight, resumed):
        train(run, range(stop, end))
    assert_identical(resumed.fingerprint(), straight.fingerprint())
    train(resumed, range(end, 250))
    assert resumed.kfac._pace.current == CHOSEN
    content = json.loads((tmp_path / "manifest.json").read_text())["content"]
    assert content["decisions"] == [decision.saved() for decision in decisions]


def test_decisions_end_with_the_governor_and_with_reset(tmp_path: Path) -> None:
    run = governed(Simulated())
    train(run, range(35))
    run.kfac.save(tmp_path)
    plain = make(jobs.SETTINGS, widths=jobs.WIDTHS)
    assert plain.kfac.load(tmp_path)
    assert plain.kfac.pace()["inv_update_steps"] == 10
    run.kfac.reset()
    assert run.kfac._pace.decisions == () and run.kfac._pace.current == Choice(10, 1, 10)
    train(run, range(31))
    assert run.kfac._pace.current == CHOSEN


@pytest.mark.parametrize(
    "change",
    [
        {"step": 0},
        {"step": 36},
        {"inverse": 30},
        {"stride": 0},
        {"cost_base": 1.5},
        {"factor": True},
        {"more": 1},
        {"step": None},
    ],
)
def test_damaged_decisions_are_refused(change: dict[str, Any]) -> None:
    run = governed(Simulated())
    train(run, range(35))
    state = run.kfac.state_dict()
    state["decisions"] = [{**state["decisions"][0], **change}]
    before = run.fingerprint()
    with pytest.raises(StateError, match="E302.*decision"):
        run.kfac.load_state_dict(state)
    assert_identical(run.fingerprint(), before)


def test_states_from_before_it_have_no_decisions() -> None:
    run = governed(Simulated())
    train(run, range(35))
    state = run.kfac.state_dict()
    del state["decisions"]
    run.kfac.load_state_dict(state)
    assert run.kfac._pace.current == Choice(10, 1, 10)


@pytest.mark.parametrize("value", [0.25, 0.3])
def test_the_settings_are_where_it_starts_and_are_never_exceeded(value: float) -> None:
    settings = {"factor_update_steps": 3, "inv_update_steps": 6, "factor_token_fraction": value}
    run = governed(Simulated(refresh=1, capture=1, reduce=1), **settings)
    train(run, range(40))
    constant = {"type": "steps", "values": [6], "boundaries": []}
    assert run.kfac.pace() == {**settings, "inv_update_steps": constant}


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2, 3])
def test_pasted_schedules_repeat_the_run_bit_for_bit(size: int) -> None:
    """Simulated times, which differ between ranks: the slowest decides, on all of them."""
    results = world(size).run(jobs.repeated, 150, True, {})
    assert all(result == results[0] for result in results)
    schedules, decisions = results[0]
    assert schedules["inv_update_steps"]["values"] == [10, {1: 20, 2: 30, 3: 50}[size]]
    assert decisions[0]["cost_refresh"] == 400_000 * size


@pytest.mark.parametrize("background", [False, True])
def test_bases_beside_training_repeat_as_well(background: bool) -> None:
    """They are used half an interval later: half of the interval that was decided."""
    jobs.repeated(0, 1, 150, True, {"background_inverse": background})


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_with_real_clocks_too(size: int) -> None:
    """Here the processor decides what is chosen, but a tiny model leaves little doubt."""
    start = {"factor_update_steps": 2, "inv_update_steps": 4, "grafting": "adam"}
    results = world(size).run(jobs.repeated, 60, False, start)
    assert all(result == results[0] for result in results)
    schedules, _ = results[0]
    assert schedules["inv_update_steps"]["values"][-1] > 4
    assert ds_kfac.KFACConfig.parse(json.loads(json.dumps(schedules)))


@pytest.mark.dist
@pytest.mark.parametrize(("stage", "direction"), [("2", "orthogonal"), ("1", "natural")])
def test_under_deepspeed_too(stage: str, direction: str) -> None:
    results = world(2).run(jobs.repeated_engine, stage, direction, isolated=True)
    assert results[0] == results[1]
    assert results[0][0]["inv_update_steps"]["values"][-1] > 4


@pytest.mark.dist
def test_ordinary_steps_have_no_collective_more() -> None:
    steps = 35
    with_it = world(2).run(jobs.collectives_by_step, steps, {"max_overhead": 0.5})[0]
    without = world(2).run(jobs.collectives_by_step, steps, {})[0]
    more = [step for step, (a, b) in enumerate(zip(with_it[0], without[0], strict=True)) if a != b]
    assert more == [30]
    extra = list(with_it[0][30])
    extra.remove("all_reduce")
    assert sorted(extra) == sorted(without[0][30])
    times = with_it[1]["kinds"].pop("times")
    assert times == {"calls": 1, "bytes": 40, "planned_bytes": 40}
    assert with_it[1]["kinds"] == without[1]["kinds"]

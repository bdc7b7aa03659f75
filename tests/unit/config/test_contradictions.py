"""Settings that exclude each other, pair by pair, and the pairs that do not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError

DIRECTIONS = ("natural", "ekfac", "eigen_adam", "orthogonal")


def complaint(settings: dict[str, Any]) -> str | None:
    try:
        KFACConfig.parse(settings)
    except ConfigError as error:
        return error.message
    return None


@pytest.mark.parametrize(
    ("factor", "inverse"), [*itertools.product((1, 2, 3, 10), (1, 2, 3, 6, 10))]
)
@pytest.mark.parametrize("as_float", [False, True])
def test_a_decomposition_needs_statistics_of_its_step(
    factor: int, inverse: int, as_float: bool
) -> None:
    number = float if as_float else int
    text = complaint({"factor_update_steps": factor, "inv_update_steps": number(inverse)})
    assert (text is None) == (inverse % factor == 0)
    if text is not None:
        assert f"inv_update_steps ({number(inverse)})" in text
        assert f"factor_update_steps ({factor})" in text


@pytest.mark.parametrize(
    ("factor", "inverse", "part"),
    [
        ([20, 50], 10, "inv_update_steps (10) must"),
        (3, [3, 10], "inv_update_steps (10 from step 7 on) must"),
        ([2, 3], [4, 8], "inv_update_steps (8 from step 7 on) must"),
        ([1, 2.5], [1, 5], "factor_update_steps: expected a whole number"),
    ],
)
def test_every_piece_of_a_schedule_is_checked(factor: Any, inverse: Any, part: str) -> None:
    """Decompositions between two captures would use statistics of another step."""

    def interval(values: Any) -> Any:
        if isinstance(values, int):
            return values
        return {"type": "steps", "values": values, "boundaries": [7]}

    settings = {"factor_update_steps": interval(factor), "inv_update_steps": interval(inverse)}
    assert part in (complaint(settings) or "")
    fitting = {"factor_update_steps": interval([2, 5]), "inv_update_steps": interval([4, 20])}
    assert complaint(fitting) is None


def test_a_default_interval_counts_as_well() -> None:
    assert "inv_update_steps (10) must be a multiple" in (
        complaint({"factor_update_steps": 4}) or ""
    )
    assert complaint({"factor_update_steps": 5}) is None


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("solver", ["eigen", "cholesky", None])
def test_eigenbases_need_the_eigen_solver(direction: str, solver: str | None) -> None:
    text = complaint({"direction": direction, "solver": solver})
    bad = solver == "cholesky" and direction in ("ekfac", "eigen_adam")
    assert (text is not None) == bad
    if bad:
        assert text is not None and f"direction {direction!r}" in text and "'cholesky'" in text


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("grafting", ["none", "rms", "adam"])
def test_orthogonal_has_its_own_length(direction: str, grafting: str) -> None:
    text = complaint({"direction": direction, "grafting": grafting})
    bad = direction == "orthogonal" and grafting != "none"
    assert (text is not None) == bad
    if bad:
        assert text is not None and f"grafting {grafting!r}" in text


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("grafting", ["none", "rms"])
@pytest.mark.parametrize("kl_clip", [0.25, None])
def test_kl_clip_is_refused_where_it_does_nothing(
    direction: str, grafting: str, kl_clip: float | None
) -> None:
    text = complaint({"direction": direction, "grafting": grafting, "kl_clip": kl_clip})
    bad = kl_clip is not None and (direction in ("eigen_adam", "orthogonal") or grafting != "none")
    assert ("kl_clip (0.25) has no effect" in (text or "")) == bad


def test_the_default_kl_clip_contradicts_nothing() -> None:
    assert all(complaint({"direction": direction}) is None for direction in DIRECTIONS)


@pytest.mark.parametrize("strategy", ["zero_aligned", "memory"])
def test_worker_fraction_belongs_to_hybrid(strategy: str) -> None:
    text = complaint({"strategy": strategy, "grad_worker_fraction": 0.5})
    assert text is not None
    assert "grad_worker_fraction (0.5)" in text and repr(strategy) in text
    assert complaint({"strategy": strategy, "grad_worker_fraction": None}) is None


def test_factorwise_refreshes_are_waited_for() -> None:
    text = complaint({"distribute": "factor", "background_inverse": True})
    assert text is not None and "distribute 'factor' contradicts background_inverse" in text
    assert complaint({"distribute": "layer", "background_inverse": True}) is None


PROBLEMS: dict[str, dict[str, Any]] = {
    "must be a multiple": {"factor_update_steps": 3},
    "works in an eigenbasis": {"direction": "ekfac", "solver": "cholesky"},
    "belongs to 'hybrid'": {"grad_worker_fraction": 0.25},
    "kl_clip (0.5) has no effect": {"grafting": "rms", "kl_clip": 0.5},
    "unknown key 'dampign'": {"dampign": 1},
    "factor_decay: expected": {"factor_decay": 1.0},
}


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(PROBLEMS, 2)])
def test_any_two_problems_are_both_reported(one: str, other: str) -> None:
    text = complaint({**PROBLEMS[one], **PROBLEMS[other]})
    assert text is not None
    assert one in text and other in text


def test_a_wrong_value_is_not_blamed_for_a_contradiction() -> None:
    text = complaint({"direction": "orthogonl", "grafting": "rms", "kl_clip": 0.5})
    assert text is not None
    assert "contradicts" not in text and "no effect" not in text


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("grafting", ["none", "rms", "adam"])
def test_what_is_dumped_can_be_parsed(direction: str, grafting: str) -> None:
    """A KL clip that nobody asked for was refused when a dumped configuration was read again."""
    if direction == "orthogonal" and grafting != "none":
        return
    config = KFACConfig.parse({"direction": direction, "grafting": grafting})
    assert KFACConfig.parse(config.model_dump()) == config
    assert (config.kl_clip is not None) == config.uses_kl_clip


@pytest.mark.parametrize(
    "key", ["factor_update_steps", "inv_update_steps", "factor_token_fraction"]
)
def test_an_overhead_to_keep_and_a_schedule_decide_the_same(key: str) -> None:
    value = 10 if key == "inv_update_steps" else 1
    schedule = {"type": "steps", "values": [value], "boundaries": []}
    text = complaint({key: schedule, "max_overhead": 0.05})
    assert text is not None and f"{key} is a schedule" in text and "max_overhead (0.05)" in text
    assert complaint({key: schedule}) is None


def test_an_overhead_is_measured_beside_steps_without_statistics() -> None:
    text = complaint({"factor_update_steps": 1, "max_overhead": 0.05})
    assert text is not None and "set factor_update_steps to 2 or more" in text
    start = {"factor_update_steps": 2, "inv_update_steps": 4, "factor_token_fraction": 0.5}
    assert complaint({**start, "max_overhead": 0.05}) is None

"""Every setting: values it takes, values it refuses, and what the refusal says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError, KFACError
from tests.unit.config.tables import SETTINGS, pairs

TYPOS = {
    "inv_update_step": "inv_update_steps",
    "inv_update_freq": "inv_update_steps",
    "factor_update_step": "factor_update_steps",
    "factor_update_freq": "factor_update_steps",
    "factors_decay": "factor_decay",
    "dampening": "damping",
    "Damping": "damping",
    "klclip": "kl_clip",
    "kl_cliping": "kl_clip",
    "directions": "direction",
    "solvers": "solver",
    "graft": "grafting",
    "beta": "betas",
    "grad_workers_fraction": "grad_worker_fraction",
    "max_factor_size": "max_factor_dim",
    "skip_layer": "skip_layers",
    "strict_layer": "strict_layers",
    "inverse_devices": "inverse_device",
    "enable": "enabled",
    "on_non_finite": "on_nonfinite",
    "max_failure": "max_failures",
    "tensor_parallelism": "tensor_parallel",
    "weights_sharing": "weight_sharing",
}


def refusal(settings: Any, kind: type[KFACError] = ConfigError) -> str:
    with pytest.raises(KFACError) as caught:
        KFACConfig.parse(settings)
    assert type(caught.value) is kind
    return str(caught.value)


def test_the_table_covers_every_setting() -> None:
    assert set(SETTINGS) == set(KFACConfig.model_fields)


@pytest.mark.parametrize(("key", "value"), pairs("good"))
def test_good_values_are_taken_as_they_are(key: str, value: Any) -> None:
    config = KFACConfig.parse({key: value})
    taken = getattr(config, key)
    if isinstance(value, dict) and "type" in value:
        given = taken.model_dump()
        assert all(given[k] == (tuple(v) if isinstance(v, list) else v) for k, v in value.items())
    else:
        assert taken == (tuple(value) if isinstance(value, list) else value)
        assert type(taken) is type(value) or isinstance(value, list)


@pytest.mark.parametrize(("key", "value"), pairs("bad"))
def test_bad_values_are_refused_with_key_and_value(key: str, value: Any) -> None:
    text = refusal({key: value})
    assert text.startswith("KFAC-E201 kfac: ")
    # The key itself, or a key inside the object that it holds, each with the value it has.
    found = re.findall(rf"(?:^|[; ']){key}(?:\.(\w+))?\b", text)
    assert found, text
    # A key that is missing, or that should not be there at all, has no value to show.
    missing = "required, but missing" in text or f"unknown key '{key}." in text
    shown = [value, *(value.get(part) for part in found if isinstance(value, dict) and part)]
    assert missing or any(repr(item)[:150] in text for item in shown), text
    for internal in ("Input", "union", "function-", "Schedule", "valid integer", "Value error"):
        assert internal not in text


@pytest.mark.parametrize(("key", "value"), pairs("bad"))
def test_one_bad_value_makes_one_complaint(key: str, value: Any) -> None:
    """pydantic reports every member of a union that it tried: noise to users."""
    text = refusal({key: value})
    complaints = len(re.findall(r"expected|required|unknown key|needs|must|lies behind", text))
    assert complaints == (2 if "'steps' a" in text else 1), text


@pytest.mark.parametrize(("typo", "meant"), TYPOS.items())
def test_unknown_keys_name_the_nearest_and_all_known_ones(typo: str, meant: str) -> None:
    text = refusal({typo: 1})
    assert f"unknown key {typo!r}; did you mean {meant!r}?" in text
    assert text.endswith("Known keys: " + ", ".join(sorted(KFACConfig.model_fields)))


def test_unknown_key_far_from_everything_gets_no_guess() -> None:
    text = refusal({"zzzz": 1, 7: 2})
    assert "unknown key 'zzzz'; unknown key '7'; Known keys: " in text
    assert "did you mean" not in text


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            {"type": "linear", "start": 1, "end": 2, "step": 3},
            "damping.steps: required, but missing; unknown key 'damping.step'; did you mean "
            "'steps'? (Known keys: begin, end, start, steps, type)",
        ),
        (
            {"type": "exponential", "start": 1, "rat": 2},
            "damping.rate: required, but missing; unknown key 'damping.rat'; did you mean "
            "'rate'? (Known keys: end, every, rate, start, type)",
        ),
        (
            {"type": "linear", "start": "x", "end": 0, "steps": -1},
            "damping.start: expected a number, got 'x' (str); damping.steps: expected a whole "
            "number >= 1, got -1 (int)",
        ),
        (
            {"type": "steps", "values": [1, "a"], "boundaries": 5},
            "damping.values: expected a list of at least one number, got [1, 'a'] (list); "
            "damping.boundaries: expected a list of whole numbers >= 1, got 5 (int)",
        ),
        (
            {"type": "steps", "values": [1], "boundaries": [5]},
            "damping: needs one value more than boundaries, got 1 values and 1 boundaries, got "
            "{'type': 'steps', 'values': [1], 'boundaries': [5]} (dict)",
        ),
        (
            {"start": 1},
            "damping: a schedule needs a type, one of 'linear', 'cosine', 'exponential', "
            "'steps', got {'start': 1} (dict)",
        ),
    ],
)
def test_problems_inside_a_schedule_have_the_path_the_user_wrote(
    schedule: dict[str, Any], expected: str
) -> None:
    assert refusal({"damping": schedule}) == f"KFAC-E201 kfac: {expected}"


def test_choices_are_listed_with_the_nearest() -> None:
    text = refusal({"direction": "natura", "solver": "eig"})
    assert "one of 'natural', 'ekfac', 'eigen_adam', 'orthogonal' (did you mean 'natural'?)" in text
    assert "solver: expected one of 'eigen', 'cholesky', or null (did you mean 'eigen'?)" in text


def test_long_values_are_cut() -> None:
    assert len(refusal({"skip_layers": ["x" * 10, 3] + ["layer"] * 10_000})) < 500


@pytest.mark.parametrize("section", [None, [], "kfac", 3, True, ["damping"]])
def test_a_section_that_is_no_object_is_refused(section: Any) -> None:
    text = refusal(section)
    assert text.startswith("KFAC-E202 kfac: expected an object")
    assert repr(section) in text


def test_all_problems_are_listed_at_once() -> None:
    text = refusal(
        {
            "dampning": 1,
            "damping": -1,
            "factor_decay": "0.9",
            "factor_update_steps": 10,
            "inv_update_steps": 15,
            "grafting": "rms",
            "direction": "orthogonal",
            "betas": [0.9, 2],
            "factor_token_fraction": {"type": "cosine", "start": 1, "end": 2, "steps": 5},
            "resume": "never",
        }
    )
    for part in (
        "unknown key 'dampning'; did you mean 'damping'?",
        "damping: expected a number in [1e-30, 1e30], a schedule of such numbers, or null, got -1",
        "factor_decay: expected a number in [0, 1), or a schedule of such numbers, got '0.9' (str)",
        "inv_update_steps (15) must be a multiple of factor_update_steps (10)",
        "grafting 'rms' contradicts direction 'orthogonal'",
        "betas: expected a list of two numbers in [0, 1), got [0.9, 2] (list)",
        "factor_token_fraction: expected a number in (0, 1]",
        "resume: expected one of 'auto', 'require', 'fresh', got 'never' (str)",
    ):
        assert part in text
    assert text.count("Known keys") == 1


@pytest.mark.parametrize("fraction", [1e-3, 0.25, 1, None])
def test_hybrid_takes_a_share_of_the_ranks(fraction: Any) -> None:
    settings = {"strategy": "hybrid", "grad_worker_fraction": fraction}
    assert KFACConfig.parse(settings).grad_worker_fraction == fraction


def test_settings_cannot_be_changed_afterwards() -> None:
    config = KFACConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.damping = 3.0


def test_an_instance_passes_through() -> None:
    config = KFACConfig(damping=0.5)
    assert KFACConfig.parse(config) is config
    assert KFACConfig.parse(config.model_dump()) == config


def test_defaults_resolve_by_direction() -> None:
    resolved = {
        name: (config.resolved_solver, config.resolved_damping, config.uses_kl_clip)
        for name in ("natural", "ekfac", "eigen_adam", "orthogonal")
        for config in [KFACConfig.parse({"direction": name})]
    }
    assert resolved == {
        "natural": ("eigen", 1.0, True),
        "ekfac": ("eigen", 0.1, True),
        "eigen_adam": ("eigen", 0.1, False),
        "orthogonal": ("cholesky", 0.1, False),
    }
    assert not KFACConfig(grafting="rms").uses_kl_clip
    assert KFACConfig(direction="orthogonal", solver="eigen").resolved_solver == "eigen"


@pytest.mark.parametrize("mode", ["relative", "absolute"])
def test_damping_outside_the_range_of_fp32_is_refused(mode: str) -> None:
    """1e300 was accepted; the first refresh ended in "value cannot be converted to type float"."""
    text = refusal({"damping": 1e300, "damping_mode": mode})
    assert "damping: expected a number in [1e-30, 1e30]" in text

"""``optimizer.params`` of type KFAC: two kinds of keys in one object."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_kfac.config import KFACConfig, split_optimizer_params
from ds_kfac.errors import ConfigError
from ds_kfac.optimizer import KFACOptimizer


def refusal(params: dict[Any, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        split_optimizer_params(params)
    assert caught.value.code == "E201"
    assert caught.value.message.startswith("optimizer.params: ")
    return caught.value.message.removeprefix("optimizer.params: ")


def test_keys_go_to_their_side() -> None:
    own, kfac = split_optimizer_params(
        {
            "lr": 0.1,
            "weight_decay": 0.01,
            "aux": {"lr": 0.02, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.5},
            "damping": 0.5,
            "betas": [0.7, 0.8],
            "momentum": 0.9,
        }
    )
    assert (own.lr, own.weight_decay, own.aux_lr, own.aux_weight_decay) == (0.1, 0.01, 0.02, 0.5)
    assert (own.aux.betas, own.aux.eps) == ((0.8, 0.9), 1e-6)
    assert kfac == {
        "direction": "orthogonal",
        "damping": 0.5,
        "betas": [0.7, 0.8],
        "momentum": 0.9,
    }
    assert KFACConfig.parse(kfac).direction == "orthogonal"


def test_defaults() -> None:
    own, kfac = split_optimizer_params({"lr": 1})
    assert (own.aux_lr, own.aux_weight_decay, own.weight_decay) == (1.0, 0.0, 0.0)
    assert kfac == {"direction": "orthogonal"}
    own, kfac = split_optimizer_params({"lr": 1, "weight_decay": 0.1, "direction": "natural"})
    assert own.aux_weight_decay == 0.1
    assert kfac == {"direction": "natural"}


def test_params_are_not_changed() -> None:
    params = {"lr": 0.1, "aux": {"lr": 0.2}, "damping": 1.0}
    split_optimizer_params(params)
    assert params == {"lr": 0.1, "aux": {"lr": 0.2}, "damping": 1.0}


@pytest.mark.parametrize(
    ("params", "parts"),
    [
        ({}, ["lr: required, but missing"]),
        ({"lr": "1e-3"}, ["lr: expected a number >= 0, got '1e-3' (str)"]),
        ({"lr": "auto"}, ["lr: expected a number >= 0, got 'auto' (str)"]),
        ({"lr": True}, ["lr: expected a number >= 0, got True (bool)"]),
        ({"lr": -1}, ["lr: expected a number >= 0, got -1 (int)"]),
        ({"lr": None}, ["lr: expected a number >= 0, got None (NoneType)"]),
        ({"lr": float("nan")}, ["lr: expected a number >= 0, got nan (float)"]),
        ({"lr": 10**400}, ["lr: expected a number >= 0, got 1000"]),
        ({"lr": 1, "weight_decay": -0.1}, ["weight_decay: expected a number >= 0, got -0.1"]),
        ({"lr": 1, "aux": 3}, ["aux: expected an object with lr, betas, eps, weight_decay, got 3"]),
        ({"lr": 1, "aux": None}, ["aux: expected an object", "got None"]),
        ({"lr": 1, "aux": {"lr": -1}}, ["aux.lr: expected a number >= 0, or null, got -1 (int)"]),
        ({"lr": 1, "aux": {"eps": 0}}, ["aux.eps: expected a number > 0, got 0 (int)"]),
        ({"lr": 1, "aux": {"betas": [0.9, 1]}}, ["aux.betas: expected a list of two numbers"]),
        (
            {"lr": 1, "aux": {"beta": 1}},
            ["unknown key 'aux.beta'; did you mean 'betas'? (Known keys: betas, eps, lr,"],
        ),
        ({"lr": 1, "weight_decy": 0}, ["unknown key 'weight_decy'; did you mean 'weight_decay'?"]),
        (
            {"lr": 1, "dampin": 0},
            ["unknown key 'dampin'; did you mean 'damping'?", "Known keys: aux"],
        ),
        ({"lr": 1, 3: 0}, ["unknown key '3'"]),
        ({"lr": 1, "damping": -1}, ["damping: expected a number in [1e-30, 1e30]"]),
        ({"lr": 0, "aux": {"lr": 0.1}}, ["aux.lr (0.1) is applied as a multiple of lr, which is"]),
        ({"lr": 1, "grafting": "rms"}, ["grafting 'rms' contradicts direction 'orthogonal'"]),
    ],
)
def test_refusals(params: dict[Any, Any], parts: list[str]) -> None:
    text = refusal(params)
    assert all(part in text for part in parts), text
    assert text.count("expected") + text.count("unknown") + text.count("required") <= 1


def test_problems_of_both_kinds_are_listed_at_once() -> None:
    text = refusal({"lr": -1, "aux": {"ep": 1}, "dampin": 1, "damping": -1, "kl_clip": 0.1})
    for part in ("lr: expected", "'aux.ep'", "'dampin'", "damping: expected", "kl_clip (0.1)"):
        assert part in text
    assert text.count("Known keys: aux, background_inverse") == 1


def test_a_zero_rate_is_allowed() -> None:
    """Warm-up schedules start there."""
    own, _ = split_optimizer_params({"lr": 0})
    assert own.aux_lr == 0.0
    assert own.aux_ratio == 1.0
    KFACOptimizer([{"params": [torch.nn.Parameter(torch.ones(2))]}], own)

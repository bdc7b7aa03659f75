"""What every setting takes and refuses: written down once, checked by several tests."""

from __future__ import annotations

from typing import Any

INF, NAN = float("inf"), float("nan")
LINEAR = {"type": "linear", "start": 0.5, "end": 0.25, "steps": 10}

_SWITCH: dict[str, list[Any]] = {
    "good": [True, False],
    "bad": [0, 1, "true", None, [True], {}],
}
_NOT_NUMBERS: list[Any] = ["1e-3", "auto", True, False, NAN, INF, -INF, [0.5], 10**400, object()]
_BAD_SCHEDULES: list[Any] = [
    {},
    {"type": None},
    {"type": "lin", "start": 1, "end": 2, "steps": 3},
    {"type": "linear", "start": 0.5, "end": "0.2", "steps": 10},
    {"type": "linear", "start": 0.5, "end": 0.25, "steps": 10.0},
    {"type": "linear", "start": 0.5, "end": 0.25, "steps": True},
    {"type": "linear", "start": 0.5, "end": 0.25, "steps": 0},
    {"type": "linear", "start": 0.5, "end": 0.25},
    {"type": "linear", "start": 0.5, "end": 0.25, "steps": 10, "stop": 3},
    {"type": "cosine", "start": NAN, "end": 0.25, "steps": 10},
    {"type": "cosine", "start": 0.5, "end": 0.25, "steps": 10, "begin": -1},
    {"type": "exponential", "start": 0.5, "rate": 0},
    {"type": "exponential", "start": 0.5, "rate": 0.5, "end": 0.75},
    {"type": "steps", "values": [], "boundaries": []},
    {"type": "steps", "values": [0.5], "boundaries": [3]},
    {"type": "steps", "values": [0.5, 0.4, 0.3], "boundaries": [5, 5]},
    {"type": "steps", "values": [0.5, 0.4, 0.3], "boundaries": [6, 5]},
    {"type": "steps", "values": [0.5, True], "boundaries": [5]},
]


def _choice(*names: str, null: bool = False) -> dict[str, list[Any]]:
    bad = [names[0].upper(), "", 1, True, [names[0]], {"type": names[0]}, *([] if null else [None])]
    return {"good": [*names, *([None] if null else [])], "bad": bad}


def _constant(value: float) -> dict[str, Any]:
    return {"type": "steps", "values": [value], "boundaries": []}


def _numbers(good: list[Any], bad: list[Any], *, null: bool = False) -> dict[str, list[Any]]:
    """A number: what is allowed, and what is a number but not allowed."""
    nothing = [None]
    return {
        "good": good + (nothing if null else []),
        "bad": bad + _NOT_NUMBERS + [{}] + ([] if null else nothing),
    }


def _scheduled(good: list[Any], bad: list[Any], *, null: bool = False) -> dict[str, list[Any]]:
    """A number or a schedule: constants of bad numbers are bad schedules."""
    values = _numbers(good, bad, null=null)
    values["good"] += [_constant(value) for value in good if not isinstance(value, dict)]
    values["bad"] += [_constant(value) for value in bad] + _BAD_SCHEDULES
    return values


SETTINGS: dict[str, dict[str, list[Any]]] = {
    "enabled": _SWITCH,
    "direction": _choice("natural", "ekfac", "eigen_adam", "orthogonal"),
    "solver": _choice("eigen", "cholesky", null=True),
    "damping": _scheduled([1e-8, 0.1, 1, 10**6, LINEAR], [0, 0.0, -1e-3, 1e31, 1e-31], null=True),
    "damping_mode": _choice("relative", "absolute"),
    "factor_decay": _scheduled([0, 0.0, 0.95, 0.999999, LINEAR], [1, 1.0, -0.1, 2]),
    "factor_update_steps": {
        "good": [1, 2, 5, 10, 2.0, {"type": "linear", "start": 1, "end": 10, "steps": 100}],
        "bad": [*_scheduled([], [0, -1, 0.5])["bad"], 2.5],
    },
    "inv_update_steps": {
        "good": [10, 20, 1000, 10.0, {"type": "linear", "start": 1, "end": 10, "steps": 100}],
        "bad": [*_scheduled([], [0, -10, 0.5])["bad"], 20.5],
    },
    "max_overhead": _numbers([1e-3, 0.05, 1, 2.5], [0, 0.0, -0.05], null=True),
    "kl_clip": _scheduled([1e-3, 1, LINEAR], [0, -1e-3], null=True),
    "grafting": _choice("none", "rms", "adam"),
    "momentum": _numbers([0, 0.0, 0.9], [1, 1.0, -0.1], null=True),
    "betas": {
        "good": [[0.9, 0.95], (0, 0.5), [0.0, 0.0]],
        "bad": [
            [0.9],
            [0.9, 1.0],
            [0.9, "0.9"],
            [True, 0.9],
            [0.9] * 3,
            0.9,
            None,
            NAN,
            [NAN, 0.9],
        ],
    },
    "strategy": _choice("zero_aligned", "memory", "communication", "hybrid"),
    "grad_worker_fraction": {
        "good": [None],
        "bad": [*_numbers([], [0, -1, 1.5, 2], null=True)["bad"]],
    },
    "distribute": _choice("layer", "factor"),
    "tensor_parallel": _choice("exact", "block"),
    "max_factor_dim": {
        "good": [1, 2048],
        "bad": [0, -1, 1.5, 2048.0, "2048", True, None, [1], INF],
    },
    "weight_sharing": _choice("expand", "reduce"),
    "factor_token_fraction": _scheduled([1e-3, 0.5, 1, 1.0, LINEAR], [0, -0.5, 1.5, 2]),
    "factor_micro_batches": _choice("all", "last"),
    "skip_layers": {"good": [[], ["a", "b.*"]], "bad": ["lm_head", [1], [None], None, 3, {"a": 1}]},
    "plain_layers": {"good": [[], ["MyLinear"]], "bad": ["MyLinear", [1], [None], None, 3]},
    "fused_parts": {
        "good": [{}, {"*qkv*": 3, "b": 1}],
        "bad": [{"a": 0}, {"a": True}, {"a": "3"}, {"a": 1.0}, {1: 2}, ["a"], "a", None],
    },
    "strict_layers": _SWITCH,
    "background_inverse": _SWITCH,
    "inverse_device": _choice("auto", "cpu"),
    "max_failures": {"good": [0, 3], "bad": [-1, 1.0, "3", True, None, [1]]},
    "on_nonfinite": _choice("skip", "raise"),
    "resume": _choice("auto", "require", "fresh"),
    "watchdog_timeout": {
        "good": [0, 3, 60.5, 1e9, None],
        "bad": [-1, 1e10, "60", True, [60], float("nan"), float("inf")],
    },
}


def pairs(which: str) -> list[tuple[str, Any]]:
    """All ``(key, value)`` of SETTINGS that are ``good`` or ``bad``."""
    return [(key, value) for key, values in SETTINGS.items() for value in values[which]]

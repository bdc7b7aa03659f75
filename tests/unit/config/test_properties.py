"""Random configurations: either one clear error, or an object that works."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError, KFACError
from tests.unit.config.tables import SETTINGS

_KEYS = sorted(SETTINGS)
_BOUND = (
    "inv_update_steps",
    "factor_update_steps",
    "max_overhead",
    "solver",
    "grafting",
    "kl_clip",
)
_FREE = [
    # Every good value of these goes with every good value of the others.
    key
    for key in _KEYS
    if key not in _BOUND
]


def _values(which: str) -> st.SearchStrategy[tuple[str, Any]]:
    pairs = [(key, value) for key in _KEYS for value in SETTINGS[key][which]]
    return st.sampled_from(pairs)


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(_FREE), st.integers(0, 99), max_size=8))
def test_every_valid_configuration_constructs(choices: dict[str, int]) -> None:
    chosen = {}
    for key, number in choices.items():
        good = SETTINGS[key]["good"]
        chosen[key] = good[number % len(good)]
    config = KFACConfig.parse(chosen)
    assert KFACConfig.parse(json.loads(config.model_dump_json(exclude_unset=True))) == config
    assert set(config.model_fields_set) == set(chosen)


@settings(max_examples=150)
@given(
    good=st.lists(_values("good"), max_size=4),
    bad=st.lists(_values("bad"), min_size=1, max_size=3, unique_by=lambda pair: pair[0]),
)
def test_every_invalid_configuration_gives_one_error_that_names_every_wrong_key(
    good: list[tuple[str, Any]], bad: list[tuple[str, Any]]
) -> None:
    try:
        KFACConfig.parse({**dict(good), **dict(bad)})
    except ConfigError as error:
        assert error.code == "E201"
        assert error.__cause__ is None and error.__context__ is None
        for key, value in bad:
            assert f"{key}" in error.message
            assert isinstance(value, dict) or repr(value)[:150] in error.message
    else:
        raise AssertionError("accepted")


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=8), _JUNK, max_size=4))
def test_no_content_raises_anything_but_our_errors(content: dict[str, Any]) -> None:
    try:
        config = KFACConfig.parse(content)
    except KFACError as error:
        assert type(error) is ConfigError
        assert "\n" not in error.message
        assert any(repr(key)[1:-1] in error.message for key in content)
    else:
        assert set(content) == config.model_fields_set

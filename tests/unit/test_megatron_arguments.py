"""Flags of KFACConfig beside Megatron's own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError
from ds_kfac.hosts.megatron_arguments import add_arguments, settings


def parse(*words: str) -> argparse.Namespace:
    return add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(words)


def test_without_the_switch_there_is_no_kfac() -> None:
    assert settings(parse()) is None


def test_the_switch_alone_gives_the_defaults() -> None:
    assert settings(parse("--kfac")) == KFACConfig()


def test_every_setting_has_a_flag_with_its_meaning_in_the_help() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    flags = {action.dest: action for action in parser._actions}
    for name in set(KFACConfig.model_fields) - {"enabled"}:
        assert flags["kfac_" + name].option_strings == ["--kfac-" + name.replace("_", "-")]
        assert "expected: " in str(flags["kfac_" + name].help)
    text = " ".join(parser.format_help().split())
    assert "Decay of the factor average per *applied step*; expected: a number in [0, 1)" in text
    assert '"orthogonal"' in text and "default: 0.95" in text


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--kfac-damping", "0.3"], "damping", 0.3),
        (["--kfac-damping", "1e-3"], "damping", 1e-3),
        (["--kfac-direction", "ekfac"], "direction", "ekfac"),
        (["--kfac-inv-update-steps", "20"], "inv_update_steps", 20),
        (["--kfac-kl-clip", "null"], "kl_clip", None),
        (["--kfac-betas", "0.8", "0.9"], "betas", (0.8, 0.9)),
        (["--kfac-betas", "[0.8, 0.9]"], "betas", (0.8, 0.9)),
        (["--kfac-skip-layers", "*.linear_fc1"], "skip_layers", ("*.linear_fc1",)),
        (["--kfac-fused-parts", '{"*kv*": 2}'], "fused_parts", {"*kv*": 2}),
        (["--kfac-strict-layers"], "strict_layers", True),
        (["--kfac-strict-layers", "false"], "strict_layers", False),
    ],
)
def test_values(words: list[str], name: str, value: object) -> None:
    config = settings(parse("--kfac", *words))
    assert getattr(config, name) == value


def test_numbers_may_be_schedules() -> None:
    schedule = {"type": "linear", "start": 1.0, "end": 0.1, "steps": 100}
    config = settings(parse("--kfac", "--kfac-damping", json.dumps(schedule)))
    assert config is not None and config.damping.value(100) == pytest.approx(0.1)


def test_flags_are_stronger_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kfac.json"
    path.write_text('{"damping": 0.5, "factor_decay": 0.9}')
    config = settings(parse("--kfac", "--kfac-config", str(path), "--kfac-damping", "0.2"))
    assert config is not None
    assert (config.damping, config.factor_decay) == (0.2, 0.9)


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_files_that_are_no_settings(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "kfac.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="--kfac-config .*kfac.json"):
        settings(parse("--kfac", "--kfac-config", str(path)))


def test_flags_without_the_switch_are_an_error() -> None:
    """Training without K-FAC in silence would be the worst answer."""
    with pytest.raises(ConfigError, match="--kfac-damping without --kfac: add --kfac"):
        settings(parse("--kfac-damping", "0.3"))


def test_wrong_values_are_all_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        settings(parse("--kfac", "--kfac-damping", "-1", "--kfac-solver", "magic"))
    assert "damping" in caught.value.message and "solver" in caught.value.message

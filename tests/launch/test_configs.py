"""Every training configuration in configs/ loads in DeepSpeed and in ds_kfac."""

import json
from pathlib import Path
from typing import Any

import pytest

from ds_kfac.config import KFACConfig, split_optimizer_params

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(path for path in CONFIGS.glob("zero*.json"))
EXPECTED = (
    "zero0_kfac zero1_kfac zero2_adamw zero2_kfac zero2_kfac_bf16 zero2_sgd_kfac_section".split()
)


def content(path: Path) -> dict[str, Any]:
    loaded = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def test_the_documented_configurations_exist() -> None:
    assert set(EXPECTED) <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_deepspeed_accepts_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = DeepSpeedConfig(str(path))
    assert config.train_batch_size == 16
    assert path.stem.startswith(f"zero{config.zero_config.stage}_")
    assert config.bfloat16_config.enabled == path.stem.endswith("bf16")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_training_script_accepts_the_file(path: Path) -> None:
    pytest.importorskip("deepspeed")
    from launch.loop import Recipe

    recipe = Recipe.read(path)
    assert (recipe.aux_lr is not None) == ("adamw" in path.stem)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kfac_settings_are_valid(path: Path) -> None:
    config = content(path)
    kind, params = config["optimizer"]["type"], config["optimizer"]["params"]
    assert (kind == "KFAC" or "kfac" in config) == ("kfac" in path.stem)
    if kind == "KFAC":
        _, section = split_optimizer_params(params)
        assert KFACConfig.parse(section).direction == "orthogonal"
    elif "kfac" in config:
        assert KFACConfig.parse(config["kfac"]).direction == "natural"


def test_kfac_variants_differ_only_where_their_names_say() -> None:
    reference = content(CONFIGS / "zero2_kfac.json")
    for stage in (0, 1):
        variant = content(CONFIGS / f"zero{stage}_kfac.json")
        assert variant.pop("zero_optimization") == {"stage": stage}
        assert variant == {k: v for k, v in reference.items() if k != "zero_optimization"}
    bf16 = content(CONFIGS / "zero2_kfac_bf16.json")
    assert bf16.pop("bf16") == {"enabled": True}
    assert bf16 == reference


def test_baseline_shares_batch_clipping_and_weight_decay_with_kfac() -> None:
    kfac, adamw = content(CONFIGS / "zero2_kfac.json"), content(CONFIGS / "zero2_adamw.json")
    for key in ("train_batch_size", "gradient_clipping", "zero_optimization"):
        assert kfac[key] == adamw[key]
    assert adamw["optimizer"]["params"]["torch_adam"]  # DeepSpeed's own Adam needs a compiler

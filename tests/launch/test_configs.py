"""Every training configuration in configs/ loads in DeepSpeed and in ds_kfac."""

import json
from pathlib import Path
from typing import Any

import pytest

from ds_kfac.config import KFACConfig, split_optimizer_params

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(path for path in CONFIGS.glob("zero*.json"))
VARIANTS: dict[str, dict[str, Any]] = {  # beside the ZeRO stage in their name
    "zero0_kfac": {},
    "zero1_kfac": {},
    "zero3_kfac": {},
    "zero0_kfac_bf16": {"bf16": {"enabled": True}},
    "zero2_kfac_bf16": {"bf16": {"enabled": True}},
    "zero3_kfac_bf16": {"bf16": {"enabled": True}},
    "zero1_kfac_bf16_fp32_sums": {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "zero2_kfac_fp16": {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}},
    "zero2_kfac_autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "zero2_kfac_offload": {"zero_force_ds_cpu_optimizer": False},
    "zero3_kfac_offload": {"bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False},
    "zero1_kfac_autotp": {"tensor_parallel": {"autotp_size": 2}},
    "zero1_kfac_pipeline": {"train_micro_batch_size_per_gpu": 2},
    "zero2_kfac_moe": {},
    "zero3_kfac_ulysses": {"sequence_parallel_size": 2},
}
# Models or groups of their own: tests.hosts trains them.
ELSEWHERE = ("autotp", "pipeline", "moe", "ulysses")
EXPECTED = (
    *VARIANTS,
    *("zero2_adamw", "zero2_kfac", "zero2_sgd_kfac_section", "zero2_adamw_kfac_section"),
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
    assert config.bfloat16_config.enabled == ("bf16" in content(path))
    assert (config.zero_config.offload_optimizer is not None) == ("offload" in path.stem)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_training_script_accepts_the_file(path: Path) -> None:
    pytest.importorskip("deepspeed")
    from launch.loop import Recipe

    recipe = Recipe.read(path)
    assert (recipe.aux_lr is not None) == (path.stem == "zero2_adamw")


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


@pytest.mark.parametrize("name", VARIANTS)
def test_kfac_variants_differ_only_where_their_names_say(name: str) -> None:
    reference = content(CONFIGS / "zero2_kfac.json")
    variant = content(CONFIGS / f"{name}.json")
    zero = variant.pop("zero_optimization")
    assert zero.pop("stage") == int(name[4])
    assert all(key.startswith("offload_") for key in zero)
    for key, value in VARIANTS[name].items():
        assert variant.pop(key) == value
    reference.pop("zero_optimization")
    if "autotp" in name:  # for Hugging Face models, which AutoTP knows how to cut
        reference["optimizer"]["params"]["skip_layers"] = ["lm_head"]
    if "moe" in name:  # an expert sees a share of the rows as it is
        reference["optimizer"]["params"]["factor_token_fraction"] = 1.0
    assert variant == reference


def _train(rank: int, size: int, names: list[str]) -> dict[str, tuple[int, int, bool]]:
    """Applied and dropped steps of each configuration on a small GPT, and whether it moved."""
    import torch

    import ds_kfac
    from launch.model import GPT, GPTConfig
    from tests._harness import deepspeed_cpu

    found = {}
    for name in names:
        # The CPU accelerator has no fp16, which only changes what DeepSpeed says about it.
        deepspeed_cpu.prepare(fake_fp16="fp16" in name)
        config = content(CONFIGS / f"{name}.json")
        config.pop("train_gpt", None)
        torch.manual_seed(0)
        model = GPT(GPTConfig(seq_len=16, layers=1, width=32, heads=2))
        engine, *_ = ds_kfac.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        moved = []
        for step in range(3):
            torch.manual_seed(100 + step)
            tokens = torch.randint(0, 256, (16, 17)).chunk(size)[rank]
            logits = engine(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
            moved.append(float(loss))
            engine.backward(loss)
            engine.step()
        counters = engine.kfac.counters
        finite = all(value == value for value in moved)
        found[name] = (counters.steps, counters.skipped, finite)
        engine.destroy()
    return found


@pytest.mark.dist
def test_every_kfac_file_trains() -> None:
    """Two ranks, real engines; but for those whose tests are beside their engines' in tests.hosts.

    ``test_deepspeed_autotp.py`` and ``test_deepspeed_guide.py``.
    """
    pytest.importorskip("deepspeed")
    from tests._harness import world

    names = [
        path.stem for path in FILES if "kfac" in path.stem and not path.stem.endswith(ELSEWHERE)
    ]
    alone = [name for name in names if "fp16" in name or "autocast" in name]
    jobs = [[name for name in names if name not in alone], *([name] for name in alone)]
    for job in jobs:
        for found in world(2).run(_train, job, isolated=True, timeout=200):
            assert found.keys() == set(job)
            for name, (steps, skipped, finite) in found.items():
                assert finite and steps + skipped == 3, (name, steps, skipped)
                assert steps == 3 or "fp16" in name, (name, steps, skipped)


def test_baseline_shares_batch_clipping_and_weight_decay_with_kfac() -> None:
    kfac, adamw = content(CONFIGS / "zero2_kfac.json"), content(CONFIGS / "zero2_adamw.json")
    for key in ("train_batch_size", "gradient_clipping", "zero_optimization"):
        assert kfac[key] == adamw[key]
    assert adamw["optimizer"]["params"]["torch_adam"]  # DeepSpeed's own Adam needs a compiler

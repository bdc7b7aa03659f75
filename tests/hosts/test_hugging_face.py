"""Hugging Face's Trainer and accelerate, unmodified, on DeepSpeed engines with K-FAC."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError
from ds_kfac.hosts import deepspeed_config
from tests import _harness
from tests.hosts import hugging_face_jobs as jobs

RANKS = 2
CONFIGS = Path(__file__).parents[2] / "configs"
MISSING = [
    name
    for name in ("deepspeed", "transformers", "accelerate")
    if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

if not MISSING:
    # Seconds per process otherwise; loading them starts no threads.
    _harness.preload("transformers.trainer", "transformers.models.gpt2.modeling_gpt2")
    _harness.preload("transformers.models.llama.modeling_llama", "accelerate")


@pytest.fixture(scope="module")
def runs(world: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("hf"))
    # Trainer and Accelerator keep process-wide state.
    results: list[dict[str, Any]] = world(RANKS).run(
        jobs.everything, folder, str(CONFIGS), isolated=True, timeout=240
    )
    return results


def check(run: dict[str, Any]) -> None:
    """Compare every weight, relative to its norm, with the oracle's.

    The Llama modules compute norms and rotations in fp32 whatever the model's dtype, so that
    the oracle has rounding errors too.
    """
    start, end = run["oracle"]["start"], run["oracle"]["end"]
    assert run["weights"].keys() == end.keys()
    for name, weight in end.items():
        assert float((run["weights"][name] - weight).norm()) < 1e-5 * float(weight.norm()), name
    layer = run["oracle"]["layer"] + ".weight"
    assert float((end[layer] - start[layer]).norm()) > 1e-2 * float(start[layer].norm())


def test_trainer_with_optimizer_type_kfac_matches_the_oracle(runs: list[dict[str, Any]]) -> None:
    """GPT-2's Conv1D layers, "auto" values, accumulation 2 on 2 ranks, clipping."""
    results = [run["gpt2"] for run in runs]
    assert results[0]["optimizer"] == "KFACOptimizer"
    assert results[0]["clipping"] == 0.5
    assert {kind for _, kind in results[0]["layers"]} == {"conv1d"}
    assert results[0]["kfac"]["steps"] == results[0]["kfac"]["preconditions"] == jobs.STEPS
    assert "lm_head" in results[0]["left out"]
    check(results[0])
    # What users see in the log is the norm of the raw gradient.
    assert results[0]["log"][-1]["grad_norm"] == pytest.approx(
        results[0]["oracle"]["norm"], rel=1e-5
    )


def test_trainer_with_kfac_section_matches_the_oracle(runs: list[dict[str, Any]]) -> None:
    results = [run["llama"] for run in runs]
    assert results[0]["optimizer"] == "SGD"
    assert {kind for _, kind in results[0]["layers"]} == {"linear"}
    check(results[0])


def test_accelerate_loop_matches_the_oracle(runs: list[dict[str, Any]]) -> None:
    """The optimizer is a torch object made by the script."""
    results = [run["accelerate"] for run in runs]
    assert results[0]["kfac"]["steps"] == results[0]["kfac"]["captures"] == jobs.STEPS
    check(results[0])


def test_without_a_section_nothing_changes(runs: list[dict[str, Any]]) -> None:
    plain, with_kfac = runs[0]["plain"], runs[0]["llama"]
    assert plain["kfac"] is None
    assert plain["log"][0]["loss"] == with_kfac["log"][0]["loss"]
    assert plain["log"][-1]["loss"] != with_kfac["log"][-1]["loss"]


def test_trainers_own_optimizer_keeps_its_parameter_groups(runs: list[dict[str, Any]]) -> None:
    """A JSON without optimizer: Trainer makes AdamW with and without weight decay."""
    run = runs[0]["trainers own"]
    assert run["optimizer"] == "AdamW"
    assert run["kfac"]["preconditions"] == jobs.STEPS


def test_gradient_checkpointing_changes_nothing(runs: list[dict[str, Any]]) -> None:
    checkpointed, plain = runs[0]["checkpointing"], runs[0]["llama"]
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(checkpointed["weights"][name], weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", ["section", "own"])
def test_resumed_run_continues_exactly(runs: list[dict[str, Any]], way: str) -> None:
    """Weights, momenta, step, data and all of K-FAC's state come from the checkpoint."""
    whole, resumed = runs[0][f"whole {way}"], runs[0][f"resumed {way}"]
    assert len(resumed["batches"]) == len(whole["batches"]) // 2
    assert resumed["log"] == whole["log"]
    for name, weight in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name


def test_accelerate_alone_resumes_exactly(runs: list[dict[str, Any]]) -> None:
    """``save_state`` and ``load_state`` without a Trainer: weights, momenta and K-FAC's state."""
    for run in runs:
        whole, resumed = run["whole accelerate"], run["resumed accelerate"]
        assert len(resumed["batches"]) == len(whole["batches"]) // 2
        assert resumed["kfac"]["steps"] == whole["kfac"]["steps"] == jobs.STEPS
        assert resumed["kfac"]["captures"] == whole["kfac"]["captures"]
        assert resumed["state"].keys() == whole["state"].keys() and whole["state"]
        for part in ("weights", "state"):
            for name, value in whole[part].items():
                assert torch.equal(resumed[part][name], value), name


def test_all_ranks_hold_the_same_weights(runs: list[dict[str, Any]]) -> None:
    for name, run in runs[0].items():
        for parameter, weight in run["weights"].items():
            assert torch.equal(weight, runs[1][name]["weights"][parameter]), (name, parameter)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("hf_*.json")), ids=lambda path: path.stem)
def test_configuration_trains(runs: list[dict[str, Any]], path: Path) -> None:
    run = runs[0][path.stem]
    assert len(run["log"]) == jobs.STEPS
    assert (run["kfac"] is not None) == ("kfac" in path.stem)
    assert run["optimizer"] == {"hf_adamw": "AdamW", "hf_kfac": "KFACOptimizer"}[path.stem]


def test_tied_parameters_are_counted_once(runs: list[dict[str, Any]]) -> None:
    """GPT-2's output head is its embedding."""
    total = runs[0]["gpt2"]["parameters"]
    assert f" of {total:,} trainable parameters" in runs[0]["gpt2"]["coverage"]


def test_auto_inside_the_kfac_section_is_refused_with_the_allowed_values() -> None:
    """The Trainer fills "auto" only in keys it knows."""
    with pytest.raises(ConfigError, match=r"damping: expected a number in \[1e-30, 1e30\].*'auto'"):
        deepspeed_config.parse({"kfac": {"damping": "auto"}})


def test_kfac_settings_of_the_examples_are_valid() -> None:
    for path in CONFIGS.glob("hf_*.json"):
        config = json.loads(path.read_text())
        params = config["optimizer"]["params"]
        assert params["lr"] == "auto"
        if "kfac" in config:
            KFACConfig.parse(config["kfac"])

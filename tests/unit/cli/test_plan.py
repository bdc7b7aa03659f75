"""``ds-kfac plan``: its arguments, its table, and what it says of wrong ones."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_kfac.cli.__main__ import main

ROOT = Path(__file__).parents[3]
RANKS = ["--ranks", "4"]
MACHINE = ["--tokens-per-rank", "512", "--flops", "1e12", "--bandwidth", "1e9"]


def tiny() -> nn.Module:
    """Found by the command as ``module:function``."""
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 10))


def broken() -> nn.Module:
    raise RuntimeError("no weights here")


def no_model() -> str:
    return "model"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_dims(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--dims", "64x32x3", "32x64+bias", *RANKS, *MACHINE, "--owners")
    assert "4 layers with 8,256 of 8,256 trainable parameters" in text
    assert "4 data-parallel ranks, gradients as under ZeRO 0" in text
    assert "overhead: " in text
    assert text.count("64x32_") == 3 and "32x64_3  rank" in text


def test_a_function_builds_the_model_on_the_meta_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = plan(capsys, "--model", f"{__name__}:tiny", *RANKS, "--stage", "3")
    assert "preconditions 2 layers" in text and "ZeRO 3" in text
    assert "times: give" in text


def test_hugging_face_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    path.write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes})
    )
    assert "preconditions 8 layers" in plan(capsys, "--hf-config", str(path), *RANKS)


def test_settings_come_from_the_deepspeed_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    params = {"lr": 0.1, "factor_update_steps": 5, "inv_update_steps": 20, "skip_layers": ["head"]}
    config = {
        "optimizer": {"type": "KFAC", "params": params},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }
    path.write_text(json.dumps(config))
    text = plan(capsys, "--dims", "8x8x2", *RANKS, "--config", str(path))
    assert "ZeRO 2; direction orthogonal, solver cholesky" in text
    assert "every 5 steps, bases every 20" in text
    assert "ZeRO 1" in plan(
        capsys, "--dims", "8x8x2", *RANKS, "--config", str(path), "--stage", "1"
    )


@pytest.mark.parametrize("machine", [[], MACHINE])
def test_plot(machine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    plan(capsys, "--dims", "8x8x2", *RANKS, *machine, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_of_a_large_model_is_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    """Three terabytes of weights, two thousand ranks."""
    text = plan(capsys, "--dims", "65536x65536x200", "--ranks", "2048", "--stage", "3")
    assert "200 of 2048 ranks" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dims", "64"], "--dims 64: expected d_in x d_out x count"),
        (["--dims", "0x4"], "--dims 0x4: expected"),
        (["--model", "nowhere:build"], "ModuleNotFoundError: No module named 'nowhere'"),
        (["--model", "nocolon"], "expected package.module:function"),
        (["--model", f"{__name__}:absent"], "has no attribute 'absent'"),
        (["--model", f"{__name__}:broken"], "RuntimeError: no weights here"),
        (["--model", f"{__name__}:no_model"], "returned str, not a nn.Module"),
        (["--hf-config", "absent.json"], "--hf-config absent.json: no such file"),
        (["--dims", "8x8", "--config", "absent.json"], "cannot read DeepSpeed configuration"),
        (["--dims", "8x8", "--flops", "1e12"], "times need all three"),
        (["--dims", "8x8", "--plot", "absent/plan.png"], "--plot absent/plan.png"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments, *RANKS]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and says in captured.err
    assert captured.err.startswith("KFAC-E2") and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "neither a kfac section nor optimizer type KFAC"),
        ({"kfac": {"dampening": 1}}, "did you mean 'damping'?"),
        ({"kfac": {}, "tensor_parallel": {"autotp_size": 2}}, "data parallelism only"),
        ({"kfac": {}, "zero_optimization": {"stage": 5}}, "use 0, 1, 2 or 3"),
        ({"kfac": {}, "data_types": {"grad_accum_dtype": "int8"}}, "use fp32, fp16 or bf16"),
        ([], "is not an object"),
    ],
)
def test_wrong_settings(
    config: object, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert main(["plan", "--dims", "8x8", *RANKS, "--config", str(path)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--ranks", "0"], ["--ranks", "x"], [*RANKS, "--flops", "-1"]]
)
def test_wrong_numbers(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--dims", "8x8", *arguments])
    assert stopped.value.code == 2
    assert "error: argument" in capsys.readouterr().err


def test_the_model_stays_on_the_meta_device() -> None:
    from ds_kfac.cli import plan_source

    for model in (
        plan_source.model_of_dims(["8x8x2"]),
        plan_source.model_of_function(f"{__name__}:tiny"),
    ):
        assert {param.device for param in model.parameters()} == {torch.device("meta")}


def test_the_guide_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = (ROOT / "docs/guide/planning.md").read_text(encoding="utf-8").split("```")
    command, shown = (block.partition("\n")[2] for block in blocks[1:4:2])
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "ds-kfac"
    monkeypatch.chdir(ROOT)  # where the command's configuration is
    assert main(arguments) == 0
    assert capsys.readouterr().out == shown

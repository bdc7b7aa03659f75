"""The Megatron training script as a user starts it, and its argument files."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from launch import megatron_arguments
from tests.launch import processes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "pretrain_gpt_megatron.py"
FILES = sorted((ROOT / "configs").glob("megatron_*.args"))
TINY = (
    "--num-layers 2 --hidden-size 32 --seq-length 16 --train-iters 4 --lr-warmup-iters 2 "
    "--eval-interval 2 --eval-sequences 16 --kfac-factor-update-steps 1 --kfac-inv-update-steps 4"
).split()
TIMEOUT = 120
needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")


def launch(ranks: int, *arguments: str) -> tuple[int, str]:
    """Start the script with torchrun; kills all of it if it hangs."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--master-port", processes.free_port()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return processes.run(
        *launcher, str(SCRIPT), *arguments, environment=environment, timeout=TIMEOUT
    )


def rows(folder: Path) -> list[dict[str, str]]:
    """The table without the column of times."""
    with (folder / "loss.csv").open(newline="") as stream:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(stream)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return path


def test_there_are_argument_files() -> None:
    layouts = {"tp2", "pp2", "dp2_distopt", "tp2_pp2_sp_distopt", "tp2_kfac", "pp2_kfac"}
    assert {f"megatron_{layout}" for layout in layouts} <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_argument_files_say_what_their_names_do(path: Path) -> None:
    args = megatron_arguments.parse([f"@{path}"])
    words = path.stem.split("_")
    assert (args.tensor_model_parallel_size == 2) == ("tp2" in words)
    assert (args.pipeline_model_parallel_size == 2) == ("pp2" in words)
    assert args.sequence_parallel == ("sp" in words)
    assert args.use_distributed_optimizer == ("distopt" in words)
    assert (megatron_arguments.kfac_flags.settings(args) is not None) == ("kfac" in words)
    assert (args.optimizer == "kfac") == ("kfac" in words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sequence-parallel"], "--tensor-model-parallel-size of 2"),
        (["--num-layers", "3", "--pipeline-model-parallel-size", "2"], "not a multiple"),
        (["--overlap-param-gather"], "needs --use-distributed-optimizer"),
        (["--optimizer", "kfac"], "it needs --kfac"),
        (["--optimizer", "sgd", "--use-distributed-optimizer"], "with --optimizer adam only"),
        (["--train-iters", "0"], "must be at least 1"),
        (["--kfac-damp", "1"], "unrecognized arguments"),
        (["--kfac-damping", "1"], "--kfac-damping without --kfac"),
        (["--kfac", "--kfac-damping", "-1"], "damping"),
    ],
)
def test_wrong_command_lines(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        megatron_arguments.parse(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_wrong_values_are_explained_before_anything_starts(tmp_path: Path) -> None:
    for words, message in (
        (["--text", "nowhere.txt"], "no such file or folder"),
        (["--compare-with", str(tmp_path / "none.csv")], "is no table of a training run"),
    ):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=TIMEOUT
        )
        assert done.returncode == 2
        assert message in done.stderr and "Traceback" not in done.stderr


@needs_megatron
@pytest.mark.dist
@pytest.mark.slow
def test_a_resumed_run_repeats_an_uninterrupted_one(tmp_path: Path, text: Path) -> None:
    common = (f"@{ROOT / 'configs' / 'megatron_tp2_kfac.args'}", "--text", str(text), *TINY)
    whole, halves, saved = (tmp_path / name for name in ("whole", "halves", "saved"))
    code, output = launch(2, *common, "--out", str(whole))
    assert code == 0, output
    table = rows(whole)
    assert [int(row["step"]) for row in table] == list(range(5))
    assert float(table[-1]["val_loss"]) < float(table[0]["val_loss"])
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    for expected in (
        "tokens/s=",
        "loss=",
        "left",
        "final validation loss",
        "K-FAC preconditions 8",
    ):
        assert expected in output
    resumable = (*common, "--save", str(saved), "--load", str(saved), "--out", str(halves))
    code, output = launch(2, *resumable, "--exit-interval", "2")
    assert code == 0 and "training starts from the beginning" in output, output
    code, output = launch(2, *resumable)
    assert code == 0 and "resumed from iteration 2" in output, output
    assert rows(halves) == table

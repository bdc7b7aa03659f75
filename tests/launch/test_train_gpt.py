"""The training script as a user starts it."""

import csv
import os
from pathlib import Path

import pytest

from tests.launch import processes

pytest.importorskip("deepspeed")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "train_gpt.py"
KFAC = ROOT / "configs" / "zero2_kfac.json"
TINY = "--layers 1 --width 32 --seq-len 32 --steps 6 --eval-every 3 --eval-sequences 16".split()
TIMEOUT = 240


def run(*command: str, extensions: Path) -> tuple[int, str]:
    """Run a command; returns its exit code and output. Kills all of it if it hangs."""
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}}
    environment.update(DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=str(extensions))
    return processes.run(*command, environment=environment, timeout=TIMEOUT)


def launch(ranks: int, *arguments: str, extensions: Path) -> tuple[int, str]:
    """Start the training script with the deepspeed launcher."""
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
    launcher += ["--master_port", processes.free_port()]
    return run(*launcher, str(SCRIPT), *arguments, extensions=extensions)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return path


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "loss.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.launcher
@pytest.mark.slow
def test_two_ranks_train_in_spite_of_a_stale_build_lock(tmp_path: Path, text: Path) -> None:
    """A killed build of DeepSpeed's CPU operator leaves a lock that used to block every start."""
    lock = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    before = set(Path("/dev/shm").iterdir())
    out = tmp_path / "out"
    code, output = launch(
        2,
        *("--deepspeed", "--deepspeed_config", str(KFAC), "--text", str(text), "--out", str(out)),
        *TINY,
        extensions=lock.parents[1],
    )
    assert code == 0, output
    table = rows(out)
    assert [int(row["step"]) for row in table] == list(range(7))
    assert float(table[-1]["val_loss"]) < float(table[0]["val_loss"])
    assert float(table[3]["val_loss"]) > 0
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    for expected in ("tokens/s=", "loss=", "left", "final validation loss", "CSV: ", "PNG: "):
        assert expected in output
    assert "K-FAC is off" not in output
    left = {path.name for path in set(Path("/dev/shm").iterdir()) - before}
    assert not {name for name in left if name.startswith("deepspeed")}


@pytest.mark.launcher
@pytest.mark.slow
def test_comparison_trains_both_and_requires_success_on_demand(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    code, output = launch(
        1,
        *("--deepspeed", "--deepspeed_config", str(KFAC), "--text", str(text), "--out", str(out)),
        *("--compare", "--compare-fraction", "0.5", "--require", *TINY),
        extensions=tmp_path / "extensions",
    )
    table = rows(out)
    assert [row["run"] for row in table] == ["AdamW"] * 7 + ["K-FAC"] * 4
    # Same weights and same validation text at the start of both.
    assert table[0]["val_loss"] == table[7]["val_loss"]
    assert table[1]["train_loss"] == table[8]["train_loss"]
    success = float(table[10]["val_loss"]) <= float(table[6]["val_loss"])
    assert ("K-FAC reached AdamW's final loss" in output) == success
    assert (code == 0) == success, output
    assert (out / "loss.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--deepspeed_config", str(KFAC), "--text", "nowhere.txt"], "no such file or folder"),
        (["--deepspeed_config", "nowhere.json"], "cannot read nowhere.json"),
        ([], "give a DeepSpeed JSON with --deepspeed_config"),
        (["--deepspeed_config", str(KFAC), "--steps", "0"], "must be at least 1"),
    ],
    ids=["text", "config", "no-config", "steps"],
)
def test_bad_arguments_give_one_clear_error(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, output = run(str(SCRIPT), *arguments, extensions=tmp_path)
    assert code == 2
    assert message in output
    assert "Traceback" not in output


def test_unknown_key_in_the_scripts_own_section_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"train_batch_size": 16, "train_gpt": {"aux_rl": 0.1}}')
    code, output = run(str(SCRIPT), "--deepspeed_config", str(config), extensions=tmp_path)
    assert code == 2
    assert "unknown key(s) ['aux_rl'] in 'train_gpt'; known: ['aux_lr', 'warmup_steps']" in output

"""The GPU benchmark where there is none: it says so, and its code runs on the processor."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, systems
from benchmarks.amortised import COLUMNS, INTERVALS
from benchmarks.parts import PARTS


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    printed = capsys.readouterr().out
    assert "no GPU here" in printed and "--device cpu --size tiny" in printed


def test_tiny_run_on_the_processor(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--device", "cpu", "--size", "tiny", "--rounds", "2", "--text", str(text)]
    assert gpu.main([*arguments, "--out", str(out), "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert "tiny: 1 blocks of width 8, 16 tokens per step; 2 cycles per system" in printed
    assert "extra time over AdamW at (10,100): " + systems.DS_KFAC in printed
    assert "| ms when due | " + " | ".join(PARTS) + " |" in printed
    with (out / "tiny.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    names = [*(f"natural {name}" for name in systems.NATURAL), *systems.OWN_DIRECTIONS]
    assert [line["system"] for line in lines] == [f"ds_kfac {n}" for n in names] * len(INTERVALS)
    for line in lines:
        assert all(math.isfinite(float(line[name])) for name in ("total", *COLUMNS))
        assert all(float(line[name]) > 0 for name in PARTS)


def test_no_round_begins_after_the_time_is_up(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--size", "tiny", "--rounds", "9", "--text", str(text)]
    more = ["--seconds", "0", "--only", "orthogonal", "--out", str(tmp_path)]
    assert gpu.main([*arguments, *more]) == 0
    assert "1 cycles per system" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "nothing"], "names no system"), (["--rounds", "0"], "1 or more")],
)
def test_bad_arguments_are_one_clear_line(
    arguments: list[str], message: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--device", "cpu", "--size", "tiny", "--text", str(text), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_the_sizes_are_those_of_the_models() -> None:
    """12 blocks of width 768, 24 of width 2048: 85 and 1208 million parameters in the blocks."""
    for name, blocks, millions in (("125m", 12, 85), ("1.3b", 24, 1208)):
        assert round(12 * gpu.SIZES[name][0].width ** 2 * blocks / 1e6) == millions

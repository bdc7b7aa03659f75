"""CSV, pictures and the verdict of a comparison."""

import csv
from pathlib import Path

import pytest

from launch.plots import draw, smooth
from launch.report import COLUMNS, Row, RunLog, comparison, reached, write_csv


def run_log(name: str, final: float, steps: int, step_seconds: float = 0.5) -> RunLog:
    rows = [Row(0, 0.0, None, 5.5, 0.0)]
    for step in range(1, steps + 1):
        measured = final + (steps - step) * 0.01 if step % 5 == 0 or step == steps else None
        rows.append(Row(step, step * step_seconds, 4.0 - step * 0.01, measured, 0.01))
    return RunLog(name, rows, final, "all of it")


def test_csv_has_one_line_per_step_and_blanks_where_nothing_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "loss.csv"
    write_csv(path, [run_log("AdamW", 2.0, 10), run_log("K-FAC", 1.9, 6)])
    with path.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert tuple(lines[0]) == COLUMNS
    assert len(lines) == 11 + 7
    assert lines[0]["train_loss"] == ""
    assert lines[1]["val_loss"] == ""
    assert float(lines[10]["val_loss"]) == 2.0
    assert {line["run"] for line in lines} == {"AdamW", "K-FAC"}


@pytest.mark.parametrize("count", [1, 2])
def test_picture_is_written(tmp_path: Path, count: int) -> None:
    pytest.importorskip("matplotlib")
    runs = [run_log("AdamW", 2.0, 10), run_log("K-FAC", 1.9, 6)][:count]
    path = tmp_path / "loss.png"
    draw(path, runs, title="title")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_picture_of_a_single_step(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "loss.png", [run_log("K-FAC", 3.0, 1)], title="title")


def test_picture_of_a_diverged_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    draw(path, [run_log("AdamW", 2.0, 10), run_log("K-FAC", float("nan"), 6)], title="title")
    assert path.exists()


def test_smoothing_is_unbiased_at_the_start() -> None:
    assert smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert smooth([]) == []
    rising = smooth([0.0, 1.0], decay=0.5)
    assert rising == pytest.approx([0.0, 1 / 1.5])


def test_positive_verdict_states_steps_and_time() -> None:
    text = comparison(run_log("AdamW", 2.0, 10), run_log("K-FAC", 1.95, 6, step_seconds=0.6))
    assert "K-FAC reached AdamW's final loss (2.0000) in 60 % of its steps" in text
    assert "72 % of its time" in text


def test_negative_verdict_states_both_losses() -> None:
    text = comparison(run_log("AdamW", 2.0, 10), run_log("K-FAC", 2.05, 6))
    assert "K-FAC did not reach AdamW's final loss (2.0000): 2.0500" in text


def test_a_diverged_run_has_not_reached_anything() -> None:
    assert reached(run_log("AdamW", 2.0, 10), run_log("K-FAC", 2.0, 6))
    assert not reached(run_log("AdamW", 2.0, 10), run_log("K-FAC", float("nan"), 6))

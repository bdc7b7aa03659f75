"""The step cost benchmark: arithmetic on made-up numbers, structure of a tiny run. No times."""

from __future__ import annotations

import csv
import importlib.metadata
import math
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import step_cost, systems
from benchmarks.amortised import COLUMNS, INTERVALS, Row, Sample, rows, table_text, verdict
from benchmarks.bars import draw
from benchmarks.parts import PARTS, PartTimer, Wrapped
from benchmarks.ranks import Ranks, combine
from launch.data import Batches
from launch.model import GPTConfig


def cost(total: float, **parts: float) -> dict[str, float]:
    return {"total": total, "wall": total, **dict.fromkeys(PARTS, 0.0), **parts}


def made_up() -> Sample:
    return Sample(
        plain=cost(1.25, direction=0.2),
        capture=cost(2.0, direction=0.2, capture=0.7),
        refresh=cost(6.0, direction=0.2, capture=0.7, refresh=4.0),
    )


@pytest.mark.parametrize(("factor", "inverse"), [(1, 1), (1, 4), (2, 4), (10, 10), (10, 100)])
def test_amortisation_is_the_mean_over_a_real_cycle(factor: int, inverse: int) -> None:
    sample = made_up()
    steps = [
        sample.refresh if t % inverse == 0 else sample.capture if t % factor == 0 else sample.plain
        for t in range(inverse)
    ]
    found = sample.at(factor, inverse)
    for key in ("total", *PARTS):
        assert found[key] == pytest.approx(sum(step[key] for step in steps) / inverse)
    assert found["total"] == pytest.approx(1.0 + sum(found[name] for name in COLUMNS))


@pytest.mark.parametrize(("factor", "inverse"), [(10, 15), (0, 10), (1, 0), (10, 1)])
def test_intervals_that_do_not_fit_are_refused(factor: int, inverse: int) -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        made_up().at(factor, inverse)


def test_rows_hold_medians_and_quartiles_of_the_cycles() -> None:
    cycles = [Sample(*[cost(value, direction=value - 1)] * 3) for value in (5.0, 1.0, 2.0)]
    (row,) = rows({"x": cycles}, [(1, 1)])
    assert (row.total, row.extra, row.quartiles) == (2.0, 1.0, (1.5, 3.5))
    assert row.parts["direction"] == 1.0 and row.parts["rest"] == 0.0
    (single,) = rows({"x": cycles[:1]}, [(1, 1)])
    assert single.total == 5.0 and single.quartiles == (5.0, 5.0)


def row(system: str, total: float, pair: tuple[int, int] = INTERVALS[-1]) -> Row:
    parts = dict.fromkeys(COLUMNS, 0.0) | {"direction": total, "rest": -1.0}
    return Row(system, *pair, total, (total, total), total, parts)


def test_verdict_compares_extra_times_at_the_last_intervals() -> None:
    table = [row("ours", 9.0, INTERVALS[0]), row("ours", 1.1), row("theirs", 1.4)]
    assert verdict(table, "ours", "theirs") == (
        "extra time over AdamW at (10,100): ours 0.100, theirs 0.400, ratio 0.25 (goal <= 0.5)"
    )
    assert "--kfac-pytorch" in verdict(table, "ours", "absent")
    assert "ratio nan" in verdict([row("ours", 1.1), row("theirs", 0.9)], "ours", "theirs")


def test_table_is_valid_markdown_or_aligned_text() -> None:
    table = [row("a system", 1.5, pair) for pair in INTERVALS]
    lines = table_text(table, markdown=True).splitlines()
    assert len(lines) == 2 + len(table)
    assert {line.count("|") for line in lines} == {6 + len(COLUMNS)}
    assert lines[0].split("|")[-2].strip() == "rest"
    plain = table_text(table, markdown=False).splitlines()
    assert len(plain) == 1 + len(table) and len({len(line) for line in plain}) == 1


def test_parts_add_up_when_wrapped_functions_call_each_other() -> None:
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    home = types.SimpleNamespace(inner=lambda: spend(2.0))
    home.outer = lambda: (spend(1.0), home.inner(), spend(4.0))
    untouched = dict(vars(home))
    timer = PartTimer(lambda: now)
    wrapped = [Wrapped("direction", home, "outer"), Wrapped("capture", home, "inner")]
    with timer.installed(wrapped):
        home.outer()
        assert timer.seconds["direction"] == 5.0 and timer.seconds["capture"] == 2.0
        timer.reset()
        assert set(timer.seconds.values()) == {0.0}
    assert vars(home) == untouched


def test_functions_are_restored_after_an_error() -> None:
    home = types.SimpleNamespace(work=lambda: 1 / 0)
    original = home.work
    timer = PartTimer(lambda: 0.0)
    with (
        pytest.raises(ZeroDivisionError),
        timer.installed([Wrapped("direction", home, "work")]),
    ):
        home.work()
    assert home.work is original


TINY = ["--width", "8", "--layers", "1", "--seq-len", "8", "--tokens", "16", "--rounds", "2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


def test_tiny_run_prints_the_table_and_writes_csv_and_png(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert step_cost.main([*TINY, "--text", str(text), "--out", str(out), "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert "extra time over AdamW at (10,100): " + systems.DS_KFAC in printed
    names = [*(f"natural {name}" for name in systems.NATURAL), *systems.OWN_DIRECTIONS]
    with (out / "step_cost.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    found = [
        (line["system"], int(line["factor_interval"]), int(line["inverse_interval"]))
        for line in lines
    ]
    assert found == [(f"ds_kfac {name}", *pair) for pair in INTERVALS for name in names]
    for line in lines:
        assert all(math.isfinite(float(line[name])) for name in ("total", *COLUMNS))
        # Every part was seen where it happens: the wrapped names are those that are called.
        assert all(float(line[name]) > 0 for name in PARTS)
        shown = f"| {line['system']} | {line['factor_interval']} / {line['inverse_interval']} |"
        assert shown in printed
    if (out / "step_cost.png").exists():
        assert (out / "step_cost.png").read_bytes().startswith(b"\x89PNG")


def test_only_some_systems(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TINY, "--rounds", "1", "--text", str(text), "--out", str(tmp_path)]
    assert step_cost.main([*arguments, "--only", "ekfac", "orthog"]) == 0
    with (tmp_path / "step_cost.csv").open(newline="") as stream:
        found = {line["system"] for line in csv.DictReader(stream)}
    assert found == {"ds_kfac ekfac", "ds_kfac orthogonal"}


@pytest.mark.dist
def test_tiny_run_on_two_ranks_reports_both(
    tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TINY, "--rounds", "1", "--text", str(text), "--out", str(tmp_path)]
    assert step_cost.main([*arguments, "--ranks", "2"]) == 0
    printed = capfd.readouterr().out
    assert "16 tokens per step and rank, 2 ranks" in printed
    steps = printed.split("rank by rank:\n")[1].splitlines()
    names = [*(f"natural {name}" for name in systems.NATURAL), *systems.OWN_DIRECTIONS]
    for name, line in zip(names, steps, strict=False):
        label, numbers = line.rsplit(": ", 1)
        assert label.strip() == f"ds_kfac {name}"
        assert all(float(number) > 0 for number in numbers.split(", ")) and "," in numbers
    with (tmp_path / "step_cost.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == len(INTERVALS) * len(names)
    # With one block, one of two ranks may own nothing to fold or refresh, never both.
    assert all(float(line[name]) > 0 for line in lines for name in PARTS)


def test_ranks_are_means_of_processor_time_and_the_longest_wall_time() -> None:
    found = combine([{"total": 1.0, "wall": 5.0, "x": 0.0}, {"total": 3.0, "wall": 4.0, "x": 1.0}])
    assert found == {"total": 2.0, "wall": 5.0, "x": 0.5, "rank 0": 1.0, "rank 1": 3.0}
    assert Ranks().together([{"total": 1.0, "wall": 2.0}]) == [
        {"total": 1.0, "wall": 2.0, "rank 0": 1.0}
    ]


def test_every_step_of_a_cycle_does_what_its_name_says() -> None:
    """Blocks start where the counters of the systems stand: at a multiple of the cycle."""
    data = (torch.arange(400) % 251).to(torch.uint8)
    meter = step_cost.Meter(time.perf_counter, Batches(data, 8, 2, seed=0))
    for system in systems.build(
        GPTConfig(seq_len=8, layers=1, width=8, heads=1), kfac_pytorch=None
    )[1:]:
        for block in range(2):
            steps = meter.cycle(system, block * len(systems.CYCLE), len(systems.CYCLE))
            for kind, seconds in zip(systems.CYCLE, steps, strict=True):
                assert (seconds["refresh"] > 0) == (kind == "refresh")
                assert (seconds["capture"] > 0) == (kind != "plain")
                assert 0 < seconds["direction"] < seconds["total"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "17"], "no multiple of --seq-len"),
        (["--kfac-pytorch", "nowhere"], "no checkout of kfac-pytorch"),
        (["--width", "65"], "not a multiple of heads"),
        (["--only", "nothing"], "--only nothing names no system"),
    ],
)
def test_bad_arguments_are_one_clear_line(
    arguments: list[str], message: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step_cost.main([*TINY, "--text", str(text), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


@pytest.fixture
def clean_imports() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "kfac":
            del sys.modules[name]


def test_kfac_pytorch_is_imported_from_a_checkout_without_installation(
    tmp_path: Path, clean_imports: None
) -> None:
    """Its package asks for the version of the distribution, which an uninstalled one has not."""
    package = tmp_path / "kfac"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib.metadata as m\n__version__ = m.version('kfac-pytorch')\n"
    )
    (package / "preconditioner.py").write_text("import warnings\nwarnings.warn('no apex')\n")
    path, version = list(sys.path), importlib.metadata.version
    module = systems.import_kfac_pytorch(tmp_path)
    assert module.__name__ == "kfac.preconditioner"
    assert sys.path == path and importlib.metadata.version is version


def test_picture_with_negative_rest(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = [row(name, 1.5, pair) for pair in INTERVALS for name in ("a", "b")]
    draw(tmp_path / "bars.png", table, title="made up")
    assert (tmp_path / "bars.png").stat().st_size > 5_000

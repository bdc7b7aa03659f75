"""The benchmarks of bytes, memory, solvers and scaling: structure and exact numbers. No times."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import planned, scaling, solvers


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_communication_against_full_factors() -> None:
    """Two layers, two ranks: packed and sent once, a quarter of a full all-reduce and padding."""
    rows, values = planned.communication(planned.blocks(16, 1), [2])
    assert [row[0] for row in rows[1:]] == [f"ZeRO {stage}, 2 ranks" for stage in planned.STAGES]
    for row in rows[1:]:
        assert 0.2 < float(row[1]) < 0.5 and row[-1] == "0"
    assert values["ZeRO 0, 2 ranks"]["gradients"] == 0.0
    found = planned.plan(planned.blocks(16, 1), ranks=2, stage=0, own=False)
    dims = [(16, 48), (16, 16), (16, 64), (64, 16)]
    assert planned.full_factors(found) == 4 * sum(a * a + b * b for a, b in dims)
    assert [planned.aligned_layers(found)] == [(0, 0)]


def test_memory_against_adamw() -> None:
    assert planned.adamw_bytes(10, stage=0, ranks=4) == 160
    assert planned.adamw_bytes(10, stage=3, ranks=4) == 40
    rows, values = planned.memory(planned.blocks(16, 1), [2])
    assert len(rows) == 1 + len(planned.STAGES)
    for group in values.values():
        assert 1 < group["natural, state"] < group["natural, peak"]


@pytest.mark.parametrize("what", ["communication", "memory"])
def test_planned_script(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned.main([what, "--ranks", "2", "--out", str(tmp_path), "--markdown"]) == 0
    assert len(lines(tmp_path / f"{what}-125m.csv")) == len(planned.STAGES)
    assert "| ZeRO 3, 2 ranks |" in capsys.readouterr().out
    assert planned.main([what, "--ranks", "1"]) == 2


def test_solvers_script(tmp_path: Path) -> None:
    arguments = ["--sizes", "8", "--conditions", "10", "--damping", "0.1", "--repeats", "1"]
    assert solvers.main([*arguments, "--out", str(tmp_path)]) == 0
    found = lines(tmp_path / "solvers.csv")
    assert [line["solver"] for line in found] == list(solvers.SOLVERS)
    assert all(float(line["error at 1e+01"]) < 1e-4 for line in found)
    assert all(float(line["products"]) > 0 for line in found)
    values = solvers.torch.linalg.eigvalsh(solvers.factor(8, 1e4))
    assert float(values[-1] / values[0]) == pytest.approx(1e4, rel=1e-6)


def test_scaling_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    arguments = ["--ranks", "1", "--widths", "8", "16", "--tokens", "16", "--seq-len", "8"]
    more = ["--rounds", "1", "--text", str(text), "--out", str(tmp_path)]
    assert scaling.main([*arguments, *more]) == 0
    found = lines(tmp_path / "scaling.csv")
    assert [line["ranks, width, tokens"] for line in found] == ["1, 8, 16", "1, 16, 16"]
    assert all(float(line["direction"]) > 0 for line in found)
    assert scaling.main([*arguments, *more, "--system", "nothing"]) == 2
    assert "is none of ds_kfac natural eigen" in capsys.readouterr().err

"""``ds-kfac inspect``: a checkpoint looked at without a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds_kfac.cli.__main__ import main
from tests.unit.checkpoint import forging
from tests.unit.checkpoint.training import make


def saved(folder: Path) -> Path:
    """A run that refreshed at step 4 and stopped at step 5, in a checkpoint's tag."""
    run = make({"factor_update_steps": 2, "inv_update_steps": 4, "direction": "ekfac"})
    for step in range(5):
        run.step(step)
    run.kfac.save(folder / "global_step5" / "kfac")
    (folder / "latest").write_text("global_step5")
    return folder


@pytest.mark.parametrize("where", ["", "global_step5", "global_step5/kfac"])
def test_it_finds_and_describes_the_state(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(saved(tmp_path) / where)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "K-FAC step 5, saved by ds_kfac" in lines[0]
    assert lines[1].startswith("direction ekfac, solver eigen, layers shared out among 1 ranks")
    content = forging.content_of(tmp_path / "global_step5" / "kfac")
    assert content["files"][0]["sha256"] in lines[3]
    first = lines[-2].split("  ")
    assert first[0] == "0" and "6 x 5" in first and "step 4 (1 ago)" in lines[-2]
    assert lines[-1].endswith("yes")


def test_condition_numbers_are_those_of_the_factors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path)
    run = make({"factor_update_steps": 2, "inv_update_steps": 4, "direction": "ekfac"})
    run.kfac.load(tmp_path / "global_step5" / "kfac")
    main(["inspect", str(tmp_path)])
    row = capsys.readouterr().out.splitlines()[-2].split()
    for text, factor in zip(row[-3:-1], run.kfac.factors("0"), strict=True):
        expected = float(torch.linalg.cond(factor.double()))
        assert float(text) == pytest.approx(expected, rel=0.1)


def test_spectra_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "spectra.png"
    assert main(["inspect", str(saved(tmp_path)), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_damage_is_an_error_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends with an exit code that scripts see."""
    saved(tmp_path)
    forging.raw(forging.flip, hashed=False)(tmp_path / "global_step5" / "kfac")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "KFAC-E301" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert "KFAC-E304" in capsys.readouterr().err


def test_numbers_that_are_not_finite_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path)
    nan = forging.tensors(lambda found: found["0/a.0.total"].fill_(float("nan")))
    nan(tmp_path / "global_step5" / "kfac")
    assert main(["inspect", str(tmp_path)]) == 0
    row = capsys.readouterr().out.splitlines()[-2]
    assert row.endswith("NO") and "nan" in row


def test_forged_entries_are_an_error_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path)
    short = forging.tensors(lambda found: found.update({"0/a.0.total": torch.zeros(2)}))
    short(tmp_path / "global_step5" / "kfac")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "KFAC-E302 layer 0: not a layer's state" in capsys.readouterr().err

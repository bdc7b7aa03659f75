"""``ds-kfac convert``: states for another tensor-parallel degree, and the refusal without it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_kfac.checkpoint import convert as offline
from ds_kfac.checkpoint.reader import read_layers, read_manifest
from ds_kfac.cli.__main__ import main
from tests._harness import world
from tests.hosts import convert_jobs as jobs
from tests.unit.checkpoint.training import make

pytestmark = pytest.mark.dist
pytest.importorskip("transformers")
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state in blocks of two tensor ranks, beside what it is converted to."""
    folder = tmp_path_factory.mktemp("convert")
    world(2).run(jobs.save, 2, "block", str(folder / "two" / "kfac"), isolated=True, timeout=120)
    for name, ranks in (("whole", 1), ("four", 4)):
        source = str(folder / "two")
        assert main(["convert", source, str(folder / name), "--tensor-ranks", str(ranks)]) == 0
    arguments = ["convert", str(folder / "four"), str(folder / "again"), "--tensor-ranks", "2"]
    assert main(arguments) == 0
    return folder


def whole(folder: Path) -> dict[str, offline.Whole]:
    """Layers as they are stored, with dense factors."""
    manifest = read_manifest(folder)
    assert manifest is not None
    layers = read_layers(folder, manifest, [layer.name for layer in manifest.layers])
    return {layer.name: offline._read(layer, layers[layer.name]) for layer in manifest.layers}


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_shards_are_put_together(saved: Path) -> None:
    """Rows of q are cut, columns of down; the other factor is that of every shard."""
    two, one = whole(saved / "two" / "kfac"), whole(saved / "whole" / "kfac")
    for name, cut, other, dim in ((Q, "g", "a", 0), (DOWN, "a", "g", 1)):
        parts = [two[f"{name}@tensor{rank}"] for rank in range(2)]
        # Within the new blocks: shards of 8 and 10 features against blocks of at most 12.
        dense, sizes = one[name].factors[cut][0], [len(p.factors[cut][0]) for p in parts]
        expected = torch.block_diag(*(part.factors[cut][0] for part in parts))
        kept = dense != 0
        same(dense[kept], expected[kept])
        assert len(dense) == sum(sizes) and bool(dense.diagonal().gt(0).all())
        same(one[name].factors[other][0], parts[0].factors[other][0])
        same(one[name].moments["momentum"], torch.cat([p.moments["momentum"] for p in parts], dim))


def test_another_degree_and_back(saved: Path) -> None:
    """Two ranks, four and two again: moments to the last bit, factors but for lost cross terms."""
    two, again = whole(saved / "two" / "kfac"), whole(saved / "again" / "kfac")
    assert two.keys() == again.keys()
    for name, layer in two.items():
        same(again[name].moments["momentum"], layer.moments["momentum"])
        for side, (factor, weight) in layer.factors.items():
            found, found_weight = again[name].factors[side]
            same(found_weight, weight)
            same(found.diagonal(), factor.diagonal())
            kept = found != 0
            same(found[kept], factor[kept])


@pytest.fixture(scope="module")
def loaded(saved: Path) -> dict[tuple[int, str, str], list[Any]]:
    """What every rank makes of a state, by tensor degree, mode and state."""
    cases = {1: [("exact", "whole"), ("exact", "two")]}
    cases[2] = [("exact", "whole"), ("block", "again"), ("block", "whole"), ("block", "four")]
    found = {}
    for size, tried in cases.items():
        folders = [(mode, str(saved / state / "kfac")) for mode, state in tried]
        by_rank = world(size).run(jobs.load_all, size, folders, isolated=True, timeout=200)
        for (mode, state), outcomes in zip(tried, zip(*by_rank, strict=True), strict=True):
            found[size, mode, state] = list(outcomes)
    return found


@pytest.mark.parametrize(
    "case", [(1, "exact", "whole"), (2, "exact", "whole"), (2, "block", "again")]
)
def test_converted_states_train_on(
    case: tuple[int, str, str], loaded: dict[tuple[int, str, str], list[Any]], saved: Path
) -> None:
    """Bases are recomputed at once, not at the next refresh."""
    _, mode, state = case
    entries = {key: value for part in loaded[case] for key, value in part.items()}
    stored = whole(saved / state / "kfac")
    for name in stored:
        assert f"{name}/a.0.basis.inverse" in entries and f"{name}/g.0.basis.inverse" in entries
    name = f"{Q}@tensor0" if mode == "block" else Q
    same(entries[f"{name}/moments.momentum"], stored[name].moments["momentum"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            (1, "exact", "two"),
            r"is that of tensor_parallel 'block' on 2 tensor ranks, this run has whole layers "
            r"\(1 tensor rank\): .*"
            r"'ds-kfac convert CHECKPOINT NEW'",
        ),
        (
            (2, "block", "whole"),
            r"is that of whole layers \(2 tensor ranks\), this run has "
            r"tensor_parallel 'block' on 2 tensor ranks: .*--tensor-ranks 2'",
        ),
        ((2, "block", "four"), r"'block' on 4 tensor ranks, this run has .* on 2 tensor ranks"),
    ],
)
def test_another_degree_is_refused_by_name(
    case: tuple[int, str, str], words: str, loaded: dict[tuple[int, str, str], list[Any]]
) -> None:
    """It was refused as "another model", layer by layer."""
    (text,) = set(loaded[case])
    assert text.startswith("KFAC-E303 ") and re.search(words, text), text


def test_what_cannot_be_converted(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = str(saved / "two"), str(saved / "none")
    assert main(["convert", source, target, "--tensor-ranks", "3"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("KFAC-E303 ") and "cannot be cut evenly over 3 ranks" in error
    assert main(["convert", source, str(saved / "whole")]) == 1
    assert capsys.readouterr().err.startswith("KFAC-E307 ")
    assert main(["convert", target, target]) == 1
    assert capsys.readouterr().err.startswith("KFAC-E304 ")


def test_what_is_not_known_cannot_be_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state of a run without tensor parallelism, and moments that live in eigenbases."""
    for direction, words in (("natural", "does not say how"), ("ekfac", "in eigenbases")):
        run = make({"direction": direction})
        run.step(0)
        run.kfac.save(tmp_path / direction)
        run.kfac.detach()
        arguments = [str(tmp_path / direction), str(tmp_path / "new"), "--tensor-ranks", "2"]
        assert main(["convert", *arguments]) == 1
        error = capsys.readouterr().err
        assert error.startswith("KFAC-E303 ") and words in error

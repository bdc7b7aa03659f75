"""K-FAC state in Megatron's checkpoints: exact resume, other layouts, states that are not there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_kfac.checkpoint import reader
from ds_kfac.cli.__main__ import main
from ds_kfac.hosts import megatron_files
from tests._harness import World
from tests.hosts import megatron_checkpoint_jobs as checkpoints
from tests.hosts.megatron_cells import NATURAL, cell
from tests.hosts.megatron_model import Cell, whole_weights

pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.dist,
]
Worlds = Callable[[int], World]
# Old statistics have to be there after the resume: they are used until the fourth step.
SPARSE = {"factor_update_steps": 2, "inv_update_steps": 4}
LAYOUTS = {
    "dp2": (2, cell(kfac=SPARSE)),
    "dp2_distopt": (2, cell(kfac=SPARSE, distributed=True, optimizer="adam")),
    "tp2_exact": (2, cell(kfac=SPARSE, tp=2)),
    "tp2_block": (2, cell(kfac={**SPARSE, "tensor_parallel": "block"}, tp=2)),
    "pp2": (2, cell(kfac=SPARSE, pp=2)),
}


def same(left: checkpoints.Weights, right: checkpoints.Weights) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name][0], right[name][0]) for name in left
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_resume_is_exact(name: str, megatron_world: Worlds, tmp_path: Path) -> None:
    ranks, of = LAYOUTS[name]
    world = megatron_world(ranks)
    arguments = (of, str(tmp_path), "torch_dist")
    compare = of.pp == 1
    whole = world.run(checkpoints.save_and_go_on, *arguments, compare_collectives=compare)
    resumed = world.run(checkpoints.resume, *arguments, compare_collectives=compare)
    for before, (after, _) in zip(whole, resumed, strict=True):
        assert same(before, after)


def test_format_torch_at_other_degrees(megatron_world: Worlds, tmp_path: Path) -> None:
    """Its files are those of model-parallel ranks: it was refused as another model."""
    of = cell(kfac=SPARSE, tp=2)
    megatron_world(2).run(checkpoints.save_and_go_on, of, str(tmp_path), "torch")
    for text in megatron_world(2).run(
        checkpoints.degrees, replace(of, tp=1, pp=2), str(tmp_path), compare_collectives=False
    ):
        assert re.search(
            "KFAC-E303 .* 2 tensor-parallel ranks, this run has 1; 1 pipeline-parallel ranks, "
            "this run has 2: .*--ckpt-format torch_dist",
            text,
        )


def test_format_torch_of_ranks_that_own_everything(megatron_world: Worlds, tmp_path: Path) -> None:
    of = cell(kfac={**SPARSE, "tensor_parallel": "block"}, tp=2)
    arguments = (of, str(tmp_path), "torch")
    whole = megatron_world(2).run(checkpoints.save_and_go_on, *arguments)
    for before, (after, _) in zip(
        whole, megatron_world(2).run(checkpoints.resume, *arguments), strict=True
    ):
        assert same(before, after)


@pytest.mark.parametrize(
    ("saved", "ranks", "of", "exact"),
    [
        ("dp2", 1, cell(kfac=SPARSE), False),
        ("pp2", 1, cell(kfac=SPARSE), True),
        ("tp2_exact", 2, cell(kfac=SPARSE, pp=2), False),
    ],
)
def test_whole_layers_fit_other_degrees(
    saved: str, ranks: int, of: Cell, exact: bool, megatron_world: Worlds, tmp_path: Path
) -> None:
    """Data, pipeline and tensor degree; the first sums of another layout are rounded otherwise."""
    before, was = LAYOUTS[saved]
    compare = was.pp == of.pp == 1
    arguments = (str(tmp_path), "torch_dist")
    world = megatron_world(before)
    whole = world.run(checkpoints.save_and_go_on, was, *arguments, compare_collectives=compare)
    resumed = megatron_world(ranks).run(
        checkpoints.resume, of, *arguments, compare_collectives=compare
    )
    want, found = whole_weights(whole), whole_weights([weights for weights, _ in resumed])
    for name, value in want.items():
        tolerances = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(found[name], value, **tolerances)


NO_BIAS = cell(kfac={**NATURAL, "tensor_parallel": "block"}, model="llama", tp=2)
"""Its bases are those of the factors that are saved with them."""


@pytest.fixture(scope="module")
def blocks(
    megatron_world: Worlds, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[checkpoints.Weights]]:
    """A checkpoint of two tensor ranks' shards, and the weights of the run that wrote it."""
    folder = tmp_path_factory.mktemp("blocks")
    arguments = (NO_BIAS, str(folder), "torch_dist")
    return folder, megatron_world(2).run(checkpoints.save_and_go_on, *arguments)


def moved(blocks: Path, source: Path, folder: Path, *words: str) -> Path:
    """The checkpoint with a state that was converted into its folder."""
    shutil.copytree(blocks, folder)
    assert main(["convert", str(source), str(folder), *words]) == 0
    return folder


def test_shards_at_other_degrees_are_refused_by_name(
    blocks: tuple[Path, Any], megatron_world: Worlds
) -> None:
    """Where a rank owned nothing of the state it stopped at a missing key, the others did not."""
    exact = replace(NO_BIAS, kfac=NATURAL)
    for of, words in (
        (exact, r"whole layers \(2 tensor ranks\)"),
        (replace(exact, tp=1, pp=2), r"whole layers \(1 tensor rank\)"),
    ):
        texts = megatron_world(2).run(
            checkpoints.refusal, of, str(blocks[0]), compare_collectives=False
        )
        assert len(set(texts)) == 1
        assert re.search(
            rf"KFAC-E303 .*'block' on 2 tensor ranks, this run has {words}: .*'ds-kfac convert",
            texts[0],
        )


def test_shards_are_converted_to_whole_layers_and_back(
    blocks: tuple[Path, list[checkpoints.Weights]], megatron_world: Worlds, tmp_path: Path
) -> None:
    """Whole layers train on in stages; shards of them are the old ones, to the last bit."""
    source, unbroken = blocks
    whole = moved(source, source, tmp_path / "whole")
    stages = replace(NO_BIAS, tp=1, pp=2, kfac=NATURAL)
    resumed = megatron_world(2).run(
        checkpoints.resume, stages, str(whole), "torch_dist", compare_collectives=False
    )
    assert all(metrics["steps"] == 2 * checkpoints.STEPS for _, metrics in resumed)
    again = moved(source, whole, tmp_path / "again", "--tensor-ranks", "2")
    before, after = megatron_files.read(source)[1], reader_of(again)
    assert before.keys() == after.keys()
    for name, entries in after.items():
        assert all(torch.equal(value, before[name][key]) for key, value in entries.items())
    trained = megatron_world(2).run(checkpoints.resume, NO_BIAS, str(again), "torch_dist")
    assert all(same(a, b) for a, (b, _) in zip(unbroken, trained, strict=True))


def test_a_state_that_changes_owners_alone_keeps_its_bases(
    megatron_world: Worlds, tmp_path: Path
) -> None:
    """Two stages on one rank, from a converted state: as if nothing had happened."""
    stages, (_, of) = tmp_path / "stages", LAYOUTS["pp2"]
    stages.mkdir()
    whole = megatron_world(2).run(
        checkpoints.save_and_go_on, of, str(stages), "torch_dist", compare_collectives=False
    )
    folder = moved(stages, stages, tmp_path / "converted")
    ((found, _),) = megatron_world(1).run(
        checkpoints.resume, replace(of, pp=1), str(folder), "torch_dist"
    )
    want = whole_weights(whole)
    assert all(torch.equal(found[name][0], value) for name, value in want.items())


def test_what_a_state_does_not_have_is_not_converted(
    megatron_world: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Statistics of biases that shards do not precondition, and cuts of layers never cut."""
    of = cell(kfac={**SPARSE, "tensor_parallel": "block"}, tp=2)
    for each, ranks, words in (
        (of, "1", r"no statistics of those of decoder.layers.0.mlp.linear_fc2"),
        (replace(of, tp=1), "2", "does not say how layers are cut"),
    ):
        folder = tmp_path / ranks
        folder.mkdir()
        megatron_world(2).run(checkpoints.save_and_go_on, each, str(folder), "torch_dist")
        target = str(tmp_path / "new")
        assert main(["convert", str(folder), target, "--tensor-ranks", ranks]) == 1
        error = capsys.readouterr().err
        assert error.startswith("KFAC-E303 ") and re.search(words, error), error


def test_shards_of_stages_know_the_cuts_of_all(megatron_world: Worlds, tmp_path: Path) -> None:
    """Each stage compared the cuts of its own layers with those of the first."""
    stages = replace(NO_BIAS, pp=2)
    arguments = (str(tmp_path), "torch_dist")
    whole = megatron_world(4).run(
        checkpoints.save_and_go_on, stages, *arguments, compare_collectives=False
    )
    resumed = megatron_world(2).run(checkpoints.resume, NO_BIAS, *arguments)
    want, found = whole_weights(whole), whole_weights([weights for weights, _ in resumed])
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def reader_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Entries of the layers of a converted state."""
    manifest = reader.read_manifest(folder / "kfac")
    assert manifest is not None
    return reader.read_layers(folder / "kfac", manifest, [x.name for x in manifest.layers])


def test_states_that_are_not_there(megatron_world: Worlds, tmp_path: Path) -> None:
    _, of = LAYOUTS["dp2"]
    world, plain = megatron_world(2), replace(of, kfac=None)
    world.run(checkpoints.save_and_go_on, plain, str(tmp_path), "torch_dist")
    for _, metrics in world.run(checkpoints.resume, of, str(tmp_path), "torch_dist"):
        assert metrics["steps"] == checkpoints.STEPS  # anew, with resume: "auto"
    required = checkpoints.fresh(of, resume="require")
    for text in world.run(checkpoints.refusal, required, str(tmp_path)):
        assert "E304" in text and "'require'" in text


def test_a_state_may_be_left_behind(megatron_world: Worlds, tmp_path: Path) -> None:
    _, of = LAYOUTS["dp2"]
    world = megatron_world(2)
    world.run(checkpoints.save_and_go_on, of, str(tmp_path), "torch_dist")
    world.run(checkpoints.resume, replace(of, kfac=None), str(tmp_path), "torch_dist")
    anew = checkpoints.fresh(of, resume="fresh")
    for _, metrics in world.run(checkpoints.resume, anew, str(tmp_path), "torch_dist"):
        assert metrics["steps"] == checkpoints.STEPS


def test_another_model_is_refused_by_name(megatron_world: Worlds, tmp_path: Path) -> None:
    _, of = LAYOUTS["dp2"]
    world = megatron_world(2)
    world.run(checkpoints.save_and_go_on, of, str(tmp_path), "torch_dist")
    other = checkpoints.fresh(of, skip_layers=["*linear_fc1"])
    for text in world.run(checkpoints.refusal, other, str(tmp_path)):
        assert "E302" in text and "linear_fc1: not preconditioned in this model" in text

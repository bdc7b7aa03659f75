"""K-FAC state on several ranks: errors and resharding, under DistributedDataParallel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests._harness import world
from tests.hosts import checkpoint_jobs as jobs

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("what", "code"), [("version", "E308"), ("shape", "E302"), ("step", "E203")]
)
def test_a_state_that_fits_on_one_rank_only_is_loaded_nowhere(what: str, code: str) -> None:
    """The good rank loaded and went on to the next vote, the bad one raised: a hang on NCCL."""
    errors = world(2).run_expecting_errors(jobs.load_damaged_on_one_rank, what)
    assert all(error is not None for error in errors)
    assert {error.same_error for error in errors if error} == {
        (errors[0].type_name, errors[0].text)  # type: ignore[union-attr]
    }
    assert f"KFAC-{code}" in errors[0].text  # type: ignore[union-attr]


def stored(folder: Path) -> tuple[dict[str, Any], list[int]]:
    """Every tensor of a checkpoint by layer and entry, and how many layers each file has."""
    content = json.loads((folder / "manifest.json").read_text())["content"]
    tensors: dict[str, Any] = {}
    counts = []
    for file in content["files"]:
        found = load_file(folder / file["name"])
        assert not found.keys() & tensors.keys()
        tensors.update(found)
        counts.append(len({key.rpartition("/")[0] for key in found}))
    return tensors, counts


def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path: Path) -> None:
    """Elsewhere a changed number of ranks is refused, or users merge shards by hand.

    All pairs of 1 to 4 ranks and back again: what is stored never changes in a bit, and training
    goes on as it would have.
    """
    sizes = (1, 2, 3, 4)
    straight = {n: world(n).run(jobs.train_and_save, str(tmp_path))[0] for n in sizes}
    original = {n: stored(tmp_path / str(n)) for n in sizes}
    assert [len(original[n][1]) for n in sizes] == [1, 2, 3, 4]
    for now in sizes:
        names = [str(before) for before in sizes]
        trained = world(now).run(jobs.load_and_save, str(tmp_path), names)[0]
        for before, weights in zip(sizes, trained, strict=True):
            tensors, counts = stored(tmp_path / f"{before}-{now}")
            assert len(counts) == now
            assert_same(tensors, original[before][0])
            for name, value in weights.items():
                limit = {"rtol": 0.0, "atol": 0.0} if before == now else {}
                torch.testing.assert_close(value, straight[before][name], **limit)
    for before in sizes:
        names = [f"{before}-{now}" for now in sizes]
        world(before).run(jobs.load_and_save, str(tmp_path), names)
        for name in names:
            assert_same(stored(tmp_path / f"{name}-{before}")[0], original[before][0])


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key

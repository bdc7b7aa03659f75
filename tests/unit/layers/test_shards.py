"""Cuts of a layer over tensor ranks: nothing is lost, doubled or out of place."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_kfac.config import KFACConfig
from ds_kfac.layers.discover import discover
from ds_kfac.layers.matrixview import to_flat, to_matrix
from ds_kfac.layers.shards import Shards, TensorCut, fused_ranges


def random_shards(generator: random.Random, *, fused: int | None = None) -> Shards:
    """Up to three fused parts, each cut into slices of any width, some of them empty."""
    size = generator.randint(1, 4)
    parts = fused or generator.randint(1, 3)
    widths = [[generator.randint(0, 3) for _ in range(size)] for _ in range(parts)]
    widths[0][0] += 1
    cut, other = sum(map(sum, widths)), generator.randint(1, 4)
    rows = generator.random() < 0.5
    d_out, d_in = (cut, other) if rows else (other, cut)
    return Shards(d_out, d_in, rows, fused_ranges(widths))


def linear(shards: Shards, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(shards.d_in, shards.d_out, bias=bias))


def table(shards: Shards, rank: int = 0, *, blocks: bool = False, **settings: object):  # type: ignore[no-untyped-def]
    config = KFACConfig.parse({"skip_layers": [], **settings})
    return discover(linear(shards), config, tensor=TensorCut({"0": shards}, rank, blocks))


@given(st.randoms(use_true_random=False))
def test_joining_what_ranks_take_gives_the_whole(generator: random.Random) -> None:
    shards = random_shards(generator)
    assert shards.problem() is None
    whole = torch.arange(shards.d_out * shards.d_in).view(shards.d_out, shards.d_in)
    parts = [shards.take(whole, rank, shards.dim) for rank in range(shards.size)]
    assert [part.shape[shards.dim] for part in parts] == shards.widths
    assert torch.equal(shards.join(parts, shards.dim), whole)


def test_fused_parts_are_cut_one_by_one() -> None:
    shards = Shards(6, 2, True, fused_ranges([[1, 1], [1, 1], [1, 1]]))
    assert shards.ranges == (((0, 1), (2, 3), (4, 5)), ((1, 2), (3, 4), (5, 6)))
    assert shards.take(torch.arange(6), 1, 0).tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    "ranges",
    [(((0, 2),), ((2, 3),)), (((0, 2),), ((1, 4),)), (((0, 3),), ((0, 1), (3, 4)))],
    ids=["short", "overlap", "twice"],
)
def test_ranges_that_are_no_cut_are_seen(ranges: tuple[tuple[tuple[int, int], ...], ...]) -> None:
    problem = Shards(4, 2, True, ranges).problem()
    assert problem is not None and "exactly once" in problem


@given(st.randoms(use_true_random=False))
def test_flat_gradients_hold_one_shard_after_another(generator: random.Random) -> None:
    shards = random_shards(generator)
    spec = table(shards).layers[0]
    matrix = torch.randn(spec.d_out, spec.columns)
    flat = to_flat(matrix, spec)
    assert torch.equal(to_matrix(flat, spec, dtype=torch.float32), matrix)
    weight, bias = matrix[:, :-1], matrix[:, -1]
    expected = [shards.take(weight, rank, shards.dim).flatten() for rank in range(shards.size)]
    if shards.rows:
        expected += [shards.take(bias, rank, 0) for rank in range(shards.size)]
    else:
        expected.append(bias)
    assert torch.equal(flat, torch.cat(expected))
    assert [spec.is_cut(slot) for slot in spec.slots] == [True, shards.rows]


def test_slices_in_order_are_not_copied() -> None:
    shards = Shards(6, 4, True, fused_ranges([[2, 4]]))
    assert shards.in_order
    assert not Shards(6, 4, True, fused_ranges([[1, 2], [1, 2]])).in_order
    assert not Shards(6, 4, False, fused_ranges([[1, 3]])).in_order
    model, cut = linear(shards, bias=False), TensorCut({"0": shards}, 0, False)
    spec = discover(model, KFACConfig(), tensor=cut).layers[0]
    flat = torch.randn(24)
    matrix = to_matrix(flat, spec, dtype=torch.float32)
    assert matrix.data_ptr() == flat.data_ptr() == to_flat(matrix, spec).data_ptr()


def test_every_rank_describes_the_same_whole_layer() -> None:
    shards = Shards(6, 4, True, fused_ranges([[2, 0], [1, 3]]))
    first, second = (table(shards, rank, max_factor_dim=4).layers[0] for rank in (0, 1))
    assert first == second
    assert (first.d_out, first.d_in, first.columns, first.numel) == (6, 4, 5, 30)
    assert [block.size for block in first.g_blocks] == [3, 3]


def test_shards_that_are_layers_of_their_own() -> None:
    """Only the local rows or columns; a bias that is whole everywhere is left out and named."""
    column = table(Shards(6, 4, True, fused_ranges([[2, 4]])), 1, blocks=True)
    spec = column.layers[0]
    assert (spec.d_out, spec.d_in, spec.columns, spec.shards) == (4, 4, 5, None)
    row = table(Shards(6, 4, False, fused_ranges([[1, 3]])), 0, blocks=True)
    spec = row.layers[0]
    assert (spec.d_out, spec.d_in, spec.columns, spec.bias) == (6, 1, 1, None)
    assert [(item.name, item.numel) for item in row.left_out] == [("0.bias", 6)]
    assert "whole on every tensor rank" in row.left_out[0].reason


@pytest.mark.parametrize(
    ("widths", "parts"), [([[1, 1], [1, 1]], 2), ([[1, 1], [2, 0]], 1), ([[2, 2]], 1)]
)
def test_fused_parts_of_a_shard(widths: list[list[int]], parts: int) -> None:
    """Only a rank with an equal slice of every part has the parts themselves."""
    shards = Shards(4, 3, True, fused_ranges(widths))
    blocks = table(shards, 0, blocks=True, fused_parts={"0": 2})
    assert blocks.layers[0].parts == parts
    assert table(shards, fused_parts={"0": 2}).layers[0].parts == 2


def test_a_module_that_works_on_parts_of_the_activations_is_left_out() -> None:
    cut = TensorCut({}, 0, False, {"0": "is whole, but works on other activations"})
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = discover(model, KFACConfig(), tensor=cut)
    assert [spec.name for spec in found.layers] == ["1"]
    assert found.left_out[0].reason == "is whole, but works on other activations"


def test_coverage_counts_what_all_tensor_ranks_hold() -> None:
    """Under two tensor ranks a cut embedding counted with the shard of one: 30,592 of 34,688."""
    model = nn.ModuleDict(
        {"embed": nn.Embedding(16, 4), "up": nn.Linear(4, 3), "down": nn.Linear(3, 4)}
    )
    cut = {
        "up": Shards(6, 4, True, (((0, 3),), ((3, 6),))),
        "down": Shards(4, 6, False, (((0, 3),), ((3, 6),))),
    }
    whole = 32 * 4 + (6 * 4 + 6) + (4 * 6 + 4)
    for blocks in (False, True):
        for skipped in ([], ["up"], ["down"]):
            config = KFACConfig.parse({"skip_layers": skipped})
            found = discover(
                model, config, tensor=TensorCut(cut, 0, blocks), sizes={"embed.weight": 32 * 4}
            )
            outside = sum(item.numel for item in found.left_out)
            inside = {"up": 6 * 4 + 6, "down": 4 * 6 + (0 if blocks else 4)}
            assert outside == whole - sum(inside[spec.name] for spec in found.layers)

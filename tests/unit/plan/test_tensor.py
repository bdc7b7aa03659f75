"""Shards as slices of whole layers: what every rank of a work group holds, sends and gets."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_kfac.layers.shards import Shards, fused_ranges
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.plan.placement import place
from ds_kfac.plan.program import build
from ds_kfac.plan.tensor import grid_of, joint_layouts, row_shares, sent_rows_numel
from ds_kfac.plan.topology import Layout
from tests.unit.plan.cases import REPLICATED, make_spec, sharded


def cut_spec(name: str, widths: list[int], other: int, *, rows: bool, bias: bool) -> LayerSpec:
    total = sum(widths)
    d_out, d_in = (total, other) if rows else (other, total)
    shards = Shards(d_out, d_in, rows, fused_ranges([widths]))
    return replace(make_spec(name, d_out, d_in, bias=bias), shards=shards)


def local_numel(spec: LayerSpec, name: str, rank: int) -> int:
    slot = next(slot for slot in spec.slots if slot.name == name)
    if spec.shards is None or not spec.is_cut(slot):
        return slot.numel
    return slot.numel // spec.shards.cut_size * spec.shards.width(rank)


class Case:
    """Random layers on a random grid of ranks."""

    def __init__(self, generator: random.Random) -> None:
        self.data, self.tensor = generator.randint(1, 3), generator.randint(1, 3)
        self.size = self.data * self.tensor
        self.specs = []
        for index in range(generator.randint(1, 5)):
            widths = [generator.randint(0, 3) for _ in range(self.tensor)]
            widths[0] += 1
            spec = cut_spec(
                f"layer{index}",
                widths,
                generator.randint(1, 4),
                rows=generator.random() < 0.5,
                bias=generator.random() < 0.5,
            )
            if generator.random() < 0.3:
                spec = replace(spec, shards=None)
            self.specs.append(spec)
        places = [(t, d) for t in range(self.tensor) for d in range(self.data)]
        generator.shuffle(places)
        self.grid = grid_of(places)
        whole = generator.random() < 0.4
        self.by_tensor_rank: list[dict[str, Layout]] = []
        for rank in range(self.tensor):
            layouts = {}
            for spec in self.specs:
                for slot in spec.slots:
                    numel = local_numel(spec, slot.name, rank)
                    edges = [generator.randint(0, numel) for _ in range(self.data - 1)]
                    ranks = generator.sample(range(self.data), self.data)
                    layouts[slot.name] = REPLICATED if whole else sharded(numel, edges, ranks)
            self.by_tensor_rank.append(layouts)
        self.layouts = joint_layouts(self.specs, self.by_tensor_rank, self.grid)
        self.owners = [generator.randrange(self.size) for _ in self.specs]
        self.exchange = build(self.specs, self.layouts, self.owners, size=self.size).exchange


@given(st.randoms(use_true_random=False))
def test_owners_read_every_element_once(generator: random.Random) -> None:
    case = Case(generator)
    for layer, spec in enumerate(case.specs):
        read = [
            element
            for segment in case.exchange.segments
            if segment.layer == layer and segment.source
            for element in range(segment.start, segment.start + segment.numel)
        ]
        assert sorted(read) == list(range(spec.numel))
    assert not case.exchange.replicated  # one all-to-all carries everything back


@given(st.randoms(use_true_random=False))
def test_every_rank_gets_all_it_holds(generator: random.Random) -> None:
    """As many elements as its host stores, of each parameter."""
    case = Case(generator)
    for tensor_rank, ranks in enumerate(case.grid):
        layouts = case.by_tensor_rank[tensor_rank]
        for data_rank, rank in enumerate(ranks):
            for spec in case.specs:
                for slot in spec.slots:
                    layout = layouts[slot.name]
                    stored = sum(p.numel for p in layout.pieces if p.rank == data_rank)
                    if layout.replicated:
                        stored = local_numel(spec, slot.name, tensor_rank)
                    held = [
                        s
                        for s in case.exchange.segments
                        if s.param == slot.name and s.holder == rank
                    ]
                    assert sum(s.numel for s in held) == stored
                    assert len(held) <= 1  # the host's view is one slice


@given(st.randoms(use_true_random=False))
def test_senders_and_receivers_agree(generator: random.Random) -> None:
    exchange = Case(generator).exchange
    for sources_only in (True, False):
        for sender in range(exchange.size):
            for receiver in range(exchange.size):
                sent = exchange.outgoing(sender, sources_only=sources_only)[receiver]
                assert sent == exchange.incoming(receiver, sources_only=sources_only)[sender]
    assert exchange.moves_gradients <= exchange.moves_shards


def test_an_owner_reads_its_own_copy() -> None:
    """What is whole on every tensor rank does not travel to an owner that has it."""
    spec = make_spec("fc", 4, 3)
    layouts = joint_layouts([spec], [{s.name: REPLICATED for s in spec.slots}] * 2, [[0], [1]])
    for owner in (0, 1):
        exchange = build([spec], layouts, [owner], size=2).exchange
        assert not exchange.moves_gradients
        assert exchange.sent_numel(owner) == (0, 16)
        assert exchange.sent_numel(1 - owner) == (0, 0)


def test_shards_travel_once_and_return_to_their_rank() -> None:
    spec = cut_spec("fc", [2, 1], 4, rows=True, bias=True)  # 3 x 4 and a bias
    layouts = joint_layouts(
        [spec], [{s.name: REPLICATED for s in spec.slots}] * 2, [[0, 2], [1, 3]]
    )
    exchange = build([spec], layouts, [0], size=4).exchange
    # Of the second shard's two copies the owner reads one, and both get their direction back.
    assert [exchange.sent_numel(rank)[0] for rank in range(4)] == [0, 5, 0, 0]
    assert exchange.sent_numel(0) == (0, 5 + 10 + 5)


def test_equal_shards_give_no_rank_all_layers() -> None:
    specs = [cut_spec(f"fc{i}", [2, 2], 4, rows=True, bias=False) for i in range(4)]
    whole = {"fc0.weight": [(0, 0, 8)], "fc1.weight": [(0, 0, 8)]}
    layouts = {
        slot.name: sharded(8, [8 if slot.name in whole else 0], [0, 1])
        for spec in specs
        for slot in spec.slots
    }
    joint = joint_layouts(specs, [layouts, layouts], [[0, 1], [2, 3]])
    owners = place(specs, [1.0] * 4, joint, size=4, strategy="zero_aligned")
    # Layers 0 and 1 are on data rank 0 of both tensor ranks, 2 and 3 on data rank 1.
    assert sorted(owners[:2]) == [0, 2] and sorted(owners[2:]) == [1, 3]


@pytest.mark.parametrize("places", [[(0, 0), (0, 0)], [(0, 0), (1, 1)]])
def test_places_that_are_no_grid(places: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="no grid"):
        grid_of(places)


@given(st.integers(0, 50), st.integers(1, 8))
def test_rows_are_shared_out_evenly(rows: int, size: int) -> None:
    shares = row_shares(rows, size)
    assert sum(shares) == rows and max(shares) - min(shares) <= 1


def test_rows_sent_are_those_that_others_work_on() -> None:
    shards = Shards(5, 2, True, fused_ranges([[3, 2]]))
    assert [sent_rows_numel(shards, 7, rank) for rank in (0, 1)] == [3 * 3, 4 * 2]

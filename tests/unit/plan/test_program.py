"""The program: both sides of every transfer agree, nothing is lost, sent twice or unbounded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_kfac.plan import program as program_module
from ds_kfac.plan.cost import factor_numel
from ds_kfac.plan.program import COUNTS_PER_LAYER, Program, ReduceItem, build
from tests.unit.plan.cases import REPLICATED, Case, cases, make_spec, sharded


def build_case(case: Case) -> Program:
    return build(case.specs, case.layouts, case.owners, size=case.size)


# ---------------------------------------------------------------- gradients and directions


@settings(max_examples=150)
@given(cases())
def test_what_one_rank_sends_is_what_the_other_expects(case: Case) -> None:
    exchange = build_case(case).exchange
    for sender in range(case.size):
        for receiver in range(case.size):
            sent = exchange.outgoing(sender)[receiver]
            assert sent == exchange.incoming(receiver)[sender]
            assert all(s.holder == sender != receiver for s in sent)
            assert all(case.owners[s.layer] == receiver for s in sent)
        assert exchange.outgoing(sender)[sender] == exchange.incoming(sender)[sender] == []


@settings(max_examples=150)
@given(cases())
def test_every_element_of_every_layer_arrives_once(case: Case) -> None:
    exchange = build_case(case).exchange
    for layer, spec in enumerate(case.specs):
        owner = case.owners[layer]
        assert layer in exchange.owned(owner)
        arrived: Counter[int] = Counter()
        incoming = [s for part in exchange.incoming(owner) for s in part]
        for segment in [*incoming, *exchange.local(owner)]:
            if segment.layer == layer:
                arrived.update(range(segment.start, segment.start + segment.numel))
        expected = 0 if layer in exchange.replicated else 1
        assert [arrived[i] for i in range(spec.numel)] == [expected] * spec.numel


@settings(max_examples=100)
@given(cases())
def test_segments_are_slices_of_their_parameter(case: Case) -> None:
    exchange = build_case(case).exchange
    slots = {slot.name: slot for spec in case.specs for slot in spec.slots}
    for segment in exchange.segments:
        slot = slots[segment.param]
        assert 0 <= segment.offset and segment.offset + segment.numel <= slot.numel
        assert segment.start == slot.offset + segment.offset


@settings(max_examples=100)
@given(cases())
def test_counted_elements_add_up(case: Case) -> None:
    exchange = build_case(case).exchange
    sent = [exchange.sent_numel(rank) for rank in range(case.size)]
    away = sum(s.numel for s in exchange.segments if s.holder != case.owners[s.layer])
    assert sum(out for out, _ in sent) == away
    padding = exchange.gather_numel * (case.size - 1)
    returned = [exchange.returned_numel(rank) for rank in range(case.size)]
    assert sum(back for _, back in sent) - sum(returned) == away
    assert exchange.spread is not None or returned == [padding] * case.size
    assert sum(returned) <= padding * case.size
    assert exchange.moves_shards == (away > 0)
    shared = [exchange.shared_numel(rank) for rank in range(case.size)]
    assert sum(shared) == sum(case.specs[i].numel for i in exchange.replicated)
    assert exchange.gather_numel == (0 if case.size == 1 else max(shared))
    owned = [layer for rank in range(case.size) for layer in exchange.owned(rank)]
    assert sorted(owned) == list(range(len(case.specs)))


def test_nothing_moves_when_owners_hold_their_layers() -> None:
    spec = make_spec(bias=True)
    layouts = {"fc.weight": sharded(12, [12], [1]), "fc.bias": sharded(4, [4], [1])}
    exchange = build([spec], layouts, [1], size=2).exchange
    assert not exchange.moves_shards
    assert [exchange.sent_numel(rank) for rank in (0, 1)] == [(0, 0), (0, 0)]
    assert [s.numel for s in exchange.local(1)] == [12, 4]


def test_a_shared_matrix_by_hand() -> None:
    spec = make_spec(d_out=4, d_in=3, bias=True)
    layouts = {"fc.weight": sharded(12, [5], [1, 0]), "fc.bias": sharded(4, [3], [0, 1])}
    exchange = build([spec], layouts, [0], size=2).exchange
    assert [(s.param, s.holder, s.start, s.offset, s.numel) for s in exchange.segments] == [
        ("fc.weight", 1, 0, 0, 5),
        ("fc.weight", 0, 5, 5, 7),
        ("fc.bias", 0, 12, 0, 3),
        ("fc.bias", 1, 15, 3, 1),
    ]
    assert exchange.sent_numel(0) == (0, 6)
    assert exchange.sent_numel(1) == (6, 0)


def test_replicated_layers_by_hand() -> None:
    specs = [make_spec("a", bias=False), make_spec("b", 2, 2, bias=False)]
    layouts = {"a.weight": REPLICATED, "b.weight": REPLICATED}
    exchange = build(specs, layouts, [0, 1], size=3).exchange
    assert (exchange.gather_numel, exchange.moves_shards) == (12, False)
    assert [exchange.sent_numel(rank) for rank in range(3)] == [(0, 24)] * 3
    assert build(specs, layouts, [0, 0], size=1).exchange.sent_numel(0) == (0, 0)


# ---------------------------------------------------------------- factors


def expected_items(case: Case, owner: int) -> list[tuple[int, str, int]]:
    """Layers in table order; of each all A blocks, all G blocks, and its counts last."""
    items = []
    for layer, spec in enumerate(case.specs):
        if case.owners[layer] == owner:
            items += [(layer, "a", i) for i in range(len(spec.a_blocks))]
            items += [(layer, "g", i) for i in range(len(spec.g_blocks))]
            items.append((layer, "counts", 0))
    return items


def items_of(program: Program, owner: int) -> list[ReduceItem]:
    return [item for round_ in program.rounds for item in round_.items[owner]]


@pytest.mark.parametrize("limit", [1, 8, 40, 1 << 26])
@settings(max_examples=40)
@given(cases())
def test_every_block_is_reduced_once_in_order_in_a_bounded_buffer(limit: int, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_module, "REDUCE_BUFFER_NUMEL", limit)
        program = build_case(case)
    for owner in range(case.size):
        items = items_of(program, owner)
        assert [(i.layer, i.side, i.block) for i in items] == expected_items(case, owner)
    for round_ in program.rounds:
        assert len(round_.items) == case.size
        sizes = []
        for items in round_.items:
            ends = [item.offset + item.numel for item in items]
            assert [item.offset for item in items] == [0, *ends[:-1]][: len(items)]
            sizes.append(sum(item.numel for item in items))
            # Only a single block may exceed an owner's share of the buffer.
            assert len(items) <= 1 or sizes[-1] <= max(1, limit // case.size)
        assert round_.part_numel == max(sizes) > 0
    blocks = sum(factor_numel(spec) + COUNTS_PER_LAYER for spec in case.specs)
    assert sum(i.numel for o in range(case.size) for i in items_of(program, o)) == blocks


@given(cases())
def test_item_sizes_are_those_of_packed_blocks(case: Case) -> None:
    program = build_case(case)
    for owner in range(case.size):
        for item in items_of(program, owner):
            spec = case.specs[item.layer]
            if item.side == "counts":
                assert item.numel == COUNTS_PER_LAYER
            else:
                n = (spec.a_blocks if item.side == "a" else spec.g_blocks)[item.block].size
                assert item.numel == n * (n + 1) // 2


def test_a_default_buffer_takes_a_small_model_in_one_round() -> None:
    specs = [make_spec(f"l{i}") for i in range(4)]
    layouts = {slot.name: REPLICATED for spec in specs for slot in spec.slots}
    program = build(specs, layouts, [0, 1, 0, 1], size=2)
    assert [round_.part_numel for round_ in program.rounds] == [2 * (10 + 10 + 3)]


# ---------------------------------------------------------------- fingerprints


@settings(max_examples=50)
@given(cases(), st.integers(0, 7))
def test_fingerprints_tell_programs_apart(case: Case, shift: int) -> None:
    program = build_case(case)
    assert program.fingerprint() == build_case(case).fingerprint()
    other = [(owner + shift) % case.size for owner in case.owners]
    moved = build(case.specs, case.layouts, other, size=case.size)
    assert (moved.fingerprint() == program.fingerprint()) == (other == case.owners)
    reordered = build(case.specs[::-1], case.layouts, case.owners[::-1], size=case.size)
    if case.specs[::-1] != case.specs:
        assert reordered.fingerprint() != program.fingerprint()

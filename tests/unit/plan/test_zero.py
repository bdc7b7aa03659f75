"""Layouts under ZeRO from sizes alone: by hand, and what holds for all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds_kfac.plan.topology import Layout, Piece
from ds_kfac.plan.zero import zero_layouts

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def test_a_group_is_cut_where_partitions_end() -> None:
    found = zero_layouts([[("a", 3), ("b", 6)], [("c", 1)]], stage=2, size=2)
    # Nine elements are padded to twelve, six for each rank.
    assert found["a"] == Layout((Piece(0, 0, 3),))
    assert found["b"] == Layout((Piece(0, 0, 3), Piece(1, 3, 3)))
    assert found["c"] == Layout((Piece(0, 0, 1),))


def test_round_robin_and_alignment() -> None:
    group = [("a", 3), ("b", 5), ("c", 4)]
    dealt = zero_layouts([group], stage=1, size=2, round_robin=True)
    assert dealt["c"] == Layout((Piece(0, 0, 3), Piece(1, 3, 1)))  # right after a
    assert dealt["b"] == Layout((Piece(1, 0, 5),))
    aligned = zero_layouts([group], stage=1, size=2, alignment=4)
    # Offsets 0, 4 and 12; sixteen elements, eight for each rank.
    assert aligned["b"] == Layout((Piece(0, 0, 4), Piece(1, 4, 1)))
    assert aligned["c"] == Layout((Piece(1, 0, 4),))


def test_stage_3_cuts_every_parameter() -> None:
    found = zero_layouts([[("a", 5), ("b", 2), ("none", 0)]], stage=3, size=4)
    assert found["a"] == Layout((Piece(0, 0, 2), Piece(1, 2, 2), Piece(2, 4, 1)))
    assert found["b"] == Layout((Piece(0, 0, 1), Piece(1, 1, 1)))
    assert found["none"] == Layout()


def test_stage_0_keeps_gradients_whole() -> None:
    assert zero_layouts([[("a", 5)]], stage=0, size=4) == {"a": Layout(replicated=True)}


@given(SIZES, st.sampled_from([1, 2, 3]), st.integers(1, 9), st.booleans(), st.sampled_from([1, 4]))
def test_slices_cover_every_parameter_once(
    sizes: list[int], stage: int, size: int, round_robin: bool, alignment: int
) -> None:
    group = [(str(i), numel) for i, numel in enumerate(sizes)]
    found = zero_layouts(
        [group], stage=stage, size=size, round_robin=round_robin, alignment=alignment
    )
    for name, numel in group:
        end = 0
        for piece in found[name].pieces:
            assert piece.start == end and piece.numel > 0 and 0 <= piece.rank < size
            end += piece.numel
        assert end == numel
        ranks = [piece.rank for piece in found[name].pieces]
        assert ranks == sorted(set(ranks))

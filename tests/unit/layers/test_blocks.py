"""Balanced cuts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds_kfac.layers.blocks import Block, cut


def test_by_hand() -> None:
    assert cut(5, 5) == (Block(0, 5),)
    assert cut(6, 5) == (Block(0, 3), Block(3, 6))
    assert cut(11, 4) == (Block(0, 4), Block(4, 8), Block(8, 11))
    assert cut(3, 1) == (Block(0, 1), Block(1, 2), Block(2, 3))
    assert [block.size for block in cut(50257, 2048)] == [2011] * 7 + [2010] * 18


@given(st.integers(1, 5000), st.integers(1, 3000))
def test_cuts_are_consecutive_balanced_and_fewest(dim: int, limit: int) -> None:
    blocks = cut(dim, limit)
    sizes = [block.size for block in blocks]
    assert blocks[0].start == 0 and blocks[-1].end == dim
    assert all(one.end == other.start for one, other in zip(blocks, blocks[1:], strict=False))
    assert 1 <= min(sizes) and max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert (len(blocks) - 1) * limit < dim

"""Outer-product sums against explicit loops over rows in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_kfac.math import moments
from ds_kfac.math.moments import add_outer_, add_outer_blocks_
from ds_kfac.math.packing import pack_upper, packed_numel, unpack_upper


def outer_slow(rows: Tensor, *, bias: bool = False, alpha: float = 1.0) -> Tensor:
    """Sum of outer products, one row at a time, the constant 1 appended if asked for."""
    width = rows.shape[1] + int(bias)
    total = np.zeros((width, width))
    for row in rows.double().numpy():
        extended = np.append(row, 1.0) if bias else row
        total += alpha * np.outer(extended, extended)
    return torch.from_numpy(total)


def integers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Small integers: every summation order gives the same bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def full(total: Tensor) -> Tensor:
    packed = pack_upper(total, torch.empty(packed_numel(total.shape[0]), dtype=total.dtype))
    return unpack_upper(packed, torch.empty_like(total))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rows_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize(("t", "n"), [(1, 1), (5, 3), (64, 17)])
def test_add_outer_equals_the_loop(
    dtype: torch.dtype, rows_dtype: torch.dtype, t: int, n: int
) -> None:
    rows = integers(t, n, dtype=rows_dtype)
    start = integers(n, n, dtype=dtype, seed=1)
    total = start.clone()
    add_outer_(total, rows, alpha=0.5)
    assert total.dtype == dtype
    assert torch.equal(total.double(), start.double() + outer_slow(rows, alpha=0.5))


@settings(max_examples=30, deadline=None)
@given(
    t=st.integers(0, 40),
    n=st.integers(1, 20),
    alpha=st.sampled_from([1.0, 0.25, -2.0, 0.0]),
    as_tensor=st.booleans(),
    seed=st.integers(0, 50),
)
def test_number_and_tensor_scales_agree(
    t: int, n: int, alpha: float, as_tensor: bool, seed: int
) -> None:
    rows = integers(t, n, seed=seed)
    total = torch.zeros(n, n)
    add_outer_(total, rows, alpha=torch.tensor(alpha) if as_tensor else alpha)
    assert torch.equal(total.double(), outer_slow(rows, alpha=alpha))


@pytest.mark.parametrize("n", [1024, 1100])
def test_large_factors_have_a_valid_upper_triangle_and_whole_diagonal_blocks(n: int) -> None:
    """Below the diagonal blocks nothing is computed: the documented half-price contract."""
    rows = integers(24, n)
    total = torch.full((n, n), 3.0)
    add_outer_(total, rows, alpha=2.0)
    expected = 3.0 + 2.0 * (rows.t() @ rows)
    assert torch.equal(total.triu(), expected.triu())
    assert torch.equal(full(total), expected)
    for start in range(0, n, 256):
        block = slice(start, min(start + 256, n))
        assert torch.equal(total[block, block], expected[block, block])
        assert (total[block.stop :, block] == 3.0).all()


def test_block_rows_equal_the_plain_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "SYRK_MIN_SIZE", 2)
    monkeypatch.setattr(moments, "_SYRK_ROWS", 3)
    for n in (2, 3, 4, 7, 9):
        rows, total = integers(6, n), torch.zeros(n, n)
        add_outer_(total, rows, alpha=torch.tensor(0.5))
        assert torch.equal(total.triu().double(), outer_slow(rows, alpha=0.5).triu())


@pytest.mark.parametrize("n", [3, 1024])
def test_no_rows_change_nothing(n: int) -> None:
    """A rank without samples takes part with weight 0; there must be no 0/0 and no stray write."""
    total = torch.full((n, n), 2.0)
    add_outer_(total, torch.empty(0, n), alpha=torch.tensor(float("nan")))
    assert (total == 2.0).all()
    parts = [torch.full((2, 2), 2.0), torch.full((2, 2), 2.0)]
    add_outer_blocks_(parts, torch.empty(0, 3), bounds=[(0, 2), (2, 3)], bias=True)
    assert all((part == 2.0).all() for part in parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_do_not_overflow(dtype: torch.dtype) -> None:
    """|x| = 300 over 10^4 rows: the sum, 9e8, is far outside fp16 and 8 bits are not enough."""
    signs = integers(10_000, 4).sign() + 0.0
    signs[signs == 0] = 1.0
    rows = (300.0 * signs).to(dtype)
    total = torch.zeros(4, 4)
    add_outer_(total, rows)
    expected = outer_slow(rows)
    bound = 10_000 * 2.0**-24  # of fp32 summation one after another; bf16 would be off by 100 %
    torch.testing.assert_close(total.double(), expected, rtol=bound, atol=bound * 9e8)
    assert expected.diagonal().min() >= 8.9e8


def test_strided_rows() -> None:
    """Token subsampling, transposed activations and expanded gradients are never contiguous."""
    base = integers(40, 30)
    for rows in (base[::3], base[:, ::2], base.t(), base[3:17, 5:11], base[:1].expand(6, 30)):
        total = torch.zeros(rows.shape[1], rows.shape[1])
        add_outer_(total, rows)
        assert torch.equal(total.double(), outer_slow(rows))


def test_rows_that_require_grad_leave_no_graph() -> None:
    """A graph kept by an accumulator holds the activations of every step it ever saw."""
    rows = integers(5, 3).requires_grad_()
    total = torch.zeros(3, 3)
    add_outer_(total, rows)
    add_outer_blocks_([total], rows, bounds=[(0, 3)], bias=False)
    assert not total.requires_grad and total.grad_fn is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("count_constant", [False, True])
@pytest.mark.parametrize("cuts", [[0, 7], [0, 3, 7], [0, 2, 4, 6, 7]])
def test_blocks_equal_the_diagonal_blocks_of_the_loop(
    bias: bool, as_tensor: bool, count_constant: bool, cuts: list[int]
) -> None:
    rows = integers(9, 7, dtype=torch.bfloat16)
    bounds = list(zip(cuts[:-1], cuts[1:], strict=True))
    whole = [*bounds[:-1], (bounds[-1][0], 7 + int(bias))]
    totals = [integers(hi - lo, hi - lo, seed=lo) for lo, hi in whole]
    starts = [total.clone() for total in totals]
    alpha = torch.tensor(0.25) if as_tensor else 0.25
    add_outer_blocks_(
        totals, rows, bounds=whole if count_constant else bounds, bias=bias, alpha=alpha
    )
    expected = outer_slow(rows, bias=bias, alpha=0.25)
    for (lo, hi), start, total in zip(whole, starts, totals, strict=True):
        assert torch.equal(total.double(), start.double() + expected[lo:hi, lo:hi])


def test_the_constant_may_be_a_block_of_its_own() -> None:
    """d_in = 4 cut at 4 leaves only the constant in the last block."""
    rows = integers(9, 4)
    totals = [torch.zeros(4, 4), torch.zeros(1, 1)]
    add_outer_blocks_(totals, rows, bounds=[(0, 4), (4, 5)], bias=True, alpha=0.5)
    assert torch.equal(totals[0].double(), outer_slow(rows, alpha=0.5))
    assert totals[1].item() == 4.5


def test_large_blocks_keep_the_constant_in_the_upper_triangle() -> None:
    """The view without the constant is not contiguous; block rows must still land in it."""
    rows = integers(5, 1024)
    total = torch.zeros(1025, 1025)
    add_outer_blocks_([total], rows, bounds=[(0, 1025)], bias=True)
    extended = torch.cat([rows, torch.ones(5, 1)], dim=1)
    assert torch.equal(full(total), extended.t() @ extended)


@pytest.mark.parametrize(
    ("shapes", "width", "bounds", "bias"),
    [
        ([(3, 3)], 4, [(0, 4)], False),
        ([(4, 4)], 4, [(0, 5)], False),
        ([(4, 4)], 4, [(0, 4)], True),
        ([(2, 2)], 4, [(0, 2), (2, 4)], False),
        ([(2, 2), (2, 2)], 5, [(0, 2), (2, 4)], False),
        ([], 0, [], False),
    ],
)
def test_blocks_that_do_not_fit_are_refused(
    shapes: list[tuple[int, int]], width: int, bounds: list[tuple[int, int]], bias: bool
) -> None:
    totals = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match="rows|last block"):
        add_outer_blocks_(totals, torch.ones(2, width), bounds=bounds, bias=bias)


def test_nothing_is_read_back_to_the_host() -> None:
    """Meta tensors have no values: any item(), bool() or float() on one raises."""
    rows, alpha = torch.empty(9, 1030, device="meta"), torch.empty((), device="meta")
    totals = [torch.empty(k, k, device="meta") for k in (4, 1027)]
    add_outer_blocks_(totals, rows, bounds=[(0, 4), (4, 1030)], bias=True, alpha=alpha)

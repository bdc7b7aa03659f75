"""Packing against explicit loops over the documented order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_kfac.math.packing import pack_upper, packed_numel, unpack_upper

SIZES = [0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 320, 449, 512, 577]


def numbered(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A matrix whose every element is different, so that a swap cannot hide."""
    return torch.arange(n * n, dtype=dtype).reshape(n, n)


def pack_slow(matrix: Tensor) -> list[float]:
    """The documented order, one element at a time."""
    n = matrix.shape[0]
    values = matrix.tolist()
    packed: list[float] = []
    for start in range(0, n, 64):
        stop = min(start + 64, n)
        packed += [values[i][j] for i in range(start, stop) for j in range(i, stop)]
    size = 64
    while size < n:
        for start in range(0, n, 2 * size):
            rows = range(start, min(start + size, n))
            cols = range(start + size, min(start + 2 * size, n))
            packed += [values[i][j] for i in rows for j in cols]
        size *= 2
    return packed


def packed_of(matrix: Tensor) -> Tensor:
    n = matrix.shape[0]
    return pack_upper(matrix, torch.empty(packed_numel(n), dtype=matrix.dtype))


@pytest.mark.parametrize("n", SIZES)
def test_pack_follows_the_documented_order(n: int) -> None:
    matrix = numbered(n)
    assert packed_of(matrix).tolist() == pack_slow(matrix)


@pytest.mark.parametrize("n", SIZES)
def test_unpack_restores_every_element(n: int) -> None:
    matrix = numbered(n).triu()
    expected = matrix + matrix.triu(1).t()
    out = torch.full((n, n), torch.nan, dtype=torch.float64)
    assert unpack_upper(packed_of(matrix), out) is out
    assert torch.equal(out, expected)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 300))
def test_every_upper_element_is_packed_exactly_once(n: int) -> None:
    packed = packed_of(numbered(n))
    rows, cols = torch.triu_indices(n, n)
    assert torch.equal(packed.sort().values, (rows * n + cols).double().sort().values)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 200), seed=st.integers(0, 99), double=st.booleans())
def test_round_trip_is_bit_exact(n: int, seed: int, double: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    matrix = torch.randn(n, n, generator=generator, dtype=dtype)
    matrix = matrix + matrix.t()
    out = unpack_upper(packed_of(matrix), torch.empty_like(matrix))
    assert torch.equal(out, matrix)
    assert torch.equal(out, out.t())


def test_lower_triangle_is_never_read() -> None:
    """Factors accumulated by block rows hold stale numbers below the diagonal blocks."""
    matrix = numbered(200)
    stale = matrix.clone()
    stale[torch.tril_indices(200, 200, -1).unbind()] = torch.nan
    assert torch.equal(packed_of(stale), packed_of(matrix))


def test_a_slice_of_a_bucket_is_written_and_nothing_else() -> None:
    """One factor that writes past its slot would corrupt the next factor of the bucket."""
    n, offset = 130, 7
    bucket = torch.full((packed_numel(n) + 20,), -1.0, dtype=torch.float64)
    pack_upper(numbered(n), bucket[offset : offset + packed_numel(n)])
    assert bucket[offset : offset + packed_numel(n)].tolist() == pack_slow(numbered(n))
    assert (bucket[:offset] == -1).all() and (bucket[offset + packed_numel(n) :] == -1).all()


def test_views_with_any_strides() -> None:
    """A factor may be one matrix of a stack, a block of a larger one, or a transposed view."""
    n = 150
    for view in (
        numbered(2 * n)[::2, ::2],
        numbered(n).t(),
        torch.stack([numbered(n), numbered(n) + 0.5])[1],
        numbered(n + 9)[4 : n + 4, 5 : n + 5],
    ):
        assert packed_of(view).tolist() == pack_slow(view)
        holder = torch.zeros(2 * n, 2 * n, dtype=torch.float64)
        out = holder[::2, ::2]
        unpack_upper(packed_of(view), out)
        assert torch.equal(out, view.triu() + view.triu(1).t())
        assert (holder[1::2] == 0).all() and (holder[:, 1::2] == 0).all()


def test_dtypes_are_converted_on_the_way() -> None:
    matrix = torch.randn(70, 70, dtype=torch.float64)
    packed = pack_upper(matrix, torch.empty(packed_numel(70)))
    assert torch.equal(packed, packed_of(matrix).float())


def test_index_tensors_stay_small() -> None:
    """kfac-pytorch builds two n x n int64 index tensors: 16 bytes for every 4-byte element."""
    sizes: list[int] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype == torch.int64:
                sizes.append(result.numel())
            return result

    matrix = torch.zeros(700, 700)
    with Watch():
        unpack_upper(pack_upper(matrix, torch.empty(packed_numel(700))), matrix)
    assert max(sizes, default=0) <= 2 * 64 * 65


@pytest.mark.parametrize(
    ("matrix", "packed", "text"),
    [
        ((3, 4), (6,), "square"),
        ((3,), (6,), "square"),
        ((3, 3), (5,), "6"),
        ((3, 3), (2, 3), "6"),
    ],
)
def test_wrong_shapes_are_refused(
    matrix: tuple[int, ...], packed: tuple[int, ...], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        pack_upper(torch.zeros(matrix), torch.zeros(packed))
    with pytest.raises(ValueError, match=text):
        unpack_upper(torch.zeros(packed), torch.zeros(matrix))


def test_strided_packed_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        pack_upper(torch.zeros(3, 3), torch.zeros(12)[::2])

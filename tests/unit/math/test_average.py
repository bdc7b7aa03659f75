"""The weighted average against the recursion of the definition and against one big batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_kfac.math.average import WeightedAverage


def batch(n: int, seed: int) -> Tensor:
    rows = torch.randn(7, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows.t() @ rows / 7


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    rho=st.floats(0.1, 1.0),
    n=st.integers(1, 6),
)
def test_value_is_the_explicit_weighted_mean(weights: list[int], rho: float, n: int) -> None:
    average = WeightedAverage.zeros(n, n, dtype=torch.float64)
    for seed, weight in enumerate(weights):
        average.decay_(rho)
        average.add_(weight * batch(n, seed), weight)
    ages = [rho ** (len(weights) - 1 - i) * w for i, w in enumerate(weights)]
    if sum(ages) == 0:
        assert (average.value() == 0).all()
        return
    expected = sum((a * batch(n, i) for i, a in enumerate(ages)), torch.zeros(n, n)) / sum(ages)
    torch.testing.assert_close(average.value(), expected, rtol=1e-12, atol=1e-13)


def test_first_batch_initialises() -> None:
    """kfac-pytorch starts at the identity: it outweighs a 1e-9 gradient factor for 500 updates."""
    average = WeightedAverage.zeros(3, 3)
    average.decay_(0.95)
    average.add_(1e-9 * torch.eye(3) * 16, 16)
    torch.testing.assert_close(average.value(), 1e-9 * torch.eye(3), rtol=1e-6, atol=0.0)


def test_empty_average_is_zero_not_nan() -> None:
    """A rank or an expert without a single token must not make 0/0."""
    average = WeightedAverage.zeros(2, 2)
    average.decay_(0.5)
    average.add_(torch.zeros(2, 2), 0)
    assert torch.equal(average.value(), torch.zeros(2, 2))


def test_decay_alone_keeps_the_value() -> None:
    average = WeightedAverage.zeros(4, 4, dtype=torch.float64)
    average.add_(5.0 * batch(4, 1), torch.tensor(5.0))
    before = average.value()
    for _ in range(50):
        average.decay_(0.9)
    torch.testing.assert_close(average.value(), before, rtol=1e-12, atol=0.0)


def test_uneven_batches_are_weighted_by_rows() -> None:
    """Plain means of a 3-token and a 1021-token batch were 44 % wrong; row weights are exact."""
    rows = torch.randint(-5, 6, (1024, 4), dtype=torch.float64)
    average = WeightedAverage.zeros(4, 4, dtype=torch.float64)
    for part in (rows[:3], rows[3:]):
        average.add_(part.t() @ part, len(part))
    assert torch.equal(average.value(), rows.t() @ rows / 1024)


def test_weight_counts_beyond_fp32() -> None:
    """2^24 + 1 rows: an fp32 counter would stand still from there on."""
    average = WeightedAverage.zeros(1, 1)
    average.add_(torch.zeros(1, 1), 2**24)
    average.add_(torch.zeros(1, 1), 1)
    assert average.weight.item() == 2**24 + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_is_a_new_tensor_of_the_same_dtype(dtype: torch.dtype) -> None:
    average = WeightedAverage.zeros(2, 2, dtype=dtype)
    average.add_(torch.eye(2, dtype=dtype), 1)
    value = average.value()
    assert value.dtype == dtype
    value.zero_()
    assert torch.equal(average.total, torch.eye(2, dtype=dtype))


def test_non_finite_sums_stay_visible() -> None:
    average = WeightedAverage.zeros(2, 2)
    average.add_(torch.full((2, 2), torch.nan), 1)
    assert average.value().isnan().all()


def test_state_is_two_plain_tensors() -> None:
    average = WeightedAverage.zeros(2, 2)
    assert isinstance(average.total, Tensor) and average.total.shape == (2, 2)
    assert isinstance(average.weight, Tensor) and average.weight.shape == ()
    copy = WeightedAverage(average.total.clone(), average.weight.clone())
    assert torch.equal(copy.value(), average.value())


def test_nothing_is_read_back_to_the_host() -> None:
    """Meta tensors have no values: any item(), bool() or float() on one raises."""
    average = WeightedAverage.zeros(3, 3, device="meta")
    average.decay_(0.5)
    average.add_(torch.empty(3, 3, device="meta"), torch.empty((), device="meta"))
    assert average.value().shape == (3, 3)

"""Bases against numpy in float64, and every way in which a factor or a solver goes wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_kfac.math import solvers
from ds_kfac.math.solvers import damped_inverses, eigen_bases
from tests.unit.math.solver_checks import assert_identity, rebuilt

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
SCALES = pytest.mark.parametrize("scale", [1e-36, 1e-20, 1.0, 1e20, 1e36])


def factor(n: int, rank: int | None = None, seed: int = 0) -> Tensor:
    """A covariance with a decaying spectrum, exactly symmetric, mean of the diagonal about 1."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(rank or 3 * n, n, generator=generator, dtype=torch.float64)
    rows *= torch.logspace(0.7, -1.3, n, dtype=torch.float64)
    product = rows.t() @ rows
    return (product + product.t()) / product.trace() * n / 2


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mean_of(f: Tensor) -> Tensor:
    return f.double().diagonal(dim1=-2, dim2=-1).mean(-1)


@BOTH
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_eigen_equals_numpy(dtype: torch.dtype, n: int) -> None:
    batch = torch.stack([factor(n, seed=s) for s in range(3)]).to(dtype)
    basis, ok, notes = eigen_bases(batch)
    tol = 2e-5 if dtype == torch.float32 else 1e-11
    assert ok.tolist() == [True] * 3 and notes == [""] * 3
    for k in range(3):
        expected = np.linalg.eigvalsh(batch[k].double().numpy())
        np.testing.assert_allclose(basis.values[k].numpy(), expected, rtol=tol, atol=tol)
        reference = batch[k].double()
        torch.testing.assert_close(
            rebuilt(basis.vectors[k], basis.values[k]), reference, rtol=tol, atol=tol * n
        )
    torch.testing.assert_close(basis.mean.double(), mean_of(batch), rtol=1e-6, atol=0.0)
    assert {basis.vectors.dtype, basis.values.dtype, basis.mean.dtype} == {dtype}


@BOTH
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_inverse_equals_numpy_and_is_exactly_symmetric(dtype: torch.dtype, n: int) -> None:
    batch = torch.stack([factor(n, seed=s) for s in range(3)]).to(dtype)
    shift = torch.tensor([1.0, 0.1, 0.01], dtype=dtype)
    basis, ok, notes = damped_inverses(batch, shift)
    assert ok.tolist() == [True] * 3 and notes == [""] * 3
    assert basis.inverse.dtype == dtype
    assert torch.equal(basis.inverse, basis.inverse.mT)
    tol = 1e-4 if dtype == torch.float32 else 1e-11
    for k in range(3):
        damped = batch[k].double().numpy() + float(shift[k]) * np.eye(n)
        expected = np.linalg.inv(damped)
        limit = tol * np.abs(expected).max()
        np.testing.assert_allclose(basis.inverse[k].numpy(), expected, rtol=tol, atol=limit)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 24), rank=st.integers(1, 24), seed=st.integers(0, 99))
def test_any_psd_factor_is_solved(n: int, rank: int, seed: int) -> None:
    batch = factor(n, rank=rank, seed=seed).float()[None]
    basis, ok, _ = eigen_bases(batch)
    assert bool(ok) and (basis.values >= 0).all()
    error = (rebuilt(basis.vectors[0], basis.values[0]) - batch[0].double()).abs().max()
    assert error <= 1e-5 * n
    inverse, ok, _ = damped_inverses(batch, 0.1 * mean_of(batch))
    assert bool(ok)
    damped = batch[0].double() + 0.1 * mean_of(batch) * torch.eye(n)
    residual = damped @ inverse.inverse[0].double() - torch.eye(n)
    assert residual.abs().max() < 1e-3


@SCALES
def test_scales_from_1e_minus_36_to_1e_plus_36(scale: float) -> None:
    """At 1e-20 squares underflow and at 1e+36 the trace overflows fp32: a fixed damping or an
    unscaled solve gave cosines of 0.3 to the exact direction in every system tried."""
    small = factor(16)
    batch = (small * scale).float()[None]
    basis, ok, notes = eigen_bases(batch)
    assert bool(ok) and notes == [""]
    values = basis.values[0].double() / scale
    expected = torch.linalg.eigvalsh(small)
    torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(basis.mean.double() / scale, mean_of(small)[None])
    inverse, ok, notes = damped_inverses(batch, 0.1 * mean_of(batch))
    assert bool(ok) and notes == [""]
    exact = torch.linalg.inv(small + 0.1 * mean_of(small) * torch.eye(16, dtype=torch.float64))
    torch.testing.assert_close(inverse.inverse[0].double() * scale, exact, rtol=1e-3, atol=1e-4)


def test_a_trace_outside_the_range_of_fp32() -> None:
    """400 diagonal entries of 1e36 sum to infinity in fp32."""
    batch = torch.eye(400)[None] * 1e36
    basis, ok, notes = eigen_bases(batch)
    assert ok.tolist() == [True] and notes == [""]
    torch.testing.assert_close(basis.mean, torch.tensor([1e36]))
    inverse, ok, notes = damped_inverses(batch, torch.tensor([1e36]))
    assert ok.tolist() == [True] and notes == [""]
    torch.testing.assert_close(inverse.inverse[0].diagonal(), torch.full((400,), 5e-37))


def test_eigenvalues_above_the_largest_float_saturate() -> None:
    """A rank-one factor at 1e38 has an eigenvalue of 16e38: infinite curvature, not a failure."""
    batch = torch.full((1, 16, 16), 1e38)
    basis, ok, _ = eigen_bases(batch)
    assert bool(ok) and basis.values.isfinite().all()
    assert basis.values[0, -1] == torch.finfo(torch.float32).max


@pytest.mark.parametrize("place", [(0, 5), (5, 0), (3, 3)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("n", [5, 8])
def test_non_finite_input_is_refused(n: int, bad: float, place: tuple[int, int]) -> None:
    """eigh of a matrix with NaN returned NaN without an exception (n = 8), raised (n = 5), and
    with a NaN only above the diagonal returned finite, wrong numbers."""
    broken = factor(n).float()
    broken[place[0] % n, place[1] % n] = bad
    basis, ok, notes = eigen_bases(broken[None])
    assert ok.tolist() == [False] and notes == ["the factor is not finite"]
    assert_identity(basis.vectors[0])
    assert (basis.values == 1).all() and (basis.mean == 1).all()
    inverse, ok, notes = damped_inverses(broken[None], torch.ones(1))
    assert ok.tolist() == [False] and notes == ["the factor is not finite"]
    assert_identity(inverse.inverse[0])


@BOTH
def test_zero_factor_is_the_identity(dtype: torch.dtype) -> None:
    """A dead layer or an expert without tokens: legal, and no division by a trace of 0."""
    batch = torch.zeros(2, 6, 6, dtype=dtype)
    batch[1] = factor(6).to(dtype)
    basis, ok, notes = eigen_bases(batch)
    assert ok.all() and notes == ["", ""]
    assert_identity(basis.vectors[0])
    assert (basis.values[0] == 1).all() and basis.mean[0] == 1
    for shift in (0.0, 1e-30, 7.0, -1.0, float("nan")):
        inverse, ok, notes = damped_inverses(batch, torch.tensor([shift, 0.5]))
        assert ok.all() and notes == ["", ""]
        assert_identity(inverse.inverse[0])


def test_negative_eigenvalues_of_rounding_are_clamped() -> None:
    """A rank-64 fp32 factor of size 512 had 223 negative eigenvalues, the smallest -2.6e-4."""
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    batch = (rows.t() @ rows)[None]
    batch = (batch + batch.mT) / 2
    assert (torch.linalg.eigvalsh(batch) < 0).any(), "the hazard this test is about"
    basis, ok, _ = eigen_bases(batch)
    assert bool(ok) and (basis.values >= 0).all()
    assert (basis.values > 0.1).sum() == 8


def test_indefinite_factor_is_refused_by_eigen() -> None:
    broken = torch.diag(torch.tensor([-0.02, 1.0, 2.0, 5.0]))[None]
    basis, ok, notes = eigen_bases(broken)
    assert ok.tolist() == [False] and "indefinite" in notes[0] and "float64" in notes[0]
    assert_identity(basis.vectors[0])
    slightly = torch.diag(torch.tensor([-0.004, 1.0, 2.0, 5.0]))[None]
    basis, ok, notes = eigen_bases(slightly)
    assert ok.tolist() == [True] and basis.values[0, 0] == 0


def test_indefinite_factor_needs_a_larger_shift_to_be_inverted() -> None:
    """Symmetric but not a sum of outer products: Cholesky fails until the shift is 100 times."""
    broken = torch.diag(torch.tensor([-0.02, 1.0, 2.0, 5.0]))[None]
    inverse, ok, notes = damped_inverses(broken, torch.tensor([1e-3]))
    assert ok.tolist() == [True] and "100 times the shift" in notes[0]
    expected = 1 / (broken[0].diagonal() + 0.1)
    torch.testing.assert_close(inverse.inverse[0].diagonal(), expected, rtol=1e-5, atol=0.0)
    inverse, ok, notes = damped_inverses(broken, torch.tensor([1e-5]))
    assert ok.tolist() == [False] and "indefinite" in notes[0]
    assert_identity(inverse.inverse[0])


def test_clamped_eigenvalues_are_the_last_rung() -> None:
    """Cholesky fails at every shift up to 100 times, but -4e-4 of the largest is still rounding."""
    broken = torch.diag(torch.tensor([-2e-3, 1.0, 2.0, 5.0]))[None]
    inverse, ok, notes = damped_inverses(broken, torch.tensor([1e-6]))
    assert ok.tolist() == [True] and "clamped" in notes[0]
    expected = 1 / (broken[0].diagonal().clamp(min=0) + 1e-6)
    torch.testing.assert_close(inverse.inverse[0].diagonal(), expected, rtol=1e-4, atol=0.0)
    assert torch.equal(inverse.inverse, inverse.inverse.mT)


def test_clamped_inverse_is_exactly_symmetric() -> None:
    """Q diag(1/d) Q^T as a product is symmetric only up to rounding."""
    spectrum = torch.linspace(0.5, 5.0, 33, dtype=torch.float64)
    spectrum[0] = -2e-3
    rotation = torch.linalg.qr(randn(33, 33)).Q
    broken = rotation @ torch.diag(spectrum) @ rotation.t()
    broken = ((broken + broken.t()) / 2)[None]
    inverse, ok, notes = damped_inverses(broken, torch.tensor([1e-6]))
    assert ok.tolist() == [True] and "clamped" in notes[0]
    assert torch.equal(inverse.inverse, inverse.inverse.mT)


def test_a_failed_cholesky_is_refused_even_where_the_probe_is_blind() -> None:
    """One negative direction in which the probe vector is nearly zero."""
    broken = torch.eye(256)
    blind = int(solvers._probe(broken).abs().argmin())
    broken[blind, blind] = -0.5
    inverse, ok, notes = damped_inverses(broken[None], torch.zeros(1))
    assert ok.tolist() == [False] and "indefinite" in notes[0]


def test_fp64_rescues_what_fp32_cannot_factorise() -> None:
    """Condition 1e8 with honest positive eigenvalues: fp32 Cholesky breaks down, fp64 does not."""
    n = 48
    rows = torch.randn(4, n, generator=torch.Generator().manual_seed(3))
    low_rank = (rows.double().t() @ rows.double()).float()[None]
    low_rank = (low_rank + low_rank.mT) / 2
    shift = 1e-6 * mean_of(low_rank)
    inverse, ok, notes = damped_inverses(low_rank, shift)
    assert bool(ok) and "float64" in notes[0]
    assert inverse.inverse.dtype == torch.float32 and inverse.inverse.isfinite().all()


def test_singular_without_shift_and_bad_shifts_are_refused() -> None:
    singular = torch.diag(torch.tensor([0.0, 1.0, 2.0]))[None].expand(4, 3, 3)
    shift = torch.tensor([0.0, -1.0, float("nan"), float("inf")])
    inverse, ok, notes = damped_inverses(singular, shift)
    assert ok.tolist() == [False] * 4
    assert "residual" in notes[0] and all("shift" in note for note in notes[1:])
    for k in range(4):
        assert_identity(inverse.inverse[k])
    regular, ok, _ = damped_inverses(factor(5)[None], torch.zeros(1))
    assert bool(ok)
    torch.testing.assert_close(regular.inverse[0], torch.linalg.inv(factor(5)))


def test_an_inverse_outside_the_range_of_fp32_is_refused() -> None:
    """1/(1e-38 * 1e-3) has no fp32 representation; infinities must not reach a weight."""
    tiny = torch.diag(torch.tensor([1.0, 0.0])).mul(1e-37)[None]
    inverse, ok, notes = damped_inverses(tiny, torch.tensor([1e-42]))
    assert ok.tolist() == [False] and notes[0]
    assert_identity(inverse.inverse[0])


def test_negative_trace_is_refused() -> None:
    batch = -factor(4).float()[None]
    for _, ok, notes in (eigen_bases(batch), damped_inverses(batch, torch.ones(1))):
        assert ok.tolist() == [False] and "trace" in notes[0]


def hazards(n: int) -> Tensor:
    """One batch with every kind of element; the good ones are 0, 3, 5 and 7."""
    broken = factor(n, seed=4).float()
    broken[1, 2] = torch.nan
    indefinite = factor(n, seed=5).float()
    indefinite[0, 0] -= 100.0
    indefinite[1, 1] += 100.0
    good = [factor(n, seed=s).float() for s in range(3)]
    inf = torch.full((n, n), torch.inf)
    return torch.stack(
        [good[0], broken, torch.zeros(n, n), good[1], inf, good[2], indefinite, good[0] * 1e-20]
    )


@pytest.mark.parametrize("n", [5, 16, 33])
def test_one_bad_element_does_not_touch_the_others(n: int) -> None:
    """A batched solver that raises for one matrix throws away the results of all the others."""
    batch = hazards(n)
    shift = 0.1 * mean_of(batch).nan_to_num(1.0, 1.0, 1.0).float()
    basis, ok, _ = eigen_bases(batch)
    inverse, ok_inverse, _ = damped_inverses(batch, shift)
    assert ok.tolist() == [k not in (1, 4, 6) for k in range(8)]
    assert [ok_inverse[k].item() for k in (0, 2, 3, 5, 7)] == [True] * 5
    assert not ok_inverse[1] and not ok_inverse[4]
    for k in range(8):
        alone, ok_alone, _ = eigen_bases(batch[k : k + 1].clone())
        assert torch.equal(alone.vectors[0], basis.vectors[k])
        assert torch.equal(alone.values[0], basis.values[k])
        assert torch.equal(alone.mean[0], basis.mean[k])
        assert ok_alone[0] == ok[k]
        single, _, _ = damped_inverses(batch[k : k + 1].clone(), shift[k : k + 1])
        assert torch.equal(single.inverse[0], inverse.inverse[k])


def test_inputs_are_not_modified() -> None:
    batch, shift = hazards(6), torch.ones(8)
    before = batch.clone()
    eigen_bases(batch)
    damped_inverses(batch, shift)
    assert torch.equal(batch.nan_to_num(9.0), before.nan_to_num(9.0))
    assert (shift == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_empty_batch(dtype: torch.dtype) -> None:
    """A rank that owns no factor of a size still takes part."""
    basis, ok, notes = eigen_bases(torch.empty(0, 4, 4, dtype=dtype))
    assert basis.vectors.shape == (0, 4, 4) and ok.shape == (0,) and notes == []
    inverse, ok, notes = damped_inverses(torch.empty(0, 4, 4, dtype=dtype), torch.empty(0))
    assert inverse.inverse.shape == (0, 4, 4) and ok.shape == (0,) and notes == []


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        ((4, 4), torch.float32, "shape"),
        ((1, 4, 5), torch.float32, "shape"),
        ((1, 0, 0), torch.float32, "shape"),
        ((1, 4, 4), torch.bfloat16, "float32 or float64"),
        ((1, 4, 4), torch.float16, "float32 or float64"),
    ],
)
def test_wrong_arguments_are_refused(shape: tuple[int, ...], dtype: torch.dtype, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        eigen_bases(torch.zeros(shape, dtype=dtype))
    with pytest.raises(ValueError, match=text):
        damped_inverses(torch.zeros(shape, dtype=dtype), torch.ones(1))


def test_wrong_number_of_shifts_is_refused() -> None:
    with pytest.raises(ValueError, match="shift"):
        damped_inverses(torch.zeros(2, 3, 3), torch.ones(3))

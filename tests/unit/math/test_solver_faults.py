"""Solvers that raise or lie, and how often a healthy batch is read by the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_kfac.math.solvers import damped_inverses, eigen_bases
from tests.unit.math.solver_checks import assert_identity, rebuilt

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def factor(n: int, seed: int = 0) -> Tensor:
    """A full-rank covariance, exactly symmetric, mean of the diagonal 1."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3 * n, n, generator=generator, dtype=torch.float64)
    product = rows.t() @ rows
    return (product + product.t()) / product.trace() * n / 2


Eigh = Callable[[Tensor], tuple[Tensor, Tensor]]


def patch_eigh(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor, Tensor], object], dtype: torch.dtype
) -> None:
    """Replaces eigh, in one dtype only, by one whose result ``spoil`` damages in place."""
    real: Eigh = torch.linalg.eigh

    def fake(matrices: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = real(matrices)
        if matrices.dtype == dtype:
            spoil(values, vectors)
        return values, vectors

    monkeypatch.setattr(torch.linalg, "eigh", fake)


def raise_error(values: Tensor, vectors: Tensor) -> None:
    raise torch.linalg.LinAlgError("failed to converge")


DAMAGE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "raises": raise_error,
    "nan values": lambda values, vectors: values[..., 0].fill_(torch.nan),
    "nan vectors": lambda values, vectors: vectors[..., 1, 1].fill_(torch.nan),
    "not orthonormal": lambda values, vectors: vectors[..., 0].mul_(1.1),
    "repeated vector": lambda values, vectors: vectors[..., 0].copy_(vectors[..., 1]),
    "wrong trace": lambda values, vectors: values[..., -1].mul_(1.2),
    "wrong order": lambda values, vectors: values.copy_(values.flip(-1)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_lying_fp32_solver_is_caught_and_replaced(
    monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """cuSOLVER and MKL have returned non-orthonormal or NaN vectors with a success code."""
    batch = torch.stack([factor(9, seed=s).float() for s in range(2)])
    patch_eigh(monkeypatch, DAMAGE[damage], torch.float32)
    basis, ok, notes = eigen_bases(batch)
    assert ok.tolist() == [True, True]
    assert all("float64" in note for note in notes)
    for k in range(2):
        error = rebuilt(basis.vectors[k], basis.values[k]) - batch[k].double()
        assert error.abs().max() < 1e-5
    assert basis.vectors.dtype == torch.float32


def test_lost_small_eigenvalues_are_seen_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an eigenvalue 600 times larger the residual of the small ones is below its limit."""
    batch = torch.diag(torch.tensor([1.0] * 63 + [600.0]))[None]
    patch_eigh(monkeypatch, lambda values, _: values[..., :-1].zero_(), torch.float32)
    basis, ok, notes = eigen_bases(batch)
    assert ok.tolist() == [True] and "float64" in notes[0]
    torch.testing.assert_close(basis.values[0], batch[0].diagonal())


@pytest.mark.parametrize("damage", DAMAGE)
@BOTH
def test_a_solver_that_fails_everywhere_is_reported_not_raised(
    monkeypatch: pytest.MonkeyPatch, damage: str, dtype: torch.dtype
) -> None:
    batch = factor(9).to(dtype)[None]
    patch_eigh(monkeypatch, DAMAGE[damage], torch.float32)
    patch_eigh(monkeypatch, DAMAGE[damage], torch.float64)
    basis, ok, notes = eigen_bases(batch)
    assert ok.tolist() == [False]
    assert "float64" in notes[0] and "n=9" in notes[0]
    assert_identity(basis.vectors[0])


def test_a_wrong_inverse_is_caught_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.cholesky_inverse

    def fake(triangle: Tensor) -> Tensor:
        result = real(triangle)
        return result * 1.05 if triangle.dtype == torch.float32 else result

    monkeypatch.setattr(torch, "cholesky_inverse", fake)
    batch = factor(9).float()[None]
    inverse, ok, notes = damped_inverses(batch, torch.ones(1))
    assert bool(ok) and "float64" in notes[0] and "times the shift" not in notes[0]
    exact = torch.linalg.inv(batch[0].double() + torch.eye(9, dtype=torch.float64))
    torch.testing.assert_close(inverse.inverse[0].double(), exact, rtol=1e-5, atol=1e-6)


def test_a_healthy_batch_is_read_by_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per-block isfinite().all() and .item() calls stall a GPU once per factor."""
    reads: list[str] = []
    for name in ("tolist", "item", "__bool__", "__float__", "__int__"):
        real = getattr(Tensor, name)

        def spy(self: Tensor, *args: object, _real=real, _name=name) -> object:  # type: ignore[no-untyped-def]
            reads.append(_name)
            return _real(self, *args)

        monkeypatch.setattr(Tensor, name, spy)
    batch = torch.stack([factor(8, seed=s).float() for s in range(5)])
    eigen_bases(batch)
    assert reads == ["tolist"]
    damped_inverses(batch, torch.ones(5))
    assert reads == ["tolist", "tolist"]

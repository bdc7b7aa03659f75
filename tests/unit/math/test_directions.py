"""Directions against explicit Kronecker solves, loops and singular values in numpy float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_kfac.math import directions

Array = npt.NDArray[np.float64]
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
SHAPES = pytest.mark.parametrize(("o", "i"), [(1, 1), (1, 4), (3, 5), (6, 2)])
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def psd(n: int, seed: int) -> Tensor:
    rows = randn(2 * n, n, seed=seed)
    return rows.t() @ rows / (2 * n)


def bases(o: int, i: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dg, qg = torch.linalg.eigh(psd(o, 1))
    da, qa = torch.linalg.eigh(psd(i, 2))
    return qg.to(dtype), dg.to(dtype), qa.to(dtype), da.to(dtype)


def check(found: Tensor, expected: Array, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    tol = TOLERANCE[dtype]
    np.testing.assert_allclose(
        found.double().numpy(), expected, rtol=tol, atol=tol * (np.abs(expected).max() + 1e-300)
    )


def eigen_sum(m: Tensor, qg: Tensor, qa: Tensor, weight: Array) -> Array:
    """Sum over all pairs of eigenvectors of weight * <pair, m> * pair, as a double loop."""
    left, right, matrix = qg.double().numpy(), qa.double().numpy(), m.double().numpy()
    total = np.zeros(matrix.shape)
    for k in range(left.shape[0]):
        for j in range(right.shape[0]):
            pair = np.outer(left[:, k], right[:, j])
            total += weight[k, j] * np.sum(pair * matrix) * pair
    return total


@BOTH
@SHAPES
@pytest.mark.parametrize("as_tensor", [False, True])
def test_natural_eigen_solves_the_damped_kronecker_system(
    dtype: torch.dtype, o: int, i: int, as_tensor: bool
) -> None:
    m = randn(o, i, seed=3)
    system = np.kron(psd(o, 1).numpy(), psd(i, 2).numpy()) + 0.3 * np.eye(o * i)
    expected = np.linalg.solve(system, m.numpy().reshape(-1)).reshape(o, i)
    lam = torch.tensor(0.3, dtype=dtype) if as_tensor else 0.3
    qg, dg, qa, da = bases(o, i, dtype)
    check(directions.natural_eigen(m.to(dtype), qg, dg, qa, da, lam), expected, dtype)


@BOTH
@SHAPES
def test_natural_inverse_solves_the_factored_kronecker_system(
    dtype: torch.dtype, o: int, i: int
) -> None:
    m = randn(o, i, seed=3)
    g = psd(o, 1).numpy() + 0.5 * np.eye(o)
    a = psd(i, 2).numpy() + 0.2 * np.eye(i)
    expected = np.linalg.solve(np.kron(g, a), m.numpy().reshape(-1)).reshape(o, i)
    ig = torch.from_numpy(np.linalg.inv(g)).to(dtype)
    ia = torch.from_numpy(np.linalg.inv(a)).to(dtype)
    check(directions.natural_inverse(m.to(dtype), ig, ia), expected, dtype)


@BOTH
@SHAPES
def test_rotated_second_moment_is_the_definition(dtype: torch.dtype, o: int, i: int) -> None:
    qg, _, qa, _ = bases(o, i, dtype)
    s, g = randn(o, i, seed=4).abs().to(dtype), randn(o, i, seed=5).to(dtype)
    before = s.double().numpy().copy()
    found = directions.second_moment_update_(s, directions.to_basis(g, qg, qa), 0.9)
    rotated = np.einsum("ak,ab,bj->kj", qg.double(), g.double(), qa.double())
    check(found, 0.9 * before + 0.1 * rotated**2, dtype)
    assert found is s


def ekfac(m: Tensor, s: Tensor, t: int | Tensor, qg: Tensor, qa: Tensor, **settings: Any) -> Tensor:
    rotated = directions.to_basis(m, qg, qa)
    return directions.from_basis(directions.ekfac(rotated, s, t, **settings), qg, qa)


def eigen_adam(
    m: Tensor, v: Tensor, t: int | Tensor, qg: Tensor, qa: Tensor, **settings: Any
) -> Tensor:
    rotated = directions.to_basis(m, qg, qa)
    return directions.from_basis(directions.eigen_adam(rotated, v, t, **settings), qg, qa)


@BOTH
@pytest.mark.parametrize("name", ["ekfac", "eigen_adam"])
def test_directions_in_the_basis_leave_their_arguments_alone(dtype: torch.dtype, name: str) -> None:
    """Momentum and second moment are state; a changed one would show a step later."""
    m, s = randn(3, 4, seed=1).to(dtype), randn(3, 4, seed=2).abs().to(dtype)
    before = m.clone(), s.clone()
    more = {"damping": 0.1} if name == "ekfac" else {}
    getattr(directions, name)(m, s, 2, beta2=0.9, **more)
    assert torch.equal(m, before[0]) and torch.equal(s, before[1])


@BOTH
@SHAPES
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_ekfac_is_the_definition(
    dtype: torch.dtype, o: int, i: int, absolute: bool, as_tensor: bool
) -> None:
    qg, _, qa, _ = bases(o, i, dtype)
    m, s = randn(o, i, seed=3).to(dtype), randn(o, i, seed=4).abs().to(dtype)
    s_hat = s.double().numpy() / (1 - 0.99**3)
    lam = 0.4 if absolute else 0.4 * s_hat.mean()
    t = torch.tensor(3) if as_tensor else 3
    damping = torch.tensor(0.4, dtype=torch.float64) if as_tensor else 0.4
    found = ekfac(m, s, t, qg, qa, beta2=0.99, damping=damping, absolute=absolute)
    check(found, eigen_sum(m, qg, qa, 1 / (s_hat + lam)), dtype)


@BOTH
@SHAPES
def test_eigen_adam_is_the_definition(dtype: torch.dtype, o: int, i: int) -> None:
    qg, _, qa, _ = bases(o, i, dtype)
    m, v = randn(o, i, seed=3).to(dtype), randn(o, i, seed=4).abs().to(dtype)
    found = eigen_adam(m, v, 2, qg, qa, beta2=0.95, eps=1e-3)
    weight = 1 / (np.sqrt(v.double().numpy() / (1 - 0.95**2)) + 1e-3)
    check(found, eigen_sum(m, qg, qa, weight), dtype)


def test_eigen_adam_in_the_identity_basis_is_adam() -> None:
    eye_o, eye_i = torch.eye(3, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    buffer, v = torch.zeros(2, 3, 4, dtype=torch.float64).unbind()
    weight = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=1.0, betas=(0.9, 0.95))
    for t in range(1, 5):
        g = randn(3, 4, seed=t)
        before = weight.detach().clone()
        weight.grad = g.clone()
        adam.step()
        buffer = 0.9 * buffer + 0.1 * g
        directions.second_moment_update_(v, directions.to_basis(g, eye_o, eye_i), 0.95)
        d = eigen_adam(directions.debias(buffer, 0.9, t), v, t, eye_o, eye_i, beta2=0.95)
        torch.testing.assert_close(before - weight.detach(), d)


@BOTH
@SHAPES
def test_moved_second_moment_is_the_diagonal_of_the_rotated_covariance(
    dtype: torch.dtype, o: int, i: int
) -> None:
    rg = torch.linalg.qr(randn(o, o, seed=6)).Q
    ra = torch.linalg.qr(randn(i, i, seed=7)).Q
    s = randn(o, i, seed=8).abs()
    rotation = np.kron(rg.numpy(), ra.numpy())
    covariance = rotation @ np.diag(s.numpy().reshape(-1)) @ rotation.T
    found = directions.move_second_moment(s.to(dtype), rg.to(dtype), ra.to(dtype))
    check(found, np.diag(covariance).reshape(o, i), dtype)
    torch.testing.assert_close(found.sum().double(), s.sum(), rtol=1e-5, atol=0.0)


def test_moving_by_a_permutation_of_eigenvectors_permutes_the_moment() -> None:
    """Eigenvectors come back in another order and sign after every refresh."""
    s = randn(3, 4, seed=8).abs()
    order = [2, 0, 1]
    rg = -torch.eye(3, dtype=torch.float64)[order]
    assert torch.equal(
        directions.move_second_moment(s, rg, torch.eye(4, dtype=torch.float64)), s[order]
    )


def newton_schulz_slow(u: Array, steps: int) -> Array:
    """The quintic applied to the singular values, one at a time."""
    left, values, right = np.linalg.svd(u, full_matrices=False)
    values = values / (np.sqrt(np.sum(u**2)) + 1e-7)
    for _ in range(steps):
        values = np.array([3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5 for x in values])
    result: Array = left @ np.diag(values) @ right
    return result


@BOTH
@pytest.mark.parametrize(("o", "i"), [(1, 1), (1, 6), (6, 1), (4, 9), (9, 4), (8, 8)])
@pytest.mark.parametrize("steps", [1, 2, 4, 5])
def test_newton_schulz_maps_singular_values(dtype: torch.dtype, o: int, i: int, steps: int) -> None:
    u = randn(o, i, seed=9)
    check(directions.newton_schulz(u.to(dtype), steps), newton_schulz_slow(u.numpy(), steps), dtype)


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e6])
def test_two_newton_schulz_steps_at_once_round_like_two_steps(condition: float) -> None:
    """In fp32 an error of a Gram matrix grows with every step that is taken without a new one."""
    left, right = (torch.linalg.qr(randn(n, 24, seed=n)).Q for n in (24, 96))
    values = torch.logspace(0.0, -math.log10(condition), 24, dtype=torch.float64)
    u = (left * values) @ right.T
    exact = torch.from_numpy(newton_schulz_slow(u.numpy(), 5))
    found = directions.newton_schulz(u.float()).double()
    assert (found - exact).norm() <= 2e-5 * exact.norm()
    torch.testing.assert_close(directions.newton_schulz(u.T), exact.T, rtol=1e-9, atol=1e-9)


def test_newton_schulz_default_is_five_steps_near_orthogonal() -> None:
    u = randn(24, 40, seed=10)
    found = directions.newton_schulz(u)
    assert torch.equal(found, directions.newton_schulz(u, 5))
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() and values.max() < 1.3


@BOTH
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("cols", [2, 12])
def test_fused_parts_are_orthogonalised_separately(
    dtype: torch.dtype, parts: int, cols: int
) -> None:
    """Fused q, k, v as one matrix mixes their scales: the largest takes the whole step."""
    u = randn(12, cols, seed=11)
    u[:4] *= 1000.0
    rows = 12 // parts
    pieces = [
        newton_schulz_slow(u[k * rows : (k + 1) * rows].numpy(), 5)
        * 0.2
        * math.sqrt(max(rows, cols))
        for k in range(parts)
    ]
    check(directions.orthogonalise(u.to(dtype), parts), np.concatenate(pieces), dtype)


@pytest.mark.parametrize("parts", [0, 5, -1])
def test_rows_that_do_not_split_are_refused(parts: int) -> None:
    with pytest.raises(ValueError, match="12 rows"):
        directions.orthogonalise(torch.zeros(12, 3), parts)


@BOTH
@settings(max_examples=25, deadline=None)
@given(o=st.integers(1, 6), i=st.integers(1, 6), exponent=st.integers(-30, 30))
def test_grafting_sets_the_norm_at_any_scale(
    dtype: torch.dtype, o: int, i: int, exponent: int
) -> None:
    """Squares of 1e-30 vanish and squares of 1e+30 overflow in fp32; the norm must not."""
    d = randn(o, i, seed=12) * 10.0**exponent
    unit = d.numpy() / np.sqrt(np.sum(d.numpy() ** 2))
    check(directions.graft_norm(d.to(dtype), 2.5), 2.5 * unit, dtype)
    check(directions.graft_norm(d.to(dtype), torch.tensor(2.5, dtype=dtype)), 2.5 * unit, dtype)
    check(directions.graft_rms(d.to(dtype)), 0.2 * math.sqrt(o * i) * unit, dtype)


@BOTH
def test_adam_update_equals_torch_adam(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=dtype))
    adam = torch.optim.Adam([weight], lr=1.0, betas=(0.9, 0.999), eps=1e-8)
    m, v = torch.zeros(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
    for t in range(1, 6):
        g = randn(2, 3, seed=t).to(dtype)
        before = weight.detach().clone()
        weight.grad = g.clone()
        adam.step()
        u = directions.adam_update_(g, m, v, t, (0.9, 0.999), 1e-8)
        torch.testing.assert_close(before - weight.detach(), u, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(m, adam.state[weight]["exp_avg"])
        torch.testing.assert_close(v, adam.state[weight]["exp_avg_sq"])


@BOTH
def test_adam_moments_of_an_unused_layer_stay(dtype: torch.dtype) -> None:
    """Its zero gradient is no measurement: decaying the moments would inflate later updates."""
    g, m, v = (randn(2, 3, seed=seed).to(dtype).abs() for seed in range(3))
    old = m.clone(), v.clone()
    directions.adam_update_(0.0 * g, m, v, 4, (0.9, 0.99), used=torch.tensor(False))
    assert torch.equal(m, old[0]) and torch.equal(v, old[1])
    twin = [x.clone() for x in old]
    found = directions.adam_update_(g, m, v, 5, (0.9, 0.99), used=torch.tensor(True))
    torch.testing.assert_close(found, directions.adam_update_(g, *twin, 5, (0.9, 0.99)))


def test_device_side_counters_keep_the_precision_of_the_bias_correction() -> None:
    """1 - 0.999 computed in fp32 is 1.3e-5 off, a step size error on the first steps."""
    average = torch.full((2,), 1e-3, dtype=torch.float64)
    t, beta = torch.tensor(1, dtype=torch.int32), torch.tensor(0.999, dtype=torch.float64)
    for found in (directions.debias(average, 0.999, t), directions.debias(average, beta, 1)):
        torch.testing.assert_close(found, torch.ones(2, dtype=torch.float64), rtol=1e-12, atol=0.0)
    narrow = directions.debias(average.float(), 0.999, torch.tensor(1.0))
    torch.testing.assert_close(narrow, torch.ones(2), rtol=1e-6, atol=0.0)


def test_nesterov_blend_is_the_definition() -> None:
    buffer, g = randn(2, 3, seed=1), randn(2, 3, seed=2)
    check(
        directions.nesterov_blend(buffer, g, 0.9),
        0.9 * buffer.numpy() + 0.1 * g.numpy(),
        buffer.dtype,
    )
    assert torch.equal(directions.nesterov_blend(buffer, g, 0.0), g)


@BOTH
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(
    ("total", "expected"), [(4.0, 0.5), (1.0, 1.0), (0.5, 1.0), (0.0, 1.0), (-3.0, 1.0)]
)
def test_kl_scale(dtype: torch.dtype, as_tensor: bool, total: float, expected: float) -> None:
    clip = torch.tensor(1.0, dtype=dtype) if as_tensor else 1.0
    found = directions.kl_scale(torch.tensor(total, dtype=dtype), clip)
    assert found.shape == () and found.dtype == dtype and found.item() == expected


def test_zero_inputs_give_zero_directions() -> None:
    """A layer that got no gradient must not turn 0/0 into NaN weights."""
    zero = torch.zeros(3, 4)
    qg, _, qa, _ = bases(3, 4, torch.float32)
    for found in (
        directions.graft_norm(zero, 2.0),
        directions.graft_rms(zero),
        directions.orthogonalise(zero, 3),
        directions.newton_schulz(zero),
        directions.natural_eigen(zero, qg, torch.zeros(3), qa, torch.zeros(4), 0.0),
        ekfac(zero, zero, 1, qg, qa, beta2=0.9, damping=0.1),
        eigen_adam(zero, zero, 1, qg, qa, beta2=0.9, eps=0.0),
        directions.adam_update_(zero, zero.clone(), zero.clone(), 1, (0.9, 0.99), 0.0),
    ):
        assert torch.equal(found, zero)


def test_non_finite_numbers_are_passed_on() -> None:
    """The host must still see its own overflow: hiding it would apply a broken step."""
    bad = torch.ones(3, 4)
    bad[1, 2] = torch.nan
    qg, dg, qa, da = bases(3, 4, torch.float32)
    for found in (
        directions.graft_norm(bad, 2.0),
        directions.graft_rms(bad),
        directions.orthogonalise(bad),
        directions.natural_eigen(bad, qg, dg, qa, da, 0.1),
        directions.natural_eigen(torch.ones(3, 4), qg, dg * torch.nan, qa, da, 0.1),
        ekfac(torch.ones(3, 4), bad, 1, qg, qa, beta2=0.9, damping=0.1),
        directions.kl_scale(torch.tensor(torch.nan), 1.0),
    ):
        assert found.isnan().any()


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


CALLS: dict[str, Callable[[], Tensor]] = {
    "natural_eigen": lambda: directions.natural_eigen(
        meta(3, 4), meta(3, 3), meta(3), meta(4, 4), meta(4), meta()
    ),
    "natural_inverse": lambda: directions.natural_inverse(meta(3, 4), meta(3, 3), meta(4, 4)),
    "second_moment": lambda: directions.second_moment_update_(
        meta(3, 4), directions.to_basis(meta(3, 4), meta(3, 3), meta(4, 4)), meta()
    ),
    "ekfac": lambda: ekfac(
        meta(3, 4), meta(3, 4), meta(), meta(3, 3), meta(4, 4), beta2=meta(), damping=meta()
    ),
    "eigen_adam": lambda: eigen_adam(
        meta(3, 4), meta(3, 4), meta(), meta(3, 3), meta(4, 4), beta2=meta(), eps=meta()
    ),
    "move": lambda: directions.move_second_moment(meta(3, 4), meta(3, 3), meta(4, 4)),
    "orthogonalise": lambda: directions.orthogonalise(meta(6, 4), 3),
    "graft_rms": lambda: directions.graft_rms(meta(3, 4)),
    "graft_norm": lambda: directions.graft_norm(meta(3, 4), meta()),
    "adam": lambda: directions.adam_update_(
        meta(3, 4), meta(3, 4), meta(3, 4), meta(), (meta(), meta()), meta()
    ),
    "adam, maybe unused": lambda: directions.adam_update_(
        meta(3, 4), meta(3, 4), meta(3, 4), meta(), (0.9, 0.99), used=meta() > 0
    ),
    "kl_scale": lambda: directions.kl_scale(meta(), meta()),
    "nesterov": lambda: directions.nesterov_blend(meta(3, 4), meta(3, 4), meta()),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_read_back_to_the_host(name: str) -> None:
    """Meta tensors have no values: any item(), bool() or float() on one raises."""
    result = CALLS[name]()
    assert result.device.type == "meta" and result.dtype == torch.float32

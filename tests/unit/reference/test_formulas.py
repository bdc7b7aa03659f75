"""The dense formulas against each other and against their definitions."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

import tests.reference
from tests.reference import formulas
from tests.reference.formulas import Damping


def _factor(n):
    rows = torch.randn(2 * n, n, dtype=torch.float64)
    return rows.t() @ rows / len(rows)


def _problem(d_out=4, d_in=3):
    return torch.randn(d_out, d_in, dtype=torch.float64), _factor(d_out), _factor(d_in)


@pytest.mark.parametrize("relative", [True, False])
def test_kronecker_solve_equals_the_eigen_formula_and_solves_the_equation(relative):
    m, G, A = _problem()
    damping = Damping(0.1, relative)
    lam = 0.1 * (float(G.trace()) / 4 * float(A.trace()) / 3 if relative else 1.0)
    d = formulas.natural_kronecker(m, G, A, damping)
    torch.testing.assert_close(d, formulas.natural_eigen(m, G, A, lam))
    torch.testing.assert_close(G @ d @ A + lam * d, m)


def test_large_problems_use_the_eigen_formula():
    m, G, A = _problem(40, 30)
    d = formulas.natural_kronecker(m, G, A, Damping(0.5, relative=False))
    torch.testing.assert_close(G @ d @ A + 0.5 * d, m)


def test_factored_damping_solves_its_equation():
    m, G, A = _problem()
    eye_g, eye_a = torch.eye(4, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    mu_g, mu_a = G.trace() / 4, A.trace() / 3
    d = formulas.natural_inverse(m, G, A, Damping(0.25, relative=True))
    torch.testing.assert_close((G + 0.5 * mu_g * eye_g) @ d @ (A + 0.5 * mu_a * eye_a), m)
    d = formulas.natural_inverse(m, G, A, Damping(0.25, relative=False))
    pi = (mu_a / mu_g).sqrt()
    torch.testing.assert_close((G + 0.5 / pi * eye_g) @ d @ (A + 0.5 * pi * eye_a), m)


def test_relative_damping_does_not_see_the_scale_of_the_factors():
    m, G, A = _problem()
    damping = Damping(0.1, relative=True)
    for solve, power in [
        (formulas.natural_kronecker, 1),
        (formulas.natural_inverse, 1),
        (formulas.whitened, 0),
    ]:
        scaled = solve(m, 100 * G, 0.1 * A, damping) * 10**power
        torch.testing.assert_close(scaled, solve(m, G, A, damping))


def test_zero_factor_acts_as_the_identity():
    m, G, _ = _problem()
    zero, eye = torch.zeros(3, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    damping = Damping(0.0, relative=True)
    expected = torch.linalg.solve(G, m)
    torch.testing.assert_close(formulas.natural_kronecker(m, G, zero, damping), expected)
    torch.testing.assert_close(formulas.natural_inverse(m, G, zero, damping), expected)
    whitened = formulas.whitened(m, G, zero, damping)
    torch.testing.assert_close(whitened, expected * G.trace() / 4)
    assert torch.equal(formulas.eigenbasis(zero)[0], torch.ones(3, dtype=torch.float64))
    assert torch.equal(formulas.alive(zero), eye)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_newton_schulz_pulls_singular_values_towards_one(shape):
    result = formulas.newton_schulz(torch.randn(shape, dtype=torch.float64))
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.5 and values.max() < 1.3


def test_newton_schulz_maps_singular_values_by_the_polynomial():
    left = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    values = torch.tensor([3.0, 2.0, 0.1], dtype=torch.float64)
    x = values / (values.norm() + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    result = formulas.newton_schulz(left[:, :3] @ torch.diag(values) @ right)
    torch.testing.assert_close(result, left[:, :3] @ torch.diag(x) @ right)


def test_parts_are_orthogonalised_apart():
    u = torch.randn(6, 3, dtype=torch.float64)
    result = formulas.orthogonalised(u, 3)
    for part in range(3):
        piece = formulas.newton_schulz(u[2 * part : 2 * part + 2]) * 0.2 * math.sqrt(3)
        assert torch.equal(result[2 * part : 2 * part + 2], piece)


@pytest.mark.parametrize(
    ("size", "limit", "sizes"),
    [(10, None, [10]), (10, 10, [10]), (10, 4, [4, 3, 3]), (7, 3, [3, 2, 2]), (5, 1, [1] * 5)],
)
def test_blocks_are_balanced(size, limit, sizes):
    bounds = formulas.block_bounds(size, limit)
    assert [stop - start for start, stop in bounds] == sizes
    assert bounds[0][0] == 0 and bounds[-1][1] == size


def test_adam_moments_agree_with_torch():
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.Adam([parameter], lr=1.0, betas=(0.8, 0.9), eps=1e-8)
    moments = formulas.AdamMoments(parameter.detach(), (0.8, 0.9))
    total = torch.zeros(3, dtype=torch.float64)
    for _ in range(3):
        gradient = torch.randn(3, dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        total -= moments.update(gradient)
        torch.testing.assert_close(parameter.detach(), total)


def test_reference_imports_nothing_of_the_package():
    folder = Path(tests.reference.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            assert not any(name.split(".")[0] == "ds_kfac" for name in names), path

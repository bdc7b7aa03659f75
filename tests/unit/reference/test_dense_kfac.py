"""The oracle's optimizer logic, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.reference import AuxOptions, DenseKFAC, formulas
from tests.reference.formulas import Damping


def _tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def _linear(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(weight)
    return nn.Sequential(layer)


def _network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)
    ).double()


def _objective(model, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 4, dtype=torch.float64, generator=generator)
    y = torch.randn(24, 2, dtype=torch.float64, generator=generator)
    return lambda: (model(x) - y).square().mean()


def _dot_objective(model, x, c):
    """J = mean over rows of <c_t, W a_t>: gamma_t = c_t / N whatever W is."""
    return lambda: (model(x) * c).sum(1).mean()


def test_factors_of_one_linear_layer_by_hand():
    model = nn.Sequential(nn.Linear(1, 1))
    oracle = DenseKFAC(model, ["0"], factor_decay=0.5)
    x, c = _tensor(1.0, 3.0)[:, None], _tensor(2.0, 4.0)[:, None]
    oracle.step(_dot_objective(model, x, c))
    A, G = oracle.factors("0")
    assert torch.equal(A, _tensor([5.0, 2.0], [2.0, 1.0]))  # mean of [x*x, x; x, 1]
    assert torch.equal(G, _tensor([10.0]))  # 2 * (1^2 + 2^2)


def test_average_weighs_batches_by_rows_and_decays_by_applied_steps():
    model = _linear(_tensor([1.0]))
    oracle = DenseKFAC(
        model, ["0"], factor_decay=0.5, factor_update_steps=2, inv_update_steps=4, lr=0.0
    )
    batches = [([1.0, 1.0], 1.0), ([9.0], 1.0), ([2.0], 3.0), ([9.0], 1.0)]
    for values, c in batches:
        x = _tensor(*values)[:, None]
        oracle.step(_dot_objective(model, x, torch.full_like(x, c)))
    A, G = oracle.factors("0")
    # Two rows of 1 at step 0, one row of 2 at step 2: rho = 0.25.
    assert A.item() == pytest.approx((0.25 * 2 * 1 + 1 * 4) / (0.25 * 2 + 1))
    assert G.item() == pytest.approx((0.25 * 2 * 1 + 1 * 9) / (0.25 * 2 + 1))
    assert oracle.layers["0"].A.item() == 1.0  # the refresh saw only step 0


def test_micro_batches_and_repeated_use_are_rows_of_one_batch():
    shared = nn.Linear(3, 3, bias=False).double()
    x = torch.randn(6, 3, dtype=torch.float64)

    def whole():
        return shared(shared(x)).square().sum() / 6

    def in_micro_batches():
        return sum(shared(shared(part)).square().sum() for part in x.split([1, 3, 2])) / 6

    results = []
    for objective in (whole, in_micro_batches):
        oracle = DenseKFAC(nn.ModuleDict({"s": shared}), ["s"], lr=0.0)
        oracle.step(objective)
        results.append(oracle.factors("s"))
        assert oracle.layers["s"].weights == {"A": 12.0, "G": 12.0}
    torch.testing.assert_close(results[0], results[1])
    rows = torch.cat([x, shared(x).detach()])
    torch.testing.assert_close(results[0][0], rows.t() @ rows / 12)


def test_natural_step_is_newtons_where_the_ggn_is_a_kronecker_product():
    """One row per example and residuals independent of the inputs: A (x) G is the Hessian."""
    weight = torch.randn(2, 3, dtype=torch.float64)
    inputs = torch.randn(4, 3, dtype=torch.float64)
    residuals = math.sqrt(2) * torch.eye(2, dtype=torch.float64)  # E[r r^T] = I
    x = inputs.repeat_interleave(2, dim=0)
    r = residuals.repeat(4, 1)
    y = x @ weight.t() - r
    model = _linear(weight)

    def objective():
        return 0.5 * (model(x) - y).square().sum(1).mean()

    oracle = DenseKFAC(model, ["0"], damping=0.0, damping_mode="absolute", lr=1.0)
    hessian = torch.autograd.functional.hessian(
        lambda w: 0.5 * (x @ w.t() - y).square().sum(1).mean(), weight
    ).reshape(6, 6)
    oracle.step(objective)
    A, G = oracle.factors("0")
    torch.testing.assert_close(torch.kron(G, A), hessian)
    [gradient] = torch.autograd.grad(objective(), list(model.parameters()))
    assert gradient.abs().max() < 1e-12


def test_product_of_factors_is_the_empirical_fisher_of_one_example():
    model = _linear(torch.randn(3, 2, dtype=torch.float64))
    x, c = torch.randn(1, 2, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)
    oracle = DenseKFAC(model, ["0"], lr=0.0)
    oracle.step(_dot_objective(model, x, c))
    A, G = oracle.factors("0")
    gradient = (c.t() @ x).flatten()
    torch.testing.assert_close(torch.kron(G, A), torch.outer(gradient, gradient))


def test_momentum_and_nesterov_by_hand():
    model = _linear(_tensor([0.0]))
    oracle = DenseKFAC(
        model, ["0"], momentum=0.5, damping=1.0, damping_mode="absolute", factor_decay=0.0, lr=0.0
    )
    one = _tensor([1.0])
    expected = []
    buffer = 0.0
    for gradient in (2.0, -1.0, 3.0):
        d = oracle.step(_dot_objective(model, one, gradient * one))["0"].item()
        buffer = 0.5 * buffer + 0.5 * gradient
        blend = 0.5 * buffer + 0.5 * gradient
        expected.append(blend / (gradient**2 + 1.0))
        assert d == pytest.approx(expected[-1])


def test_eigen_adam_of_a_scalar_layer_is_adam():
    model, plain = _linear(_tensor([0.0])), nn.Parameter(_tensor([0.0]))
    oracle = DenseKFAC(model, ["0"], direction="eigen_adam", momentum=0.8, betas=(0.8, 0.9), lr=0.1)
    adam = torch.optim.Adam([plain], lr=0.1, betas=(0.8, 0.9))
    one = _tensor([1.0])
    for gradient in (2.0, -1.0, 3.0):
        oracle.step(_dot_objective(model, one, gradient * one))
        plain.grad = _tensor([gradient])
        adam.step()
    torch.testing.assert_close(model[0].weight.detach(), plain.detach())


def test_ekfac_after_one_step_divides_by_the_squared_rotated_gradient():
    model = _network()
    oracle = DenseKFAC(model, ["0"], direction="ekfac", damping=0.1, lr=0.0)
    g = _gradient(model, 0, 3)
    d = oracle.step(_objective(model, 3))["0"]
    state = oracle.layers["0"]
    rotated = state.q_g.t() @ g @ state.q_a
    squares = rotated.square()
    torch.testing.assert_close(
        state.q_g.t() @ d @ state.q_a, rotated / (squares + 0.1 * squares.mean())
    )


def test_second_moment_moves_to_the_new_basis():
    model = _network()
    oracle = DenseKFAC(
        model, ["3"], direction="ekfac", inv_update_steps=2, lr=0.0, aux=AuxOptions(lr=0.0)
    )
    for seed in range(2):
        oracle.step(_objective(model, seed))
    state = oracle.layers["3"]
    old, q_a, q_g = state.second, state.q_a, state.q_g
    oracle.step(_objective(model, 2))
    assert not torch.equal(state.q_a, q_a)
    covariance = torch.einsum("pi,qj,ij,ri,sj->pqrs", q_g, q_a, old, q_g, q_a)
    moved = torch.einsum(
        "pi,qj,pqrs,ri,sj->ij", state.q_g, state.q_a, covariance, state.q_g, state.q_a
    )
    rotated = state.q_g.t() @ _gradient(model, 3, 2) @ state.q_a
    torch.testing.assert_close(state.second, 0.95 * moved + 0.05 * rotated.square())


@pytest.mark.parametrize("direction", ["natural", "ekfac", "eigen_adam", "orthogonal"])
@pytest.mark.parametrize("damping_mode", ["relative", "absolute"])
def test_every_direction_descends(direction, damping_mode):
    model = _network()
    oracle = DenseKFAC(
        model,
        ["0", "3", "5"],
        direction=direction,
        damping_mode=damping_mode,
        momentum=0.5,
        max_factor_dim=3,
        lr=1e-3,
    )
    objective = _objective(model, 0)
    before = objective().item()
    for _ in range(3):
        oracle.step(objective)
    assert objective().item() < before
    assert oracle.spectral_gap("0") > 0


def test_blocks_are_solved_tile_by_tile():
    model = _network()
    oracle = DenseKFAC(model, ["0"], max_factor_dim=3, damping=0.1, lr=0.0)
    g = _gradient(model, 0, 0)
    d = oracle.step(_objective(model, 0))["0"]
    A, G = oracle.factors("0")
    assert A.shape == (5, 5) and not A[:3, 3:].any() and not G[3:, :3].any()
    for i in (slice(0, 3), slice(3, 5)):
        for j in (slice(0, 3), slice(3, 5)):
            tile = formulas.natural_kronecker(g[i, j], G[i, i], A[j, j], Damping(0.1, True))
            torch.testing.assert_close(d[i, j], tile)


def test_kl_clip_bounds_the_modelled_change_over_all_layers():
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    oracle = DenseKFAC(model, ["0", "3"], kl_clip=1e-4, optimizer=optimizer)
    g = {name: _gradient(model, int(name), 0) for name in ("0", "3")}
    directions = oracle.step(_objective(model, 0))
    assert oracle.kl_scale < 1
    # All directions share the factor nu, so the clipped sum is nu * (kl_clip / nu^2).
    total = sum(0.25 * float((directions[name] * g[name]).sum()) for name in g)
    assert total == pytest.approx(1e-4 / oracle.kl_scale)


@pytest.mark.parametrize("grafting", ["rms", "adam"])
def test_grafting_sets_the_norm(grafting):
    model = _network()
    oracle = DenseKFAC(model, ["0"], grafting=grafting, kl_clip=1e-9, lr=0.0)
    d = oracle.step(_objective(model, 0))["0"]
    # Adam's first update is sign(g).
    expected = math.sqrt(25) * (0.2 if grafting == "rms" else 1.0)
    assert d.norm().item() == pytest.approx(expected, rel=1e-5)


def test_gradient_clipping_scales_the_raw_gradient_and_leaves_the_factors():
    plain, clipped = _network(), _network()
    gradients = torch.autograd.grad(_objective(plain, 0)(), list(plain.parameters()))
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    first = DenseKFAC(plain, ["0"], lr=0.0)
    second = DenseKFAC(clipped, ["0"], lr=0.0, gradient_clipping=0.01)
    d_first = first.step(_objective(plain, 0))["0"]
    d_second = second.step(_objective(clipped, 0))["0"]
    assert first.raw_norm == second.raw_norm == pytest.approx(norm)
    torch.testing.assert_close(d_second, d_first * (0.01 / (norm + 1e-6)))
    torch.testing.assert_close(first.factors("0"), second.factors("0"))


def test_base_optimizer_consumes_directions_and_raw_gradients():
    model = _network()
    before = [p.detach().clone() for p in model.parameters()]
    raw = torch.autograd.grad(_objective(model, 0)(), list(model.parameters()))
    oracle = DenseKFAC(model, ["0"], optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    d = oracle.step(_objective(model, 0))["0"]
    updates = [d[:, :-1], d[:, -1], *raw[2:]]
    for p, old, update in zip(model.parameters(), before, updates, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.1 * update)


def test_own_update_decays_preconditioned_weights_and_runs_adamw_on_the_rest():
    model, twin = _network(), _network()
    aux = AuxOptions(lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    oracle = DenseKFAC(model, ["0"], lr=0.1, weight_decay=0.5, aux=aux)
    rest = [p for name, p in twin.named_parameters() if not name.startswith("0.")]
    adamw = torch.optim.AdamW(rest, lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    for seed in range(3):
        twin.zero_grad()
        _objective(twin, seed)().backward()
        d = oracle.step(_objective(model, seed))["0"]
        adamw.step()
        with torch.no_grad():
            twin[0].weight.mul_(1 - 0.05).sub_(0.1 * d[:, :-1])
            twin[0].bias.mul_(1 - 0.05).sub_(0.1 * d[:, -1])
        for p, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, other)


@pytest.mark.parametrize("zero_missing", [True, False])
def test_unused_layer_keeps_its_state(zero_missing):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    oracle = DenseKFAC(
        model,
        ["a", "b"],
        direction="ekfac",
        momentum=0.9,
        lr=0.1,
        weight_decay=0.5,
        zero_missing=zero_missing,
    )
    x = torch.randn(8, 2, dtype=torch.float64)
    oracle.step(lambda: (model["a"](x) + model["b"](x)).square().mean())
    state = oracle.layers["b"]
    kept = [state.buffer, state.second, state.updates, dict(state.weights)]
    weight = model["b"].weight.detach().clone()
    directions = oracle.step(lambda: model["a"](x).square().mean())
    assert not directions["b"].any() and directions["a"].any()
    after = [state.buffer, state.second, state.updates, dict(state.weights)]
    assert after[2:] == kept[2:] and torch.equal(after[0], kept[0])
    # The basis did not change either: without rows there is nothing new to decompose.
    torch.testing.assert_close(after[1], kept[1])
    decayed = weight * (0.95 if zero_missing else 1.0)
    torch.testing.assert_close(model["b"].weight.detach(), decayed)


def _gradient(model, index, seed):
    layer = model[index]
    weight, bias = torch.autograd.grad(_objective(model, seed)(), [layer.weight, layer.bias])
    return torch.cat([weight, bias[:, None]], dim=1)

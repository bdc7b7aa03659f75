"""Directions at the owner against the same formulas written out in plain coordinates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ds_kfac import direct
from ds_kfac.direct import DirectionSettings
from ds_kfac.layers.blocks import Block, cut
from ds_kfac.layers.spec import LayerSpec, ParamSlot
from ds_kfac.refresh import RefreshSettings, refresh
from ds_kfac.state import LayerState

ROWS, COLUMNS = 6, 5
SETTINGS = DirectionSettings(
    direction="eigen_adam",
    damping=0.1,
    absolute=False,
    momentum=0.9,
    betas=(0.9, 0.99),
    grafting="none",
)
REFRESH = RefreshSettings(
    solver="eigen", damping=0.1, absolute=False, per_factor=False, max_failures=5, on_cpu=False
)


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def new_state(max_dim: int = 8) -> LayerState:
    weight = ParamSlot("layer.weight", (ROWS, COLUMNS - 1), 0)
    bias = ParamSlot("layer.bias", (ROWS,), ROWS * (COLUMNS - 1))
    blocks = cut(COLUMNS, max_dim), cut(ROWS, max_dim)
    spec = LayerSpec("layer", "linear", COLUMNS - 1, ROWS, weight, bias, 1, *blocks)
    return LayerState.zeros(spec, torch.device("cpu"), torch.float64)


def new_bases(state: LayerState, seed: int, *, only_g: bool = False) -> None:
    """Other statistics and their bases; those of A may be bad, which keeps its last good basis."""
    for offset, (name, side) in enumerate(state.sides()):
        for index, average in enumerate(side.averages):
            size = side.blocks[index].size
            x = randn(20, size, seed=100 * seed + 10 * offset + index)
            rows, columns = torch.triu_indices(size, size)
            average.total.copy_((x.T @ x)[rows, columns])
            average.weight.fill_(20)
            if only_g and name == "a":
                average.total.fill_(torch.nan)
    refresh([state], REFRESH, step=seed)


class Plain:
    """The same in plain coordinates: momentum of the gradient, rotated where it is used."""

    def __init__(self, settings: DirectionSettings) -> None:
        self.settings = settings
        self.m, self.s = torch.zeros(2, ROWS, COLUMNS, dtype=torch.float64).unbind()
        self.t = 0
        self.old: dict[tuple[Block, Block], tuple[Tensor, Tensor]] = {}

    def step(self, state: LayerState, g: Tensor) -> tuple[Tensor, Tensor]:
        beta, beta2 = self.settings.momentum, self.settings.betas[1]
        self.t += 1
        self.m = beta * self.m + (1 - beta) * g
        m = beta * self.m + (1 - beta) * g
        if self.settings.direction == "eigen_adam":
            m = self.m / (1 - beta**self.t)
        d = m.clone()
        for rows, basis_g in zip(state.g.blocks, state.g.bases, strict=True):
            for columns, basis_a in zip(state.a.blocks, state.a.bases, strict=True):
                if basis_g is None or basis_a is None:
                    continue
                tile = slice(*rows), slice(*columns)
                qg, qa = basis_g.vectors, basis_a.vectors
                assert qg is not None and qa is not None
                was = self.old.get((rows, columns), (qg, qa))
                turn_g, turn_a = qg.T @ was[0], qa.T @ was[1]
                s = turn_g.square() @ self.s[tile] @ turn_a.square().T
                self.s[tile] = beta2 * s + (1 - beta2) * (qg.T @ g[tile] @ qa).square()
                self.old[rows, columns] = qg, qa
                s_hat = self.s[tile] / (1 - beta2**self.t)
                if self.settings.direction == "eigen_adam":
                    divisor = s_hat.sqrt() + 1e-8
                else:
                    divisor = s_hat + self.settings.damping * s_hat.mean()
                d[tile] = qg @ ((qg.T @ m[tile] @ qa) / divisor) @ qa.T
        return d, m


@pytest.mark.parametrize("name", ["ekfac", "eigen_adam"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("max_dim", [8, 3])
@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.5, 2.0)])
def test_moments_move_with_their_basis(
    name: str, momentum: float, max_dim: int, rates: tuple[float, float]
) -> None:
    """Steps before the first basis, with one basis missing or old, and over several refreshes."""
    if name == "eigen_adam" and momentum == 0.0:
        momentum = 0.5
    settings = replace(SETTINGS, direction=name, momentum=momentum)
    state, plain = new_state(max_dim), Plain(settings)
    for step in range(12):
        if step in (4, 8, 9):
            new_bases(state, seed=step)
        elif step in (2, 10):
            new_bases(state, seed=step, only_g=True)
        g = randn(ROWS, COLUMNS, seed=step)
        before = g.clone()
        found, change = direct.direction(state, g, settings, rates=rates)
        expected, m = plain.step(state, before)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        columns = (expected * m).sum(dim=0)
        inner = rates[0] ** 2 * columns[:-1].sum() + rates[1] ** 2 * columns[-1]
        torch.testing.assert_close(change, inner, rtol=1e-9, atol=1e-9)
        assert torch.equal(g, before) and found.data_ptr() != g.data_ptr()


def on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_flag", lambda condition: condition)


def same(found: Tensor, expected: Tensor) -> None:
    # Decays that depend on a flag are rounded to fp32 where Adam's update is grafted.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


CASES = {
    "ordinary": lambda step: randn(ROWS, COLUMNS, seed=step),
    "sometimes unused": lambda step: randn(ROWS, COLUMNS, seed=step) * (step % 3 > 0),
    "overflow": lambda step: randn(ROWS, COLUMNS, seed=step) * (1e200 if step == 4 else 1.0),
}


@pytest.mark.parametrize("name", ["natural", "orthogonal", "ekfac", "eigen_adam"])
@pytest.mark.parametrize("grafting", ["none", "rms", "adam"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_depends_on_whether_flags_are_read(
    name: str, grafting: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where reading is free it saves passes; an accelerator computes with the flags instead."""
    settings = replace(SETTINGS, direction=name, grafting=grafting)
    runs = []
    for accelerator in (False, True):
        if accelerator:
            on_an_accelerator(monkeypatch)
        state = new_state()
        new_bases(state, seed=1)
        steps = [
            direct.direction(state, CASES[case](step), settings, rates=(1.0, 1.0))
            for step in range(8)
        ]
        runs.append((steps, state))
    (host, first), (device, second) = runs
    for (d, change), (other, other_change) in zip(host, device, strict=True):
        same(d, other)
        same(change, other_change)
    assert first.moments.keys() == second.moments.keys()
    for key, moment in first.moments.items():
        same(moment, second.moments[key])
    assert int(first.updates) == int(second.updates) == (5 if case == "sometimes unused" else 8)
    assert int(first.fallbacks) == int(second.fallbacks)


def test_direction_that_is_not_finite_is_replaced_by_the_gradient() -> None:
    settings = replace(SETTINGS, direction="natural", momentum=0.0)
    state = new_state()
    new_bases(state, seed=1)
    basis = state.a.bases[0]
    assert basis is not None and basis.values is not None
    basis.values.fill_(torch.nan)
    g = randn(ROWS, COLUMNS, seed=3)
    found, change = direct.direction(state, g, settings, rates=(1.0, 1.0))
    assert torch.equal(found, g) and found.data_ptr() != g.data_ptr()
    torch.testing.assert_close(change, g.square().sum())
    assert int(state.fallbacks) == 1


@pytest.mark.parametrize("name", ["natural", "ekfac", "eigen_adam", "orthogonal"])
def test_unused_layer_stays_as_it_is(name: str) -> None:
    settings = replace(SETTINGS, direction=name, grafting="adam")
    state = new_state()
    new_bases(state, seed=1)
    direct.direction(state, randn(ROWS, COLUMNS, seed=1), settings)
    before = {key: value.clone() for key, value in state.moments.items()}
    zero = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    found, change = direct.direction(state, zero, settings, rates=(1.0, 1.0))
    assert torch.equal(found, zero) and float(change) == 0.0 and int(state.updates) == 1
    assert all(torch.equal(before[key], value) for key, value in state.moments.items())

"""The owner's averages: what a step adds to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ds_kfac
from tests.hosts.test_plain import sgd


@pytest.mark.parametrize("fraction", [0.5, 0.25])
def test_a_share_that_is_empty_leaves_averages_alone(fraction: float) -> None:
    """Calls of few rows had none in the share: G fell by half while A stayed."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x = torch.randn(2, 3)
    optimizer = sgd(model, rate=0.0)
    settings = {"factor_update_steps": 1, "inv_update_steps": 1, "factor_token_fraction": fraction}
    kfac = ds_kfac.attach(model, optimizer, settings)
    assert kfac is not None
    found = []
    for _ in range(8):
        optimizer.zero_grad()
        model(x.repeat(1, 1)).square().mean().backward()
        optimizer.step()
        found.append(torch.cat([factor.flatten() for factor in kfac.factors("")]))
    for turn in range(8):
        if turn % round(1 / fraction) >= 2:  # of two rows, none was used
            assert torch.equal(found[turn], found[turn - 1])


def test_the_share_of_rows_rotates_with_captures() -> None:
    """With statistics every 10 steps, every other position of a sequence was never seen."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = sgd(model, rate=0.0)
    settings = {
        "factor_update_steps": 4,
        "inv_update_steps": 4,
        "factor_token_fraction": 0.25,
        "factor_decay": 0.999,
    }
    kfac = ds_kfac.attach(model, optimizer, settings)
    assert kfac is not None
    for _ in range(16):
        optimizer.zero_grad()
        model(torch.eye(4)).sum().backward()
        optimizer.step()
    seen = kfac.factors("")[0].diagonal()
    assert (seen > 0).all()


def test_a_snapshot_in_memory_stays_what_it_was() -> None:
    """Its counters were of one step and its tensors, which training changed, of another."""
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    settings = {"factor_update_steps": 1, "inv_update_steps": 1, "direction": "ekfac"}
    kfac = ds_kfac.attach(model, optimizer, settings)
    assert kfac is not None

    def step(seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()

    step(0)
    weights, snapshot = model.state_dict(), kfac.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    step(1)
    expected = model.weight.detach().clone()
    step(2)
    model.load_state_dict(weights)
    kfac.load_state_dict(snapshot)
    step(1)
    assert torch.equal(model.weight, expected)

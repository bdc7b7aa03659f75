"""torch.compile with hooks in place before the first call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.unit.capture.twin import assert_same, attach, twin


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_are_captured() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    expected = twin(copy.deepcopy(model), ["0", "2"], [lambda net: net(x).square().mean()])
    session, _ = attach(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(x).square().mean().backward()
        assert session.error is None
        assert_same(session.drain(), expected)
    session.begin(active=False, fraction=1.0, turn=1)
    compiled(x).square().mean().backward()
    assert session.pending == {}
    session.begin(active=True, fraction=1.0, turn=2)
    compiled(x).square().mean().backward()
    assert_same(session.drain(), expected)
    compiled.eval()
    compiled(x).square().mean().backward()
    assert session.pending == {}

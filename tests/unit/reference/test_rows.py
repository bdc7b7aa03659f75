"""Rows of every layer kind: the gradient identity and hand-made sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.reference import rows


class Conv1D(nn.Module):
    """Same layout as transformers' Conv1D."""

    def __init__(self, d_out: int, d_in: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_in, d_out))
        self.bias = nn.Parameter(torch.randn(d_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def _frozen_bias():
    layer = nn.Linear(4, 3)
    layer.bias.requires_grad_(False)
    return layer


CASES = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear-3d": (lambda: nn.Linear(4, 3), (2, 5, 4)),
    "linear-no-bias": (lambda: nn.Linear(4, 3, bias=False), (2, 3, 2, 4)),
    "linear-frozen-bias": (_frozen_bias, (5, 4)),
    "conv1d-hf": (lambda: Conv1D(3, 4), (2, 5, 4)),
    "conv": (lambda: nn.Conv2d(2, 3, 3), (2, 2, 5, 6)),
    "conv-odd": (
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        (2, 2, 6, 5),
    ),
    "conv-same": (lambda: nn.Conv2d(2, 3, (2, 3), padding="same", bias=False), (2, 2, 4, 5)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", CASES)
def test_rows_give_the_gradient_back(case):
    """dJ/dW = sum of gamma a^T holds for expand rows of every layer."""
    build, shape = CASES[case]
    layer = build().double()
    x = torch.randn(shape, dtype=torch.float64)
    with rows.Recorder({"layer": layer}) as recorder:
        value = layer(x).sin().mean()
    assert "forward" not in vars(layer)
    [(seen, output)] = recorder.calls["layer"]
    parameters = [p for p in layer.parameters() if p.requires_grad]
    gamma, *gradients = torch.autograd.grad(value, [output, *parameters])
    a, g, terms = rows.call_rows(layer, seen, gamma, "expand")
    expected = rows.to_matrix(layer, *gradients, *([None] if len(gradients) == 1 else []))
    torch.testing.assert_close(g.t() @ a, expected)
    assert terms == (x.shape[0] if isinstance(layer, nn.Conv2d) else len(a))
    for found, gradient in zip(rows.from_matrix(layer, expected), gradients, strict=False):
        assert torch.equal(found, gradient)


def test_patches_agree_with_unfold():
    conv = nn.Conv2d(3, 2, (2, 3), stride=(1, 2), padding=(1, 0), bias=False).double()
    x = torch.randn(2, 3, 4, 7, dtype=torch.float64)
    a, _, _ = rows.call_rows(conv, x, torch.zeros_like(conv(x)), "expand")
    unfolded = functional.unfold(x, (2, 3), stride=(1, 2), padding=(1, 0))
    assert torch.equal(a, unfolded.transpose(1, 2).reshape(a.shape))


def test_reduce_averages_inputs_and_sums_gradients():
    layer = nn.Linear(2, 1)
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[0.0, 2.0], [2.0, 0.0]]])
    gamma = torch.tensor([[[1.0], [2.0]], [[-1.0], [0.5]]])
    a, g, terms = rows.call_rows(layer, x, gamma, "reduce")
    assert torch.equal(a, torch.tensor([[2.0, 3.0, 1.0], [1.0, 1.0, 1.0]]))
    assert torch.equal(g, torch.tensor([[3.0], [-0.5]]))
    assert terms == 2
    conv = nn.Conv2d(1, 1, 1, bias=False)
    image = torch.arange(4.0).reshape(1, 1, 2, 2)
    a, g, terms = rows.call_rows(conv, image, torch.ones(1, 1, 2, 2), "reduce")
    assert (a.item(), g.item(), terms) == (1.5, 4.0, 1)


def test_reduce_on_flat_input_is_expand():
    layer = nn.Linear(3, 2)
    x, gamma = torch.randn(4, 3), torch.randn(4, 2)
    for left, right in zip(
        rows.call_rows(layer, x, gamma, "reduce"),
        rows.call_rows(layer, x, gamma, "expand"),
        strict=True,
    ):
        assert torch.equal(torch.as_tensor(left), torch.as_tensor(right))


def test_calls_without_gradient_are_not_recorded():
    layer = nn.Linear(2, 2)
    with rows.Recorder({"layer": layer}) as recorder, torch.no_grad():
        layer(torch.ones(1, 2))
    assert recorder.calls["layer"] == []


def test_in_place_activation_behind_the_layer():
    layer = nn.Linear(2, 2).double()
    x = torch.randn(8, 2, dtype=torch.float64)
    with rows.Recorder({"layer": layer}) as recorder:
        value = functional.relu(layer(x), inplace=True).sum()
    [(_, output)] = recorder.calls["layer"]
    [gamma] = torch.autograd.grad(value, output)
    assert torch.equal(gamma, (layer(x) > 0).double())

"""Matrix views against loops, and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ds_kfac.config import KFACConfig
from ds_kfac.layers.discover import discover
from ds_kfac.layers.matrixview import to_flat_, to_matrix
from ds_kfac.layers.spec import LayerSpec
from tests.unit.layers.models import Conv1D

MODULES = {
    "linear": lambda: nn.Linear(3, 5),
    "linear_nobias": lambda: nn.Linear(3, 5, bias=False),
    "linear_row": lambda: nn.Linear(7, 1),
    "conv1d": lambda: Conv1D(5, 3),
    "conv2d": lambda: nn.Conv2d(2, 4, (2, 3)),
    "conv2d_nobias": lambda: nn.Conv2d(3, 2, 1, bias=False),
}


def spec_of(module: nn.Module) -> LayerSpec:
    return discover(module, KFACConfig()).layers[0]


def flat_of(module: nn.Module) -> Tensor:
    """Every element another number, in the order weight, bias."""
    numel = sum(param.numel() for param in module.parameters())
    return torch.arange(1, numel + 1, dtype=torch.float64)


def matrix_slow(module: nn.Module, flat: Tensor) -> list[list[float]]:
    """Element by element: row o, column i of a linear layer, (c, u, v) of a kernel."""
    weight = flat[: module.weight.numel()].reshape(module.weight.shape)
    rows = weight.shape[1] if isinstance(module, Conv1D) else weight.shape[0]
    matrix = []
    for o in range(rows):
        if isinstance(module, nn.Conv2d):
            _, channels, height, width = weight.shape
            row = [
                weight[o, c, u, v].item()
                for c in range(channels)
                for u in range(height)
                for v in range(width)
            ]
        elif isinstance(module, Conv1D):
            row = [weight[i, o].item() for i in range(weight.shape[0])]
        else:
            row = [weight[o, i].item() for i in range(weight.shape[1])]
        if module.bias is not None:
            row.append(flat[module.weight.numel() + o].item())
        matrix.append(row)
    return matrix


@pytest.mark.parametrize("name", MODULES)
def test_matrix_view_element_by_element(name: str) -> None:
    module = MODULES[name]()
    matrix = to_matrix(flat_of(module), spec_of(module), dtype=torch.float64)
    assert matrix.tolist() == matrix_slow(module, flat_of(module))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16])
def test_round_trip(name: str, stored: torch.dtype) -> None:
    module = MODULES[name]()
    spec = spec_of(module)
    flat = flat_of(module).to(stored)
    matrix = to_matrix(flat, spec, dtype=torch.float32)
    assert matrix.dtype == torch.float32
    assert matrix.shape == (spec.d_out, spec.columns)
    out = torch.full_like(flat, torch.nan)
    assert to_flat_(matrix, spec, out) is out
    assert torch.equal(out, flat)


@pytest.mark.parametrize("name", MODULES)
def test_strided_matrices_can_be_written_back(name: str) -> None:
    """Directions come out of products with transposed layouts."""
    module = MODULES[name]()
    spec = spec_of(module)
    flat = flat_of(module)
    matrix = to_matrix(flat, spec, dtype=torch.float64)
    strided = matrix.t().contiguous().t()
    assert torch.equal(to_flat_(strided, spec, torch.empty_like(flat)), flat)


def test_no_copy_without_need() -> None:
    module = nn.Linear(3, 5, bias=False)
    flat = flat_of(module)
    assert to_matrix(flat, spec_of(module), dtype=torch.float64).data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("name", MODULES)
def test_the_matrix_acts_on_rows_as_the_layer_does(name: str) -> None:
    """W [a, 1]^T is the layer's output: the view is the one that A and G belong to."""
    from ds_kfac.layers.kinds import KINDS

    module = MODULES[name]().double()
    spec = spec_of(module)
    shape = (2, 3, 4, 5) if "conv2d_nobias" in name else (2, 2, 4, 5)
    x = torch.randn(*shape if "conv2d" in name else (4, spec.d_in), dtype=torch.float64)
    flat = torch.cat([param.detach().flatten() for param in module.parameters()])
    rows = KINDS[spec.kind].input_rows(module, x, "expand")
    if spec.bias is not None:
        rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
    output = rows @ to_matrix(flat, spec, dtype=torch.float64).t()
    expected = KINDS[spec.kind].gradient_rows(module, module(x).detach(), "expand")
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)

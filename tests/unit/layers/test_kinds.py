"""Rows of every kind of layer against loops and against autograd."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_kfac.layers.kinds import KINDS, kind_of
from tests.unit.layers.models import Conv1D

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"stride": (2, 1)},
    "padding": {"padding": (1, 2)},
    "dilation": {"dilation": (1, 2)},
    "valid": {"padding": "valid"},
    "same": {"padding": "same"},
    "same_dilated": {"padding": "same", "dilation": (2, 1)},
    "same_reflect": {"padding": "same", "padding_mode": "reflect"},
    "reflect": {"padding": (1, 2), "padding_mode": "reflect"},
    "circular": {"padding": (1, 2), "padding_mode": "circular"},
    "replicate": {"padding": (2, 1), "padding_mode": "replicate", "stride": 2},
    "everything": {"stride": (2, 3), "padding": (2, 1), "dilation": (2, 1)},
}


def padded_index(index: int, size: int, mode: str) -> int | None:
    """Where a position outside the image is read; None for a zero."""
    if 0 <= index < size:
        return index
    if mode == "zeros":
        return None
    if mode == "circular":
        return index % size
    if mode == "replicate":
        return min(max(index, 0), size - 1)
    assert mode == "reflect"
    return -index if index < 0 else 2 * (size - 1) - index


def patches_slow(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """``[B, positions, C * kh * kw]``, one element at a time."""
    (kh, kw), (sh, sw), (dh, dw) = conv.kernel_size, conv.stride, conv.dilation
    before, after = [], []
    for axis, (kernel, dilation) in enumerate(zip(conv.kernel_size, conv.dilation, strict=True)):
        total = dilation * (kernel - 1)
        if conv.padding == "same":
            low, high = total // 2, total - total // 2
        elif conv.padding == "valid":
            low = high = 0
        else:
            low = high = int(conv.padding[axis])
        before.append(low)
        after.append(high)
    batch, channels, height, width = x.shape
    out_h = (height + before[0] + after[0] - dh * (kh - 1) - 1) // sh + 1
    out_w = (width + before[1] + after[1] - dw * (kw - 1) - 1) // sw + 1
    rows = torch.zeros(batch, out_h * out_w, channels * kh * kw, dtype=x.dtype)
    for i, j in itertools.product(range(out_h), range(out_w)):
        columns = itertools.product(range(channels), range(kh), range(kw))
        for column, (c, u, v) in enumerate(columns):
            row = padded_index(i * sh + u * dh - before[0], height, conv.padding_mode)
            col = padded_index(j * sw + v * dw - before[1], width, conv.padding_mode)
            if row is not None and col is not None:
                rows[:, i * out_w + j, column] = x[:, c, row, col]
    return rows


def rows_of(module: nn.Module, x: Tensor, sharing: str) -> tuple[Tensor, Tensor, int, list[Tensor]]:
    """Input rows, gradient rows, loss terms and the parameters' true gradients of one call."""
    kind = kind_of(module)
    assert kind is not None
    output = module(x)
    g = torch.randn_like(output)
    grads = torch.autograd.grad(output, list(module.parameters()), g)
    a = kind.input_rows(module, x, sharing)
    gamma = kind.gradient_rows(module, g, sharing)
    assert a.shape[0] == gamma.shape[0]
    return a, gamma, kind.loss_terms(g, gamma.shape[0], sharing), list(grads)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_patches(name: str) -> None:
    conv = nn.Conv2d(2, 3, (3, 2), **CONVOLUTIONS[name])
    x = torch.randn(2, 2, 6, 7)
    slow = patches_slow(conv, x)
    expand = KINDS["conv2d"].input_rows(conv, x, "expand")
    reduce = KINDS["conv2d"].input_rows(conv, x, "reduce")
    assert torch.equal(expand, slow.flatten(0, 1))
    torch.testing.assert_close(reduce, slow.mean(1))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_products_of_rows_are_the_convolutions_gradient(name: str) -> None:
    conv = nn.Conv2d(2, 3, (3, 2), **CONVOLUTIONS[name]).double()
    x = torch.randn(2, 2, 6, 7, dtype=torch.float64)
    a, gamma, terms, (weight, bias) = rows_of(conv, x, "expand")
    torch.testing.assert_close(gamma.t() @ a, weight.flatten(1))
    torch.testing.assert_close(gamma.sum(0), bias)
    assert terms == 2


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_unbatched_convolution_is_a_batch_of_one(sharing: str) -> None:
    conv = nn.Conv2d(2, 3, (3, 2), padding=1)
    x, kind = torch.randn(2, 6, 7), KINDS["conv2d"]
    g = torch.randn_like(conv(x))
    for rows in (kind.input_rows, kind.gradient_rows):
        one, batched = (x, x[None]) if rows == kind.input_rows else (g, g[None])
        assert torch.equal(rows(conv, one, sharing), rows(conv, batched, sharing))
    assert kind.loss_terms(g, 99, sharing) == kind.loss_terms(g[None], 99, sharing) == 1


def test_reduced_convolution_by_hand() -> None:
    conv = nn.Conv2d(2, 3, 2)
    x, g = torch.randn(4, 2, 3, 3), torch.randn(4, 3, 2, 2)
    gamma = KINDS["conv2d"].gradient_rows(conv, g, "reduce")
    expected = [[g[b, o].sum().item() for o in range(3)] for b in range(4)]
    torch.testing.assert_close(gamma, torch.tensor(expected))
    assert KINDS["conv2d"].input_rows(conv, x, "reduce").shape == (4, 8)
    assert KINDS["conv2d"].loss_terms(g, 4, "reduce") == 4


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 5), lambda: Conv1D(5, 3)])
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3), (2, 4, 2, 3), (1, 1, 3)])
def test_linear_expand(make: Any, shape: tuple[int, ...]) -> None:
    layer = make().double()
    x = torch.randn(*shape, dtype=torch.float64)
    a, gamma, terms, (weight, bias) = rows_of(layer, x, "expand")
    assert a.tolist() == x.reshape(-1, 3).tolist()
    matrix = KINDS[kind_of(layer).name].to_matrix(weight)  # type: ignore[union-attr]
    torch.testing.assert_close(gamma.t() @ a, matrix)
    torch.testing.assert_close(gamma.sum(0), bias)
    assert terms == a.shape[0] == x.numel() // 3


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 5), lambda: Conv1D(5, 3)])
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3), (2, 4, 2, 3), (6, 1, 3)])
def test_linear_reduce(make: Any, shape: tuple[int, ...]) -> None:
    layer = make().double()
    kind = kind_of(layer)
    assert kind is not None
    x = torch.randn(*shape, dtype=torch.float64)
    g = torch.randn(*shape[:-1], 5, dtype=torch.float64)
    a, gamma = kind.input_rows(layer, x, "reduce"), kind.gradient_rows(layer, g, "reduce")
    examples = shape[0] if len(shape) > 1 else 1
    for b in range(examples):
        positions = x[b].reshape(-1, 3) if len(shape) > 2 else x.reshape(-1, 3)[b : b + 1]
        slopes = g[b].reshape(-1, 5) if len(shape) > 2 else g.reshape(-1, 5)[b : b + 1]
        mean = sum(positions[p] for p in range(len(positions))) / len(positions)
        total = sum(slopes[p] for p in range(len(slopes)))
        torch.testing.assert_close(a[b], mean)
        torch.testing.assert_close(gamma[b], total)
    assert kind.loss_terms(g, gamma.shape[0], "reduce") == a.shape[0] == examples


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("shape", [(0, 3), (0, 4, 3), (0, 4, 2, 3)])
def test_empty_batches_have_no_rows(sharing: str, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(3, 5)
    a, gamma, terms, _ = rows_of(layer, torch.zeros(*shape), sharing)
    assert (a.shape, gamma.shape, terms) == ((0, 3), (0, 5), 0)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("padding", [0, 1])
def test_empty_batches_of_images(sharing: str, padding: int) -> None:
    conv = nn.Conv2d(2, 3, 2, padding=padding)
    a, gamma, terms, _ = rows_of(conv, torch.zeros(0, 2, 4, 4), sharing)
    assert (a.shape, gamma.shape, terms) == ((0, 8), (0, 3), 0)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_strided_inputs(sharing: str) -> None:
    layer, kind = nn.Linear(3, 5), KINDS["linear"]
    x = torch.randn(3, 4, 2).permute(2, 1, 0)
    assert torch.equal(
        kind.input_rows(layer, x, sharing), kind.input_rows(layer, x.contiguous(), sharing)
    )
    conv, images = nn.Conv2d(2, 3, 2), torch.randn(2, 2, 4, 4)
    strided = images.to(memory_format=torch.channels_last)
    for rows in (KINDS["conv2d"].input_rows, KINDS["conv2d"].gradient_rows):
        torch.testing.assert_close(rows(conv, strided, sharing), rows(conv, images, sharing))


def test_subclasses_are_their_bases_kind_and_others_have_none() -> None:
    class MyLinear(nn.Linear):
        pass

    assert kind_of(MyLinear(2, 2)) is KINDS["linear"]
    assert kind_of(nn.Conv2d(1, 1, 1)) is KINDS["conv2d"]
    assert kind_of(Conv1D(1, 1)) is KINDS["conv1d"]
    for module in (nn.Conv1d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1), nn.Bilinear(1, 1, 1)):
        assert kind_of(module) is None


def test_a_class_called_conv1d_without_a_weight_is_not_it() -> None:
    fake = type("Conv1D", (nn.Module,), {})()
    assert kind_of(fake) is None
    fake.nf = 3
    assert kind_of(fake) is None


def test_an_empty_sequence_is_a_zero_row_not_nan() -> None:
    """``reduce`` took the mean of no positions: a finite step was dropped as non-finite."""
    layer = nn.Linear(3, 2)
    rows = KINDS["linear"].input_rows(layer, torch.ones(2, 0, 3), "reduce")
    assert torch.equal(rows, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("granularity", "modules", "kept"),
    [
        (None, None, True),
        ("full", None, True),
        ("selective", ["core_attn", "mlp"], True),
        ("selective", ["core_attn", "layernorm"], False),
        ("selective", ["moe_act"], False),
    ],
)
def test_megatron_may_empty_the_input_of_a_layer(
    granularity: str | None, modules: list[str] | None, kept: bool
) -> None:
    layer = nn.Module()
    layer.config = SimpleNamespace(recompute_granularity=granularity, recompute_modules=modules)
    assert KINDS["parallel_linear"].keeps_input(layer) is kept

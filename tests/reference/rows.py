"""From calls of a layer to the rows that its Kronecker factors are sums over.

Written for being obviously right: a convolution's patches are collected position by position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Recorder:
    """Records every call of some modules by replacing ``forward`` on the instances.

    Args:
        modules: Modules by name.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self.calls: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __enter__(self) -> Recorder:
        self.calls = {name: [] for name in self._modules}
        for name, module in self._modules.items():
            module.forward = self._wrap(module.forward, self.calls[name])
        return self

    def __exit__(self, *exc: object) -> None:
        for module in self._modules.values():
            del module.forward  # the class attribute shows again

    @staticmethod
    def _wrap(
        forward: Callable[..., Any], calls: list[tuple[Tensor, Tensor]]
    ) -> Callable[..., Any]:
        def recorded(x: Tensor) -> Tensor:
            output: Tensor = forward(x)
            if output.requires_grad:
                calls.append((x.detach().clone(), output))
                # A later in-place operation would change what the recorded tensor stands for.
                output = output.clone()
            return output

        return recorded


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is a transformers ``Conv1D``: a linear layer that stores [in, out]."""
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Conv1d)


def call_rows(
    module: nn.Module, x: Tensor, gamma: Tensor, sharing: str
) -> tuple[Tensor, Tensor, int]:
    """Rows of one call.

    Args:
        module: The layer.
        x: Its input.
        gamma: Gradient of the global objective with respect to its output.
        sharing: ``expand`` or ``reduce``.

    Returns:
        ``(a [N, d_in (+1)], gamma [N, d_out], M)`` with M the number of loss terms.
    """
    if isinstance(module, nn.Conv2d):
        x, gamma = _patches(module, x), gamma.flatten(2).transpose(1, 2)
        shared = True
    else:
        shared = x.dim() > 2
    batch = x.shape[0]
    if sharing == "reduce" and shared:
        a = x.reshape(batch, -1, x.shape[-1]).mean(1)
        g = gamma.reshape(batch, -1, gamma.shape[-1]).sum(1)
    else:
        a, g = x.reshape(-1, x.shape[-1]), gamma.reshape(-1, gamma.shape[-1])
    terms = batch if isinstance(module, nn.Conv2d) else a.shape[0]
    if has_bias(module):
        a = torch.cat([a, torch.ones(a.shape[0], 1, dtype=a.dtype)], dim=1)
    return a, g, terms


def has_bias(module: nn.Module) -> bool:
    """Whether the layer has a trainable bias."""
    bias = getattr(module, "bias", None)
    return bias is not None and bias.requires_grad


def to_matrix(module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Parameter-shaped tensors of a layer as a new ``[d_out, d_in (+1)]`` matrix."""
    if is_conv1d(module):
        matrix = weight.t()
    else:
        matrix = weight.reshape(weight.shape[0], -1)
    return torch.cat([matrix, bias[:, None]], dim=1) if bias is not None else matrix.clone()


def from_matrix(module: nn.Module, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
    """Inverse of `to_matrix`: tensors of the shapes of weight and bias."""
    bias = matrix[:, -1].clone() if has_bias(module) else None
    body = matrix[:, :-1] if has_bias(module) else matrix
    weight = module.get_parameter("weight")
    return (body.t() if is_conv1d(module) else body).reshape(weight.shape).clone(), bias


def _patches(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Input patches, ``[B, H' * W', C * kh * kw]``, channel slowest."""
    if conv.groups != 1 or conv.padding_mode != "zeros":
        raise ValueError("the reference covers only plain zero-padded convolutions")
    (kh, kw), (sh, sw), (dh, dw) = conv.kernel_size, conv.stride, conv.dilation
    extent_h, extent_w = dh * (kh - 1), dw * (kw - 1)
    if conv.padding == "same":
        top, left = extent_h // 2, extent_w // 2
        bottom, right = extent_h - top, extent_w - left
    elif conv.padding == "valid":
        top = bottom = left = right = 0
    else:
        top = bottom = int(conv.padding[0])
        left = right = int(conv.padding[1])
    batch, channels, height, width = x.shape
    padded = torch.zeros(batch, channels, height + top + bottom, width + left + right).to(x)
    padded[:, :, top : top + height, left : left + width] = x
    rows = []
    for i in range((padded.shape[2] - extent_h - 1) // sh + 1):
        for j in range((padded.shape[3] - extent_w - 1) // sw + 1):
            patch = torch.empty(batch, channels, kh, kw, dtype=x.dtype)
            for u in range(kh):
                for v in range(kw):
                    patch[:, :, u, v] = padded[:, :, i * sh + u * dh, j * sw + v * dw]
            rows.append(patch.flatten(1))
    return torch.stack(rows, dim=1)

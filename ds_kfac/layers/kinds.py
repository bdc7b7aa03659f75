"""Supported module types: how each one's call becomes rows for A and G.

Conventions for shared weights follow Eschenhagen et al. 2023 (arXiv 2311.00636), for
convolutions Grosse & Martens 2016 (arXiv 1602.01407):

* ``expand``: every position is a row. A is a mean over rows; G counts one loss term per
  row for linear layers, one per example for convolutions.
* ``reduce``: per example, activations are averaged over positions and output gradients
  are summed; one row and one loss term per example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_kfac.errors import UnsupportedError


class LayerKind(Protocol):
    """What ds_kfac has to know about a module type; stateless."""

    @property
    def name(self) -> str:
        """Key of the kind in layer tables."""
        ...

    @property
    def returns_tuple(self) -> bool:
        """Whether a call returns its output with something behind it."""
        ...

    def dims(self, module: nn.Module) -> tuple[int, int]:
        """``(d_out, d_in)`` of the matrix view without bias."""
        ...

    def keeps_input(self, module: nn.Module) -> bool:
        """Whether the input of a call stays as it is until its gradient arrives."""
        ...

    def refusal(self, module: nn.Module) -> str | None:
        """Why this very module is not supported, or None."""
        ...

    def input_rows(self, module: nn.Module, x: Tensor, sharing: str) -> Tensor:
        """Input of one call as rows ``[T, d_in]``."""
        ...

    def gradient_rows(self, module: nn.Module, g: Tensor, sharing: str) -> Tensor:
        """Gradient of the call's output as rows ``[T, d_out]``, in the order of the input's."""
        ...

    def loss_terms(self, g: Tensor, rows: int, sharing: str) -> int:
        """Loss terms that this call's output gradient of ``rows`` rows stands for."""
        ...

    def counts(self, shape: torch.Size, sharing: str) -> tuple[int, int]:
        """Rows and loss terms of a call, from the shape of its output alone."""
        ...

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Weight-shaped tensor as ``[d_out, d_in]``."""
        ...

    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Inverse of :meth:`to_matrix`."""
        ...


@dataclass(frozen=True)
class LinearKind:
    """``nn.Linear``: weight ``[out, in]``, features last."""

    name: str = "linear"
    returns_tuple: bool = False

    def keeps_input(self, module: nn.Module) -> bool:
        """Autograd keeps it for the weight's gradient."""
        return True

    def dims(self, module: nn.Module) -> tuple[int, int]:
        """``(out_features, in_features)``, from the module: under ZeRO-3 weights are empty."""
        assert isinstance(module, nn.Linear)
        return module.out_features, module.in_features

    def refusal(self, module: nn.Module) -> str | None:
        """Every ``nn.Linear`` is supported."""
        return None

    def input_rows(self, module: nn.Module, x: Tensor, sharing: str) -> Tensor:
        """Rows of ``[..., d_in]``."""
        if sharing == "reduce" and x.ndim > 2:
            positions = x.flatten(1, -2)
            # Of an empty sequence nothing is known: its mean counts as zero, not as 0 / 0.
            return positions.mean(dim=1) if positions.shape[1] else positions.sum(dim=1)
        return _matrix(x)

    def gradient_rows(self, module: nn.Module, g: Tensor, sharing: str) -> Tensor:
        """Rows of ``[..., d_out]``."""
        if sharing == "reduce" and g.ndim > 2:
            return g.flatten(1, -2).sum(dim=1)
        return _matrix(g)

    def loss_terms(self, g: Tensor, rows: int, sharing: str) -> int:
        """One loss term per row."""
        return rows

    def counts(self, shape: torch.Size, sharing: str) -> tuple[int, int]:
        """Positions, or examples where positions are reduced; one loss term each."""
        rows = shape[0] if sharing == "reduce" and len(shape) > 2 else math.prod(shape[:-1])
        return rows, rows

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Already ``[out, in]``."""
        return weight

    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Already weight-shaped."""
        return matrix


def _matrix(x: Tensor) -> Tensor:
    # Counted, not inferred: a tensor rank may hold none of the features.
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@dataclass(frozen=True)
class TransposedLinearKind(LinearKind):
    """Hugging Face ``Conv1D`` (GPT-2): a linear layer whose weight is ``[in, out]``."""

    name: str = "conv1d"

    def dims(self, module: nn.Module) -> tuple[int, int]:
        """``(nf, nx)``; older releases have no ``nx``, then the weight tells."""
        module_any: Any = module
        shape = getattr(module.weight, "ds_shape", None) or tuple(module_any.weight.shape)
        return int(module_any.nf), int(shape[0])

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Transpose to ``[out, in]``."""
        return weight.t()

    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Transpose back to ``[in, out]``."""
        return matrix.t()


@dataclass(frozen=True)
class ParallelLinearKind(LinearKind):
    """megatron-core's ``ColumnParallelLinear`` and ``RowParallelLinear``.

    They return ``(output, bias)``, where the bias is None unless the caller is to add it: either
    way its gradient is that of the output.
    """

    name: str = "parallel_linear"
    returns_tuple: bool = True

    def dims(self, module: nn.Module) -> tuple[int, int]:
        """``(out, in)`` of this rank's shard."""
        weight = module._parameters["weight"]
        assert weight is not None
        return weight.shape[0], weight.shape[1]

    def keeps_input(self, module: nn.Module) -> bool:
        """Unless Megatron empties it, to compute it again in the backward pass."""
        config = getattr(module, "config", None)
        if getattr(config, "recompute_granularity", None) != "selective":
            return True
        # Their outputs are dropped, and come back at a moment that depends on the module.
        return set(getattr(config, "recompute_modules", None) or ()) <= {"core_attn", "mlp", "moe"}


@dataclass(frozen=True)
class TransformerEngineKind(ParallelLinearKind):
    """megatron-core's wrappers of Transformer Engine's plain linear layer."""

    name: str = "te_linear"

    def keeps_input(self, module: nn.Module) -> bool:
        """Not known: the library keeps what its backward needs, and clears what it does not."""
        return False

    def input_rows(self, module: nn.Module, x: Tensor, sharing: str) -> Tensor:
        """Rows of ``[..., d_in]``.

        Raises:
            UnsupportedError: The call ran under an fp8 autocast (E150).
        """
        if getattr(module, "fp8", False):  # says the library's forward, of this very call
            raise UnsupportedError(
                "E150",
                f"not available with kfac: {type(module).__name__} under an fp8 autocast (it "
                "multiplies quantised operands, not those that are seen; use bf16)",
            )
        return super().input_rows(module, x, sharing)


@dataclass(frozen=True)
class Conv2dKind:
    """``nn.Conv2d`` without groups, any stride, padding (also modes) and dilation."""

    name: str = "conv2d"
    returns_tuple: bool = False

    def keeps_input(self, module: nn.Module) -> bool:
        """Autograd keeps it for the weight's gradient."""
        return True

    def dims(self, module: nn.Module) -> tuple[int, int]:
        """``(out_channels, in_channels * kernel_height * kernel_width)``."""
        assert isinstance(module, nn.Conv2d)
        height, width = module.kernel_size
        return module.out_channels, module.in_channels * height * width

    def refusal(self, module: nn.Module) -> str | None:
        """Groups cut the weight into independent layers, which have no common factor A."""
        assert isinstance(module, nn.Conv2d)
        if module.groups != 1:
            return f"Conv2d with groups={module.groups} is not supported (only groups=1)"
        return None

    def input_rows(self, module: nn.Module, x: Tensor, sharing: str) -> Tensor:
        """Patches of ``[B, C, H, W]`` as rows of length ``C * kh * kw``."""
        assert isinstance(module, nn.Conv2d)
        x = x if x.ndim == 4 else x.unsqueeze(0)
        # The module's own padding amounts: they also cover padding="same" and padding modes.
        amounts: list[int] = module._reversed_padding_repeated_twice
        if any(amounts):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x = functional.pad(x, amounts, mode=mode)
        patches = functional.unfold(x, module.kernel_size, module.dilation, 0, module.stride)
        if sharing == "reduce":
            return patches.mean(dim=2)
        return patches.transpose(1, 2).reshape(-1, patches.shape[1])

    def gradient_rows(self, module: nn.Module, g: Tensor, sharing: str) -> Tensor:
        """Rows of ``[B, out, H', W']``."""
        g = g if g.ndim == 4 else g.unsqueeze(0)
        if sharing == "reduce":
            return g.sum(dim=(2, 3))
        return g.permute(0, 2, 3, 1).reshape(-1, g.shape[1])

    def loss_terms(self, g: Tensor, rows: int, sharing: str) -> int:
        """One loss term per example."""
        return g.shape[0] if g.ndim == 4 else 1

    def counts(self, shape: torch.Size, sharing: str) -> tuple[int, int]:
        """Positions, or examples where positions are reduced; one loss term per example."""
        examples = shape[0] if len(shape) == 4 else 1
        positions = 1 if sharing == "reduce" else shape[-2] * shape[-1]
        return examples * positions, examples

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Flatten ``[out, in, kh, kw]`` to ``[out, in * kh * kw]``."""
        return weight.reshape(weight.shape[0], -1)

    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Restore the kernel's shape."""
        return matrix.reshape(shape)


_LINEAR, _CONV1D, _CONV2D = LinearKind(), TransposedLinearKind(), Conv2dKind()
_PARALLEL, _TE = ParallelLinearKind(), TransformerEngineKind()
KINDS: dict[str, LayerKind] = {
    kind.name: kind for kind in (_LINEAR, _CONV1D, _CONV2D, _PARALLEL, _TE)
}


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of a module, or None when its type is not supported."""
    if isinstance(module, nn.Linear):
        return _LINEAR
    if isinstance(module, nn.Conv2d):
        return _CONV2D
    if _is_hugging_face_conv1d(module):
        return _CONV1D
    # By name, so that megatron-core need not be installed; a subclass may compute anything.
    cls = type(module)
    return _MEGATRON.get(cls.__module__, {}).get(cls.__name__)


_MEGATRON: dict[str, dict[str, LayerKind]] = {
    "megatron.core.tensor_parallel.layers": dict.fromkeys(
        ("ColumnParallelLinear", "RowParallelLinear"), _PARALLEL
    ),
    "megatron.core.extensions.transformer_engine": dict.fromkeys(
        ("TEColumnParallelLinear", "TERowParallelLinear", "TELinear"), _TE
    ),
}
"""Classes of megatron-core by module."""


_FORWARDS = {nn.Linear: ("forward",), nn.Conv2d: ("forward", "_conv_forward")}
_PASSING_ON = {("timm.layers.linear", "Linear")}
"""Classes known to call the plain function with the plain arguments."""


def overridden(module: nn.Module) -> str | None:
    """The class of a module that computes its output in its own way.

    What such a layer does to its input or weight is not known, and statistics of something else
    than what meets the weight would be wrong in silence.

    Returns:
        Name of the class whose forward is overridden, None where it is the plain one.
    """
    cls = type(module)
    if (cls.__module__, cls.__qualname__) in _PASSING_ON:
        return None
    for base, methods in _FORWARDS.items():
        if isinstance(module, base):
            same = all(getattr(cls, name) is getattr(base, name) for name in methods)
            return None if same else base.__name__
    return None


def _is_hugging_face_conv1d(module: nn.Module) -> bool:
    # By name, so that transformers need not be installed; nn.Conv1d has no `nf`.
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__ == "Conv1D"
        and hasattr(module, "nf")
        and isinstance(weight, torch.nn.Parameter)
    )

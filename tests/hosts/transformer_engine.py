"""Stands in for NVIDIA's Transformer Engine, which needs an accelerator, under its names.

megatron-core's own wrappers (``TEColumnParallelLinear`` and so on) are built on these classes:
types, attributes and calls are those of ``transformer_impl="transformer_engine"``, products and
collectives those of megatron-core's local layers. Numerics of the library are not tested by this.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn

VERSION = "1.10.0"


class TransformerEngineBaseModule(nn.Module):
    """What all layers of the library are."""


class Linear(TransformerEngineBaseModule):
    """The plain layer: column, row or not parallel."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.fp8, self.tp_group, self.parallel_mode = False, tp_group, parallel_mode
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.tp_size, self.use_bias, self.return_bias = tp_size, bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        shape = (self.out_features, self.in_features)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=params_dtype))
        _mark(self.weight, 1 if parallel_mode == "row" else 0)
        self.bias = torch.empty(0)
        if bias:
            self.bias = nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype))
            if parallel_mode == "column":
                _mark(self.bias, 0)
            elif parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """The library's output: with the bias only if that is to be returned."""
        from megatron.core.tensor_parallel import layers, mappings

        column, row = self.parallel_mode == "column", self.parallel_mode == "row"
        inside = self.use_bias and not self.return_bias
        out = layers.linear_with_grad_accumulation_and_async_allreduce(
            input=inp,
            weight=self.weight,
            bias=self.bias if inside and not row else None,
            gradient_accumulation_fusion=self.fuse_wgrad_accumulation,
            allreduce_dgrad=column and self.tp_size > 1 and not self.sequence_parallel,
            sequence_parallel=column and self.sequence_parallel,
            tp_group=self.tp_group,
        )
        if row and self.tp_size > 1:
            reduce = mappings.reduce_from_tensor_model_parallel_region
            if self.sequence_parallel:
                reduce = mappings.reduce_scatter_to_sequence_parallel_region
            out = reduce(out, group=self.tp_group)
        if row and inside:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """The layer that applies a norm first; never called here."""


class GroupedLinear(TransformerEngineBaseModule):
    """Experts in one layer; never called here."""


class DotProductAttention(TransformerEngineBaseModule):
    """Attention; never called here."""


class LayerNorm(nn.LayerNorm):
    """A norm, also of a rank's own tokens."""

    def __init__(self, hidden_size: int, eps: float, sequence_parallel: bool, **unused: Any):
        super().__init__(hidden_size, eps)
        for param in self.parameters():
            param.sequence_parallel = sequence_parallel


class RMSNorm(nn.RMSNorm):
    """The same without a mean."""

    def __init__(self, hidden_size: int, eps: float, sequence_parallel: bool, **unused: Any):
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = sequence_parallel


class CudaRNGStatesTracker:
    """Base of a tracker that is not used."""


def _mark(param: Any, dim: int) -> None:
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1


@contextlib.contextmanager
def _nothing_around(*args: Any, **kwargs: Any) -> Any:
    yield


def with_wrappers(spec: Any) -> Any:
    """Transformer Engine's plain layers in place of the local ones; norms stay layers of theirs."""
    from megatron.core.extensions import transformer_engine as extensions

    layer = spec.submodules
    for owner, name in (("self_attention", "linear_qkv"), ("mlp", "linear_fc1")):
        setattr(getattr(layer, owner).submodules, name, extensions.TEColumnParallelLinear)
    for owner, name in (("self_attention", "linear_proj"), ("mlp", "linear_fc2")):
        setattr(getattr(layer, owner).submodules, name, extensions.TERowParallelLinear)
    return spec


def install() -> None:
    """Take the library's place in this process; before megatron is imported."""
    state = types.SimpleNamespace(is_fp8_enabled=lambda: False, FP8_CALIBRATION=False)
    _module("", __version__=VERSION)
    _module(".common")
    _module(".common.recipe", DelayedScaling=object, Format=object)
    layers = (Linear, LayerNormLinear, GroupedLinear, DotProductAttention, LayerNorm, RMSNorm)
    _module(
        ".pytorch",
        fp8_model_init=_nothing_around,
        fp8_autocast=_nothing_around,
        **{layer.__name__: layer for layer in layers},
    )
    _module(
        ".pytorch.fp8",
        FP8GlobalStateManager=state,
        fp8_autocast=_nothing_around,
        fp8_model_init=_nothing_around,
    )
    _module(
        ".pytorch.distributed",
        CudaRNGStatesTracker=CudaRNGStatesTracker,
        activation_recompute_forward=_nothing_around,
        is_fp8_activation_recompute_enabled=lambda: False,
        get_all_rng_states=dict,
    )
    _module(".pytorch.float8_tensor", Float8Tensor=type("Float8Tensor", (Tensor,), {}))
    _module(".pytorch.cpp_extensions", cast_to_fp8=None)


def _module(name: str, **content: Any) -> None:
    whole = "transformer_engine" + name
    module = types.ModuleType(whole)
    module.__spec__ = importlib.machinery.ModuleSpec(whole, None, is_package=True)
    module.__dict__.update(content, __path__=[])
    for value in content.values():
        if isinstance(value, type) and value.__module__ == __name__:
            value.__module__ = f"{whole}.module"  # says where a class is from
    sys.modules[whole] = module
    parent, _, leaf = whole.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)

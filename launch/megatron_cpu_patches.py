"""What megatron-core leaves to Transformer Engine or Apex and the CPU has to do without them."""

import contextlib
import types
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional as F  # noqa: N812


def apply() -> None:
    """Repair the parts of megatron-core that fail without those libraries."""
    _allow_norms_with_sequence_parallelism()
    _allow_attention_with_context_parallelism()
    _define_missing_names()
    _keep_splits_on_cpu()


def _allow_norms_with_sequence_parallelism() -> None:
    """The plain norm refuses it, only because it does not mark its parameters."""
    from megatron.core.transformer import torch_norm

    def make(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        module = norms[config.normalization](hidden_size, eps=eps)
        for param in module.parameters():  # their gradients are summed over the tensor group
            param.sequence_parallel = config.sequence_parallel
        return module

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(make)


def _allow_attention_with_context_parallelism() -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    init, forward = DotProductAttention.__init__, DotProductAttention.forward

    def patched_init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        size = config.context_parallel_size
        config.context_parallel_size = 1  # the class asserts this, and asks no more about it
        try:
            init(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = size

    def patched_forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.config.context_parallel_size == 1:
            return forward(self, query, key, value, mask, *args, **kwargs)
        group = parallel_state.get_context_parallel_group()
        return causal_attention(query, key, value, self.softmax_scale, group)

    DotProductAttention.__init__ = patched_init
    DotProductAttention.forward = patched_forward


def context_chunks(size: int, rank: int) -> tuple[int, int]:
    """The two of ``2 * size`` chunks of a sequence that Megatron gives to a rank."""
    return rank, 2 * size - 1 - rank


class _WholeSequence(torch.autograd.Function):
    """Parts of all context-parallel ranks, ``[s / ranks, ...]``, in the order of the sequence."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        size = group.size()
        parts = [torch.empty_like(part) for _ in range(size)]
        c10d.all_gather(parts, part.contiguous(), group=group)
        chunks: dict[int, Tensor] = {}
        for rank, gathered in enumerate(parts):
            chunks |= dict(zip(context_chunks(size, rank), gathered.chunk(2), strict=True))
        return torch.cat([chunks[index] for index in sorted(chunks)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        total = gradients[0].contiguous()
        c10d.all_reduce(total, group=ctx.group)
        size = ctx.group.size()
        chunks = total.chunk(2 * size)
        return torch.cat([chunks[i] for i in context_chunks(size, ctx.group.rank())]), None


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, group: Any) -> Tensor:
    """Causal attention of ``[s, b, heads, dim]`` with the keys of all context-parallel ranks."""
    length = query.shape[0]
    gather: Any = _WholeSequence.apply
    key, value = (gather(part, group) for part in (key, value))
    half = length // 2
    chunks = context_chunks(group.size(), group.rank())
    place = torch.cat([torch.arange(half) + half * chunk for chunk in chunks])
    repeats = query.shape[2] // key.shape[2]
    key, value = (part.repeat_interleave(repeats, 2) for part in (key, value))
    mask = place[:, None] >= torch.arange(key.shape[0])[None, :]
    q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(length, query.shape[1], -1)


def _define_missing_names() -> None:
    """Names that 0.16 takes from Transformer Engine and uses without it."""
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not hasattr(parallel_random, "FP8GlobalStateManager"):
        never = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        parallel_random.FP8GlobalStateManager = never
        parallel_random.activation_recompute_forward = _nothing_around
        parallel_random.fp8_autocast = _nothing_around


def _nothing_around(*args: Any, **kwargs: Any) -> Any:
    return contextlib.nullcontext()


def _keep_splits_on_cpu() -> None:
    """The token dispatcher makes lists of its splits only if they come from the accelerator."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = on_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = on_cpu

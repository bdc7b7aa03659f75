"""Where DeepSpeed keeps reduced gradients under ZeRO 3.

Facts about DeepSpeed 0.19 that this file relies on, each covered by a test:

* every parameter by itself is cut into ``partition_numel()`` elements per rank, the last ones
  padded; a rank may hold nothing but padding;
* ``averaged_gradients[i][j]`` belongs to parameter j of sub-group i and is a view of a buffer
  that lives as long as the optimizer. With an offloaded optimizer the gradient is a slice of
  ``fp32_partitioned_groups_flat[i].grad``, and its norm is remembered per parameter;
* the first backward pass of a step, and the first one after ``optimizer.zero_grad()``, replaces
  what is in the buffer;
* neither buffer is cleared: a parameter without gradient in a step still shows its last one,
  which would be applied again, and added to in a later micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_kfac.hosts.base import Groups
from ds_kfac.hosts.deepspeed_storage import ZeroStorage, parameter_names
from ds_kfac.plan.topology import Layout, Piece


@dataclass(frozen=True)
class _Shard:
    """A parameter's place on this rank: sub-group, index in it, and elements that are real."""

    param: nn.Parameter
    group: int
    index: int
    numel: int


class ShardedGradients(ZeroStorage):
    """Stage 3: each rank holds a slice of every parameter."""

    def __init__(self, engine: Any, groups: Groups) -> None:
        super().__init__(engine)
        names = parameter_names(engine)
        data_ranks = _global_ranks(groups.data)
        self._layouts: dict[str, Layout] = {}
        self._shards: dict[str, _Shard] = {}
        for i, sub_group in enumerate(self._optimizer.fp16_groups):
            for j, param in enumerate(sub_group):
                name = names.get(id(param))
                if name is None:
                    continue  # frozen: it has a place but no gradient
                pieces = _pieces(self._optimizer, param, data_ranks)
                self._layouts[name] = Layout(pieces=pieces)
                mine = data_ranks.index(dist.get_rank())
                numel = sum(piece.numel for piece in pieces if piece.rank == mine)
                self._shards[name] = _Shard(param, i, j, numel)

    def layouts(self, names: Sequence[str]) -> dict[str, Layout]:
        """Slices of every rank, from the parameter's own partition size."""
        return {name: self._layouts.get(name, Layout()) for name in names}

    def views(self) -> dict[str, Tensor]:
        """Local slices without padding; empty where this rank holds only padding."""
        optimizer = self._optimizer
        views: dict[str, Tensor] = {}
        for name, shard in self._shards.items():
            if optimizer.offload_optimizer:
                _, start, _ = optimizer.grad_position[optimizer.get_param_id(shard.param)]
                flat = optimizer.fp32_partitioned_groups_flat[shard.group].grad
                views[name] = flat.narrow(0, start, shard.numel)
                continue
            gradients = optimizer.averaged_gradients.get(shard.group)
            if gradients is not None:
                views[name] = gradients[shard.index].view(-1)[: shard.numel]
        return views

    def writable(self) -> Mapping[str, Tensor]:
        """Local slices in fp32, in memory that ends with the step.

        The optimizer flattens and casts these lists in any case. Written into its permanent
        buffer, a direction could come back as the gradient of a later step.
        """
        if not self._optimizer.offload_optimizer:
            buffer = self._optimizer.grad_partitions_flat_buffer.untyped_storage().data_ptr()
            for i, gradients in list(self._optimizer.averaged_gradients.items()):
                if not gradients or all(
                    tensor.untyped_storage().data_ptr() != buffer for tensor in gradients
                ):
                    continue
                wide = torch.promote_types(gradients[0].dtype, torch.float32)
                self._optimizer.averaged_gradients[i] = [
                    tensor.to(wide, copy=True) for tensor in gradients
                ]
        return self.views()

    def dtype(self) -> torch.dtype | None:
        """The accumulation dtype, or the master weights' when these are offloaded."""
        optimizer = self._optimizer
        if optimizer.offload_optimizer:
            offloaded: torch.dtype = optimizer.fp32_partitioned_groups_flat[0].dtype
            return offloaded
        dtype: torch.dtype = optimizer.gradient_accumulation_dtype
        return dtype

    def starts_anew(self) -> bool:
        """In the first micro-batch, as the optimizer counts them."""
        return int(self._optimizer.micro_step_id) == 0

    def refresh_caches(self) -> None:
        """Norms that an offloaded optimizer remembers, of the parameters it has seen."""
        optimizer = self._optimizer
        if not optimizer.offload_optimizer:
            return
        for name, view in self.views().items():
            key = optimizer.get_param_id(self._shards[name].param)
            if key in optimizer.norm_for_param_grads:
                optimizer.norm_for_param_grads[key] = view.float().norm(2)

    def end_step(self) -> None:
        """Clear the permanent buffers, so that nothing is applied twice."""
        super().end_step()
        optimizer = self._optimizer
        optimizer.grad_partitions_flat_buffer.zero_()
        if optimizer.offload_optimizer:
            for flat in optimizer.fp32_partitioned_groups_flat:
                if flat.grad is not None:
                    flat.grad.zero_()


def _pieces(optimizer: Any, param: nn.Parameter, data_ranks: list[int]) -> tuple[Piece, ...]:
    """Slices of a parameter; their ranks are those of the data group."""
    sharded: Any = param
    size, numel = int(sharded.partition_numel()), int(sharded.ds_numel)
    holders = dist.get_process_group_ranks(optimizer._get_param_partition_group(param))
    pieces = []
    for index, holder in enumerate(holders):
        real = min(size, numel - index * size)
        if real > 0:
            pieces.append(Piece(data_ranks.index(holder), index * size, real))
    return tuple(pieces)


def _global_ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)

"""Where DeepSpeed keeps reduced gradients under ZeRO 1 and 2; choice of the right storage.

Facts about DeepSpeed 0.19 that this file relies on, each covered by a test:

* ``optimizer.averaged_gradients[i]`` holds, in the order of ``params_in_partition[i]``, the
  local slice of each parameter (plus marked padding), or one flat fp32 buffer when gradients
  are accumulated in fp32;
* with an offloaded optimizer the local partition is ``single_partition_of_fp32_groups[i].grad``
  on the CPU. It is not cleared between steps, the norm of each parameter is remembered, and
  overflow is a flag that was set in the backward pass;
* a backward pass after that of the last micro-batch replaces the gradients of the step so far,
  unless they are accumulated in fp32 for a half-precision model. Offloaded ones are added up from
  the second pass on; the first one is lost where it is the only one expected;
* the optimizer's own tables say which rank holds which slice, for all ranks, also under
  ``round_robin_gradients`` and ``parameter_alignment``. ``param._hp_mapping`` does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_kfac.hosts.base import Groups
from ds_kfac.hosts.deepspeed_mixed import (
    Bf16Gradients,
    HalfPrecisionGradients,
    ReplicatedGradients,
)
from ds_kfac.hosts.deepspeed_storage import Storage, ZeroStorage, parameter_names
from ds_kfac.hosts.deepspeed_zero3 import ShardedGradients
from ds_kfac.plan.topology import Layout, Piece


def storage_of(engine: Any, groups: Groups) -> Storage:
    """Choose the storage of an engine that has passed the support checks.

    Args:
        engine: The initialised engine.
        groups: Its process groups.
    """
    wrapper = type(engine.optimizer).__name__
    if wrapper == "DeepSpeedZeroOptimizer_Stage3":
        return ShardedGradients(engine, groups)
    if wrapper == "DeepSpeedZeroOptimizer":
        return PartitionedGradients(engine)
    if wrapper == "BF16_Optimizer":
        return Bf16Gradients(engine)
    if wrapper in ("FP16_Optimizer", "FP16_UnfusedOptimizer"):
        return HalfPrecisionGradients(engine)
    return ReplicatedGradients(engine)


class PartitionedGradients(ZeroStorage):
    """Stages 1 and 2: each rank holds a contiguous slice of the flattened parameter group."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._names = parameter_names(engine)
        self._pieces = {
            self._names[id(param)]: pieces
            for i in range(len(self._optimizer.bit16_groups))
            for param, pieces in _pieces(self._optimizer, i)
        }
        self._local = [self._local_pieces(i) for i in range(len(self._optimizer.bit16_groups))]

    def layouts(self, names: Sequence[str]) -> dict[str, Layout]:
        """Slices of every rank, from the optimizer's own tables."""
        return {
            name: Layout(pieces=tuple(piece for piece, _ in self._pieces.get(name, ())))
            for name in names
        }

    def writable(self) -> Mapping[str, Tensor]:
        """Local slices in fp32.

        Directions do not fit half precision: their size is that of a gradient over a
        curvature. The optimizer casts the list to its fp32 master dtype right after the
        step begins, so widening it here costs no extra copy.
        """
        if self._optimizer.cpu_offload:
            return self.views()
        for i, gradients in list(self._optimizer.averaged_gradients.items()):
            if not gradients or getattr(gradients, "flat_partition", None) is not None:
                continue
            if gradients[0].dtype in (torch.float16, torch.bfloat16):
                self._optimizer.averaged_gradients[i] = [_widen(tensor) for tensor in gradients]
        return self.views()

    def views(self) -> dict[str, Tensor]:
        """Flat views of the local slices."""
        views: dict[str, Tensor] = {}
        for i in range(len(self._optimizer.bit16_groups)):
            if self._optimizer.cpu_offload:
                gradients = self._optimizer.single_partition_of_fp32_groups[i].grad
            else:
                gradients = self._optimizer.averaged_gradients.get(i)
            if gradients is not None:
                views.update(self._views_of_group(i, gradients))
        return views

    def dtype(self) -> torch.dtype | None:
        """The accumulation dtype, or the master weights' when these are offloaded."""
        optimizer = self._optimizer
        if optimizer.cpu_offload:
            offloaded: torch.dtype = optimizer.single_partition_of_fp32_groups[0].dtype
            return offloaded
        dtype: torch.dtype = optimizer.gradient_accumulation_dtype
        return dtype

    def starts_anew(self) -> bool:
        """Where the gradients of the whole step are here already."""
        gradients = self._optimizer.averaged_gradients
        if not self._engine.managed_gradient_accumulation():
            return False
        if self._optimizer.cpu_offload:
            alone = self._engine.gradient_accumulation_steps() == 1
            return alone and int(self._optimizer.micro_step_id) == 0
        first = next((group for group in gradients.values() if group), None)
        return first is not None and getattr(first, "flat_partition", None) is None

    def refresh_caches(self) -> None:
        """Norms that an offloaded optimizer remembers, of the parameters it has seen."""
        optimizer = self._optimizer
        if not optimizer.cpu_offload:
            return
        views = self.views()
        for params in optimizer.params_in_partition:
            for param in params:
                key, view = optimizer.get_param_id(param), views.get(self._names[id(param)])
                if view is not None and key in optimizer.norm_for_param_grads:
                    optimizer.norm_for_param_grads[key] = view.float().norm(2)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Also where the configuration tells the optimizer not to look for overflows."""
        optimizer = self._optimizer
        check = optimizer.check_grad_overflow
        optimizer.check_grad_overflow = True
        if optimizer.cpu_offload:
            optimizer.local_overflow = True
        try:
            with super().skipping():
                yield
        finally:
            optimizer.check_grad_overflow = check

    def end_step(self) -> None:
        """Clear what an offloaded optimizer keeps, so that nothing is applied twice."""
        super().end_step()
        optimizer = self._optimizer
        if not optimizer.cpu_offload:
            return
        for flat in optimizer.single_partition_of_fp32_groups:
            if flat.grad is not None:
                flat.grad.zero_()
        for accumulated in optimizer.accumulated_grads_in_cpu.values():
            accumulated.zero_()

    def _local_pieces(self, i: int) -> list[tuple[str, Piece, int]]:
        """This rank's slices of group i in the order of the optimizer's list."""
        rank = dist.get_rank(self._optimizer.real_dp_process_group[i])  # experts have their own
        return [
            (self._names[id(param)], piece, start)
            for param in self._optimizer.params_in_partition[i]
            for piece, start in self._pieces.get(self._names[id(param)], ())
            if piece.rank == rank
        ]

    def _views_of_group(self, i: int, gradients: Any) -> Iterator[tuple[str, Tensor]]:
        local = self._local[i]
        offloaded = self._optimizer.cpu_offload
        flat = gradients if offloaded else getattr(gradients, "flat_partition", None)
        if flat is not None:
            for name, piece, start in local:
                yield name, flat.view(-1).narrow(0, start, piece.numel)
            return
        tensors = [t for t in gradients if not getattr(t, "_zero_padding", False)]
        for (name, piece, _), tensor in zip(local, tensors, strict=False):
            assert tensor.numel() == piece.numel, (name, tensor.shape, piece)
            yield name, tensor.view(-1)


def _pieces(optimizer: Any, i: int) -> Iterator[tuple[nn.Parameter, list[tuple[Piece, int]]]]:
    """Per parameter of group i, its slices on all ranks and their starts in the partition."""
    partition = int(optimizer.partition_size[i])
    for param in optimizer.round_robin_bit16_groups[i]:
        key = optimizer.get_param_id(param)
        if key not in optimizer.param_to_partition_ids[i]:
            continue  # zero-sized parameters are in no partition
        pieces = []
        for rank in optimizer.param_to_partition_ids[i][key]:
            start = int(optimizer.grad_start_offset[i][rank][key])
            target = int(optimizer.grad_partition_insertion_offset[i][rank][key])
            numel = min(param.numel() - start, partition - target)
            if numel > 0:
                pieces.append((Piece(rank, start, numel), target))
        yield param, pieces


def _widen(tensor: Tensor) -> Tensor:
    wide = tensor.float()
    if getattr(tensor, "_zero_padding", False):
        wide._zero_padding = True  # type: ignore[attr-defined]
    return wide

"""Where DeepSpeed keeps reduced gradients under ZeRO 0, 1 and 2.

Facts about DeepSpeed 0.19 that this file relies on, each covered by a test:

* stage 0: whole gradients in ``param.grad``, in the model's dtype;
* stages 1 and 2: ``optimizer.averaged_gradients[i]`` holds, in the order of
  ``params_in_partition[i]``, the local slice of each parameter (plus marked padding), or one
  flat fp32 buffer when gradients are accumulated in fp32;
* the optimizer's own tables say which rank holds which slice, for all ranks, also under
  ``round_robin_gradients`` and ``parameter_alignment``. ``param._hp_mapping`` does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.hosts.base import Gradients, Groups
from ds_kfac.plan.topology import Layout, Piece


class ReplicatedGradients:
    """Stage 0: every rank holds every gradient."""

    def __init__(self, engine: Any) -> None:
        self._parameters = {
            name: param for name, param in engine.module.named_parameters() if param.requires_grad
        }

    def layouts(self, names: Sequence[str]) -> dict[str, Layout]:
        """Replicated."""
        return {name: Layout(replicated=True) for name in names}

    def gradients(self) -> Gradients:
        """Flat views of ``param.grad``."""
        return Gradients(self.writable(), partial=False)

    def writable(self) -> Mapping[str, Tensor]:
        """The same views: ``param.grad`` has to keep the parameter's dtype."""
        views = {}
        for name, param in self._parameters.items():
            if param.grad is not None:
                if not param.grad.is_contiguous():
                    param.grad = param.grad.contiguous()
                views[name] = param.grad.view(-1)
        return views


class PartitionedGradients:
    """Stages 1 and 2: each rank holds a contiguous slice of the flattened parameter group."""

    def __init__(self, engine: Any, groups: Groups) -> None:
        self._optimizer = engine.optimizer
        self._rank = _rank_in(groups)
        self._names = {id(p): n for n, p in engine.module.named_parameters() if p.requires_grad}
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

    def gradients(self) -> Gradients:
        """Flat views of the local slices."""
        return Gradients(self._views(), partial=True)

    def writable(self) -> Mapping[str, Tensor]:
        """Local slices in fp32.

        Directions do not fit half precision: their size is that of a gradient over a
        curvature. The optimizer casts the list to its fp32 master dtype right after the
        step begins, so widening it here costs no extra copy.
        """
        for i, gradients in list(self._optimizer.averaged_gradients.items()):
            if not gradients or getattr(gradients, "flat_partition", None) is not None:
                continue
            if gradients[0].dtype in (torch.float16, torch.bfloat16):
                self._optimizer.averaged_gradients[i] = [_widen(tensor) for tensor in gradients]
        return self._views()

    def _views(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for i in range(len(self._optimizer.bit16_groups)):
            gradients = self._optimizer.averaged_gradients.get(i)
            if gradients is not None:
                views.update(self._views_of_group(i, gradients))
        return views

    def _local_pieces(self, i: int) -> list[tuple[str, Piece, int]]:
        """This rank's slices of group i in the order of the optimizer's list."""
        return [
            (self._names[id(param)], piece, start)
            for param in self._optimizer.params_in_partition[i]
            for piece, start in self._pieces.get(self._names[id(param)], ())
            if piece.rank == self._rank
        ]

    def _views_of_group(self, i: int, gradients: Any) -> Iterator[tuple[str, Tensor]]:
        local = self._local[i]
        flat = getattr(gradients, "flat_partition", None)
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


def _rank_in(groups: Groups) -> int:
    if groups.data is None:
        return 0
    import torch.distributed as dist

    return dist.get_rank(groups.data)

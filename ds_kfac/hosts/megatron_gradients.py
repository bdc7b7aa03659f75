"""Where Megatron's optimizers keep gradients between ``prepare_grads`` and clipping.

Facts about megatron-core 0.16 that this file relies on, each covered by a test:

* ``FP32Optimizer`` has them in ``param.grad``, ``Float16OptimizerWithFloat16Params`` in the
  ``grad`` of fp32 copies, ``DistributedOptimizer`` in that of shards: slices of the flat
  parameter that need not begin or end with a row;
* lists of parameters and of what the optimizer steps for them have the same order, group by
  group, and groups keep their index;
* ``get_megatron_optimizer`` returns a chain, of two optimizers where there are experts;
* gradients of experts are divided by the number of all data-parallel ranks, as all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.ledger import Ledger
from ds_kfac.hosts.base import Expert, Gradients, Groups
from ds_kfac.layers.names import enclosing
from ds_kfac.plan.topology import Layout, Piece


@dataclass(frozen=True)
class Holding:
    """What this rank steps of a parameter.

    Attributes:
        param: The model's parameter.
        stepped: What the inner optimizer steps for it.
        start: First element in the flat parameter.
        end: One past the last one.
        place: Index of the inner optimizer and of its parameter group.
    """

    param: Any
    stepped: Any
    start: int
    end: int
    place: tuple[int, int]


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Optimizers of a chain in the order of all ranks; None for those without parameters here."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return [inner for item in chained for inner in inner_optimizers(item)]
    return [None if getattr(optimizer, "is_stub_optimizer", False) else optimizer]


def is_distributed(optimizer: Any) -> bool:
    """Whether gradients are sharded."""
    return any(hasattr(item, "model_param_gbuf_map") for item in inner_optimizers(optimizer))


def holdings(optimizer: Any) -> Iterator[Holding]:
    """Everything that this rank steps."""
    for index, inner in enumerate(inner_optimizers(optimizer)):
        if inner is None:
            continue
        for models, stepped, group in _paired(inner):
            for param, item in zip(models, stepped, strict=True):
                start, end = 0, param.numel()
                if hasattr(inner, "model_param_gbuf_map"):
                    span = inner._get_model_param_range_map(param)["param"]
                    start, end = span.start, span.end
                yield Holding(param, item, start, end, (index, group))


def _paired(inner: Any) -> Iterator[tuple[Sequence[Any], Sequence[Any], int]]:
    if hasattr(inner, "model_param_gbuf_map"):
        pairs = [
            (inner.model_float16_groups, inner.shard_fp32_from_float16_groups),
            (inner.model_fp32_groups, inner.shard_fp32_groups),
        ]
    elif hasattr(inner, "fp32_from_float16_groups"):
        fp32 = inner.fp32_from_fp32_groups
        pairs = [(inner.float16_groups, inner.fp32_from_float16_groups), (fp32, fp32)]
    else:
        plain = [group["params"] for group in inner.optimizer.param_groups]
        pairs = [(plain, plain)]
    for models, stepped in pairs:
        for group, (left, right) in enumerate(zip(models, stepped, strict=True)):
            yield left, right, group


class Storage:
    """Gradients of this rank by the names that parameters have in the whole model.

    Args:
        optimizer: Megatron's optimizer.
        model: The whole model's names, this rank's modules.
        groups: Process groups; a collective over data and expert groups.
        experts: Expert modules by name.
    """

    def __init__(
        self, optimizer: Any, model: nn.Module, groups: Groups, experts: Mapping[str, Expert]
    ) -> None:
        self._optimizer = optimizer
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._expert = {
            name: experts[top].group
            for name, _ in model.named_parameters()
            if (top := enclosing(name, experts)) is not None
        }
        self._distributed = is_distributed(optimizer)
        self._duplicates = self._found_elsewhere(model, groups)
        spans = self._spans()
        self._places: dict[str, tuple[int, int]] = {}
        self._layouts: dict[str, Layout] = {}
        dense = set(self._names.values()) - self._expert.keys()
        self._share = self._gather(groups.data, spans, dense)
        shares = {
            key: self._gather(group, spans, self._expert) for key, group in groups.experts.items()
        }
        self._shares = {name: shares[key] for name, key in self._expert.items()}

    def views(self) -> dict[str, Tensor]:
        """Flat gradients, or slices of them, as the inner optimizers will read them."""
        return {
            self._names[id(held.param)]: held.stepped.grad.view(-1)
            for held in holdings(self._optimizer)
            if held.stepped.grad is not None and held.end > held.start
        }

    def gradients(self) -> Gradients:
        """The same, and what of them counts in the norm of the model."""
        return Gradients(
            self.views(),
            partial=True,
            share=self._share,
            shares=self._shares,
            duplicates=self._duplicates,
        )

    def layouts(self, names: Sequence[str]) -> dict[str, Layout]:
        """In ranks of the data group, of experts in ranks of theirs."""
        whole = Layout(replicated=True)
        return {name: self._layouts.get(name, whole) for name in names}

    def dtype(self) -> torch.dtype:
        """Of main gradients, the widest of this rank's."""
        dtype = torch.float32
        for held in holdings(self._optimizer):
            dtype = torch.promote_types(dtype, held.stepped.dtype)
        return dtype

    def learning_rates(self) -> dict[str, float]:
        """Of all parameters of this stage that somebody steps."""
        inner = inner_optimizers(self._optimizer)
        rates = {}
        for name, (index, group) in self._places.items():
            if inner[index] is not None:
                rates[name] = float(inner[index].optimizer.param_groups[group]["lr"])
        return rates

    def _spans(self) -> dict[str, tuple[int, int, tuple[int, int], tuple[int, ...]]]:
        """Slices of this rank, where they are stepped and by which optimizer instance."""
        inner = inner_optimizers(self._optimizer)
        spans = {}
        for held in holdings(self._optimizer):
            group = getattr(inner[held.place[0]], "data_parallel_group", None)
            instance = tuple(dist.get_process_group_ranks(group)) if self._distributed else ()
            name = self._names[id(held.param)]
            spans[name] = held.start, held.end, held.place, instance
        return spans

    def _gather(self, group: Any, spans: Mapping[str, Any], names: Collection[str]) -> float:
        """Learn what the ranks of a group hold of some parameters.

        Returns:
            How much of the squared norm of a rank's view counts in that of the model.
        """
        communicator = Communicator(group, Ledger())
        sets: dict[str, dict[Any, list[Piece]]] = defaultdict(lambda: defaultdict(list))
        instances = set()
        mine = {name: span for name, span in spans.items() if name in names}
        for rank, theirs in enumerate(communicator.gather_objects(mine)):
            for name, (start, end, place, instance) in theirs.items():
                self._places.setdefault(name, place)
                instances.add(instance)
                if end > start:
                    sets[name][instance].append(Piece(rank, start, end - start))
        if not self._distributed:
            return 1.0 / communicator.size
        for name, by_instance in sets.items():
            pieces, *copies = (
                tuple(sorted(items, key=lambda piece: piece.start))
                for _, items in sorted(by_instance.items())
            )
            self._layouts[name] = Layout(pieces=pieces, copies=tuple(copies))
        return 1.0 / max(1, len(instances))

    def _found_elsewhere(self, model: nn.Module, groups: Groups) -> frozenset[str]:
        """Parameters whose norm another rank counts."""
        first = groups.tensor is None or dist.get_rank(groups.tensor) == 0
        return frozenset(
            name
            for name, param in model.named_parameters()
            if getattr(param, "shared", False)
            or not (first or name in self._expert or getattr(param, "tensor_model_parallel", False))
        )

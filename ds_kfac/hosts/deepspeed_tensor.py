"""DeepSpeed AutoTP: linear layers whose weights are cut over a tensor group.

Facts about DeepSpeed 0.19 that this file relies on, each covered by a test:

* AutoTP replaces ``nn.Linear`` while the engine is built and keeps the parameter objects; its
  classes are no ``nn.Linear``. A weight is ``[out / ranks, in]`` or ``[out, in / ranks]``;
* cuts are frozen in ``_partition_sizes``, of fused matrices in ``_subparam_shard_widths`` (one
  list per matrix), and may be uneven or empty for a rank;
* a column-parallel module is given its whole input and returns its own features, unless
  ``gather_output``; a row-parallel one is given its own features, unless it cuts its input
  itself, and returns the whole output, bias included;
* gradients of what is not cut are the same on all tensor ranks. They are averaged over the
  data group only, and the norm counts them on the first tensor rank;
* groups are process-wide: a process has one tensor degree for good.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_kfac.hosts.base import Gradients, Groups
from ds_kfac.layers.shards import Shards, TensorCut, fused_ranges

_COLUMN = {
    "LinearLayer",
    "VocabParallelLinear",
    "fused_LinearLayer",
    "GateUpPack_LinearLayer",
    "SubParamLinearLayer",
}
_ROW = {"LinearAllreduce", "LinearAllreduceWithReplicatedInput", "SubParamLinearAllreduce"}
_CUTS_INPUT_ITSELF = {"LinearAllreduceWithReplicatedInput"}


def is_cut(engine: Any) -> bool:
    """Whether an engine trains with AutoTP."""
    return int(engine.autotp_size()) > 1


def tensor_groups(engine: Any) -> Groups:
    """Groups of an engine with AutoTP, which excludes pipelines: everybody shares all layers."""
    from deepspeed.utils import groups

    world = torch.distributed.group.WORLD
    return Groups(
        data=engine.seq_data_parallel_group,
        tensor=groups.get_tensor_model_parallel_group(),
        work=world,
        model=world,
    )


def tensor_cut(model: nn.Module, *, blocks: bool) -> TensorCut | None:
    """What AutoTP has cut of a model, None where it has not been at work.

    Args:
        model: The model, after the engine has replaced its modules.
        blocks: Every tensor rank's shards are layers of their own.
    """
    ranks = [int(module.tp_index) for module in model.modules() if _is_replaced(module)]  # type: ignore[arg-type]
    if not ranks:
        return None
    return TensorCut(shards_of(model), ranks[0], blocks, _partial_modules(model))


def shards_of(model: nn.Module) -> dict[str, Shards]:
    """Cut modules by name; those of which it is unclear how they are cut are absent."""
    found = {}
    for name, module in model.named_modules():
        shards = _shards(module)
        if shards is not None and shards.problem() is None:
            found[name] = shards
    return found


def shared_gradients(
    gradients: Gradients, *, model: nn.Module, ranks: int, tensor_rank: int
) -> Gradients:
    """Gradients of a tensor rank as a part of the whole model's.

    Args:
        gradients: As the engine stores them; whole ones are the same on all data ranks.
        model: The model.
        ranks: Data ranks.
        tensor_rank: This rank in the tensor group.
    """
    whole: frozenset[str] = frozenset()
    if tensor_rank > 0:
        whole = frozenset(name for name, p in model.named_parameters() if not _is_shard(p))
    share = gradients.share if gradients.partial else 1.0 / ranks
    return replace(gradients, partial=True, share=share, duplicates=gradients.duplicates | whole)


def _partial_modules(model: nn.Module) -> dict[str, str]:
    """Modules whose weight is whole although every tensor rank shows them other activations."""
    return {
        name: "is whole, but works on other activations on every tensor rank"
        for name, module in model.named_modules()
        if any(
            getattr(param, "_ds_grad_allreduce_registered", False)
            for param in module.parameters(recurse=False)
        )
    }


def _is_replaced(module: nn.Module) -> bool:
    return hasattr(module, "tp_index") and hasattr(module, "tp_world_size")


def _is_shard(param: nn.Parameter) -> bool:
    from deepspeed.runtime.utils import is_model_parallel_parameter

    return bool(is_model_parallel_parameter(param))


def _shards(module: nn.Module) -> Shards | None:
    kind = type(module).__name__
    if type(module).__module__ != "deepspeed.module_inject.layers":
        return None
    if kind not in _COLUMN and kind not in _ROW:
        return None
    cut: Any = module
    rows = kind in _COLUMN
    shape = tuple(int(dim) for dim in cut._orig_weight_shape)
    widths: Any = getattr(cut, "_subparam_shard_widths", None)
    if kind.startswith("SubParam"):
        # Weights that are cut along an inner dimension of a view have no rows of their own.
        if tuple(cut._logical_shape) != shape or cut.partition_dim != (0 if rows else 1):
            return None
    elif widths is None:
        if kind == "fused_LinearLayer":
            return None  # interleaved or replicated blocks
        widths = [cut._partition_sizes]
    whole = bool(getattr(cut, "gather_output", False)) or kind in _CUTS_INPUT_ITSELF
    return Shards(shape[0], shape[1], rows, fused_ranges(widths), whole)

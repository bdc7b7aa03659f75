"""Megatron's model chunks: names, groups, and how layers are cut.

Facts about megatron-core 0.16 that this file relies on, each covered by a test:

* ``TransformerLayer.layer_number`` counts from one over all stages; module names count per
  chunk;
* a column-parallel layer has ``[out / ranks, in]``, sees the whole input (with sequence
  parallelism its own tokens, whole features) and returns its own features of all tokens; a
  row-parallel one has ``[out, in / ranks]`` and is the mirror image;
* the rows of ``linear_qkv`` are ordered by query group, so that shards one after another are
  the whole matrix; those of a gated ``linear_fc1`` are [gate; up] on every rank;
* experts are numbered from zero on every rank;
* gradients of what is not cut are the same on all tensor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ds_kfac.config import KFACConfig
from ds_kfac.errors import UnsupportedError
from ds_kfac.hosts.base import Expert, Groups
from ds_kfac.layers.kinds import kind_of
from ds_kfac.layers.names import enclosing
from ds_kfac.layers.shards import Shards, TensorCut, fused_ranges

EXPERTS = "experts"
"""Key of the group that holds the same experts."""


def bare(chunk: Any) -> Any:
    """The model inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def whole(chunks: Sequence[Any]) -> nn.Module:
    """All chunks of this rank as one model, with the names of the whole model.

    Modules are the chunks' own; only what contains numbered layers is a container of ours.

    Args:
        chunks: Model chunks in their wrappers.

    Raises:
        UnsupportedError: Two chunks have a module of the same name (E150).
    """
    model = nn.Module()
    for chunk in chunks:
        _mirror(bare(chunk), model)
    return model


def with_fused_parts(config: KFACConfig, chunks: Sequence[Any]) -> KFACConfig:
    """Settings whose default patterns of fused matrices are those of Megatron's layers.

    Query, key and value are interleaved by query group there: they have no rows of their own.
    """
    if "fused_parts" in config.model_fields_set:
        return config
    gated = getattr(bare(chunks[0]).config, "gated_linear_unit", False)
    return config.model_copy(update={"fused_parts": {"*linear_fc1": 2} if gated else {}})


def output_layers(model: nn.Module) -> dict[str, str]:
    """Output layers by name, and why they are left out.

    Where the embedding is tied to it, the weight is handed to the layer from another stage.
    """
    reason = "output layer: its G would have the vocabulary's size"
    return {
        name: reason
        for name, _ in model.named_modules()
        if name.rsplit(".", 1)[-1] == "output_layer"
    }


def groups(chunks: Sequence[Any], model: nn.Module) -> Groups:
    """Process groups of a stage, from the objects that carry them."""
    from megatron.core import parallel_state

    wrapper, collection = chunks[0], getattr(bare(chunks[0]), "pg_collection", None)
    data = getattr(wrapper, "dp_cp_group", None)
    if data is None:
        data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensor = getattr(collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()
    found = Groups(data=data, model=dist.group.WORLD)
    if dist.get_world_size(tensor) > 1:
        work = getattr(collection, "tp_dp_cp", None)
        if work is None:
            work = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        found = Groups(data=data, model=dist.group.WORLD, tensor=tensor, work=work)
    if not experts(model):
        return found
    same = getattr(wrapper, "expt_dp_group", None)
    if same is None:
        same = parallel_state.get_expert_data_parallel_group()
    return Groups(found.data, found.model, found.tensor, found.work, {EXPERTS: same})


def experts(model: nn.Module) -> dict[str, Expert]:
    """Expert modules of this rank by name."""
    from megatron.core import parallel_state

    found = {}
    for name, module in model.named_modules():
        local = getattr(module, "local_experts", None)
        if not isinstance(local, nn.ModuleList):
            continue
        group = getattr(module, "ep_group", None)
        if group is None:
            group = parallel_state.get_expert_model_parallel_group()
        first = dist.get_rank(group) * len(local)
        for index in range(len(local)):
            prefix = f"{name}.local_experts"
            found[f"{prefix}.{index}"] = Expert(EXPERTS, f"{prefix}.{first + index}")
    return found


def sizes(model: nn.Module, found: Groups) -> dict[str, int]:
    """Elements that parameters count in the whole model, where not all of them are here.

    The copy of a tied embedding on the last stage counts on the first.
    """
    ranks = 1 if found.tensor is None else dist.get_world_size(found.tensor)
    inside = experts(model)
    counts = {}
    for name, param in model.named_parameters():
        if getattr(param, "shared", False):
            counts[name] = 0
        elif getattr(param, "tensor_model_parallel", False) and enclosing(name, inside) is None:
            counts[name] = param.numel() * ranks
    return counts


def tensor_cut(model: nn.Module, found: Groups, *, blocks: bool, tokens: bool) -> TensorCut | None:
    """What is cut over the tensor group, None without one.

    Args:
        model: The whole model's names, this rank's modules.
        found: Its process groups.
        blocks: Every tensor rank's shards are layers of their own.
        tokens: Tensor ranks have their own tokens between cut layers (sequence parallel).
    """
    if found.tensor is None:
        return None
    size, rank = dist.get_world_size(found.tensor), dist.get_rank(found.tensor)
    cut: dict[str, Shards] = {}
    left_out: dict[str, str] = {}
    inside = experts(model)
    for name, module in model.named_modules():
        if kind_of(module) is None or enclosing(name, inside) is not None:
            continue
        shards = _shards(name, module, size)
        if shards is not None:
            cut[name] = shards
        elif tokens:
            left_out[name] = "is whole, but may see other tokens on every tensor rank"
    return TensorCut(cut, rank, blocks, left_out)


def _shards(name: str, module: Any, size: int) -> Shards | None:
    kind, weight = type(module).__name__, module._parameters.get("weight")
    if weight is None:
        return None
    if kind in ("ColumnParallelLinear", "RowParallelLinear"):
        rows = kind == "ColumnParallelLinear"
        mine = module.output_size_per_partition if rows else module.input_size_per_partition
        if mine * size != (module.output_size if rows else module.input_size):
            return None
        whole = bool(module.gather_output if rows else not module.input_is_parallel)
    else:  # of Transformer Engine, which neither gathers outputs nor cuts inputs
        if getattr(module, "parallel_mode", None) not in ("column", "row"):
            return None
        rows, whole = module.parallel_mode == "column", False
        mine = weight.shape[0 if rows else 1]
    gated = module.config.gated_linear_unit and name.endswith("linear_fc1")
    parts = 2 if gated and rows else 1
    return Shards(
        int(weight.shape[0]) * (size if rows else 1),
        int(weight.shape[1]) * (1 if rows else size),
        rows,
        fused_ranges([[mine // parts] * size] * parts),
        whole=whole,
        tokens=bool(module.sequence_parallel),
    )


def _mirror(module: nn.Module, model: nn.Module) -> None:
    for name, param in module.named_parameters(recurse=False):
        model.register_parameter(name, param)
    for name, child in module.named_children():
        if _is_numbered(child):
            container = _container(model, name)
            for layer in child.children():
                _add(container, str(int(layer.layer_number) - 1), layer)  # type: ignore[arg-type]
        elif any(_is_numbered(inner) for inner in child.modules()):
            _mirror(child, _container(model, name))
        elif next(child.parameters(), None) is not None:
            _add(model, name, child)


def _is_numbered(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList) or not len(module):
        return False
    return all(hasattr(layer, "layer_number") for layer in module)


def _container(model: nn.Module, name: str) -> nn.Module:
    if name not in model._modules:
        model.add_module(name, nn.Module())
    container = model._modules[name]
    assert container is not None
    return container


def _add(model: nn.Module, name: str, module: nn.Module) -> None:
    if name in model._modules:
        raise UnsupportedError(
            "E150",
            f"not available with kfac: two model chunks with a module {name} "
            f"({type(module).__name__}) on one rank",
        )
    model.add_module(name, module)

"""DeepSpeed's mixture of experts: fewer ranks hold an expert than a dense layer.

Facts about DeepSpeed 0.19 that this file relies on, each covered by a test:

* ``MoE`` marks expert parameters with ``allreduce = False`` and the name of their group, in
  ``engine.expert_data_parallel_group``: ranks that hold the same experts, under local names;
* their gradients are summed over that group and divided by the number of all data ranks, like
  those of dense layers: both are gradients of the same objective;
* ZeRO cuts a parameter group marked ``moe`` over the ranks of its ``name``
  (``optimizer.real_dp_process_group``); all its parameters have to be experts;
* an expert is called with slots: a row of zeros where there is no token;
* the gate reads the weight of its linear layer without calling it;
* without ZeRO the engine takes the mean over ranks of each rank's norm for that of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from ds_kfac.errors import UnsupportedError
from ds_kfac.hosts import deepspeed_tensor
from ds_kfac.hosts.base import Expert, Gradients, Groups

_WITH_TENSOR = (
    "MoE layers with tensor parallelism (an expert would belong to two kinds of groups; set "
    "tensor_parallel.autotp_size to 1)"
)
_WITH_PARAMETERS = (
    "MoE layers with ZeRO 3 (DeepSpeed cuts no experts of deepspeed.moe; use "
    "zero_optimization.stage 1 or 2)"
)
_ACCUMULATING_WRAPPERS = ("BF16_Optimizer", "FP16_Optimizer", "FP16_UnfusedOptimizer")


def check_request(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed fails on while it builds the engine, before ranks wait there.

    Args:
        model: The model as it is handed to ``deepspeed.initialize``.
        config: The DeepSpeed configuration.

    Raises:
        UnsupportedError: AutoTP or ZeRO 3 would cut a model with experts (E150).
    """
    if not any(_group_name(param) for param in model.parameters()):
        return
    problems = []
    if (config.get("tensor_parallel") or {}).get("autotp_size", 0) > 1:
        problems.append(_WITH_TENSOR)
    if (config.get("zero_optimization") or {}).get("stage") == 3:
        problems.append(_WITH_PARAMETERS)
    _refuse(problems)


def check_experts(engine: Any) -> None:
    """Refuse what experts do not go with.

    Args:
        engine: An initialised engine whose model may have experts.

    Raises:
        UnsupportedError: Names the reason and the alternative (E150).
    """
    if not engine.has_moe_layers:
        return
    problems = []
    is_pipeline = type(engine).__name__ == "PipelineEngine"
    if any(type(module).__name__ == "AutoEPMoELayer" for module in engine.module.modules()):
        problems.append(
            "expert_parallel (AutoEP keeps weights in one tensor for all experts; use "
            "deepspeed.moe.layer.MoE)"
        )
    if is_pipeline:
        problems.append(
            "MoE layers in a pipeline (a stage's copies hold different experts; use ZeRO 1 or 2 "
            "without PipelineModule)"
        )
    if engine.sequence_parallel_size > 1:
        problems.append(
            "MoE layers with sequence parallelism (by what experts' gradients are divided has not "
            "been verified; keep sequences whole)"
        )
    # DeepSpeed counts a pipeline's stages as slices of the model.
    if deepspeed_tensor.is_cut(engine) or (engine.mp_world_size > 1 and not is_pipeline):
        problems.append(_WITH_TENSOR)
    wrapper = type(engine.optimizer).__name__
    if wrapper in _ACCUMULATING_WRAPPERS:
        problems.append(
            f"MoE layers with {wrapper} (its norm over experts has not been verified; use fp32, or "
            "ZeRO 1 or 2 and gradients accumulated in the model's dtype)"
        )
    if getattr(engine.optimizer, "cpu_offload", False):
        problems.append(
            "MoE layers with an offloaded optimizer (where it keeps experts' norms has not been "
            "verified; remove zero_optimization.offload_optimizer)"
        )
    _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UnsupportedError("E150", "not available with kfac: " + "; ".join(problems))


def experts(model: nn.Module) -> dict[str, Expert]:
    """Expert modules of this rank by name.

    They are numbered from zero on every rank; their names for all ranks have the numbers of
    DeepSpeed's own files, which do not depend on the expert-parallel degree.
    """
    from deepspeed.moe.experts import Experts
    from deepspeed.moe.sharded_moe import MOELayer
    from deepspeed.utils import groups

    found = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, MOELayer) or not isinstance(layer.experts, Experts):
            continue
        prefix = f"{name}.experts.deepspeed_experts"
        group, count = str(layer.ep_group_name), len(layer.experts.deepspeed_experts)
        first = groups._get_expert_parallel_rank(group) * count
        for index in range(count):
            found[f"{prefix}.{index}"] = Expert(group, f"{prefix}.{first + index}")
    return found


def gates(model: nn.Module) -> dict[str, str]:
    """Linear layers of gates by name, and why they are left out."""
    from deepspeed.moe.sharded_moe import TopKGate

    return {
        f"{name}.wg": "its gate (TopKGate) uses this weight without calling the layer"
        for name, module in model.named_modules()
        if isinstance(module, TopKGate)
    }


def expert_groups(engine: Any) -> Groups:
    """Dense layers are shared by all data ranks, experts by the ranks that hold them."""
    keys = {expert.group for expert in experts(engine.module).values()}
    return Groups(
        data=engine.seq_data_parallel_group,
        experts={key: engine.expert_data_parallel_group[key] for key in keys},
    )


def expert_gradients(gradients: Gradients, *, model: nn.Module, groups: Groups) -> Gradients:
    """Gradients of this rank as a part of the whole model's, all experts included.

    Args:
        gradients: As the engine stores them.
        model: Says which parameters are experts'.
        groups: Ranks that hold the same ones.
    """
    if gradients.partial:
        return gradients
    shares = {
        name: 1.0 / dist.get_world_size(groups.experts[_group_name(param)])
        for name, param in model.named_parameters()
        if _group_name(param)
    }
    share = 1.0 / dist.get_world_size(groups.data)
    return replace(gradients, partial=True, share=share, shares=shares)


def expert_param_groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Split parameters so that ZeRO can cut each group over its own ranks.

    Args:
        parameters: Of an optimizer, or its groups.

    Returns:
        Groups; the same ones where there are no experts.
    """
    items = list(parameters)
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    result = []
    for group in groups:
        parts: dict[str, list[nn.Parameter]] = defaultdict(list)
        for param in group["params"]:
            parts[_group_name(param)].append(param)
        for name in sorted(parts):
            marks = {"name": name, "moe": True} if name else {}
            result.append({**group, "params": parts[name], **marks})
    return result


def _group_name(param: nn.Parameter) -> str:
    """Name of an expert's ranks; empty for dense parameters."""
    return "" if getattr(param, "allreduce", True) else str(getattr(param, "group_name", ""))

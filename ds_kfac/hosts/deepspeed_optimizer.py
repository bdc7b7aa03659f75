"""Optimizers that ds_kfac brings along for an engine."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_kfac.config import KFACConfig, OptimizerConfig
from ds_kfac.hosts import (
    deepspeed_config,
    deepspeed_moe,
    deepspeed_pipe,
    deepspeed_support,
    deepspeed_tensor,
)
from ds_kfac.hosts.apex import fused_adam
from ds_kfac.layers.discover import discover
from ds_kfac.optimizer import KFACOptimizer, param_groups


def bring_own(
    arguments: dict[str, Any],
    config: dict[str, Any],
    settings: KFACConfig,
    optimizer: OptimizerConfig,
) -> None:
    """Hand ds_kfac's element-wise optimizer to DeepSpeed as a client optimizer.

    Args:
        arguments: Arguments of ``deepspeed.initialize``; changed.
        config: The DeepSpeed configuration.
        settings: Settings of the preconditioner.
        optimizer: Settings of the optimizer.

    Raises:
        KFACError: The arguments contradict the configuration, or the model offers nothing to
            precondition.
    """
    model: nn.Module = arguments["model"]
    chosen = deepspeed_support.chosen_parameters(arguments)
    trainable = [
        (name, param)
        for name, param in model.named_parameters()
        if param.requires_grad and (chosen is None or id(param) in chosen)
    ]

    def inside() -> set[str]:
        table = discover(
            model,
            settings,
            optimized={name for name, _ in trainable},
            excluded={**(deepspeed_pipe.tied_modules(model) or {}), **deepspeed_moe.gates(model)},
            whole=not deepspeed_pipe.is_pipeline(model),
            tensor=deepspeed_tensor.tensor_cut(model, blocks=settings.tensor_parallel == "block"),
        )
        return {slot.name for spec in table.layers for slot in spec.slots}

    inside()  # what is wrong with the model is said before the engine is built

    def build(_: Any) -> KFACOptimizer:
        # By now AutoTP has replaced modules, and may have left others to the base optimizer.
        groups = param_groups(trainable, inside(), optimizer)
        return KFACOptimizer(deepspeed_moe.expert_param_groups(groups), optimizer)

    arguments["optimizer"] = build
    arguments["model_parameters"] = [param for _, param in trainable]
    deepspeed_config.replace_config(
        arguments, deepspeed_config.without_kfac(config, drop_optimizer=True)
    )


def bring_fused_adam(arguments: dict[str, Any], config: dict[str, Any]) -> None:
    """Build NVIDIA Apex's optimizer as a client optimizer: DeepSpeed's JSON knows no such type.

    Args:
        arguments: Arguments of ``deepspeed.initialize``; changed.
        config: The DeepSpeed configuration.
    """
    build = fused_adam(dict(config["optimizer"].get("params") or {}))
    arguments["optimizer"] = lambda parameters: build(deepspeed_moe.expert_param_groups(parameters))
    deepspeed_config.replace_config(
        arguments, deepspeed_config.without_kfac(config, drop_optimizer=True)
    )

"""What of DeepSpeed is supported; everything else is refused at start, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_kfac.errors import ConfigError, UnsupportedError
from ds_kfac.hosts.deepspeed_config import mapping

_WRAPPERS = {
    "DeepSpeedZeroOptimizer": "ZeRO 1 and 2",
    "DeepSpeedZeroOptimizer_Stage3": "ZeRO 3",
    "BF16_Optimizer": "ZeRO 1, bf16 accumulated in fp32",
    "FP16_UnfusedOptimizer": "stage 0, bf16 and fp16",
    "FP16_Optimizer": "stage 0, bf16 and fp16 with a fused optimizer",
}


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse configurations that DeepSpeed accepts but ds_kfac cannot serve.

    Raises:
        UnsupportedError: Names the setting, the reason and the alternative (E150).
    """
    problems = _zero_problems(mapping(config, "zero_optimization"))
    for key in ("fp16_master_weights_and_grads", "bf16_master_weights_and_grads"):
        if (config.get(key[:4]) or {}).get(key):
            problems.append(f"{key[:4]}.{key} (directions need fp32 master weights; remove it)")
    problems += _tensor_problems(config)
    if (config.get("compile") or {}).get("deepcompile"):
        problems.append("compile.deepcompile (its graphs bypass the hooks; set it to false)")
    if problems:
        raise UnsupportedError("E150", "not available with kfac: " + "; ".join(problems))


def _tensor_problems(config: Mapping[str, Any]) -> list[str]:
    """What does not go with AutoTP, each with the alternative."""
    if (config.get("tensor_parallel") or {}).get("autotp_size", 0) <= 1:
        return []
    problems = []
    zero = config.get("zero_optimization") or {}
    if zero.get("stage", 0) == 3:
        problems.append(
            "tensor_parallel.autotp_size with zero_optimization.stage=3 (use stage 0, 1 or 2)"
        )
    if (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
        problems.append(
            "tensor_parallel.autotp_size with zero_optimization.offload_optimizer (remove it)"
        )
    if (config.get("expert_parallel") or {}).get("enabled"):
        problems.append("expert_parallel (set enabled to false)")
    return problems


def _zero_problems(zero: Mapping[str, Any]) -> list[str]:
    """What of a ``zero_optimization`` section is not available, each with the alternative."""
    problems = []
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        problems.append(f"zero_optimization.stage={zero['stage']!r} (use 0, 1, 2 or 3)")
    offload = zero.get("offload_optimizer") or {}
    if offload.get("device") == "nvme":
        problems.append(
            "zero_optimization.offload_optimizer.device='nvme' (gradients are on disk when "
            "directions are computed; use 'cpu')"
        )
    if offload.get("super_offload"):
        problems.append(
            "zero_optimization.offload_optimizer.super_offload (it applies gradients during the "
            "backward pass; set it to false)"
        )
    if offload.get("ratio", 1.0) != 1.0:
        problems.append("zero_optimization.offload_optimizer.ratio (use 1.0)")
    if (zero.get("offload_param") or {}).get("device") == "nvme":
        problems.append("zero_optimization.offload_param.device='nvme' (use 'cpu')")
    if zero.get("zenflow"):
        problems.append(
            "zero_optimization.zenflow (it steps outside the engine's step; use offload_optimizer "
            "without zenflow)"
        )
    if zero.get("zero_quantized_gradients"):
        problems.append("zero_optimization.zero_quantized_gradients (set it to false)")
    return problems


def check_engine(engine: Any) -> None:
    """Refuse engines and optimizer wrappers whose gradients ds_kfac cannot reach.

    Raises:
        UnsupportedError: Names the class (E150).
    """
    import torch

    if type(engine).__name__ not in ("DeepSpeedEngine", "PipelineEngine"):
        raise UnsupportedError(
            "E150",
            f"engine {type(engine).__name__} is not supported (only DeepSpeedEngine and "
            "PipelineEngine)",
        )
    if hasattr(engine, "grid") and engine.grid.model_parallel_size > 1:
        raise UnsupportedError(
            "E150",
            "a pipeline topology with tensor slicing (axis 'model') is not supported: use the axes "
            "'pipe' and 'data'",
        )
    if hasattr(engine, "grid") and _scales_autocast(engine):
        raise UnsupportedError(
            "E150",
            "torch_autocast.dtype='float16' in a pipeline: only the last stage's gradient scaler "
            "ever scales a loss, and DeepSpeed's other stages fail at their first step or go on "
            "with a scale of their own; use 'bfloat16', or fp16.enabled",
        )
    wrapper = type(engine.optimizer).__name__
    bare = isinstance(engine.optimizer, torch.optim.Optimizer) and not engine.zero_optimization()
    if not bare and wrapper not in _WRAPPERS:
        known = ", ".join(f"{name} ({use})" for name, use in _WRAPPERS.items())
        raise UnsupportedError(
            "E150",
            f"DeepSpeed optimizer wrapper {wrapper} is not supported; supported: bare optimizers "
            f"(stage 0, fp32 and torch autocast), {known}",
        )
    if getattr(engine.optimizer, "swap_optimizer", False):
        raise UnsupportedError("E150", "an optimizer offloaded to nvme is not supported; use cpu")
    if engine.is_deepcompile_active():
        raise UnsupportedError(
            "E150", "DeepCompile is not supported: its graphs bypass the hooks; use torch.compile"
        )


def _scales_autocast(engine: Any) -> bool:
    import torch

    return bool(engine.torch_autocast_enabled()) and engine.torch_autocast_dtype() == torch.float16


def chosen_parameters(arguments: Mapping[str, Any]) -> set[int] | None:
    """Ids of the parameters that a call with optimizer type KFAC wants to train.

    Args:
        arguments: Arguments of ``deepspeed.initialize``; an iterator is consumed.

    Returns:
        None when the call names none: then all trainable parameters are meant.

    Raises:
        ConfigError: An optimizer object was passed beside type KFAC (E209), or
            ``model_parameters`` are groups with settings of their own (E210).
    """
    if arguments.get("optimizer") is not None:
        raise ConfigError(
            "E209",
            f"optimizer {arguments['optimizer']!r} was passed although the configuration names "
            "optimizer type KFAC: keep one (a kfac section works beside any optimizer)",
        )
    if arguments.get("model_parameters") is None:
        return None
    chosen: set[int] = set()
    for item in arguments["model_parameters"]:
        if not isinstance(item, Mapping):
            chosen.add(id(item))
        elif set(item) <= {"params", "name", "moe"}:  # as DeepSpeed splits experts off
            chosen.update(id(param) for param in item["params"])
        else:
            raise ConfigError(
                "E210",
                "optimizer type KFAC builds its own parameter groups (preconditioned and "
                f"auxiliary); model_parameters has a group with settings {sorted(item)}. For own "
                "groups use a kfac section beside your optimizer",
            )
    return chosen

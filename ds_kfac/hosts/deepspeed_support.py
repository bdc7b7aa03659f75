"""What of DeepSpeed is supported; everything else is refused at start, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_kfac.errors import ConfigError, UnsupportedError

_WRAPPERS = {
    "DeepSpeedZeroOptimizer": "ZeRO 1 and 2",
    "FP16_UnfusedOptimizer": "stage 0, bf16",
    "FP16_Optimizer": "stage 0, bf16 with a fused optimizer",
}


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse configurations that DeepSpeed accepts but ds_kfac cannot serve.

    Raises:
        UnsupportedError: Names the setting, the reason and the alternative (E150).
    """
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    problems = []
    if stage not in (0, 1, 2):
        problems.append(f"zero_optimization.stage={stage!r} (use 0, 1 or 2)")
    for key in ("offload_optimizer", "offload_param", "zenflow"):
        device = (zero.get(key) or {}).get("device", "cpu") if zero.get(key) else "none"
        if device != "none":
            problems.append(f"zero_optimization.{key} (remove it)")
    if (config.get("fp16") or {}).get("enabled"):
        problems.append("fp16.enabled (use bf16 or fp32)")
    if (config.get("torch_autocast") or {}).get("enabled"):
        problems.append("torch_autocast.enabled (use bf16 or fp32)")
    if (config.get("tensor_parallel") or {}).get("autotp_size", 0):
        problems.append("tensor_parallel.autotp_size (remove it)")
    if config.get("sequence_parallel_size", 1) != 1:
        problems.append("sequence_parallel_size (remove it)")
    if (config.get("compile") or {}).get("deepcompile"):
        problems.append("compile.deepcompile (its graphs bypass the hooks; set it to false)")
    if problems:
        raise UnsupportedError("E150", "not available with kfac: " + "; ".join(problems))


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
    wrapper = type(engine.optimizer).__name__
    bare = isinstance(engine.optimizer, torch.optim.Optimizer) and not engine.zero_optimization()
    if not bare and wrapper not in _WRAPPERS:
        known = ", ".join(f"{name} ({use})" for name, use in _WRAPPERS.items())
        raise UnsupportedError(
            "E150",
            f"DeepSpeed optimizer wrapper {wrapper} is not supported; supported: bare optimizers "
            f"(stage 0, fp32), {known}. With bf16 and ZeRO 1 leave data_types.grad_accum_dtype out",
        )
    if engine.zero_optimization() and engine.optimizer.cpu_offload:
        raise UnsupportedError(
            "E150", "optimizer offload is not supported: remove offload_optimizer"
        )
    if getattr(engine, "has_moe_layers", False):
        raise UnsupportedError("E150", "DeepSpeed MoE layers are not supported")


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
        elif set(item) == {"params"}:
            chosen.update(id(param) for param in item["params"])
        else:
            raise ConfigError(
                "E210",
                "optimizer type KFAC builds its own parameter groups (preconditioned and "
                f"auxiliary); model_parameters has a group with settings {sorted(item)}. For own "
                "groups use a kfac section beside your optimizer",
            )
    return chosen

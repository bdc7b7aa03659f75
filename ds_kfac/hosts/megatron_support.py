"""What of Megatron is supported; everything else is refused at attach, with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ds_kfac.config import KFACConfig
from ds_kfac.errors import UnsupportedError
from ds_kfac.hosts import megatron_layers
from ds_kfac.hosts.compatibility import check_base_optimizer
from ds_kfac.hosts.megatron_gradients import inner_optimizers
from ds_kfac.hosts.megatron_model import bare, whole

_OPTIMIZERS = (
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "DistributedOptimizer",
)
# Fields of configurations that are not available while they are set, and what to do.
_MODEL_FIELDS = {
    "enable_cuda_graph": "graphs do not replay hooks; switch it off",
    "external_cuda_graph": "graphs do not replay hooks; switch it off",
    "use_transformer_engine_op_fuser": "fused layers have no hooks; switch it off",
    "fp8": "layers quantise their operands; use bf16",
    "fp4": "layers quantise their operands; use bf16",
    "cpu_offloading": "inputs of layers are moved away before their gradients arrive",
    "fine_grained_activation_offloading": "inputs are moved away before their gradients arrive",
    "moe_shared_expert_overlap": "shared experts are not called as layers; switch it off",
    "overlap_moe_expert_parallel_comm": "passes are split up in its schedule; switch it off",
    "delay_wgrad_compute": "weight gradients come after the backward pass; switch it off",
    "hybrid_context_parallel": "groups change from batch to batch; use context parallelism",
    "heterogeneous_block_specs": "layers are no transformer layers",
    "is_hybrid_model": "state-space layers have not been tried; use transformer layers",
    "mtp_num_layers": "multi-token prediction has not been tried; switch it off",
    "multi_latent_attention": (
        "megatron-core runs it on Transformer Engine's attention, with norms inside of its up "
        "projections, and its local layers do not sum the gradients of the rotary rows of "
        "linear_kv_down_proj over tensor ranks; use attention with query groups"
    ),
}
_OPTIMIZER_FIELDS = {
    "use_precision_aware_optimizer": "gradients are not where others are; switch it off",
    "optimizer_cpu_offload": "gradients are moved to the host; switch it off",
    "optimizer_cuda_graph": "the step is captured in a graph; switch it off",
    "overlap_param_gather_with_optimizer_step": "it steps one optimizer before the others",
}
_WRAPPER_FIELDS = {
    "use_megatron_fsdp": "parameters are sharded tensors; use the distributed optimizer",
    "use_custom_fsdp": "parameters are sharded tensors; use the distributed optimizer",
}


def check(chunks: Sequence[Any], optimizer: Any, config: KFACConfig) -> None:
    """Refuse what K-FAC does not go with. Local to this rank.

    Args:
        chunks: Model chunks in their wrappers.
        optimizer: Megatron's optimizer.
        config: The ``kfac`` settings.

    Raises:
        UnsupportedError: Names the settings, the reasons and the alternatives (E150).
        ConfigError: The base optimizer does not go with the direction (E205).
    """
    problems = [
        *_wrapper_problems(chunks),
        *_optimizer_problems(optimizer),
        *_model_problems(chunks, config),
        *megatron_layers.problems(whole(chunks), config.skip_layers),
    ]
    if problems:
        listed = "; ".join(dict.fromkeys(problems))
        raise UnsupportedError("E150", f"not available with kfac: {listed}")
    for inner in inner_optimizers(optimizer):
        if inner is not None:
            check_base_optimizer(inner.optimizer, config)


def _wrapper_problems(chunks: Sequence[Any]) -> Iterator[str]:
    for chunk in chunks:
        # The wrapper of plain torch has the same name.
        name = f"{type(chunk).__module__}.{type(chunk).__name__}"
        if name != "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel":
            yield f"model chunks in {name} (use megatron.core's DistributedDataParallel)"
        else:
            yield from _set_fields(chunk.ddp_config, _WRAPPER_FIELDS)


def _optimizer_problems(optimizer: Any) -> Iterator[str]:
    inner = [item for item in inner_optimizers(optimizer) if item is not None]
    for item in (optimizer, *inner):
        if not hasattr(item, "prepare_grads") or not hasattr(item, "step_with_ready_grads"):
            yield f"{type(item).__name__} (pass what get_megatron_optimizer returned)"
            return
    for item in inner:
        if type(item).__name__ not in _OPTIMIZERS:
            yield f"{type(item).__name__} (known are {', '.join(_OPTIMIZERS)})"
        yield from _set_fields(item.config, _OPTIMIZER_FIELDS)


def _model_problems(chunks: Sequence[Any], config: KFACConfig) -> Iterator[str]:
    model: Any = bare(chunks[0]).config
    yield from _set_fields(model, _MODEL_FIELDS)
    if getattr(model, "cuda_graph_impl", "none") != "none":
        yield f"cuda_graph_impl={model.cuda_graph_impl!r} (graphs do not replay hooks; use 'none')"
    if config.weight_sharing == "reduce":
        yield (
            "kfac.weight_sharing='reduce' (ranks and layers see parts of sequences; use 'expand')"
        )
    tensor = getattr(model, "tensor_model_parallel_size", 1)
    if getattr(model, "gtp_remat", False) or getattr(model, "generalized_tensor_parallel", False):
        yield "generalized tensor parallelism (weights are cut along one more dimension)"
    if getattr(model, "num_moe_experts", None):
        yield from _expert_problems(model, tensor)


def _expert_problems(model: Any, tensor: int) -> Iterator[str]:
    expert_tensor = getattr(model, "expert_tensor_parallel_size", None) or tensor
    if expert_tensor > 1:
        yield (
            f"expert_tensor_parallel_size={expert_tensor} with tensor_model_parallel_size={tensor} "
            "(features of experts would have to be exchanged in groups of their own; cut experts "
            "over expert ranks instead: set it to 1)"
        )
    if getattr(model, "add_bias_linear", False):
        yield "experts with biases (they are multiplied by probabilities; add_bias_linear=False)"
    if tensor > 1 and getattr(model, "expert_model_parallel_size", 1) == 1:
        yield (
            "experts with tensor parallelism and expert_model_parallel_size=1 (set it to the "
            "tensor degree or a multiple)"
        )


def _set_fields(config: Any, fields: dict[str, str]) -> Iterator[str]:
    for name, reason in fields.items():
        value = getattr(config, name, None)
        if value:
            yield f"{name}={value!r} ({reason})"

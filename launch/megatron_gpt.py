"""Model of launch/pretrain_gpt_megatron.py, from megatron-core's parts."""

import argparse
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

VOCABULARY = 256
"""One token per byte; a multiple of every usual tensor-parallel size."""


def start(args: argparse.Namespace) -> None:
    """Form Megatron's process groups and seed everything as Megatron-LM does."""
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(args.seed + 100 * stage)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)


def dtype(args: argparse.Namespace) -> torch.dtype:
    """Of activations and of the parameters that layers see."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def configuration(args: argparse.Namespace) -> TransformerConfig:
    """Megatron's description of the model."""
    options: dict[str, Any] = {
        "num_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "hidden_dropout": args.hidden_dropout,
        "attention_dropout": args.attention_dropout,
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "sequence_parallel": args.sequence_parallel,
        "pipeline_dtype": dtype(args),
        "params_dtype": dtype(args),
        "bf16": args.bf16,
        "fp16": args.fp16,
        "attention_softmax_in_fp32": True,
        # Needs Apex.
        "gradient_accumulation_fusion": False,
    }
    if args.swiglu:
        options |= {
            "gated_linear_unit": True,
            "activation_func": nn.functional.silu,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "bias_activation_fusion": False,
            # As many weights as with an ungated MLP of four times the width.
            "ffn_hidden_size": 8 * args.hidden_size // 3 // 16 * 16,
        }
    if args.recompute_activations:
        options |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(**options)


def build_model(args: argparse.Namespace, config: TransformerConfig) -> list[Any]:
    """This rank's part of the model, wrapped for data parallelism."""
    if args.transformer_impl == "local":
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization)
    else:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    model: nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope" if args.swiglu else "learned_absolute",
    )
    for param in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    model.cuda()
    if args.bf16 or args.fp16:
        model = Float16Module(config, model)
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce or args.overlap_param_gather,
        overlap_param_gather=args.overlap_param_gather,
        grad_reduce_in_fp32=True,
    )
    wrapped = DistributedDataParallel(config, options, model)
    wrapped.broadcast_params()
    return [wrapped]


def connect(config: TransformerConfig, chunks: list[Any], optimizer: Any) -> None:
    """Tell the schedules how gradients are scaled, synchronised and finished."""
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    options = chunks[0].ddp_config
    if options.overlap_grad_reduce:
        config.no_sync_func = chunks[0].no_sync
    if options.overlap_param_gather:
        config.param_sync_func = chunks[0].start_param_sync

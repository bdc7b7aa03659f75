"""Optimizer and schedule of launch/pretrain_gpt_megatron.py."""

import argparse
from collections.abc import Collection, Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from ds_kfac.config import AuxiliaryConfig
from ds_kfac.config import OptimizerConfig as DirectionConfig
from ds_kfac.errors import ConfigError
from ds_kfac.optimizer import KFACOptimizer
from launch import megatron_repairs


def build(args: argparse.Namespace, chunks: list[Any], dtype: torch.dtype) -> Any:
    """Megatron's optimizer; with `--optimizer kfac` around ds_kfac's own element-wise one.

    Args:
        args: Command line.
        chunks: Model chunks in their wrappers.
        dtype: Of the parameters that layers see.
    """
    megatron_repairs.apply()
    own = args.optimizer == "kfac"
    options = OptimizerConfig(
        optimizer="sgd" if own else args.optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        decoupled_lr=None if own else args.decoupled_lr,
        decoupled_min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        sgd_momentum=0.0 if args.kfac else 0.9,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=dtype,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
    )
    overrides = _two_kinds(args) if own else None
    optimizer = get_megatron_optimizer(options, chunks, config_overrides=overrides)
    for inner in optimizer.chained_optimizers:
        if own and inner.optimizer is not None:
            inner.optimizer = _element_wise(args, inner.optimizer.param_groups)
            inner.init_state_fn = _init_adam
        if inner.init_state_fn is None:  # SGD has no state, and Megatron asks for it in vain
            inner.init_state_fn = _nothing
    return optimizer


def is_matrix(param: nn.Parameter, name: str) -> bool:
    """Whether a parameter is the weight or bias of a linear layer inside a transformer layer."""
    return ".layers." in name and ".linear_" in name and "layer_norm" not in name


def _two_kinds(args: argparse.Namespace) -> dict[ParamKey, Any]:
    """Parameter groups for directions and for Adam.

    Megatron finds the groups of a checkpoint by `is_decoupled_lr` and `wd_mult`.
    """
    kinds = {
        "matrices": (is_matrix, {"preconditioned": True, "max_lr": args.lr}),
        "others": (
            lambda param, name: not is_matrix(param, name),
            {
                "preconditioned": False,
                "is_decoupled_lr": True,
                "max_lr": args.decoupled_lr or args.lr,
            },
        ),
        "vectors": (lambda param, name: param.ndim == 1, {"wd_mult": 0.0}),
    }
    return {
        ParamKey(with_name_predicate=ParamWithNamePredicate(name=name, fn=chosen)): settings
        for name, (chosen, settings) in kinds.items()
    }


def _element_wise(args: argparse.Namespace, groups: list[dict[str, Any]]) -> KFACOptimizer:
    aux = AuxiliaryConfig(betas=(args.adam_beta1, args.adam_beta2))
    config = DirectionConfig(lr=args.lr, weight_decay=args.weight_decay, aux=aux)
    return KFACOptimizer(groups, config)


def _init_adam(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Give Adam's parameters the state that a checkpoint is loaded into."""
    for group in optimizer.param_groups:
        for param in () if group["preconditioned"] else group["params"]:
            if not optimizer.state[param]:
                optimizer.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }


def _nothing(*args: Any) -> None:
    """No state."""


def check_all_preconditioned(chunks: Sequence[nn.Module], layers: Collection[str]) -> None:
    """Check that no raw gradient is applied as if it was a direction.

    Args:
        chunks: Model chunks.
        layers: Names of K-FAC's layers in the whole model.

    Raises:
        ConfigError: K-FAC leaves out a matrix of `--optimizer kfac` (E205).
    """
    known = {name.rpartition(".layers.")[2].partition(".")[2] for name in layers}
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            layer = name.rpartition(".layers.")[2].partition(".")[2].rpartition(".")[0]
            if is_matrix(param, name) and layer not in known:
                raise ConfigError(
                    "E205",
                    f"--optimizer kfac applies directions to {name}, which K-FAC leaves out: "
                    "change --kfac-skip-layers, or take --optimizer adam",
                )


def build_schedule(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """Linear warm-up, then decay, counted in iterations."""
    warmup = min(args.lr_warmup_iters, args.train_iters // 2)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr / warmup if warmup else args.lr,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=args.train_iters,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )

"""Ulysses sequence parallelism: ranks of a sequence group hold different tokens of one sequence.

Statistics are sums over tokens, so that to them a sequence rank is one more data rank; what
differs is by how much DeepSpeed divides.

Facts about DeepSpeed 0.19 that this file relies on, each covered by a test:

* with ``mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp`` gradients are reduced, and
  ZeRO's slices cut, over data times sequence ranks (``engine.seq_data_parallel_group``);
* the sum is divided by the number of data ranks (ZeRO 0, 1, 2), or by all ranks (ZeRO 3);
* with a device mesh (``sequence_parallel_size`` and ``data_parallel_size`` in the JSON, or
  ``mesh_param``) gradients are reduced over data ranks alone, and the copies of a parameter
  drift apart;
* a predivide factor, and ``reduce_scatter: false`` under ZeRO 3, leave out the correction for
  sequence ranks in some of the buckets;
* ``BF16_Optimizer`` takes sequence ranks for tensor ranks when it measures the norm: all but the
  first find no gradient to measure, fail, and leave the first one waiting.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ds_kfac.config import KFACConfig
from ds_kfac.errors import UnsupportedError


def averaging_ranks(engine: Any) -> float:
    """By how many ranks the engine divides the sum of dense gradients."""
    ranks = dist.get_world_size(engine.seq_data_parallel_group)
    if not engine.gradient_average:
        return 1.0
    return float(ranks) if engine.zero_optimization_partition_weights() else ranks / _size(engine)


def check_sequence(engine: Any, config: KFACConfig) -> None:
    """Refuse what cannot be right when sequences are cut over ranks.

    Args:
        engine: The initialised engine.
        config: Settings of the preconditioner.

    Raises:
        UnsupportedError: Names the setting, the reason and the alternative (E150).
    """
    if not _cuts_sequences(engine):
        return
    if config.weight_sharing == "reduce":
        raise UnsupportedError(
            "E150",
            "kfac.weight_sharing='reduce' with sequence parallelism: it averages over positions, "
            "which are on different ranks; use 'expand'",
        )
    if _size(engine) == 1:
        return
    reduced = dist.get_process_group_ranks(engine.seq_data_parallel_group)
    if not set(dist.get_process_group_ranks(engine.seq_parallel_group)) <= set(reduced):
        raise UnsupportedError(
            "E150",
            "sequence parallelism by a device mesh (sequence_parallel_size and data_parallel_size, "
            "or mesh_param): DeepSpeed does not reduce gradients over sequence ranks then. Pass "
            "mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp instead",
        )
    if engine.gradient_predivide_factor() != 1.0:
        raise UnsupportedError(
            "E150",
            "gradient_predivide_factor with sequence parallelism: DeepSpeed's average depends on "
            "it; use 1.0",
        )
    if type(engine.optimizer).__name__ == "BF16_Optimizer":
        raise UnsupportedError(
            "E150",
            "BF16_Optimizer (ZeRO 1, bf16 with data_types.grad_accum_dtype='fp32') with sequence "
            "parallelism: it measures norms on the first sequence rank only and fails on the "
            "others; use ZeRO 2 or 3, or remove grad_accum_dtype",
        )
    if engine.zero_optimization_partition_weights() and not engine.zero_reduce_scatter():
        raise UnsupportedError(
            "E150",
            "zero_optimization.reduce_scatter=false with ZeRO 3 and sequence parallelism: "
            "DeepSpeed's average depends on a parameter's size; set it to true",
        )


def _size(engine: Any) -> int:
    return int(engine.sequence_parallel_size)


def _cuts_sequences(engine: Any) -> bool:
    """Also where the engine knows nothing of it and every rank counts as a data rank."""
    from deepspeed.sequence.layer import DistributedAttention

    return _size(engine) > 1 or any(
        isinstance(module, DistributedAttention) and dist.get_world_size(module.spg) > 1
        for module in engine.module.modules()
    )

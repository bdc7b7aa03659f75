"""Checkpoints of launch/pretrain_gpt_megatron.py in Megatron's torch_dist format.

Folders are those of Megatron-LM: `DIR/iter_0000100`, and the number of the newest complete one in
`DIR/latest_checkpointed_iteration.txt`, which is replaced last.
"""

import os
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from launch import megatron_repairs
from launch.report import Row

TRACKER = "latest_checkpointed_iteration.txt"
# Optimizer states that can be loaded with another parallel layout.
SHARDING = "fully_reshardable"


def save(
    folder: Path,
    iteration: int,
    chunks: Sequence[Any],
    optimizer: Any,
    schedule: Any,
    *,
    rows: Sequence[Row],
) -> None:
    """Write a checkpoint. A collective.

    Args:
        folder: Folder of all checkpoints of the run.
        iteration: Steps taken.
        chunks: Model chunks.
        optimizer: Megatron's optimizer.
        schedule: Megatron's schedule of learning rate and weight decay.
        rows: Record of the run so far.
    """
    target = folder / f"iter_{iteration:07d}"
    if torch.distributed.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    content = _content(chunks, optimizer, is_loading=False)
    content |= {
        "iteration": iteration,
        "opt_param_scheduler": schedule.state_dict(),
        "rows": [astuple(row) for row in rows] if torch.distributed.get_rank() == 0 else [],
    }
    dist_checkpointing.save(
        content, str(target), preprocess_common_before_consistancy_check=_without_rows
    )
    if torch.distributed.get_rank() == 0:
        fresh = folder / (TRACKER + ".new")
        fresh.write_text(f"{iteration}\n")
        os.replace(fresh, folder / TRACKER)
    torch.distributed.barrier()


def load(
    folder: Path, chunks: Sequence[Any], optimizer: Any, schedule: Any
) -> tuple[int, list[Row]] | None:
    """Restore the newest checkpoint. A collective.

    Returns:
        Steps taken and the record of the run until then; None if there is no checkpoint.
    """
    tracker = folder / TRACKER
    if not tracker.is_file():
        return None
    source = folder / f"iter_{int(tracker.read_text()):07d}"
    content = dist_checkpointing.load(_content(chunks, optimizer, is_loading=True), str(source))
    for index, chunk in enumerate(chunks):
        chunk.module.load_state_dict(content[f"model{index}"])
    optimizer.load_state_dict(content["optimizer"])
    for inner in optimizer.chained_optimizers:
        megatron_repairs.separate_step_counts(inner.optimizer)
    schedule.load_state_dict(content["opt_param_scheduler"])
    _set_random_state(content["rng_state"])
    return int(content["iteration"]), [Row(*row) for row in content["rows"]]


def _content(chunks: Sequence[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": SHARDING,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    content: dict[str, Any] = {
        f"model{index}": chunk.module.sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(chunks)
    }
    content["optimizer"] = optimizer.sharded_state_dict(
        dict(content), is_loading=is_loading, metadata=metadata
    )
    content["rng_state"] = _random_state()
    return content


def _without_rows(content: dict[str, Any]) -> dict[str, Any]:
    """Times differ between ranks; Megatron wants everything that is not sharded to be equal."""
    return {key: value for key, value in content.items() if key != "rows"}


def _random_state() -> ShardedObject:
    """Of dropout, one per rank."""
    state = {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return ShardedObject("rng_state", state, (size,), (rank,), replica_id=0)


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])

"""DeepSpeed pipelines: every rank holds one stage of a ``PipelineModule``.

Facts about DeepSpeed 0.19 that ds_kfac relies on, each covered by a test:

* the pipeline engine passes ``_take_model_step`` once per batch like every other engine, after
  tied and data-parallel reductions; all its sends and receives are done by then, so collectives
  over all stages are safe;
* output gradients are those of ``loss / micro-batches`` on every stage;
* parameters tied between stages hold the same gradient on each of them, and all copies but the
  first are marked ``ds_pipe_replicated``;
* the norms of ZeRO and of the stage 0 wrappers are reduced over the stages once per parameter
  group, so that stages with different numbers of groups wait for each other for ever;
* module names carry the index of the layer in the whole model (``"5.linear"``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_kfac.hosts.base import Gradients, Groups


def is_pipeline(model: nn.Module) -> bool:
    """Whether a model is DeepSpeed's ``PipelineModule``, of which a rank holds one stage."""
    from deepspeed.pipe import PipelineModule

    return isinstance(model, PipelineModule)


def tied_modules(model: nn.Module) -> dict[str, str] | None:
    """Modules that several pipeline layers share, by name, and why they are left out.

    Every stage with a copy has to apply the same update. The answer does not depend on the
    number of stages, although layers that share a module may end up in one.

    Returns:
        None for models that are not pipelines.
    """
    if not is_pipeline(model):
        return None
    tied = model.get_submodule("tied_modules")
    return {
        f"tied_modules.{key}": f"tied between pipeline layers (TiedLayerSpec {key!r})"
        for key, _ in tied.named_children()
    }


def stage_groups(engine: Any) -> Groups:
    """Copies of this stage share its layers; all ranks share the model."""
    return Groups(data=engine.grid.get_data_parallel_group(), model=torch.distributed.group.WORLD)


def stage_gradients(gradients: Gradients, *, model: nn.Module, ranks: int) -> Gradients:
    """Gradients of a stage as a part of the whole model's.

    Args:
        gradients: As the engine stores them; whole ones are the same on all copies.
        model: The stage.
        ranks: Copies of the stage.
    """
    duplicates = (
        name
        for name, param in model.named_parameters()
        if getattr(param, "ds_pipe_replicated", False)
    )
    share = 1.0 if gradients.partial else 1.0 / ranks
    return replace(gradients, partial=True, share=share, duplicates=frozenset(duplicates))


@contextmanager
def unmeasured(optimizer: Any) -> Iterator[None]:
    """Keep an optimizer wrapper from measuring over all stages what it will not clip.

    Optimizer type KFAC has one parameter group on a stage without layers, two elsewhere.
    """
    measures = hasattr(optimizer, "scaled_global_norm")
    if measures:
        optimizer.scaled_global_norm = _no_norm
    # FP16_Optimizer and FP16_UnfusedOptimizer look at their own stage alone, without an mpu.
    mpu = getattr(optimizer, "mpu", None) if hasattr(optimizer, "loss_scale_config") else None
    if mpu is not None:
        optimizer.mpu = None
    try:
        yield
    finally:
        if measures:
            del optimizer.scaled_global_norm
        if mpu is not None:
            optimizer.mpu = mpu


def _no_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(())

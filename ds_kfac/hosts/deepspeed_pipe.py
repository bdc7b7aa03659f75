"""DeepSpeed pipelines: every rank holds one stage of a ``PipelineModule``.

Facts about DeepSpeed 0.19 that this file relies on, each covered by a test:

* the pipeline engine passes ``_take_model_step`` once per batch like every other engine, after
  tied and data-parallel reductions; all its sends and receives are done by then, so collectives
  over all stages are safe;
* output gradients are those of ``loss / micro-batches`` on every stage;
* ZeRO's own norm is reduced over the stages once per parameter group, so that stages with
  different numbers of groups wait for each other for ever;
* parameters tied between stages hold the same gradient on each of them, and all copies but the
  first are marked ``ds_pipe_replicated``;
* module names carry the index of the layer in the whole model (``"5.linear"``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ds_kfac.hosts.base import Gradients, Groups
from ds_kfac.hosts.deepspeed import DeepSpeedHost
from ds_kfac.hosts.deepspeed_support import tied_stage_modules


class PipelineHost(DeepSpeedHost):
    """A DeepSpeed pipeline engine with ZeRO stage 0 or 1.

    Layers are shared out among the data-parallel ranks of their stage. Votes, the gradient's
    norm and the KL clip cover the whole model: a stage without layers takes part in them.

    Args:
        engine: The initialised engine.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.groups = Groups(
            data=engine.grid.get_data_parallel_group(), model=torch.distributed.group.WORLD
        )
        self._duplicates = frozenset(
            name
            for name, param in engine.module.named_parameters()
            if getattr(param, "ds_pipe_replicated", False)
        )

    def excluded(self) -> Mapping[str, str]:
        """Tied modules: every stage with a copy has to apply the same update."""
        return tied_stage_modules(self.model)

    def gradients(self) -> Gradients:
        """As the engine stores them; whole ones are the same on all ranks of the stage."""
        gradients = super().gradients()
        return replace(
            gradients,
            partial=True,
            share=1.0 if gradients.partial else 1.0 / self._ranks,
            duplicates=self._duplicates,
        )

    @contextmanager
    def clipping_done(self) -> Iterator[None]:
        """Keep the engine from clipping again, and from measuring what nobody clips.

        Optimizer type KFAC has one parameter group on a stage without layers, two elsewhere.
        """
        optimizer = self._engine.optimizer
        measures = hasattr(optimizer, "scaled_global_norm")
        if measures:
            optimizer.scaled_global_norm = _no_norm
        try:
            with super().clipping_done():
                yield
        finally:
            if measures:
                del optimizer.scaled_global_norm


def _no_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(())

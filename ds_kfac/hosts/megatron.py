"""megatron-core: ``ds_kfac.megatron.attach``.

The preconditioner works inside the optimizer's ``prepare_grads``: gradients are reduced,
unscaled and checked for overflow by then, and not yet clipped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.ledger import Ledger
from ds_kfac.comm.vote import together
from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError, UnsupportedError
from ds_kfac.hosts import megatron_model, megatron_step, megatron_support
from ds_kfac.hosts.base import Expert, Gradients
from ds_kfac.hosts.compatibility import is_own_optimizer
from ds_kfac.hosts.megatron_gradients import Storage, inner_optimizers
from ds_kfac.layers.shards import TensorCut
from ds_kfac.plan.topology import Layout
from ds_kfac.preconditioner import KFAC

logger = logging.getLogger(__name__)


def attach(
    model_chunks: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    config: KFACConfig | Mapping[str, Any],
) -> KFAC | None:
    """Attach K-FAC to a megatron-core training loop.

    Call it on every rank, after the optimizer has been built and before a checkpoint is loaded.

    Args:
        model_chunks: The model, or the list of this rank's model chunks, each in megatron-core's
            ``DistributedDataParallel``.
        optimizer: What ``get_megatron_optimizer`` returned.
        config: The ``kfac`` settings.

    Returns:
        The preconditioner, or None when ``enabled`` is false.

    Raises:
        ConfigError: Wrong settings, or an optimizer with K-FAC already.
        CoverageError: Nothing to precondition on any stage.
        UnsupportedError: Something of Megatron that K-FAC does not go with; on every rank.
    """
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    world = Communicator(dist.group.WORLD, Ledger())
    parsed, model = together(world, lambda: _checked(chunks, optimizer, config))
    if not parsed.enabled:
        return None
    host = MegatronHost(chunks, model, optimizer)
    kfac = KFAC(host, parsed, own_optimizer=_is_own(optimizer))
    megatron_step.install(kfac, host, chunks, optimizer)
    return kfac


def _checked(
    chunks: list[Any], optimizer: Any, config: KFACConfig | Mapping[str, Any]
) -> tuple[KFACConfig, nn.Module]:
    parsed = KFACConfig.parse(config)
    if not parsed.enabled:
        return parsed, nn.Module()
    if megatron_step.is_attached(optimizer):
        raise ConfigError("E212", "this optimizer has K-FAC already; call its detach() first")
    megatron_support.check(chunks, optimizer, parsed)
    return megatron_model.with_fused_parts(parsed, chunks), megatron_model.whole(chunks)


def _is_own(optimizer: Any) -> bool:
    inner = [item.optimizer for item in inner_optimizers(optimizer) if item is not None]
    return bool(inner) and all(is_own_optimizer(item) for item in inner)


class MegatronHost:
    """Model chunks of one rank, and Megatron's optimizer of them.

    Args:
        chunks: Model chunks in their wrappers.
        model: The same modules under their names in the whole model.
        optimizer: Megatron's optimizer.

    Attributes:
        late_scale: What gradients of the step were multiplied by after the backward pass.
        threshold: ``clip_grad``, while the optimizer is kept from clipping; None otherwise.
    """

    def __init__(self, chunks: Sequence[Any], model: nn.Module, optimizer: Any) -> None:
        self.model = model
        self.groups = megatron_model.groups(chunks, model)
        self._optimizer = optimizer
        self._config = megatron_model.bare(chunks[0]).config
        self._per_token = bool(getattr(self._config, "calculate_per_token_loss", False))
        self._ranks = dist.get_world_size(self.groups.data)
        self._storage = Storage(optimizer, model, self.groups, self.experts())
        self._loss_scale: float | None = None
        self.late_scale = 1.0
        self.threshold: float | None = None

    def excluded(self) -> Mapping[str, str]:
        """Output layers."""
        return megatron_model.output_layers(self.model)

    def tensor_cut(self, *, blocks: bool) -> TensorCut | None:
        """Column- and row-parallel layers."""
        tokens = bool(getattr(self._config, "sequence_parallel", False))
        return megatron_model.tensor_cut(self.model, self.groups, blocks=blocks, tokens=tokens)

    def sizes(self) -> Mapping[str, int]:
        """Of cut embeddings and output layers, and of tied copies."""
        return megatron_model.sizes(self.model, self.groups)

    def experts(self) -> Mapping[str, Expert]:
        """This rank's experts."""
        return megatron_model.experts(self.model)

    def uncalled(self) -> Mapping[str, str]:
        """Nothing: routers have their weight outside of any layer."""
        return {}

    def layouts(self, names: Sequence[str]) -> dict[str, Layout]:
        """From the optimizer's map of shards."""
        return self._storage.layouts(names)

    def gradients(self) -> Gradients:
        """What clipping and the inner optimizer will read."""
        return self._storage.gradients()

    def writable(self) -> Mapping[str, Tensor]:
        """The same tensors, which are the optimizer's own."""
        return self._storage.views()

    def gradient_dtype(self) -> Any:
        """That of main gradients."""
        return self._storage.dtype()

    def after_write(self) -> None:
        """Nothing is cached."""

    def output_scale(self) -> float:
        """Undo the loss scale, apply the average over data-parallel ranks.

        Micro-batches are in the loss. With ``calculate_per_token_loss`` gradients are summed,
        and divided once the number of tokens is known.
        """
        if self._loss_scale is None:
            # Reading the scale waits for the device: once per step, not once per layer.
            self._loss_scale = float(self._optimizer.get_loss_scale())
        return 1.0 / (self._loss_scale * (1 if self._per_token else self._ranks))

    def begin_step(self) -> None:
        """Forget what was read for the last step."""
        self._loss_scale, self.late_scale = None, 1.0

    def stored_scale(self) -> float:
        """Gradients are unscaled by the time they are asked for."""
        return 1.0

    def scale_adapts(self) -> bool:
        """With a dynamic loss scale."""
        scalers = [getattr(item, "grad_scaler", None) for item in self._inner()]
        return any(type(scaler).__name__ == "DynamicGradScaler" for scaler in scalers)

    def gradients_stay_in_parameters(self) -> bool:
        """They move to ``main_grad`` during the backward pass."""
        return False

    def micro_batch_is_last(self) -> bool:
        """Not known: schedules overlap micro-batches.

        Raises:
            UnsupportedError: Always (E155).
        """
        raise UnsupportedError(
            "E155",
            "kfac.factor_micro_batches='last' is not available with Megatron, whose schedules "
            "overlap micro-batches; use 'all', and factor_token_fraction to take fewer rows",
        )

    def clip_threshold(self) -> float:
        """``clip_grad`` of the optimizer's configuration."""
        if self.threshold is not None:
            return self.threshold
        return float(getattr(self._optimizer.config, "clip_grad", 0.0) or 0.0)

    def learning_rates(self) -> Mapping[str, float]:
        """From the inner optimizers' parameter groups."""
        return self._storage.learning_rates()

    def announce(self, text: str) -> None:
        """Through Python's logging, at level INFO."""
        logger.info("ds_kfac\n%s", text)

    def _inner(self) -> list[Any]:
        return [item for item in inner_optimizers(self._optimizer) if item is not None]

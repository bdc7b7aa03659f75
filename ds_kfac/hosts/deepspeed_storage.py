"""What the ways of DeepSpeed to keep gradients have in common, and loss scales."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_kfac.hosts.base import Gradients
from ds_kfac.plan.topology import Layout


class Storage:
    """Where one kind of engine keeps its reduced gradients; subclasses know the place.

    Args:
        engine: The initialised engine.
    """

    #: Slices of different ranks add up to the model.
    partial = False
    #: Gradients wait in ``param.grad`` for the step.
    in_parameters = False

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        self._scale: float | None = None

    def layouts(self, names: Sequence[str]) -> dict[str, Layout]:
        """Where the gradient of each named parameter lives."""
        raise NotImplementedError

    def views(self) -> dict[str, Tensor]:
        """Flat local gradients by parameter name, as stored; no copy."""
        raise NotImplementedError

    def gradients(self) -> Gradients:
        """The stored gradients."""
        return Gradients(self.views(), partial=self.partial)

    def writable(self) -> Mapping[str, Tensor]:
        """Views that the engine's optimizer will consume, in the widest dtype it allows."""
        return self.views()

    def dtype(self) -> torch.dtype | None:
        """Dtype of stored gradients; None is that of the parameters."""
        return None

    def after_write(self) -> None:
        """Bring scale and cached values in line with what was written."""
        ratio = self.consumed_scale() / self.stored_scale()
        views = list(self.views().values())
        if ratio != 1.0 and views:
            torch._foreach_mul_(views, ratio)
        self.refresh_caches()

    def refresh_caches(self) -> None:
        """Recompute what the optimizer remembers about its gradients."""

    def stored_scale(self) -> float:
        """The loss scale in force in this step's backward passes."""
        if self._scale is None:
            # A gradient scaler's value is on the device: ask once per step.
            self._scale = loss_scale(self._optimizer)
        return self._scale

    def starts_anew(self) -> bool:
        """Whether a backward pass now takes the place of the step's earlier ones."""
        return False

    def scale_adapts(self) -> bool:
        """Whether the loss scale is dynamic."""
        if getattr(self._optimizer, "torch_autocast_gradscaler", None) is not None:
            return True
        return bool(getattr(getattr(self._optimizer, "loss_scaler", None), "dynamic", False))

    def consumed_scale(self) -> float:
        """What the optimizer will divide by: not always the scale of the backward passes.

        ZeRO updates a dynamic loss scale before it divides by it: where the scale doubles,
        its update is half of what it should be (as of DeepSpeed 0.19).
        """
        return next_loss_scale(self._optimizer)

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Around the engine's step of a healthy step."""
        yield

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Around the engine's step of a step to be dropped.

        Every wrapper drops steps with infinite gradients, but none sees bad statistics, nor
        all of them every bad gradient; so it is shown one it cannot miss.
        """
        for view in self.writable().values():
            view[:1] = float("inf")
        self.refresh_caches()
        yield

    def end_step(self) -> None:
        """After the engine's step, applied or dropped."""
        self._scale = None

    def forget_rehearsal(self) -> None:
        """Undo a step that the optimizer took before training, if it is of that kind."""

    def detach(self) -> None:
        """Undo whatever was changed about the engine."""


class ZeroStorage(Storage):
    """Storage of a ZeRO optimizer: gradients in slices, under torch autocast with a scaler.

    ZeRO leaves a step with an infinite gradient before a gradient scaler has seen it, so that
    the scale stays where it is and every later step overflows as well (as of DeepSpeed 0.19).
    """

    partial = True

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Lower the scale as the scaler would have done."""
        scaler = self._optimizer.torch_autocast_gradscaler
        before = None if scaler is None else float(scaler.get_scale())
        with super().skipping():
            yield
        if scaler is not None and before == float(scaler.get_scale()):
            scaler.update(before * scaler.get_backoff_factor())


def parameter_names(engine: Any) -> dict[int, str]:
    """Name of each trainable parameter by ``id``."""
    return {id(p): name for name, p in engine.module.named_parameters() if p.requires_grad}


def loss_scale(optimizer: Any) -> float:
    """Loss scale of a ZeRO or BF16 optimizer, whoever keeps it; 1 where there is none."""
    scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
    if scaler is not None:
        return float(scaler.get_scale())
    return float(getattr(optimizer, "loss_scale", 1.0))


def next_loss_scale(optimizer: Any) -> float:
    """Loss scale that a ZeRO optimizer divides by, if the coming step succeeds."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if getattr(optimizer, "torch_autocast_gradscaler", None) is not None or scaler is None:
        return loss_scale(optimizer)
    if optimizer.custom_loss_scaler or not scaler.dynamic:
        return loss_scale(optimizer)
    # The scaler itself says what its update will do; it is plain numbers, so a copy is safe.
    rehearsal = copy.copy(scaler)
    rehearsal.update_scale(False)
    return float(rehearsal.loss_scale)

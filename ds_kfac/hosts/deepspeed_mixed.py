"""Whole gradients on every rank: stage 0 in all precisions, and ``BF16_Optimizer``.

Facts about DeepSpeed 0.19 that this file relies on, each covered by a test:

* stage 0 without a wrapper (fp32, torch autocast): ``param.grad``; under fp16 autocast times
  the scale of ``engine.torch_autocast_z0_gradscaler``;
* stage 0, fp16 and bf16 (``FP16_Optimizer``, ``FP16_UnfusedOptimizer``): ``param.grad`` in
  that dtype. With fp16 the gradient is divided by a loss scale that the loss was never
  multiplied by. Their construction takes a step with zero gradients, which decays weights;
* ``BF16_Optimizer``: ``fp32_groups_gradients[i][j]``, whole and the same on every rank. The
  norm that decides about overflow is taken over the whole without a reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_kfac.hosts.base import flat_gradients
from ds_kfac.hosts.deepspeed_storage import Storage, parameter_names
from ds_kfac.plan.topology import Layout


class ReplicatedGradients(Storage):
    """Stage 0 with a bare torch optimizer: every rank holds every gradient in ``param.grad``."""

    in_parameters = True

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._parameters = dict(engine.module.named_parameters())  # some may be frozen for now

    def layouts(self, names: Sequence[str]) -> dict[str, Layout]:
        """Replicated."""
        return {name: Layout(replicated=True) for name in names}

    def views(self) -> dict[str, Tensor]:
        """Flat views of ``param.grad``."""
        return flat_gradients(self._parameters)

    def stored_scale(self) -> float:
        """That of the gradient scaler, if there is one."""
        scaler = getattr(self._engine, "torch_autocast_z0_gradscaler", None)
        if self._scale is None:
            self._scale = 1.0 if scaler is None else float(scaler.get_scale())
        return self._scale

    def scale_adapts(self) -> bool:
        """With a gradient scaler."""
        return getattr(self._engine, "torch_autocast_z0_gradscaler", None) is not None

    def consumed_scale(self) -> float:
        """The scaler divides before it updates itself."""
        return self.stored_scale()

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """A bare optimizer applies whatever it finds, so its step does nothing for once."""
        optimizer = self._optimizer
        step = optimizer.step
        optimizer.step = _do_nothing
        optimizer.overflow = True  # the engine counts the step as skipped
        try:
            yield
        finally:
            optimizer.step = step
            del optimizer.overflow


class HalfPrecisionGradients(ReplicatedGradients):
    """Stage 0 in fp16 or bf16: ``param.grad`` has to keep the parameter's dtype."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._config = self._optimizer.loss_scale_config
        self._loss_is_scaled: bool | None = None
        if self._config.use_grad_scaling:
            self._measure_loss_scale()

    def stored_scale(self) -> float:
        """The wrapper's loss scale if the loss was multiplied by it, which is measured."""
        return float(self._config.cur_scale) if self._loss_is_scaled else 1.0

    def scale_adapts(self) -> bool:
        """As configured."""
        return bool(self._config.dynamic_loss_scale)

    def after_write(self) -> None:
        """Keep directions inside the dtype: infinity would look like an overflow."""
        views = list(self.views().values())
        if views and views[0].dtype == torch.float16:
            limit = torch.finfo(torch.float16).max
            torch._foreach_clamp_min_(views, -limit)
            torch._foreach_clamp_max_(views, limit)

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Where the loss was not scaled, gradients must not be divided by the scale."""
        if self._loss_is_scaled:
            yield
            return
        self._optimizer.unscale_and_clip_grads = _scale_one
        try:
            yield
        finally:
            del self._optimizer.unscale_and_clip_grads

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """As every wrapper."""
        with Storage.skipping(self):
            yield

    def forget_rehearsal(self) -> None:
        """Undo the decay, and the count that bias corrections would take it for."""
        self._optimizer.refresh_fp32_params()
        self._engine.basic_optimizer.state.clear()

    def detach(self) -> None:
        """Stop measuring."""
        self._engine.__dict__.pop("backward", None)

    def _measure_loss_scale(self) -> None:
        """Compare the gradient that reaches the user's loss with the loss scale, once."""
        original = self._engine.backward

        def backward(loss: Any, *args: Any, scale_wrt_gas: bool = True, **kwargs: Any) -> Any:
            if self._loss_is_scaled is None and isinstance(loss, Tensor) and loss.requires_grad:
                steps = self._engine.gradient_accumulation_steps() if scale_wrt_gas else 1
                loss.register_hook(  # type: ignore[no-untyped-call]
                    lambda g: self._note_multiplier(float(g.sum()) * steps)
                )
            return original(loss, *args, scale_wrt_gas=scale_wrt_gas, **kwargs)

        self._engine.backward = backward

    def _note_multiplier(self, multiplier: float) -> None:
        scale = float(self._config.cur_scale)
        if scale != 1.0:  # at scale 1 both are the same: ask again
            self._loss_is_scaled = abs(multiplier - scale) < abs(multiplier - 1.0)


class Bf16Gradients(Storage):
    """``BF16_Optimizer``: whole flat gradients in the accumulation dtype, on every rank."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._names = parameter_names(engine)

    def layouts(self, names: Sequence[str]) -> dict[str, Layout]:
        """Replicated: a rank applies its slice only, but the norm is taken over the whole."""
        return {name: Layout(replicated=True) for name in names}

    def views(self) -> dict[str, Tensor]:
        """The accumulated gradients."""
        optimizer = self._optimizer
        return {
            self._names[id(param)]: optimizer.fp32_groups_gradients[i][j].view(-1)
            for i, group in enumerate(optimizer.bf16_groups)
            for j, param in enumerate(group)
            if optimizer.fp32_groups_has_gradients[i][j] and id(param) in self._names
        }

    def dtype(self) -> torch.dtype | None:
        """The accumulation dtype."""
        dtype: torch.dtype = self._optimizer.grad_acc_dtype
        return dtype

    def stored_scale(self) -> float:
        """bf16 needs no loss scale."""
        return 1.0

    def consumed_scale(self) -> float:
        """bf16 needs no loss scale."""
        return 1.0


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _scale_one(*args: Any, **kwargs: Any) -> float:
    return 1.0

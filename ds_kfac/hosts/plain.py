"""Plain PyTorch and DistributedDataParallel: the reference host.

Everything happens in the optimizer's public step hooks, so that learning-rate schedulers,
gradient scalers and profilers that wrap ``optimizer.step`` keep working.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError, UnsupportedError
from ds_kfac.hosts.base import Gradients, Groups, flat_gradients
from ds_kfac.hosts.compatibility import check_base_optimizer, is_own_optimizer
from ds_kfac.plan.topology import Layout
from ds_kfac.preconditioner import KFAC

logger = logging.getLogger(__name__)

_MARK = "_ds_kfac_attached"
_REFUSED_WRAPPERS = {
    "FullyShardedDataParallel": "DeepSpeed ZeRO to shard",
    "FSDPModule": "DeepSpeed ZeRO to shard",
    "DataParallel": "DistributedDataParallel",
}


class PlainHost:
    """A model whose gradients are in ``param.grad``, whole on every rank.

    Args:
        model: The bare model.
        optimizer: The base optimizer.
        groups: Process groups; gradients are averaged over ``groups.data``.
        grad_scaler: The ``torch.amp.GradScaler`` in use, if any.
        wrapper: The model's ``DistributedDataParallel``, if it has one.

    Attributes:
        stepped: The optimizer was called since the gradient scaler's last update.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Groups,
        grad_scaler: torch.amp.GradScaler | None,
        wrapper: DistributedDataParallel | None = None,
    ) -> None:
        self._wrapper = wrapper
        self._warned = False
        self.model = model
        self.groups = groups
        self._optimizer = optimizer
        self._scaler = grad_scaler
        self._loss_scale: float | None = None
        self._stored_scale = 1.0
        self.stepped = False
        self._ranks = 1 if groups.data is None else dist.get_world_size(groups.data)
        self._parameters = dict(model.named_parameters())  # frozen ones may be trained later

    def layouts(self, names: Sequence[str]) -> dict[str, Layout]:
        """Every rank holds whole gradients."""
        return {name: Layout(replicated=True) for name in names}

    def gradients(self) -> Gradients:
        """Flat views of ``param.grad``."""
        return Gradients(self.writable(), partial=False)

    def writable(self) -> Mapping[str, Tensor]:
        """Flat views of ``param.grad``, which has the parameter's dtype."""
        return flat_gradients(self._parameters)

    def gradient_dtype(self) -> torch.dtype | None:
        """That of the parameters."""
        return None

    def after_write(self) -> None:
        """Nothing is cached."""

    def output_scale(self) -> float:
        """Undo the gradient scaler, apply the average over ranks."""
        if self._scaler is None:
            return 1.0 / self._ranks
        if self._loss_scale is None:
            # Reading the scale waits for the device: once per step, not once per layer.
            self._loss_scale = float(self._scaler.get_scale())
        return 1.0 / (self._loss_scale * self._ranks)

    def loss_scale_changed(self) -> None:
        """Forget the cached scale."""
        self._loss_scale = None

    def stored_scale(self) -> float:
        """1, unless the optimizer undoes the gradient scaler inside its step."""
        return self._stored_scale

    def scale_adapts(self) -> bool:
        """With a gradient scaler."""
        return self._scaler is not None

    def gradients_stay_in_parameters(self) -> bool:
        """They do."""
        return True

    def enter_step(self, *, half_gradients: bool) -> None:
        """Find out whether gradients are still scaled: fused optimizers unscale them themselves.

        Args:
            half_gradients: Layers have got fp16 gradients, which hardly work without a scaler.

        Raises:
            ConfigError: They are, by a gradient scaler that :func:`attach` was not told about.
            UnsupportedError: Ranks may run out of inputs one by one (E154).
        """
        # Private to torch; without it nothing is refused, and join() stays unsupported.
        join = getattr(self._wrapper, "_join_config", None)
        if getattr(join, "enable", False):
            raise UnsupportedError(
                "E154",
                "DistributedDataParallel.join() is not supported: a rank that has run out of "
                "inputs takes no part in K-FAC's collectives. Give all ranks the same number of "
                "batches (DistributedSampler with drop_last)",
            )
        if half_gradients and self._scaler is None and not self._warned:
            self._warned = True
            logger.warning(
                "KFAC-W114 layers have fp16 gradients, but no gradient scaler was passed to "
                "ds_kfac.attach. If you use one, pass it (grad_scaler=scaler): statistics are "
                "taken from scaled gradients"
            )
        # What torch.amp.GradScaler hands to such optimizers; None or absent: unscaled already.
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is not None and self._scaler is None:
            raise ConfigError(
                "E213",
                "a gradient scaler drives this optimizer, and statistics are taken from scaled "
                "gradients: pass it to ds_kfac.attach(..., grad_scaler=scaler)",
            )
        self._stored_scale = 1.0 if scale is None else float(scale)

    def micro_batch_is_last(self) -> bool:
        """DDP is told so, by leaving out ``no_sync()``; other loops tell nobody."""
        if self._wrapper is None:
            raise UnsupportedError(
                "E155",
                "factor_micro_batches='last' needs to know which micro-batch is the last: use "
                "DistributedDataParallel with no_sync() for the others, a DeepSpeed engine, or "
                "'all' with a smaller factor_token_fraction",
            )
        return bool(self._wrapper.require_backward_grad_sync)

    def clip_threshold(self) -> float:
        """Whoever clips does it before the optimizer steps."""
        return 0.0

    def announce(self, text: str) -> None:
        """Through Python's logging, at level INFO."""
        logger.info("%s", text)

    def learning_rates(self) -> Mapping[str, float]:
        """From the optimizer's parameter groups, which loading its state replaces."""
        rates = {
            id(param): float(group["lr"])
            for group in self._optimizer.param_groups
            for param in group["params"]
        }
        return {
            name: rates[id(param)] for name, param in self._parameters.items() if id(param) in rates
        }


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: KFACConfig | Mapping[str, Any],
    *,
    groups: Groups | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> KFAC | None:
    """Attach K-FAC to a plain PyTorch or DDP training loop.

    Args:
        model: The model, or its ``DistributedDataParallel`` wrapper.
        optimizer: The base optimizer, which consumes the directions.
        config: The ``kfac`` settings.
        groups: Process groups when gradients are averaged by other means than DDP.
            ``Groups()`` says that this process trains alone.
        grad_scaler: The gradient scaler of fp16 autocast training.

    Returns:
        The preconditioner, or None when ``enabled`` is false.

    Raises:
        ConfigError: Wrong settings, or gradients of which it is unclear how they are averaged.
        CoverageError: Nothing to precondition.
        UnsupportedError: The model's wrapper or the optimizer is not supported.
    """
    config = KFACConfig.parse(config)
    if not config.enabled:
        return None
    if groups is not None and groups.tensor is not None:
        raise UnsupportedError(
            "E154",
            "ds_kfac.attach does not know how layers are cut over groups.tensor; use DeepSpeed "
            "AutoTP, or leave groups.tensor out for models that are whole on every rank",
        )
    if getattr(optimizer, _MARK, False):
        raise ConfigError("E212", "this optimizer has K-FAC already; call its detach() first")
    bare, groups = _unwrap(model, groups)
    check_base_optimizer(optimizer, config)
    wrapper = model if isinstance(model, DistributedDataParallel) else None
    host = PlainHost(bare, optimizer, groups, grad_scaler, wrapper)
    kfac = KFAC(host, config, own_optimizer=is_own_optimizer(optimizer))
    _install(kfac, optimizer, host)
    if grad_scaler is not None:
        _watch_scaler(kfac, host, grad_scaler)
    return kfac


def _unwrap(model: nn.Module, groups: Groups | None) -> tuple[nn.Module, Groups]:
    if isinstance(model, DistributedDataParallel):
        bare: nn.Module = model.module
        return bare, groups or Groups(data=model.process_group)
    # By base class: fully_shard gives every module it wraps a class of its own.
    bases = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    for name, instead in _REFUSED_WRAPPERS.items():
        if name in bases:
            raise UnsupportedError("E151", f"{name} is not supported; use {instead}")
    if groups is None and dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1:
            raise ConfigError(
                "E204",
                f"torch.distributed runs with {dist.get_world_size()} ranks but the model is a "
                f"bare {type(model).__name__}: wrap it in DistributedDataParallel, pass "
                "groups=ds_kfac.Groups(data=...) if gradients are averaged by other means, or "
                "groups=ds_kfac.Groups() if every process trains alone",
            )
    return model, groups or Groups()


class _StepHooks:
    """Pre and post hook of ``optimizer.step`` around one step."""

    def __init__(self, kfac: KFAC, host: PlainHost) -> None:
        self._kfac = kfac
        self._host = host
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._healthy = True

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Precondition; on a bad step hide the gradients, which optimizers then skip."""
        self._healthy = self._kfac.before_step(lambda: self._prepare((*args, *kwargs.values())))
        if self._healthy:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._hidden = [(param, param.grad) for param in params if param.grad is not None]
        for param, _ in self._hidden:
            param.grad = None

    def _prepare(self, arguments: tuple[Any, ...]) -> None:
        if any(callable(value) for value in arguments):
            raise UnsupportedError(
                "E152", "optimizer.step(closure) is not supported: call backward before step()"
            )
        self._host.enter_step(half_gradients=self._kfac.half_gradients)

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Close the step and give hidden gradients back: the user may want to see them."""
        for param, grad in self._hidden:
            param.grad = grad
        self._hidden = []
        self._host.stepped = True
        self._kfac.after_step(applied=self._healthy)


def _install(kfac: KFAC, optimizer: torch.optim.Optimizer, host: PlainHost) -> None:
    hooks = _StepHooks(kfac, host)
    setattr(optimizer, _MARK, True)
    kfac.on_detach(lambda: delattr(optimizer, _MARK))
    before = optimizer.register_step_pre_hook(hooks.before)
    after = optimizer.register_step_post_hook(hooks.after)
    kfac.on_detach(before.remove)
    kfac.on_detach(after.remove)
    _watch_zero_grad(kfac, optimizer)


def _watch_zero_grad(kfac: KFAC, optimizer: torch.optim.Optimizer) -> None:
    """Drop the statistics of gradients that are thrown away: a batch that was given up."""
    own = optimizer.__dict__.get("zero_grad")
    original = optimizer.zero_grad

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        kfac.discard_statistics()
        original(*args, **kwargs)

    def undo() -> None:
        if optimizer.__dict__.get("zero_grad") is not zero_grad:
            return  # somebody wrapped it again; what is detached has nothing to drop
        if own is None:
            del optimizer.zero_grad
        else:
            optimizer.zero_grad = own  # type: ignore[method-assign]

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    kfac.on_detach(undo)


class _ScalerUpdate:
    """``scaler.update`` for all preconditioners that share a gradient scaler.

    One wrapper for all of them, so that they can be detached in any order.

    Args:
        scaler: The scaler whose ``update`` this replaces.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._own = scaler.__dict__.get("update")
        self._original = scaler.update
        self._watching: list[tuple[KFAC, PlainHost]] = []
        scaler.update = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Drop the statistics of steps that the scaler skipped: it never calls the optimizer."""
        for kfac, host in self._watching:
            if not host.stepped:
                kfac.discard_step()
        self._original(*args, **kwargs)
        for _, host in self._watching:
            host.loss_scale_changed()
            host.stepped = False

    def add(self, kfac: KFAC, host: PlainHost) -> None:
        """Watch for another preconditioner."""
        self._watching.append((kfac, host))

    def remove(self, kfac: KFAC) -> None:
        """Watch no longer; the last one leaves the scaler as it was."""
        self._watching = [pair for pair in self._watching if pair[0] is not kfac]
        if self._watching or self._scaler.__dict__.get("update") is not self:
            return
        if self._own is None:
            del self._scaler.update
        else:
            self._scaler.update = self._own


def _watch_scaler(kfac: KFAC, host: PlainHost, scaler: torch.amp.GradScaler) -> None:
    watch = scaler.__dict__.get("update")
    if not isinstance(watch, _ScalerUpdate):
        watch = _ScalerUpdate(scaler)
    watch.add(kfac, host)
    kfac.on_detach(lambda: watch.remove(kfac))

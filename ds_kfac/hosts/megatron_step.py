"""What ds_kfac wraps of a Megatron optimizer and of its model chunks.

All attributes are those of instances: ``ChainedOptimizer`` and the optimizers inside call
``self.prepare_grads()`` from ``step()``, and training loops call ``optimizer.step()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ds_kfac.hosts import megatron_checkpoint
from ds_kfac.hosts.megatron_gradients import inner_optimizers
from ds_kfac.preconditioner import KFAC

if TYPE_CHECKING:
    from ds_kfac.hosts.megatron import MegatronHost

_MARK = "_ds_kfac_attached"


def is_attached(optimizer: Any) -> bool:
    """Whether an optimizer has K-FAC."""
    return bool(getattr(optimizer, _MARK, False))


def install(kfac: KFAC, host: MegatronHost, chunks: Sequence[Any], optimizer: Any) -> None:
    """Put the preconditioner between the overflow check and clipping."""
    step = _Step(kfac, host, optimizer)
    setattr(optimizer, _MARK, True)
    kfac.on_detach(lambda: delattr(optimizer, _MARK))
    for name in ("prepare_grads", "get_grad_norm", "step", "zero_grad"):
        _wrap(optimizer, name, getattr(step, name), kfac)
    # All chunks are scaled alike, by one over the number of tokens of the global batch.
    _wrap(chunks[0], "scale_gradients", step.scale_gradients, kfac)
    megatron_checkpoint.install(kfac, optimizer, _wrap)


class _Step:
    """Methods of an optimizer around the ones it had; each is given its original first."""

    def __init__(self, kfac: KFAC, host: MegatronHost, optimizer: Any) -> None:
        self._kfac = kfac
        self._host = host
        self._optimizer = optimizer
        self._preconditioned = False

    def zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A batch begins, or begins anew: its predecessor may have been given up."""
        self._kfac.discard_statistics()
        self._host.begin_step()
        return original(*args, **kwargs)

    def scale_gradients(self, original: Callable[..., Any], factor: Any, *args: Any) -> Any:
        """Gradients are divided by the number of tokens, which hooks did not know."""
        self._host.late_scale *= float(factor)
        return original(factor, *args)

    def prepare_grads(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Whether the step has to be dropped; if not, directions stand where gradients were."""
        if original(*args, **kwargs):
            return True
        with torch.no_grad():
            self._preconditioned = self._kfac.before_step(self._finish_statistics)
        return not self._preconditioned

    def get_grad_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Norm of the raw gradient: users watch it, and a direction is no gradient."""
        norm = self._kfac.grad_norm
        return float(norm) if self._preconditioned and norm is not None else original()

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One step of the optimizer."""
        self._preconditioned = False
        with self._unclipped():
            applied, norm, zeros = original(*args, **kwargs)
        if self._preconditioned and self._kfac.grad_norm is not None:
            norm = float(self._kfac.grad_norm)
        self._preconditioned = False
        self._kfac.after_step(applied=bool(applied))
        self._host.begin_step()
        return applied, norm, zeros

    def _finish_statistics(self) -> None:
        if self._host.late_scale != 1.0:
            self._kfac.rescale_statistics(self._host.late_scale)

    @contextmanager
    def _unclipped(self) -> Iterator[None]:
        """Keep the optimizer from clipping: the raw gradient was, and a direction is none."""
        inner = [item for item in inner_optimizers(self._optimizer) if item is not None]
        configs = {id(item.config): item.config for item in (self._optimizer, *inner)}
        thresholds = {key: config.clip_grad for key, config in configs.items()}
        self._host.threshold = float(self._optimizer.config.clip_grad or 0.0)
        for config in configs.values():
            config.clip_grad = 0.0
        try:
            yield
        finally:
            self._host.threshold = None
            for key, config in configs.items():
                config.clip_grad = thresholds[key]


def _wrap(owner: Any, name: str, replacement: Callable[..., Any], kfac: KFAC) -> None:
    own, original = owner.__dict__.get(name), getattr(owner, name)
    attached = [True]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs) if attached else original(*args, **kwargs)

    def undo() -> None:
        attached.clear()
        if owner.__dict__.get(name) is not wrapper:
            return  # somebody has wrapped it again, and keeps calling what passes on
        if own is None:
            owner.__dict__.pop(name)
        else:
            setattr(owner, name, own)

    setattr(owner, name, wrapper)
    kfac.on_detach(undo)

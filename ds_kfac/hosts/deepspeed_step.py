"""What ds_kfac wraps of an engine, and where the base optimizer keeps a parameter's settings."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_kfac.capture.hooks import sessions
from ds_kfac.preconditioner import KFAC

if TYPE_CHECKING:
    from ds_kfac.hosts.deepspeed import DeepSpeedHost


logger = logging.getLogger(__name__)


def replace_earlier(module: nn.Module) -> None:
    """Take the K-FAC of an earlier engine off the model.

    Trainers build a new engine on the same model for each call of ``train()`` and let go of the
    old one without destroying it.
    """
    for session in sessions(module):
        logger.warning(
            "KFAC-W117 the model has K-FAC through an earlier engine (or ds_kfac.attach): it is "
            "detached there, and the new engine starts with new statistics"
        )
        if session.detach is not None:
            session.detach()


def drop_gradients(module: nn.Module) -> None:
    """Take the gradients off a model that an engine is about to be built on.

    An engine that is let go of in the middle of accumulation leaves them in ``param.grad`` under
    ZeRO 0 and 1, where the first step of the next one would add them to its own, without their
    statistics.
    """
    left = [param for param in module.parameters() if param.grad is not None]
    for param in left:
        param.grad = None
    if left:
        logger.warning(
            "KFAC-W119 %d parameters had a gradient before the engine was built, as an earlier "
            "engine leaves it in the middle of accumulation: it is dropped, or it would be added "
            "to that of the first step",
            len(left),
        )


def wrap_step(engine: Any, kfac: KFAC, host: DeepSpeedHost) -> None:
    """Put the preconditioner at the entry of the engine's step."""
    original = engine._take_model_step

    def take_model_step(*args: Any, **kwargs: Any) -> Any:
        if not kfac.before_step():
            with host.skipping():
                result = original(*args, **kwargs)
            host.end_step()
            kfac.after_step(applied=False)
            return result
        with host.clipping_done():
            result = original(*args, **kwargs)
        # The engine has just measured the directions; users watch the gradient's norm.
        engine._global_grad_norm = kfac.grad_norm
        host.end_step()
        kfac.after_step(applied=True)
        return result

    engine._take_model_step = take_model_step
    kfac.on_detach(lambda: engine.__dict__.pop("_take_model_step", None))


def wrap_backward(engine: Any, kfac: KFAC, host: DeepSpeedHost) -> None:
    """Forget statistics of gradients that a backward pass is about to replace."""
    if not host.replaces_gradients:
        return
    original = engine.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        if host.starts_anew():
            kfac.discard_statistics()
        return original(*args, **kwargs)

    engine.backward = backward
    kfac.on_detach(lambda: engine.__dict__.pop("backward", None))


def wrap_destroy(engine: Any, kfac: KFAC) -> None:
    """Detach before the engine is taken apart."""
    original = engine.destroy

    def destroy(*args: Any, **kwargs: Any) -> Any:
        kfac.detach()
        return original(*args, **kwargs)

    engine.destroy = destroy
    kfac.on_detach(lambda: engine.__dict__.pop("destroy", None))


def group_index(engine: Any) -> dict[str, int]:
    """Index of the base optimizer's parameter group of every parameter it has, by name."""
    optimizer = engine.optimizer
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        groups = getattr(optimizer, attribute, None)
        if groups is not None:
            break
    else:
        groups = [group["params"] for group in optimizer.param_groups]
    # ZeRO 3 cuts each parameter group into sub-groups.
    parents = getattr(optimizer, "sub_group_to_group_id", range(len(groups)))
    index = {id(param): parents[i] for i, group in enumerate(groups) for param in group}
    return {
        name: index[id(param)]
        for name, param in engine.module.named_parameters()
        if id(param) in index
    }

"""Forward hooks that capture each call exactly once.

A call closes over its own statistics and puts a hook on its own output tensor. Only an
output that reaches the loss fires, once, whatever the checkpointing: under reentrant
recomputation the recomputed output fires (the first ran under no_grad), under
non-reentrant recomputation the first one fires. `register_full_backward_hook` is not
used: it breaks in-place activations behind the layer (pytorch#61519, singd#56).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_kfac.capture.session import CaptureSession, InputSums


def install(
    model: nn.Module, session: CaptureSession, *, output_scale: Callable[[], float]
) -> list[RemovableHandle]:
    """Hook every layer of the session.

    Args:
        model: The bare model whose module names the session's layers use.
        session: Receives the statistics.
        output_scale: Factor from a hooked output gradient to the gradient of the global
            objective, asked at each backward (a dynamic loss scale changes).

    Returns:
        Handles; removing them all leaves the model as it was.
    """
    modules = dict(model.named_modules())
    return [
        modules[name].register_forward_hook(
            _forward_hook(name, session, output_scale), with_kwargs=True
        )
        for name in session.specs
    ]


def _forward_hook(
    name: str, session: CaptureSession, output_scale: Callable[[], float]
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], None]:
    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if not session.active or not module.training:
            return
        if not torch.is_grad_enabled() or not output.requires_grad:
            return
        try:
            x: Tensor = args[0] if args else kwargs["input" if "input" in kwargs else "x"]
            with torch.no_grad():
                source = _keep_or_reduce(name, session, module, x)
            gradient_hook = _gradient_hook(name, session, module, source, output_scale)
            output.register_hook(gradient_hook)  # type: ignore[no-untyped-call]
        except Exception as error:
            session.error = session.error or error

    return hook


def _gradient_hook(
    name: str,
    session: CaptureSession,
    module: nn.Module,
    source: Callable[[], InputSums],
    output_scale: Callable[[], float],
) -> Callable[[Tensor], None]:
    def hook(g: Tensor) -> None:
        if not session.active:
            return
        try:
            with torch.no_grad():
                session.add(name, module, source(), g, scale=output_scale())
        except Exception as error:
            session.error = session.error or error

    return hook


def _keep_or_reduce(
    name: str, session: CaptureSession, module: nn.Module, x: Tensor
) -> Callable[[], InputSums]:
    """Reduce the input now, or keep it until its gradient arrives.

    Autograd keeps a layer's input for the weight's gradient anyway, so holding it costs no
    memory and spares a [d_in, d_in] buffer per call in flight. Not so when something sits
    between: saved-tensor hooks (non-reentrant checkpointing, offloading) exist to release
    it, and autocast saves a cast copy, which leaves the caller free to overwrite the input.

    The weight itself is not looked at: under ZeRO 3 it has been released by now, and reading
    the attribute would gather it again.
    """
    kept_by_autograd = (
        not torch.is_autocast_enabled(x.device.type)
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )
    if kept_by_autograd:
        kept = x.detach()
        return lambda: session.input_sums(name, module, kept)
    sums = session.input_sums(name, module, x)
    return lambda: sums

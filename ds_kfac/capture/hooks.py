"""Forward hooks that capture each call exactly once.

A call closes over its own statistics and puts a hook on its own output tensor. Only an
output that reaches the loss fires, once, whatever the checkpointing: under reentrant
recomputation the recomputed output fires (the first ran under no_grad), under
non-reentrant recomputation the first one fires. `register_full_backward_hook` is not
used: it breaks in-place activations behind the layer (pytorch#61519, singd#56).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_kfac.capture.passes import Reach, current_pass, reach
from ds_kfac.capture.session import CaptureSession, InputSums
from ds_kfac.errors import ConfigError
from ds_kfac.layers.kinds import KINDS, LayerKind

_INPUTS = ("input", "x", "input_")
"""Names of the input of torch's, transformers' and Megatron's layers."""


def install(
    model: nn.Module,
    session: CaptureSession,
    *,
    output_scale: Callable[[], float],
    gradients_stay: bool = False,
) -> list[RemovableHandle]:
    """Hook every layer of the session.

    Args:
        model: The bare model whose module names the session's layers use.
        session: Receives the statistics.
        output_scale: Factor from a hooked output gradient to the gradient of the global
            objective, asked at each backward (a dynamic loss scale changes).
        gradients_stay: Gradients wait in ``param.grad`` for the optimizer's step, so that a
            missing one was thrown away.

    Returns:
        Handles; removing them all leaves the model as it was.

    Raises:
        ConfigError: A layer has K-FAC already (E212).
    """
    modules = dict(model.named_modules())
    _require_free(model, session.specs)
    handles = [
        modules[name].register_forward_hook(
            _Observer(
                _forward_hook(name, modules[name], session, output_scale, gradients_stay), session
            ),
            with_kwargs=True,
        )
        for name in session.specs
    ]
    if gradients_stay:
        handles += [_mark_gradients(name, modules[name], session) for name in session.specs]
    return handles


def sessions(model: nn.Module) -> list[CaptureSession]:
    """Sessions whose hooks are on modules of a model."""
    found = {
        id(hook.session): hook.session
        for module in model.modules()
        for hook in module._forward_hooks.values()
        if isinstance(hook, _Observer) and hook.session is not None
    }
    return list(found.values())


def _require_free(model: nn.Module, names: Collection[str]) -> None:
    for session in sessions(model):
        taken = next((name for name in names if name in session.specs), None)
        if taken is not None:
            raise ConfigError(
                "E212",
                f"layer {taken} has K-FAC already, through another optimizer: call detach() of "
                "that preconditioner first",
            )


def _mark_gradients(name: str, module: nn.Module, session: CaptureSession) -> RemovableHandle:
    weight = _weight(module)
    assert weight is not None  # layers without one are left out

    def mark(param: Tensor) -> None:
        if session.active and param.grad is not None:
            session.marks.set(name, param.grad)

    handle: RemovableHandle = weight.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
    return handle


class _Observer:
    """A forward hook that copies and files of its model do not take along.

    A deep copy (EMA, evaluation) or a model saved whole with ``torch.save`` is another model:
    there the hook is one that does nothing.

    Args:
        hook: The hook, None for one that does nothing.
        session: Where it brings statistics.
    """

    def __init__(
        self,
        hook: Callable[..., Any] | None = None,
        session: CaptureSession | None = None,
    ) -> None:
        self._hook = hook
        self.session = session

    def __call__(self, *args: Any) -> Any:
        return None if self._hook is None else self._hook(*args)

    def __reduce__(self) -> tuple[type[_Observer], tuple[()]]:
        return _Observer, ()


def _forward_hook(
    name: str,
    attached: nn.Module,
    session: CaptureSession,
    output_scale: Callable[[], float],
    gradients_stay: bool,
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # Replicas and shallow copies of the module share this function but are other modules.
        if module is not attached or not session.active or not module.training:
            return None
        if not torch.is_grad_enabled():
            return None
        try:
            rest: tuple[Any, ...] | None = None
            if isinstance(output, tuple) and KINDS[session.specs[name].kind].returns_tuple:
                output, *others = output
                rest = tuple(others)
            if not _has_gradient(name, module, output):
                return None
            x: Tensor = args[0] if args else next(kwargs[k] for k in _INPUTS if k in kwargs)
            with torch.no_grad():
                mask = session.masks.of(name)
                skips = session.skips_rows is not None and session.skips_rows()
                source = None if skips else _keep_or_reduce(name, session, module, x, mask)
            replacement, target = _hookable(output)
            gradient_hook = _gradient_hook(
                name, session, module, source, output_scale, output.shape, gradients_stay, mask
            )
            target.register_hook(gradient_hook)  # type: ignore[no-untyped-call]
            return replacement if replacement is None or rest is None else (replacement, *rest)
        except Exception as error:
            session.error = session.error or error
            return None

    return hook


def _hookable(output: Tensor) -> tuple[Tensor | None, Tensor]:
    """Find the tensor whose gradient is surely computed, whatever happens to the output.

    Layers with more than two input dimensions return a view of a matrix. An in-place
    activation rewrites the history of the matrix and drops the view's, hook included; the
    matrix's own hook stays with the product that made it.

    Returns:
        What replaces the layer's output (None: nothing), and the tensor to hook.
    """
    base = output._base
    if base is None:
        return None, output
    if (
        base.grad_fn is not None
        and base.numel() == output.numel()
        and base.is_contiguous()
        and output.is_contiguous()
    ):
        return None, base
    copy = output.clone()
    return copy, copy


def _gradient_hook(
    name: str,
    session: CaptureSession,
    module: nn.Module,
    source: Callable[[], InputSums] | None,
    output_scale: Callable[[], float],
    shape: torch.Size,
    gradients_stay: bool,
    mask: Tensor | None,
) -> Callable[[Tensor], None]:
    def hook(g: Tensor) -> None:
        if not session.active:
            return
        try:
            weight = _weight(module)
            reached = reach(weight)
            # Handed out, a gradient gets to the step only where users may put it.
            handed_out = reached is Reach.HANDS_OUT
            if reached is Reach.NOTHING or (handed_out and not gradients_stay):
                return
            with torch.no_grad():
                if not handed_out:
                    grad = None if weight is None else weight.grad
                    session.enter_backward(name, current_pass(), grad, stays=gradients_stay)
                if source is None:
                    session.count(name, shape, mask)
                    return
                # Tensor ranks exchange rows here: before any work that one of them may fail in.
                rows = session.gradient_rows(name, module, g.reshape(shape), mask)
                scale = output_scale()
                session.add(name, source(), rows, scale=scale, handed_out=handed_out)
        except Exception as error:
            session.error = session.error or error

    return hook


def _has_gradient(name: str, module: nn.Module, output: Any) -> bool:
    """Whether this call will contribute to the weight's gradient (it may be frozen by now)."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"layer {name} ({type(module).__name__}) returns {type(output).__name__} instead of a "
            "tensor; list it in kfac.skip_layers"
        )
    weight = _weight(module)
    return output.requires_grad and weight is not None and weight.requires_grad


def _weight(module: nn.Module) -> Tensor | None:
    """The layer's weight, as it is.

    ZeRO 3 has released it by now, and gathers it again for whoever reads the attribute.
    """
    return module._parameters.get("weight")


def _keep_or_reduce(
    name: str, session: CaptureSession, module: nn.Module, x: Tensor, mask: Tensor | None
) -> Callable[[], InputSums]:
    """Reduce the input now, or keep it until its gradient arrives.

    Autograd keeps a layer's input for the weight's gradient anyway, so holding it costs no
    memory and spares a [d_in, d_in] buffer per call in flight.
    """
    if not _kept_by_autograd(KINDS[session.specs[name].kind], module, x):
        try:
            # Whoever asks adds to what it gets, and a retained graph asks once per backward.
            return session.input_sums(name, module, x, mask).copy
        except Exception as error:
            session.error = session.error or error
            return _failing(error)
    kept, version = x.detach(), x._version

    def reduce() -> InputSums:
        if kept._version != version:
            session.input_rows(
                name, module, kept, mask
            )  # other tensor ranks may be waiting for them
            raise RuntimeError(
                f"the input of layer {name} was overwritten between its forward and backward; "
                "clone it before the layer, or list the layer in kfac.skip_layers"
            )
        return session.input_sums(name, module, kept, mask)

    return reduce


def _failing(error: Exception) -> Callable[[], InputSums]:
    """Stands in for sums that could not be computed.

    The call still has to be heard of in backward: there the tensor ranks exchange its rows.
    """

    def fail() -> InputSums:
        raise error

    return fail


def _kept_by_autograd(kind: LayerKind, module: nn.Module, x: Tensor) -> bool:
    """Whether autograd itself holds this input, unchanged, until the layer's backward.

    Not so when something sits between: saved-tensor hooks (non-reentrant checkpointing,
    offloading) exist to release it; autocast and padding modes save a changed copy, which
    leaves the caller free to overwrite the input.
    """
    weight = _weight(module)
    if weight is None or weight.dtype != x.dtype:
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    if getattr(module, "padding_mode", "zeros") != "zeros" or not kind.keeps_input(module):
        return False
    # Private, and absent in older releases: then the input is reduced at once, which is right
    # under any hooks.
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top_hooks is not None and top_hooks(True) is None

"""Which rows of an expert's input hold tokens.

Experts work on slots: as many as the capacity, filled up with rows of zeros. A zero row may
come out of the expert's first layer as something else, so that what is padding has to be
found where the slots come in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_kfac.layers.names import enclosing


class TokenMasks:
    """The slots of every expert that is at work.

    Args:
        experts: Module names of experts.
        layers: Names of layers, some of them in experts.
    """

    def __init__(self, experts: Iterable[str] = (), layers: Sequence[str] = ()) -> None:
        self.experts = tuple(experts)
        self._expert_of = {layer: enclosing(layer, self.experts) for layer in layers}
        self._running: dict[str, Tensor] = {}

    def enter(self, expert: str, x: Tensor) -> None:
        """Note the slots that an expert is called with, ``[..., features]``."""
        self._running[expert] = (x.detach() != 0).any(dim=-1).reshape(-1)

    def leave(self, expert: str) -> None:
        """Forget them: layers of an expert are only heard of while it runs."""
        self._running.pop(expert, None)

    def of(self, layer: str) -> Tensor | None:
        """Which rows of a layer's call hold tokens, bool ``[T]``; None outside of experts.

        Raises:
            RuntimeError: Its expert is not running.
        """
        expert = self._expert_of.get(layer)
        if expert is None:
            return None
        if expert not in self._running:
            raise RuntimeError(
                f"layer {layer} was called without its expert {expert}, so that its tokens and its "
                "padding cannot be told apart: checkpoint activations of the whole MoE layer, or "
                "list the layer in kfac.skip_layers"
            )
        return self._running[expert]


def watch_experts(
    model: nn.Module, masks: TokenMasks, *, wanted: Callable[[], bool]
) -> list[RemovableHandle]:
    """Hook every expert, after its layers: an expert may be a single layer.

    Args:
        model: The bare model.
        masks: Told what experts are called with.
        wanted: Whether calls are captured in this step.

    Returns:
        Handles; removing them all leaves the model as it was.
    """
    handles: list[RemovableHandle] = []
    for name in masks.experts:
        expert = model.get_submodule(name)
        watch = _Watch(name, masks, wanted)
        handles.append(expert.register_forward_pre_hook(watch.enter))
        handles.append(expert.register_forward_hook(watch.leave, always_call=True))
    return handles


class _Watch:
    """Hooks of one expert; copies of the model take along hooks that do nothing."""

    def __init__(
        self,
        name: str = "",
        masks: TokenMasks | None = None,
        wanted: Callable[[], bool] | None = None,
    ) -> None:
        self._name = name
        self._masks = masks
        self._wanted = wanted

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._masks is None or self._wanted is None or not self._wanted():
            return
        if module.training and torch.is_grad_enabled() and args and isinstance(args[0], Tensor):
            self._masks.enter(self._name, args[0])

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._masks is not None:
            self._masks.leave(self._name)

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()


def keep_tokens(name: str, rows: Tensor, mask: Tensor) -> Tensor:
    """Rows of a call with zeros in place of padding.

    Args:
        name: Layer name.
        rows: ``[T, features]``.
        mask: Bool ``[T]``.

    Raises:
        RuntimeError: The layer does not work on its expert's rows.
    """
    if rows.shape[0] != mask.shape[0]:
        raise RuntimeError(
            f"layer {name} works on {rows.shape[0]} rows, its expert on {mask.shape[0]} slots; "
            "list it in kfac.skip_layers"
        )
    return torch.where(mask.unsqueeze(1), rows, rows.new_zeros(()))

"""What a backward pass does with a layer's weight, and what became of its gradient since."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class Reach(Enum):
    """What the running backward pass does with the gradient of a weight."""

    NOTHING = "nothing"
    """It does not compute it: gradients of inputs, ``backward(inputs=...)``."""
    ACCUMULATES = "accumulates"
    """It adds it to ``weight.grad``."""
    HANDS_OUT = "hands out"
    """``torch.autograd.grad`` gives it to its caller."""


def reach(weight: Tensor | None) -> Reach:
    """What the backward pass that is running does with a weight's gradient.

    Asked from within the pass. Where torch does not tell, it accumulates.
    """
    will_execute = getattr(torch._C, "_will_engine_execute_node", None)
    if will_execute is None or weight is None or not weight.is_leaf:
        return Reach.ACCUMULATES
    try:
        executes = bool(will_execute(get_gradient_edge(weight).node))
    except RuntimeError:
        # torch refuses to answer for leaves whose gradient autograd.grad() returns.
        return Reach.HANDS_OUT
    return Reach.ACCUMULATES if executes else Reach.NOTHING


def current_pass() -> int | None:
    """Number of the backward pass that is running; None where torch does not tell."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return None if task is None else int(task())


@dataclass
class GradientMarks:
    """Tells whether ``weight.grad`` is still what backward passes have left there.

    Only hosts whose gradients wait in ``param.grad`` for the step have use for it. A mark is
    memory address and version, not the tensor: nothing is kept alive.
    """

    _marks: dict[str, tuple[int, int]] = field(default_factory=dict)

    def set(self, name: str, grad: Tensor) -> None:
        """Note a layer's gradient as it is now."""
        self._marks[name] = grad.data_ptr(), grad._version

    def is_touched(self, name: str, grad: Tensor) -> bool:
        """Whether anything was written to the gradient, or put in its place."""
        mark = self._marks.get(name)
        return mark is not None and mark != (grad.data_ptr(), grad._version)

    def is_replaced(self, name: str, view: Tensor) -> bool:
        """Whether another tensor stands in the gradient's place."""
        mark = self._marks.get(name)
        return mark is not None and mark[0] != view.data_ptr()

"""Resuming megatron-core's distributed optimizer around torch's own Adam.

Megatron's checkpoints expect the Adam of Transformer Engine or Apex, which has its state from the
start and counts steps once per group. Where neither is installed, 0.16 falls back to
`torch.optim.AdamW`, which it cannot resume without these repairs.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

MARK = "_resumes_torch_adam"


def apply() -> None:
    """Repair `DistributedOptimizer`; idempotent, and nothing to do with another Adam."""
    from megatron.core import optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if not getattr(optimizer, "USING_PYTORCH_OPTIMIZER", False) or hasattr(
        DistributedOptimizer, MARK
    ):
        return
    setattr(DistributedOptimizer, MARK, True)
    for name, repaired in (
        ("sharded_state_dict", _with_state),
        ("_set_main_param_and_optimizer_states", _with_step),
        ("load_state_dict", _with_own_steps),
    ):
        setattr(DistributedOptimizer, name, _around(getattr(DistributedOptimizer, name), repaired))


def separate_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Megatron gives all parameters one tensor, which torch's Adam then counts up for each."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def _around(original: Callable[..., Any], repaired: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return repaired(self, original, *args, **kwargs)

    return method


def _with_state(
    self: Any,
    original: Any,
    model_sharded_state_dict: Any,
    is_loading: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A checkpoint is loaded into states that are there."""
    if is_loading and not self.is_stub_optimizer and not self.optimizer.state:
        self._init_optimizer_states_with_dummy_values()
    return original(self, model_sharded_state_dict, is_loading, *args, **kwargs)


def _with_step(self: Any, original: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
    """The count of steps has come with the parameter groups before."""
    group, index = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
    if "step" in state:
        tensors = {**tensors, "step": state["step"]}
    with torch.no_grad():  # copies into views of leaves
        return original(self, model_param, tensors)


def _with_own_steps(self: Any, original: Any, state_dict: Any) -> Any:
    result = original(self, state_dict)
    if not self.is_stub_optimizer:
        separate_step_counts(self.optimizer)
    return result

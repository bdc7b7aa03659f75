"""The element-wise optimizer behind ``"optimizer": {"type": "KFAC"}``.

It only applies what the preconditioner computed, and AdamW to everything else, element by
element: ZeRO may flatten, pad and cut its parameters as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ds_kfac.config import OptimizerConfig


class KFACOptimizer(torch.optim.Optimizer):
    """Applies directions with decoupled weight decay, and AdamW to auxiliary groups.

    Every group has the base learning rate in ``lr``, whatever scheduler drives it; the rate
    of an auxiliary group is ``lr * lr_ratio``, so that schedulers that write one number
    into every group (DeepSpeed's WarmupLR) keep the ratio.

    Args:
        params: Parameter groups with ``preconditioned`` (bool) set; see :func:`param_groups`.
        config: Learning rates, weight decay, AdamW settings.
    """

    def __init__(self, params: Iterable[dict[str, Any]], config: OptimizerConfig) -> None:
        defaults = {
            "lr": float(config.lr),
            "lr_ratio": config.aux_ratio,
            "betas": tuple(config.aux.betas),
            "eps": float(config.aux.eps),
            "weight_decay": float(config.weight_decay),
            "preconditioned": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply one step.

        Args:
            closure: Evaluates the loss again, as in ``torch.optim``.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            if group["preconditioned"]:
                _apply_directions(params, group)
            else:
                self._adamw(params, group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As in ``torch.optim``, with moments of zero where there are none.

        DeepSpeed's conversion to a universal checkpoint looks for Adam's moments of every
        parameter. Those of preconditioned parameters are one zero each, expanded to the
        parameter's shape: they take no room in memory, nor in the file.
        """
        result: dict[str, Any] = super().state_dict()
        counts = [state["step"] for state in self.state.values() if "step" in state]
        # DeepSpeed takes the first parameter's count for that of all.
        step = counts[0] if counts else torch.zeros((), dtype=torch.float32)
        for group, packed in zip(self.param_groups, result["param_groups"], strict=True):
            if not group["preconditioned"]:
                continue
            for index, param in zip(packed["params"], group["params"], strict=True):
                zeros = torch.zeros((), dtype=param.dtype).expand(param.shape)
                result["state"][index] = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim``; what :meth:`state_dict` made up is left out."""
        made_up = {
            index
            for group in state_dict["param_groups"]
            if group.get("preconditioned")
            for index in group["params"]
        }
        state = {key: value for key, value in state_dict["state"].items() if key not in made_up}
        super().load_state_dict({**state_dict, "state": state})

    def _adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param].update(
                    step=torch.zeros((), dtype=torch.float32),
                    exp_avg=torch.zeros_like(param),
                    exp_avg_sq=torch.zeros_like(param),
                )
        states = [self.state[param] for param in params]
        beta1, beta2 = group["betas"]
        adamw(
            params,
            [param.grad for param in params if param.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"] * group["lr_ratio"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _apply_directions(params: list[Tensor], group: dict[str, Any]) -> None:
    lr, decay = group["lr"], group["weight_decay"]
    if decay:
        torch._foreach_mul_(params, 1.0 - lr * decay)
    grads = [param.grad.to(param.dtype) for param in params if param.grad is not None]
    torch._foreach_add_(params, grads, alpha=-lr)


def param_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    preconditioned: set[str],
    config: OptimizerConfig,
) -> list[dict[str, Any]]:
    """Split named parameters into the preconditioned and the auxiliary group.

    Args:
        parameters: Named trainable parameters, in the model's order.
        preconditioned: Names whose gradient the preconditioner replaces.
        config: Weight decays and rates.

    Returns:
        Groups for :class:`KFACOptimizer`; empty ones are left out.
    """
    inside: list[nn.Parameter] = []
    outside: list[nn.Parameter] = []
    for name, param in parameters:
        (inside if name in preconditioned else outside).append(param)
    groups = [
        {"params": inside, "preconditioned": True, "lr_ratio": 1.0},
        {
            "params": outside,
            "preconditioned": False,
            "weight_decay": config.aux_weight_decay,
        },
    ]
    return [group for group in groups if group["params"]]

"""What DeepSpeed's universal checkpoints need so that optimizer type KFAC survives them.

DeepSpeed 0.19 treats every optimizer as Adam there: it gives moments to all parameters, and with
ZeRO 3 writes the settings of the first parameter group into all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ds_kfac.hosts.compatibility import is_own_optimizer


@contextmanager
def loading(engine: Any) -> Iterator[None]:
    """Around ``load_checkpoint`` of a universal checkpoint.

    Groups keep what they are, and parameters that are preconditioned get no moments. Other
    optimizers are left as DeepSpeed leaves them.

    Args:
        engine: The engine that loads.
    """
    optimizer = engine.basic_optimizer
    if not is_own_optimizer(optimizer):
        yield
        return
    kept = [
        {key: value for key, value in group.items() if key not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
    yield
    for group, settings in zip(optimizer.param_groups, kept, strict=True):
        group.update(settings)
    wrapper = engine.optimizer
    for index, group in enumerate(optimizer.param_groups):
        if group["preconditioned"]:
            for param in _stored(wrapper, group, index):
                optimizer.state.pop(param, None)
            for param in _model_parameters(wrapper, index):
                mapping = getattr(param, "_hp_mapping", None)
                if mapping is not None:
                    mapping.optim_fragment = {}


def _stored(wrapper: Any, group: dict[str, Any], index: int) -> list[Tensor]:
    """Parameters of a group as the base optimizer has them."""
    groups: list[int] | None = getattr(wrapper, "sub_group_to_group_id", None)
    if groups is None:
        return list(group["params"])
    flat = wrapper.fp32_partitioned_groups_flat
    return [flat[i] for i in range(len(flat)) if groups[i] == index]


def _model_parameters(wrapper: Any, index: int) -> list[Tensor]:
    """Parameters of a group as the model has them; none under ZeRO 3, which links nothing."""
    for name in ("bit16_groups", "bf16_groups"):
        groups = getattr(wrapper, name, None)
        if groups is not None:
            return list(groups[index])
    return []

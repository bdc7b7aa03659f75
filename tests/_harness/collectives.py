"""Record of the collective calls of a rank, and the comparison between ranks.

gloo sums two same-shaped all-reduces issued in swapped order without a word, where NCCL would
hang or corrupt. Comparing what every rank asked for finds that class of bug on a CPU.

Calls are seen only when made through the module, ``torch.distributed.all_reduce`` or
``dist.all_reduce``; a name imported with ``from torch.distributed import ...`` is not wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

# op -> (parameter holding the tensors or None, ranks must agree on numel, parameter to compare).
# isend and irecv are left alone: P2POp checks them by identity.
_OPS: dict[str, tuple[str | None, bool, str | None]] = {
    "all_reduce": ("tensor", True, "op"),
    "all_reduce_coalesced": ("tensors", True, "op"),
    "broadcast": ("tensor", True, "src"),
    "reduce": ("tensor", True, "dst"),
    "all_gather": ("tensor", True, None),
    "all_gather_into_tensor": ("input_tensor", True, None),
    "all_gather_single": ("input_tensor", True, None),
    "reduce_scatter": ("input_list", True, "op"),
    "reduce_scatter_tensor": ("input", True, "op"),
    "reduce_scatter_single": ("input", True, "op"),
    "all_to_all": ("input_tensor_list", False, None),
    "all_to_all_single": ("input", False, None),
    "gather": ("tensor", True, "dst"),
    "scatter": ("tensor", True, "src"),
    "all_gather_object": (None, False, None),
    "broadcast_object_list": (None, False, "src"),
    "gather_object": (None, False, "dst"),
    "scatter_object_list": (None, False, "src"),
    "barrier": (None, False, None),
    "monitored_barrier": (None, False, None),
    "send": ("tensor", False, "dst"),
    "recv": ("tensor", False, "src"),
    "batch_isend_irecv": (None, False, None),
}
_POINT_TO_POINT = frozenset({"send", "recv", "batch_isend_irecv"})


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective call of one rank.

    Attributes:
        op: Name of the ``torch.distributed`` function.
        numel: Elements of this rank's (input) tensors; None for object collectives.
        dtype: Their dtype without the ``torch.`` prefix; None for object collectives.
        group: Global ranks of the group, in group order.
        detail: Root rank or reduction of the call.
        site: ``file:line`` of the caller; for messages, never compared.
    """

    op: str
    numel: int | None
    dtype: str | None
    group: tuple[int, ...]
    detail: str = ""
    site: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[str, int | None, str | None, str]:
        """The part that must be equal on all ranks of the group."""
        numel = self.numel if _OPS[self.op][1] else None
        return self.op, numel, self.dtype, self.detail

    def __str__(self) -> str:
        shown = [f"numel={self.numel}" if self.numel is not None else "", self.dtype or ""]
        inner = ", ".join(part for part in [*shown, self.detail] if part)
        return f"{self.op}({inner}) at {self.site}"


_logs: list[list[CollectiveRecord]] = []
_inside = threading.local()


@contextlib.contextmanager
def recording() -> Iterator[list[CollectiveRecord]]:
    """Collect this process's collective calls; contexts nest and each gets every call."""
    install()
    log: list[CollectiveRecord] = []
    _logs.append(log)
    try:
        yield log
    finally:
        # By identity: two logs with equal records are equal lists.
        _logs[:] = [other for other in _logs if other is not log]


def install() -> None:
    """Wrap the functions once per process.

    The wrappers stay: DeepSpeed's backend keeps references to what it found at start, so removing
    and adding them around every job would lose its calls.
    """
    for op in _OPS:
        function = getattr(dist, op, None)
        if function is not None and not hasattr(function, "_records_collective"):
            setattr(dist, op, _wrap(op, function))


def _wrap(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not _logs or getattr(_inside, "active", False):
            return function(*args, **kwargs)
        with contextlib.suppress(TypeError):  # wrong arguments: the real function will complain
            arguments = signature.bind(*args, **kwargs).arguments
            record = _make_record(op, arguments, sys._getframe(1))
            if record is not None:
                for log in _logs:
                    log.append(record)
        _inside.active = True
        try:
            return function(*args, **kwargs)
        finally:
            _inside.active = False

    recorded._records_collective = True  # type: ignore[attr-defined]
    return recorded


def _make_record(op: str, arguments: dict[str, Any], frame: Any) -> CollectiveRecord | None:
    group = arguments.get("group")
    if op == "batch_isend_irecv":
        group = arguments["p2p_op_list"][0].group if arguments["p2p_op_list"] else None
    # torch before 2.5 does not take None for the default group here.
    whole = dist.group.WORLD if group is None else group
    ranks = tuple(dist.get_process_group_ranks(whole)) if _is_member(group) else ()
    if not ranks:
        return None
    holder, _, detail_name = _OPS[op]
    tensors = _tensors(arguments.get(holder)) if holder else []
    detail = _detail(detail_name, arguments) if detail_name else ""
    return CollectiveRecord(
        op=op,
        numel=sum(t.numel() for t in tensors) if holder else None,
        dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else None,
        group=ranks,
        detail=detail,
        site=f"{frame.f_code.co_filename}:{frame.f_lineno}",
    )


def _detail(name: str, arguments: dict[str, Any]) -> str:
    value = arguments.get(name)
    if value is None and f"group_{name}" in arguments:
        return f"group_{name}={arguments[f'group_{name}']}"
    if name == "op":
        return str(dist.ReduceOp.SUM if value is None else value).rsplit(".", maxsplit=1)[-1]
    return f"{name}={0 if value is None else value}"


def _is_member(group: Any) -> bool:
    return group is None or group is not dist.GroupMember.NON_GROUP_MEMBER


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value or () if isinstance(item, torch.Tensor)]


def compare(logs: Sequence[Sequence[CollectiveRecord]]) -> str | None:
    """First difference between the ranks' logs, group by group.

    Groups are told apart by their ranks. Point-to-point calls are skipped: they differ by nature.

    Args:
        logs: One log per rank, index = global rank.

    Returns:
        A sentence naming group, position and both calls, or None if all ranks agree.
    """
    groups = sorted({record.group for log in logs for record in log})
    for group in groups:
        first, *others = (rank for rank in group if rank < len(logs))
        calls = {
            rank: [r for r in logs[rank] if r.group == group and r.op not in _POINT_TO_POINT]
            for rank in (first, *others)
        }
        for rank in others:
            pairs = itertools.zip_longest(calls[first], calls[rank])
            for index, (left, right) in enumerate(pairs):
                if left is None or right is None or left.key != right.key:
                    return (
                        f"collective {index} of group {group} differs: "
                        f"rank {first} {left or 'made no more calls'}; "
                        f"rank {rank} {right or 'made no more calls'}"
                    )
    return None

"""What the preconditioner asks of a framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from ds_kfac.layers.shards import TensorCut
from ds_kfac.plan.topology import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Groups:
    """Process groups of a host; None stands for this process alone.

    Attributes:
        data: Ranks over which gradients are averaged; owners are chosen among them.
        model: All ranks that share the model (data, tensor and pipeline parallel); votes and
            scalars of the whole model go over it. Defaults to ``data``.
        tensor: Ranks that hold the shards of the same layers (tensor parallel).
        work: Data times tensor ranks of the same layers, among which owners are chosen when
            layers are cut over ``tensor``. Defaults to ``data``.
        experts: Ranks that hold the same experts, by a key of the host's.
    """

    data: ProcessGroup | None = None
    model: ProcessGroup | None = None
    tensor: ProcessGroup | None = None
    work: ProcessGroup | None = None
    experts: Mapping[str, ProcessGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class Expert:
    """An expert of this rank.

    Attributes:
        group: Key of the ranks that hold it in :attr:`Groups.experts`.
        name: Its name among the experts of all ranks, under which it is saved. Module names may
            be those of other experts on other ranks.
    """

    group: str
    name: str


@dataclass(frozen=True)
class Gradients:
    """The host's reduced gradients at the entry of its step, on this rank.

    Attributes:
        views: Per trainable parameter the flat local slice (the whole when replicated),
            aliasing what the host will consume. Parameters without gradient are absent.
        partial: The slices of different ranks add up to the model, so that norms have to be
            summed over the model group.
        share: How much of this rank's squared norm counts in that sum: one over the number
            of ranks that hold the same slices.
        shares: The same for single views that fewer ranks hold (experts).
        duplicates: Views that count on another rank (parameters tied between stages).
    """

    views: Mapping[str, Tensor]
    partial: bool
    share: float = 1.0
    shares: Mapping[str, float] = field(default_factory=dict)
    duplicates: frozenset[str] = frozenset()


def flat_gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Flat views of ``param.grad``; parameters without a gradient are absent.

    Args:
        parameters: By name.

    Returns:
        Per name ``[numel]``, in the dtype of the gradient, aliasing it: of a sparse gradient its
        values, of a complex one real and imaginary parts.
    """
    views = {}
    for name, param in parameters.items():
        if param.grad is not None:
            views[name] = _flat(param)
    return views


def _flat(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    if param.grad.is_sparse:
        # Rows that occur twice add up, and only then have a norm; absent rows are zero.
        param.grad = param.grad.coalesce()
        return param.grad.values().view(-1)
    # Channels-last and other strided gradients cannot be flattened in place.
    if not param.grad.is_contiguous():
        param.grad = param.grad.contiguous()
    grad = torch.view_as_real(param.grad) if param.grad.is_complex() else param.grad
    return grad.view(-1)


class Host(Protocol):
    """A framework that trains the model; implemented once per framework."""

    model: nn.Module
    groups: Groups

    def layouts(self, names: Sequence[str]) -> dict[str, Layout]:
        """Where the reduced gradient of each named parameter lives; static."""
        ...

    def gradients(self) -> Gradients:
        """Reduced, not yet clipped gradients as the host stores them; no copy."""
        ...

    def writable(self) -> Mapping[str, Tensor]:
        """Views that the host's optimizer will consume, in the widest dtype it allows."""
        ...

    def gradient_dtype(self) -> torch.dtype | None:
        """Dtype in which reduced gradients are stored; None is that of the parameters."""
        ...

    def after_write(self) -> None:
        """Bring what the host has cached about its gradients up to date."""
        ...

    def output_scale(self) -> float:
        """Factor from a hooked output gradient to the gradient of the global objective."""
        ...

    def stored_scale(self) -> float:
        """What the stored gradients are still multiplied by (the loss scale)."""
        ...

    def scale_adapts(self) -> bool:
        """Whether the loss scale is looked for by trial: overflows are then nothing special."""
        ...

    def gradients_stay_in_parameters(self) -> bool:
        """Whether gradients wait in ``param.grad`` for the step: gone from there, they are lost."""
        ...

    def micro_batch_is_last(self) -> bool:
        """Whether the micro-batch at work is the last one before the step.

        Raises:
            UnsupportedError: The host cannot know (E155); asked once at attach.
        """
        ...

    def clip_threshold(self) -> float:
        """Norm to which the raw gradient is clipped; 0 leaves it as it is."""
        ...

    def learning_rates(self) -> Mapping[str, float]:
        """Current learning rate of each trainable parameter, by name."""
        ...

    def announce(self, text: str) -> None:
        """Show users what was attached, where the host shows its own messages."""
        ...


class StageHost(Host, Protocol):
    """A host whose ranks hold different parts of the model (pipeline stages).

    Having :meth:`excluded` is what tells it apart.
    What one stage lacks another may have: coverage is judged over ``groups.model``.
    """

    def excluded(self) -> Mapping[str, str]:
        """Modules of this stage that stay with the base optimizer, by name, and why."""
        ...


class TensorHost(Host, Protocol):
    """A host whose layers are cut over ``groups.tensor``; having :meth:`tensor_cut` says so.

    Gradients, layouts and parameters of such a host are those of this rank's shards.
    """

    def tensor_cut(self, *, blocks: bool) -> TensorCut | None:
        """What is cut and how, the same on all tensor ranks; None if nothing is."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Elements that parameters count in the whole model, by name; optional.

        Of those that this rank has a shard of outside of :meth:`tensor_cut`, and zero for copies
        of what another stage counts.
        """
        ...


class ExpertHost(Host, Protocol):
    """A host with layers that fewer ranks share than the others (mixture of experts).

    Having :meth:`experts` is what tells it apart. Its layouts name ranks of a layer's own group.
    """

    def experts(self) -> Mapping[str, Expert]:
        """Expert modules of this rank by name, with the same groups on all ranks.

        Rows of zeros in an expert's input hold no token.
        """
        ...

    def uncalled(self) -> Mapping[str, str]:
        """Modules whose weights are used without calling them (gates), by name, and why."""
        ...

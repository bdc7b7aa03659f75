"""What a step begins with: all that host and hooks have to say, and reasons not to go on."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_kfac.capture.session import CaptureSession, Pending
from ds_kfac.comm.communicator import Communicator
from ds_kfac.errors import CoverageError, NumericalError
from ds_kfac.soundness import gradient_norm, is_finite

if TYPE_CHECKING:
    from ds_kfac.hosts.base import Gradients, Host


logger = logging.getLogger(__name__)

_SHOWN = 3


@dataclass(frozen=True)
class StepInput:
    """Read before the vote, so that a host that fails on one rank can still be voted on.

    Attributes:
        gradients: The host's reduced gradients.
        pending: Statistics of the step, by layer name.
        norm: 0-d fp64, norm of this rank's share of the gradients, as stored: squares of all
            ranks add up where they are partial.
        finite: 0-d bool, whether all numbers of this rank are finite.
        stored_scale: What the stored gradients are still multiplied by.
        scale_adapts: Whether that scale is looked for by trial.
        clip_threshold: Norm to which the raw gradient is clipped; 0 leaves it as it is.
        learning_rates: By parameter name; empty where nobody asks for them.
    """

    gradients: Gradients
    pending: dict[str, Pending]
    norm: Tensor
    finite: Tensor
    stored_scale: float
    scale_adapts: bool
    clip_threshold: float
    learning_rates: Mapping[str, float]


def read(
    host: Host,
    session: CaptureSession,
    device: torch.device,
    *,
    frozen: Mapping[str, str],
    wants_rates: bool,
) -> StepInput:
    """Ask host and session; local to this rank.

    Args:
        host: The framework's adapter.
        session: Holds the statistics, which it hands over.
        device: Compute device.
        frozen: Weights that were frozen at attach, and their layers, by name.
        wants_rates: Learning rates are asked for, of every parameter.

    Raises:
        CoverageError: A layer has been unfrozen since attach, and the optimizer trains it (E130).
    """
    gradients = host.gradients()
    if host.gradients_stay_in_parameters():
        _warn_of_foreign_gradients(session, gradients.views)
        pending = session.drain_for(gradients.views)
    else:
        pending = session.drain()
    _warn_of_evaluation(host, session, pending, gradients)
    unfrozen = {weight: frozen[weight] for weight in frozen if weight in gradients.views}
    rates = host.learning_rates() if wants_rates or unfrozen else {}
    _refuse_unfrozen(unfrozen, rates)
    norm = _norm(gradients, device)
    return StepInput(
        gradients=gradients,
        pending=pending,
        norm=norm,
        finite=is_finite(norm, pending.values()),
        stored_scale=host.stored_scale(),
        scale_adapts=host.scale_adapts(),
        clip_threshold=host.clip_threshold(),
        learning_rates=rates,
    )


def _warn_of_foreign_gradients(session: CaptureSession, views: Mapping[str, Tensor]) -> None:
    """Say once that gradients come from elsewhere than the statistics."""
    if not session.dropped:
        return
    weights = {name: spec.weight.name for name, spec in session.specs.items()}
    if not any(
        session.marks.is_replaced(name, views[weight])
        for name, weight in weights.items()
        if weight in views
    ):
        return
    session.warn_once(
        "KFAC-W115 gradients were put in place of those that backward() has left, and statistics "
        "of passes before zero_grad() were thrown away with their gradients. If you set gradients "
        "aside and combine them, statistics are those of the last pass alone: use backward() "
        "without zero_grad() in between"
    )


def _warn_of_evaluation(
    host: Host, session: CaptureSession, pending: Mapping[str, Pending], gradients: Gradients
) -> None:
    """Say once that a rank trains in eval mode, whose calls are taken for evaluation."""
    if session.active and not pending and gradients.views and not host.model.training:
        session.warn_once(
            "KFAC-W116 this rank trains a model in eval mode and takes no statistics from it: "
            "call model.train(), and eval() of single modules if you want to"
        )


def _norm(gradients: Gradients, device: torch.device) -> Tensor:
    by_share: dict[float, list[Tensor]] = defaultdict(list)
    for name, view in gradients.views.items():
        if name not in gradients.duplicates:
            by_share[gradients.shares.get(name, gradients.share)].append(view)
    parts = [gradient_norm(views, device) * share**0.5 for share, views in by_share.items()]
    return torch.stack(parts).norm() if parts else gradient_norm([], device)


def _refuse_unfrozen(unfrozen: Mapping[str, str], rates: Mapping[str, float]) -> None:
    for weight, layer in unfrozen.items():
        if weight in rates:
            raise CoverageError(
                "E130",
                f"layer {layer} was frozen when K-FAC was attached and is trained now: call "
                "detach() and attach again after unfreezing, or list it in kfac.skip_layers to "
                "leave it to the base optimizer",
            )


def refuse_nonfinite(
    begun: StepInput, number: int, model: Communicator, *, raises: bool, speaks: bool
) -> None:
    """Say that a step is dropped because of non-finite numbers. A collective.

    Args:
        begun: The step.
        number: Applied steps so far.
        model: All ranks of the model; every one of them calls this.
        raises: Raise instead, unless a loss scale is looked for.
        speaks: This rank warns for all of them.

    Raises:
        NumericalError: Asked for (E102); all ranks get here together.
    """
    if begun.scale_adapts:  # overflows are how it finds its value
        scale = begun.stored_scale
        logger.info("step %d: overflow at loss scale %g, dropped on all ranks", number, scale)
        return
    found = model.gather_objects(_nonfinite(begun))
    where = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)
    where = where or "their norm overflows"
    if raises:
        raise NumericalError(
            "E102",
            f"step {number}: non-finite gradients or statistics ({where}). Set "
            "kfac.on_nonfinite to 'skip' to drop such steps",
        )
    if speaks:
        logger.warning(
            "KFAC-W101 step %d: non-finite gradients or statistics (%s); the step is dropped on "
            "all ranks",
            number,
            where,
        )


def _nonfinite(begun: StepInput) -> str:
    """What of this rank's numbers is bad, in words; a rare path, which may read from the device."""
    one = torch.ones((), device=begun.norm.device)
    # The backward pass went through them from the last to the first.
    pending = reversed(begun.pending.items())
    layers = [name for name, sums in pending if not bool(is_finite(one, [sums]))]
    views = begun.gradients.views
    gradients = [name for name, view in views.items() if not bool(torch.isfinite(view).all())]
    parts = [
        f"{kind} of {', '.join(names[:_SHOWN])}"
        + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for kind, names in (("statistics", layers), ("gradients", gradients))
        if names
    ]
    return ", ".join(parts)

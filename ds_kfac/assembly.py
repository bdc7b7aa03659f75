"""What a preconditioner is built from at attach: layers, placement and program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ds_kfac import schedules
from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.vote import agree, raise_everywhere
from ds_kfac.config import KFACConfig
from ds_kfac.layers.discover import discover, require_coverage
from ds_kfac.layers.spec import LayerSpec, LayerTable
from ds_kfac.plan import cost
from ds_kfac.plan.placement import place
from ds_kfac.plan.program import Program, build

if TYPE_CHECKING:
    from ds_kfac.hosts.base import Host


@dataclass(frozen=True)
class Assembly:
    """The static side of a preconditioner.

    Attributes:
        layers: Preconditioned layers and what was left out.
        program: Owners and everything that moves.
        device: Where parameters live.
        dtype: Dtype of factors, bases and directions: fp32, for fp64 models fp64.
        stored_dtype: Dtype of the layers' stored gradients; they travel in it.
        is_stage: The model is one stage of a pipeline.
    """

    layers: LayerTable
    program: Program
    device: torch.device
    dtype: torch.dtype
    stored_dtype: torch.dtype
    is_stage: bool


def assemble(
    host: Host, config: KFACConfig, *, data: Communicator, model: Communicator
) -> Assembly:
    """Find the layers, place them and derive the program.

    Args:
        host: The framework's adapter.
        config: Settings.
        data: Ranks that share the layers' work.
        model: All ranks of the model.

    Raises:
        CoverageError: A rank's model has nothing to precondition; on every rank.
        DistributedError: Ranks disagree on layers, settings or program (E203).
    """
    layers = _discover(host, config, model)
    agree(data, "the set of layers", layers.fingerprint())
    agree(model, "the kfac configuration", config.model_dump_json())
    parameters = dict(host.model.named_parameters())
    weights = [parameters[spec.weight.name] for spec in layers.layers]
    # A pipeline stage may have nothing to precondition; it takes part in what all ranks do.
    first = weights[0] if weights else next(iter(parameters.values()))
    stored = first.dtype
    for weight in weights:
        stored = torch.promote_types(stored, weight.dtype)
    stored = host.gradient_dtype() or stored
    program = _program(host, config, layers.layers, data.size)
    agree(data, "the communication program", program.fingerprint())
    return Assembly(
        layers=layers,
        program=program,
        device=first.device,
        dtype=torch.promote_types(stored, torch.float32),
        stored_dtype=stored,
        is_stage=_excluded(host) is not None,
    )


def _discover(host: Host, config: KFACConfig, model: Communicator) -> LayerTable:
    """Find the layers; a rank that cannot makes all ranks raise."""
    table: LayerTable | None = None
    error: Exception | None = None
    excluded = _excluded(host)
    try:
        table = discover(
            host.model,
            config,
            optimized=host.learning_rates().keys(),
            excluded=excluded,
            whole=excluded is None,
        )
    except Exception as caught:
        error = caught
    raise_everywhere(model, error)
    assert table is not None
    if excluded is not None:
        require_coverage(model.gather_objects(table))
    return table


def _excluded(host: Host) -> Mapping[str, str] | None:
    """What a host of pipeline stages keeps out; None where every rank holds the whole model."""
    excluded: Callable[[], Mapping[str, str]] | None = getattr(host, "excluded", None)
    return None if excluded is None else excluded()


def _program(host: Host, config: KFACConfig, specs: tuple[LayerSpec, ...], size: int) -> Program:
    layouts = host.layouts([slot.name for spec in specs for slot in spec.slots])
    # Intervals may be schedules; the latest value governs most of a run.
    interval = schedules.interval_at(config.inv_update_steps, 1_000_000)
    costs = [
        cost.step_flops(
            spec,
            direction=config.direction,
            solver=config.resolved_solver,
            refresh_interval=interval,
        )
        for spec in specs
    ]
    owners = place(specs, costs, layouts, size=size, strategy=config.strategy)
    return build(specs, layouts, owners, size=size)

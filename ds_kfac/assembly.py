"""What a preconditioner is built from at attach: layers, placement and program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ds_kfac import schedules
from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.vote import agree, raise_everywhere
from ds_kfac.config import KFACConfig
from ds_kfac.layers.discover import discover
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
    """

    layers: LayerTable
    program: Program
    device: torch.device
    dtype: torch.dtype
    stored_dtype: torch.dtype


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
    stored = parameters[layers.layers[0].weight.name].dtype
    for spec in layers.layers:
        stored = torch.promote_types(stored, parameters[spec.weight.name].dtype)
    stored = host.gradient_dtype() or stored
    program = _program(host, config, layers.layers, data.size)
    agree(data, "the communication program", program.fingerprint())
    return Assembly(
        layers=layers,
        program=program,
        device=parameters[layers.layers[0].weight.name].device,
        dtype=torch.promote_types(stored, torch.float32),
        stored_dtype=stored,
    )


def _discover(host: Host, config: KFACConfig, model: Communicator) -> LayerTable:
    """Find the layers; a rank that cannot makes all ranks raise."""
    table: LayerTable | None = None
    error: Exception | None = None
    try:
        table = discover(host.model, config, optimized=host.learning_rates().keys())
    except Exception as caught:
        error = caught
    raise_everywhere(model, error)
    assert table is not None
    return table


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

"""What a preconditioner is built from at attach: layers, placement and program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ds_kfac import schedules
from ds_kfac.capture.rows import RowSharing
from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.ledger import Ledger
from ds_kfac.comm.vote import agree, raise_everywhere
from ds_kfac.config import KFACConfig
from ds_kfac.layers.discover import discover, require_coverage
from ds_kfac.layers.shards import TensorCut
from ds_kfac.layers.spec import LayerSpec, LayerTable
from ds_kfac.plan import cost
from ds_kfac.plan.placement import place
from ds_kfac.plan.program import Program, build
from ds_kfac.plan.tensor import grid_of, joint_layouts

if TYPE_CHECKING:
    from ds_kfac.hosts.base import Groups, Host


@dataclass(frozen=True)
class Communicators:
    """A host's process groups with one ledger.

    Attributes:
        data: Ranks over which gradients are averaged.
        model: All ranks of the model.
        tensor: Ranks that hold the shards of the same layers.
        work: Ranks that share the layers' work: data times tensor where layers are whole ones,
            data alone where every tensor rank's shards are layers of their own.
    """

    data: Communicator
    model: Communicator
    tensor: Communicator
    work: Communicator

    @classmethod
    def of(cls, groups: Groups, ledger: Ledger, *, blocks: bool) -> Communicators:
        """Communicators of a host.

        Args:
            groups: Its process groups.
            ledger: Counts what is sent.
            blocks: Every tensor rank's shards are layers of their own.
        """
        data = Communicator(groups.data, ledger)
        tensor = Communicator(groups.tensor, ledger)
        shared = tensor.size > 1 and not blocks
        return cls(
            data=data,
            model=Communicator(groups.model or groups.data, ledger),
            tensor=tensor,
            work=Communicator(groups.work, ledger) if shared else data,
        )

    @property
    def shares_tensor(self) -> bool:
        """Whether tensor ranks share the work on the same layers."""
        return self.work is not self.data

    @property
    def shard(self) -> str:
        """What tells this rank's layers from others of the same name; empty where they are one."""
        alone = self.tensor.size > 1 and not self.shares_tensor
        return f"@tensor{self.tensor.rank}" if alone else ""

    def row_sharing(self) -> RowSharing:
        """How rows of calls are shared out."""
        return RowSharing(self.tensor if self.shares_tensor else None)


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
        uncounted: Layers that another rank of the model counts as its own: with
            ``tensor_parallel: "block"``, what is whole on every tensor rank.
    """

    layers: LayerTable
    program: Program
    device: torch.device
    dtype: torch.dtype
    stored_dtype: torch.dtype
    is_stage: bool
    uncounted: frozenset[str] = frozenset()


def assemble(host: Host, config: KFACConfig, comms: Communicators) -> Assembly:
    """Find the layers, place them and derive the program.

    Args:
        host: The framework's adapter.
        config: Settings.
        comms: Its process groups.

    Raises:
        CoverageError: A rank's model has nothing to precondition; on every rank.
        DistributedError: Ranks disagree on layers, settings or program (E203).
    """
    tensor = _tensor_cut(host, config, comms)
    layers = _discover(host, config, comms.model, tensor)
    agree(comms.work, "the set of layers", layers.fingerprint())
    agree(comms.model, "the kfac configuration", config.model_dump_json())
    parameters = dict(host.model.named_parameters())
    weights = [parameters[spec.weight.name] for spec in layers.layers]
    # A pipeline stage may have nothing to precondition; it takes part in what all ranks do.
    first = weights[0] if weights else next(iter(parameters.values()))
    stored = first.dtype
    for weight in weights:
        stored = torch.promote_types(stored, weight.dtype)
    stored = host.gradient_dtype() or stored
    program = _program(host, config, layers.layers, comms)
    agree(comms.work, "the communication program", program.fingerprint())
    uncounted: frozenset[str] = frozenset()
    if tensor is not None and tensor.blocks and tensor.rank > 0:
        uncounted = frozenset(s.name for s in layers.layers if s.name not in tensor.modules)
    return Assembly(
        layers=layers,
        program=program,
        device=first.device,
        dtype=torch.promote_types(stored, torch.float32),
        stored_dtype=stored,
        is_stage=_excluded(host) is not None,
        uncounted=uncounted,
    )


def _tensor_cut(host: Host, config: KFACConfig, comms: Communicators) -> TensorCut | None:
    """What is cut over the tensor group, if anything is."""
    tensor_cut: Callable[..., TensorCut | None] | None = getattr(host, "tensor_cut", None)
    if tensor_cut is None or comms.tensor.size == 1:
        return None
    return tensor_cut(blocks=config.tensor_parallel == "block")


def _discover(
    host: Host, config: KFACConfig, model: Communicator, tensor: TensorCut | None
) -> LayerTable:
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
            tensor=tensor,
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


def _program(
    host: Host, config: KFACConfig, specs: tuple[LayerSpec, ...], comms: Communicators
) -> Program:
    size = comms.work.size
    layouts = host.layouts([slot.name for spec in specs for slot in spec.slots])
    if comms.shares_tensor:
        grid = grid_of(comms.work.gather_objects((comms.tensor.rank, comms.data.rank)))
        layouts = joint_layouts(specs, comms.tensor.gather_objects(layouts), grid)
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

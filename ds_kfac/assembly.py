"""What a preconditioner is built from at attach: layers, placement and program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ds_kfac.capture.rows import RowSharing
from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.ledger import Ledger
from ds_kfac.comm.progress import Progress
from ds_kfac.comm.vote import agree, raise_everywhere, together
from ds_kfac.config import KFACConfig
from ds_kfac.errors import DistributedError
from ds_kfac.layers.describe import whole_sizes
from ds_kfac.layers.discover import discover, require_coverage
from ds_kfac.layers.names import enclosing
from ds_kfac.layers.shards import TensorCut
from ds_kfac.layers.spec import LayerSpec, LayerTable, coverage_line
from ds_kfac.plan.derive import derive
from ds_kfac.plan.program import Program
from ds_kfac.plan.tensor import grid_of, joint_layouts

if TYPE_CHECKING:
    from ds_kfac.hosts.base import Expert, Groups, Host


@dataclass(frozen=True)
class Communicators:
    """A host's process groups with one ledger.

    Attributes:
        data: Ranks over which gradients are averaged.
        model: All ranks of the model.
        tensor: Ranks that hold the shards of the same layers.
        work: Ranks that share the layers' work: data times tensor where layers are whole ones,
            data alone where every tensor rank's shards are layers of their own.
        experts: Ranks that hold the same experts, by the host's key.
    """

    data: Communicator
    model: Communicator
    tensor: Communicator
    work: Communicator
    experts: Mapping[str, Communicator] = field(default_factory=dict)

    @classmethod
    def of(
        cls, groups: Groups, ledger: Ledger, progress: Progress, *, blocks: bool
    ) -> Communicators:
        """Communicators of a host.

        Args:
            groups: Its process groups.
            ledger: Counts what is sent.
            progress: Notes where this rank is.
            blocks: Every tensor rank's shards are layers of their own.
        """
        data = Communicator(groups.data, ledger, progress)
        tensor = Communicator(groups.tensor, ledger, progress)
        shared = tensor.size > 1 and not blocks
        return cls(
            data=data,
            model=Communicator(groups.model or groups.data, ledger, progress),
            tensor=tensor,
            work=Communicator(groups.work, ledger, progress) if shared else data,
            experts={
                key: Communicator(group, ledger, progress) for key, group in groups.experts.items()
            },
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
class PartitionPlan:
    """Layers whose work the same ranks share.

    Attributes:
        layers: In table order.
        communicator: Those ranks.
        program: Owners and everything that moves.
    """

    layers: tuple[LayerSpec, ...]
    communicator: Communicator
    program: Program


@dataclass(frozen=True)
class Assembly:
    """The static side of a preconditioner.

    Attributes:
        layers: Preconditioned layers and what was left out.
        partitions: The same layers by the ranks that share them, in the same order on all
            ranks: the dense ones first.
        experts: Names of modules that see padded tokens.
        stored_names: Name of each layer in files, where it is that of no other layer of any rank.
        device: Where parameters live.
        dtype: Dtype of factors, bases and directions: fp32, for fp64 models fp64.
        stored_dtype: Dtype of the layers' stored gradients; they travel in it.
        is_stage: The model is one stage of a pipeline.
        tensor: What is cut over tensor ranks, if anything is.
        uncounted: Layers that another rank of the model counts as its own: with
            ``tensor_parallel: "block"``, what is whole on every tensor rank.
        token_sides: Layers with a side (``"a"`` or ``"g"``) whose sums cover this rank's own
            tokens only and have to be added up over the tensor group.
    """

    layers: LayerTable
    partitions: tuple[PartitionPlan, ...]
    experts: tuple[str, ...]
    stored_names: Mapping[str, str]
    device: torch.device
    dtype: torch.dtype
    stored_dtype: torch.dtype
    is_stage: bool
    tensor: TensorCut | None = None
    uncounted: frozenset[str] = frozenset()
    token_sides: Mapping[str, str] = field(default_factory=dict)
    coverage: str = ""


def assemble(host: Host, config: KFACConfig, comms: Communicators) -> Assembly:
    """Find the layers, place them and derive the programs.

    Args:
        host: The framework's adapter.
        config: Settings.
        comms: Its process groups.

    Raises:
        CoverageError: A rank's model has nothing to precondition; on every rank.
        DistributedError: Ranks disagree on layers, settings or program (E203).
    """
    if config.factor_micro_batches == "last":
        together(comms.model, host.micro_batch_is_last)  # raises if the host cannot tell
    tensor = _tensor_cut(host, config, comms)
    layers = _discover(host, config, comms.model, tensor)
    agree(comms.model, "the kfac configuration", config.model_dump_json())
    parameters = dict(host.model.named_parameters())
    weights = [parameters[spec.weight.name] for spec in layers.layers]
    # A pipeline stage may have nothing to precondition; it takes part in what all ranks do.
    first = weights[0] if weights else next(iter(parameters.values()))
    stored = first.dtype
    for weight in weights:
        stored = torch.promote_types(stored, weight.dtype)
    stored = host.gradient_dtype() or stored
    experts = _experts(host)
    uncounted: frozenset[str] = frozenset()
    if tensor is not None and tensor.blocks and tensor.rank > 0:
        # Experts are no copies: every tensor rank has its own.
        whole = (spec.name for spec in layers.layers if spec.name not in tensor.modules)
        uncounted = frozenset(name for name in whole if enclosing(name, experts) is None)
    return Assembly(
        layers=layers,
        partitions=_partitions(host, config, _split(layers, experts, comms), comms),
        experts=tuple(experts),
        stored_names={
            spec.name: _stored_name(spec.name, experts) + comms.shard for spec in layers.layers
        },
        device=first.device,
        dtype=torch.promote_types(stored, torch.float32),
        stored_dtype=stored,
        is_stage=_excluded(host) is not None,
        tensor=tensor,
        uncounted=uncounted,
        token_sides=_token_sides(layers, tensor),
        coverage=_coverage(host, comms, layers, experts, tensor),
    )


def _coverage(
    host: Host,
    comms: Communicators,
    layers: LayerTable,
    experts: Mapping[str, Expert],
    tensor: TensorCut | None,
) -> str:
    """What is preconditioned of the whole model. A collective where ranks hold parts of it."""
    cut = {} if tensor is None else whole_sizes(tensor, host.model)
    sizes = {
        _stored_name(spec.name, experts): sum(cut.get(s.name, s.numel) for s in spec.slots)
        for spec in layers.layers
    }
    rest = {_stored_name(item.name, experts): item.numel for item in layers.left_out}
    if _excluded(host) is None and comms.tensor.size == 1 and not comms.experts:
        return layers.coverage()
    parts = comms.model.gather_objects((sizes, rest))
    inside = {name: numel for part, _ in parts for name, numel in part.items()}
    outside = {name: numel for _, part in parts for name, numel in part.items()}
    return coverage_line(list(inside.values()), list(outside.values()))


def _token_sides(layers: LayerTable, tensor: TensorCut | None) -> dict[str, str]:
    """Sides that no exchange of rows completes, because shards are layers of their own."""
    if tensor is None or not tensor.blocks:
        return {}
    cut = {spec.name: tensor.modules.get(spec.name) for spec in layers.layers}
    return {
        name: "a" if shards.rows else "g"
        for name, shards in cut.items()
        if shards is not None and shards.tokens
    }


def _split(
    layers: LayerTable, experts: Mapping[str, Expert], comms: Communicators
) -> list[tuple[tuple[LayerSpec, ...], Communicator]]:
    """Layers by the ranks that share them; the same groups in the same order on every rank."""
    expert_of = {spec.name: enclosing(spec.name, experts) for spec in layers.layers}
    parts = [(tuple(s for s in layers.layers if expert_of[s.name] is None), comms.work)]
    for key in sorted({expert.group for expert in experts.values()}):
        inside = {name for name, at in expert_of.items() if at and experts[at].group == key}
        parts.append((tuple(s for s in layers.layers if s.name in inside), comms.experts[key]))
    return parts


def _partitions(
    host: Host,
    config: KFACConfig,
    parts: list[tuple[tuple[LayerSpec, ...], Communicator]],
    comms: Communicators,
) -> tuple[PartitionPlan, ...]:
    """Programs of all partitions. What goes wrong in one group is raised on all ranks.

    Ranks of other groups (experts, pipeline stages) would start to train and wait for ever.
    """

    def plans() -> tuple[PartitionPlan, ...]:
        return tuple(
            PartitionPlan(specs, group, _program(host, config, specs, group, comms))
            for specs, group in parts
        )

    tables = [(group, LayerTable(specs, ()).fingerprint()) for specs, group in parts]
    _agree_in_groups(comms.model, "the set of layers", tables)
    made = together(comms.model, plans)
    programs = [(plan.communicator, plan.program.fingerprint()) for plan in made]
    _agree_in_groups(comms.model, "the communication program", programs)
    return made


def _agree_in_groups(
    model: Communicator, what: str, values: Sequence[tuple[Communicator, str]]
) -> None:
    error: Exception | None = None
    for group, value in values:
        try:
            agree(group, what, value)
        except DistributedError as caught:
            error = error or caught  # the next group's ranks need an answer from this one too
    raise_everywhere(model, error)


def _stored_name(name: str, experts: Mapping[str, Expert]) -> str:
    expert = enclosing(name, experts)
    return name if expert is None else experts[expert].name + name.removeprefix(expert)


def _experts(host: Host) -> Mapping[str, Expert]:
    """Expert modules by name."""
    experts: Callable[[], Mapping[str, Expert]] | None = getattr(host, "experts", None)
    return {} if experts is None else experts()


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
    excluded = _excluded(host)
    table = together(
        model,
        lambda: discover(
            host.model,
            config,
            optimized=host.learning_rates().keys(),
            excluded={**(excluded or {}), **_uncalled(host)},
            whole=excluded is None,
            tensor=tensor,
            sizes=_sizes(host),
        ),
    )
    if excluded is not None:
        require_coverage(model.gather_objects(table))
    return table


def _excluded(host: Host) -> Mapping[str, str] | None:
    """What a host of pipeline stages keeps out; None where every rank holds the whole model."""
    excluded: Callable[[], Mapping[str, str]] | None = getattr(host, "excluded", None)
    return None if excluded is None else excluded()


def _sizes(host: Host) -> Mapping[str, int]:
    """Elements that parameters count in the whole model, where a host knows other numbers."""
    sizes: Callable[[], Mapping[str, int]] | None = getattr(host, "sizes", None)
    return {} if sizes is None else sizes()


def _uncalled(host: Host) -> Mapping[str, str]:
    """Modules whose weights the host's own code uses without calling them, and why."""
    uncalled: Callable[[], Mapping[str, str]] | None = getattr(host, "uncalled", None)
    return {} if uncalled is None else uncalled()


def _program(
    host: Host,
    config: KFACConfig,
    specs: tuple[LayerSpec, ...],
    communicator: Communicator,
    comms: Communicators,
) -> Program:
    size = communicator.size
    layouts = host.layouts([slot.name for spec in specs for slot in spec.slots])
    if comms.shares_tensor and communicator is comms.work:
        grid = grid_of(comms.work.gather_objects((comms.tensor.rank, comms.data.rank)))
        layouts = joint_layouts(specs, comms.tensor.gather_objects(layouts), grid)
    return derive(specs, layouts, config, size=size)

"""Jobs with Ulysses sequence parallelism: sequences cut over ranks, attention over whole ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_kfac
from tests._harness import deepspeed_cpu
from tests.hosts import topology_jobs

BATCH, LENGTH, WIDTH, HEADS = 4, 8, 8, 4
STEPS = 3
LR, DECAY, AUX_LR = topology_jobs.LR, topology_jobs.DECAY, topology_jobs.AUX_LR
LAYERS = ("enter", "query", "key", "value", "out", "leave")


@dataclass(frozen=True)
class Cell:
    """One way to train.

    Attributes:
        zero: ZeRO stage.
        kfac: Settings of the preconditioner.
        own: Optimizer type KFAC; otherwise SGD with momentum beside a kfac section.
        accumulation: Micro-batches per step.
        clipping: The engine's gradient clipping.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        extra: More DeepSpeed JSON.
    """

    zero: int
    kfac: dict[str, Any] = field(hash=False)
    own: bool = True
    accumulation: int = 1
    clipping: float = 0.0
    dtype: str = "fp32"
    extra: dict[str, Any] = field(default_factory=dict, hash=False)


class Net(nn.Module):
    """A causal attention layer between two projections.

    Args:
        group: Sequence-parallel group; None for whole sequences.
    """

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.8, 1.2, WIDTH))
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, 3)
        self.attention: Any = attend
        if group is not None:
            from deepspeed.sequence.layer import DistributedAttention

            self.attention = DistributedAttention(Attend(), group, scatter_idx=2, gather_idx=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gain * torch.tanh(self.enter(x))
        heads = [part(x).unflatten(2, (HEADS, -1)) for part in (self.query, self.key, self.value)]
        return self.leave(x + self.out(self.attention(*heads, 0).flatten(2)))


class Attend(nn.Module):
    """:func:`attend` as a module."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


def attend(q: Tensor, k: Tensor, v: Tensor, _: int = 0) -> Tensor:
    """Causal attention over ``[batch, length, heads, features]``."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def make_net(group: Any = None) -> Net:
    """The network with its initial weights."""
    torch.manual_seed(5)
    return Net(group)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Whole sequences and targets of a step."""
    generator = torch.Generator().manual_seed(300 + step)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    return x, torch.randn(BATCH, LENGTH, 3, generator=generator)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean over the positions at hand."""
    return 0.5 * (output - target).square().sum(-1).mean()


def config_of(cell: Cell, copies: int) -> dict[str, Any]:
    """The DeepSpeed JSON of a cell."""
    config: dict[str, Any] = {
        "train_batch_size": copies * cell.accumulation,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": cell.accumulation,
        "gradient_clipping": cell.clipping,
        "zero_optimization": {
            "stage": cell.zero,
            "reduce_bucket_size": 100,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if cell.dtype != "fp32":
        config[cell.dtype] = {"enabled": True}
    topology_jobs.add_optimizer(config, cell.kfac, own=cell.own)
    return topology_jobs.merged(config, cell.extra)


def start(size: int, *, fake_fp16: bool = False) -> Any:
    """Sequence groups of the job's ranks, as DeepSpeed's own launchers make them."""
    deepspeed_cpu.prepare(fake_fp16=fake_fp16)
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu

    mpu.initialize_sequence_parallel(sequence_parallel_size=size)
    return mpu


def make_engine(cell: Cell, mpu: Any, copies: int) -> Any:
    """A real engine over sequence-parallel ranks with K-FAC attached."""
    net = make_net(mpu.get_sequence_parallel_group())
    engine, *_ = ds_kfac.initialize(
        model=net, model_parameters=net.parameters(), config=config_of(cell, copies), mpu=mpu
    )
    return engine


def train(rank: int, ranks: int, sequence: int, cells: list[Cell]) -> list[dict[str, Any]]:
    """Train every cell with sequences cut over ``sequence`` ranks."""
    mpu = start(sequence, fake_fp16=any(cell.dtype == "fp16" for cell in cells))
    return [train_cell(rank // sequence, rank % sequence, ranks // sequence, mpu, c) for c in cells]


def train_cell(copy: int, place: int, copies: int, mpu: Any, cell: Cell) -> dict[str, Any]:
    """Train one cell as copy ``copy`` of the sequences, holding their part ``place``."""
    import deepspeed

    engine = make_engine(cell, mpu, copies)
    positions = torch.arange(LENGTH).chunk(mpu.get_sequence_parallel_world_size())[place]
    norms = []
    for step in range(STEPS):
        x, y = batch(step)
        parts = torch.arange(BATCH).chunk(copies * cell.accumulation)
        for _ in range(topology_jobs.MAX_OVERFLOWS):  # where a loss scale is being looked for
            for rows in parts[copy * cell.accumulation :][: cell.accumulation]:
                mine = rows[:, None], positions[None]
                output = engine(x[mine].to(topology_jobs.DTYPES[cell.dtype]))
                engine.backward(loss(output.float(), y[mine]))
                engine.step()
            if engine.was_step_applied():
                break
        norms.append(float(engine.get_global_grad_norm()))
    kfac = engine.kfac
    named = dict(engine.module.named_parameters())
    sharded = [param for param in named.values() if hasattr(param, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded):
        weights = {name: param.detach().float().clone() for name, param in named.items()}
    report = {
        "weights": weights,
        "norms": norms,
        "factors": {name: kfac.factors(name) for name in kfac.owners},
        "owners": kfac.owners,
    }
    engine.destroy()
    return report


def refuse(rank: int, ranks: int, cells: list[Cell]) -> list[str]:
    """The messages that a device mesh and each cell are refused with."""
    messages = [_refuse_mesh(ranks)]
    mpu = start(ranks)
    return messages + [_message(lambda c=c: make_engine(c, mpu, 1)) for c in cells]


def _refuse_mesh(ranks: int) -> str:
    deepspeed_cpu.prepare()
    from deepspeed.utils import groups

    net = make_net()
    extra = {"sequence_parallel_size": ranks, "data_parallel_size": 1}
    config = config_of(Cell(1, {}, extra=extra), 1)
    message = _message(
        lambda: ds_kfac.initialize(model=net, model_parameters=net.parameters(), config=config)
    )
    groups.mesh_device = None
    return message


def _message(action: Any) -> str:
    try:
        action()
    except ds_kfac.KFACError as error:
        return str(error)
    return "accepted"

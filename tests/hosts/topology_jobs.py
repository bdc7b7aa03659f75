"""Jobs of the topology matrix: the same global batch, cut in every way, on real hosts.

A cell trains a small network for a few steps and returns its weights. The data of a step
is a function of the step alone; ranks and micro-batches take their share of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_kfac
from tests._harness import deepspeed_cpu

ROWS = 48
STEPS = 5
MAX_OVERFLOWS = 40
FEATURES, WIDTH, CLASSES = 6, 10, 4


@dataclass(frozen=True)
class Cell:
    """One way to train.

    Attributes:
        host: ``ddp`` or a ZeRO stage ``0`` to ``3``.
        kfac: Settings of the preconditioner.
        accumulation: Micro-batches per step.
        uneven: Ranks and micro-batches get different numbers of rows.
        own: Optimizer type KFAC; otherwise SGD with momentum beside a kfac section.
        clipping: The host's gradient clipping.
        dtype: Of the model: ``fp32``, ``bf16`` or ``fp16``.
        integers: Integer data and a linear loss: every sum is exact in fp32.
        extra: More DeepSpeed JSON, merged into the sections of the cell.
        zero_init: Build the model under ``deepspeed.zero.Init``.
    """

    host: str
    kfac: dict[str, Any] = field(hash=False)
    accumulation: int = 1
    uneven: bool = False
    own: bool = True
    clipping: float = 0.0
    dtype: str = "fp32"
    integers: bool = False
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    zero_init: bool = False


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LR, DECAY, AUX_LR = 0.05, 0.01, 0.02


class Net(nn.Module):
    """Linear layers with and without bias, and a parameter that stays with the base optimizer.

    No normalisation layer: it would give a factor an exact null direction, in which Adam in an
    eigenbasis amplifies rounding to full size, whoever computes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.8, 1.2, WIDTH))
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.gain * self.first(x))
        x = functional.elu(self.middle(x), inplace=True)
        return self.last(x)


class ExactNet(nn.Module):
    """Parallel linear layers under a linear loss: gradients do not depend on weights."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], dim=-1)


LAYERS = ("first", "middle", "last")


def make_net(cell: Cell) -> nn.Module:
    """The cell's network with its initial weights."""
    torch.manual_seed(7)
    return ExactNet() if cell.integers else Net()


def batch(step: int, *, integers: bool) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the whole step, ``ROWS`` (64 for integers) rows."""
    generator = torch.Generator().manual_seed(100 + step)
    if integers:
        x = torch.randint(-3, 4, (64, 8), generator=generator).float()
        return x, torch.randint(-2, 3, (64, 24), generator=generator).float()
    return torch.randn(ROWS, FEATURES, generator=generator), torch.randn(
        ROWS, CLASSES, generator=generator
    )


def loss_sum(output: Tensor, target: Tensor, *, integers: bool) -> Tensor:
    """Loss summed over rows."""
    output, target = output.float(), target.float()
    if integers:
        return (output * target).sum()
    return 0.5 * (output - target).square().sum()


def shares(rows: int, parts: int, *, uneven: bool) -> list[slice]:
    """Cut rows into parts of equal or very different size, some of a single row."""
    if not uneven or parts == 1:
        sizes = [rows // parts] * parts
    else:
        sizes = [1 + i for i in range(parts - 1)]
        sizes.append(rows - sum(sizes))
    ends = [sum(sizes[: i + 1]) for i in range(parts)]
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def train(rank: int, size: int, cells: list[Cell]) -> list[dict[str, Tensor]]:
    """Train every cell; weights by name, in fp32, the same on every rank."""
    return [_train_cell(rank, size, cell) for cell in cells]


def _train_cell(rank: int, size: int, cell: Cell) -> dict[str, Tensor]:
    run = _train_ddp if cell.host == "ddp" else _train_deepspeed
    return run(rank, size, cell)


def micro_batches(
    rank: int, size: int, cell: Cell, step: int
) -> list[tuple[Tensor, Tensor, float]]:
    """This rank's micro-batches and the factor that makes their losses a global mean."""
    x, y = batch(step, integers=cell.integers)
    parts = shares(len(x), size * cell.accumulation, uneven=cell.uneven)
    mine = parts[rank * cell.accumulation : (rank + 1) * cell.accumulation]
    factor = size * cell.accumulation / len(x)
    return [(x[part], y[part], factor) for part in mine]


def _train_ddp(rank: int, size: int, cell: Cell) -> dict[str, Tensor]:
    net = make_net(cell)
    model = nn.parallel.DistributedDataParallel(net) if size > 1 else net
    optimizer = _client_optimizer(net, cell)
    kfac = ds_kfac.attach(model, optimizer, cell.kfac)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = micro_batches(rank, size, cell, step)
        for index, (x, y, factor) in enumerate(parts):
            last = index == len(parts) - 1
            loss = loss_sum(model(x), y, integers=cell.integers) * (factor / cell.accumulation)
            if last or size == 1:
                loss.backward()
            else:
                with model.no_sync():
                    loss_sum(model(x), y, integers=cell.integers)  # a forward without backward
                    loss.backward()
        if cell.clipping:
            nn.utils.clip_grad_norm_(net.parameters(), cell.clipping)
        optimizer.step()
    kfac.detach()
    return {name: param.detach().clone() for name, param in net.named_parameters()}


def _client_optimizer(net: nn.Module, cell: Cell) -> torch.optim.Optimizer:
    if not cell.own:
        return torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
    from ds_kfac.config import AuxiliaryConfig, OptimizerConfig
    from ds_kfac.optimizer import param_groups

    config = OptimizerConfig(lr=LR, weight_decay=DECAY, aux=AuxiliaryConfig(lr=AUX_LR))
    names = {n for n, p in net.named_parameters() if n != "gain"}
    return ds_kfac.KFACOptimizer(param_groups(net.named_parameters(), names, config), config)


def deepspeed_config(cell: Cell, size: int) -> dict[str, Any]:
    """The DeepSpeed JSON of a cell."""
    config: dict[str, Any] = {
        "train_batch_size": size * cell.accumulation,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": cell.accumulation,
        "gradient_clipping": cell.clipping,
        "zero_optimization": {"stage": int(cell.host), "reduce_bucket_size": 300},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if cell.dtype != "fp32":
        config[cell.dtype] = {"enabled": True}
    add_optimizer(config, cell.kfac, own=cell.own)
    return merged(config, cell.extra)


def add_optimizer(config: dict[str, Any], kfac: dict[str, Any], *, own: bool) -> None:
    """Type KFAC, or SGD with momentum beside a kfac section, with the rates of all jobs."""
    if own:
        aux = {"lr": AUX_LR, "betas": [0.9, 0.95]}
        params = {"lr": LR, "weight_decay": DECAY, "aux": aux, **kfac}
        config["optimizer"] = {"type": "KFAC", "params": params}
    else:
        params = {"lr": LR, "momentum": 0.9, "weight_decay": DECAY}
        config["optimizer"] = {"type": "SGD", "params": params}
        config["kfac"] = dict(kfac)


def merged(config: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Two nested configurations in one; the second wins."""
    result = dict(config)
    for key, value in extra.items():
        inner = result.get(key)
        both = isinstance(inner, dict) and isinstance(value, dict)
        result[key] = merged(inner, value) if both else value
    return result


def make_engine(cell: Cell, size: int) -> Any:
    """A real engine with K-FAC attached."""
    deepspeed = deepspeed_cpu.prepare(fake_fp16=cell.dtype == "fp16")
    config = deepspeed_config(cell, size)
    if cell.zero_init:
        with deepspeed.zero.Init(config_dict_or_path=config):
            net = make_net(cell)
    else:
        net = make_net(cell)
    engine, *_ = ds_kfac.initialize(model=net, model_parameters=net.parameters(), config=config)
    return engine


def full_weights(engine: Any) -> dict[str, Tensor]:
    """Whole weights in fp32 on every rank; gathered where ZeRO 3 has cut them."""
    import deepspeed

    named = dict(engine.module.named_parameters())
    sharded = [param for param in named.values() if hasattr(param, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded):
        return {name: param.detach().float().clone() for name, param in named.items()}


def _train_deepspeed(rank: int, size: int, cell: Cell) -> dict[str, Tensor]:
    engine = make_engine(cell, size)
    for step in range(STEPS):
        for x, y, factor in micro_batches(rank, size, cell, step):
            output = engine(x.to(DTYPES[cell.dtype]))
            engine.backward(loss_sum(output, y, integers=cell.integers) * factor)
            engine.step()
    weights = full_weights(engine)
    engine.destroy()
    return weights

"""Jobs behind the promises: counts, bytes, bad numbers, switching off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ds_kfac
from tests._harness import collectives, deepspeed_cpu
from tests.hosts import topology_jobs as jobs
from tests.hosts.topology_jobs import Cell


class Deep(nn.Module):
    """A chain of equal layers, for counts that must not grow with depth."""

    def __init__(self, depth: int, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


def deep_engine(depth: int, stage: str, size: int, kfac: dict[str, Any], **extra: Any) -> Any:
    """An engine over a deep chain; directions with their own length rule bring the optimizer."""
    deepspeed = deepspeed_cpu.prepare()
    del deepspeed
    torch.manual_seed(3)
    net = Deep(depth)
    own = kfac["direction"] in ("orthogonal", "eigen_adam")
    config = jobs.deepspeed_config(Cell(stage, kfac, own=own, **extra), size)
    engine, *_ = ds_kfac.initialize(model=net, model_parameters=net.parameters(), config=config)
    return engine


def take_step(engine: Any, rank: int, step: int, micro_batches: int = 1) -> None:
    """One optimizer step on random data."""
    for micro in range(micro_batches):
        torch.manual_seed(1000 * step + 10 * micro + rank)
        x = torch.randn(8, 12, dtype=next(engine.module.parameters()).dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()


def decompositions(rank: int, size: int, stage: str) -> dict[str, float]:
    """Metrics after three refreshes."""
    kfac = {"direction": "natural", "factor_update_steps": 1, "inv_update_steps": 2}
    engine = deep_engine(5, stage, size, {**kfac, "max_factor_dim": 7})
    for step in range(5):
        take_step(engine, rank, step)
    metrics = engine.kfac.metrics()
    engine.destroy()
    return dict(metrics)


def accumulation_counts(rank: int, size: int, stage: str) -> dict[str, float]:
    """Metrics after two steps of four micro-batches."""
    kfac = {"direction": "natural", "factor_update_steps": 1, "inv_update_steps": 1}
    engine = deep_engine(2, stage, size, kfac, accumulation=4)
    for step in range(2):
        take_step(engine, rank, step, micro_batches=4)
    metrics = engine.kfac.metrics()
    engine.destroy()
    return dict(metrics)


def traffic(
    rank: int, size: int, stage: str, depth: int, direction: str, strategy: str
) -> dict[str, Any]:
    """Ledger, owners and recorded collectives of one capture step and two ordinary ones."""
    kfac = {"direction": direction, "factor_update_steps": 3, "inv_update_steps": 3}
    engine = deep_engine(depth, stage, size, {**kfac, "strategy": strategy}, clipping=1.0)
    logs: list[list[str]] = []
    for step in range(3):
        with only_ours(engine) as log:
            take_step(engine, rank, step)
        logs.append(log)
    report = engine.kfac.ledger()
    owners = engine.kfac.owners
    layouts = engine.kfac._host.layouts(
        [f"{name}.{kind}" for name in owners for kind in ("weight", "bias")]
    )
    engine.destroy()
    return {"ledger": report, "owners": owners, "layouts": layouts, "collectives": logs}


class only_ours:  # noqa: N801 - used like a function
    """Record the collectives between the entry of the step and the engine's own step."""

    def __init__(self, engine: Any) -> None:
        self._kfac = engine.kfac
        self.log: list[str] = []

    def __enter__(self) -> list[str]:
        original = self._kfac.before_step

        def before_step() -> bool:
            with collectives.recording() as records:
                healthy = original()
            self.log.extend(record.op for record in records)
            return healthy

        self._kfac.before_step = before_step
        return self.log

    def __exit__(self, *_: object) -> None:
        del self._kfac.before_step


def bad_batches(
    rank: int, size: int, cell: Cell, bad_steps: list[int], value: float
) -> dict[str, Any]:
    """Train with extra steps whose batch is bad on the last rank only."""
    run = _ddp_loop(cell, size) if cell.host == "ddp" else _engine_loop(cell, size)
    net, kfac, backward, optimizer_step = run
    good = iter(range(jobs.STEPS))
    for position in range(jobs.STEPS + len(bad_steps)):
        bad = position in bad_steps
        step = 0 if bad else next(good)
        ((x, y, factor),) = jobs.micro_batches(rank, size, cell, step)
        if bad and rank == size - 1:
            x = x.clone()
            x[0, 0] = value
        backward(x, y, factor)
        optimizer_step()
    factors = {name: kfac.factors(name) for name in jobs.LAYERS}
    weights = {n: p.detach().float().clone() for n, p in net.named_parameters()}
    metrics = kfac.metrics()
    kfac.detach()
    return {"weights": weights, "factors": factors, "metrics": metrics}


def _engine_loop(cell: Cell, size: int) -> Any:
    engine = jobs.make_engine(cell, size)
    half = cell.dtype == "bf16"

    def backward(x: Tensor, y: Tensor, factor: float) -> None:
        output = engine(x.bfloat16() if half else x)
        engine.backward(jobs.loss_sum(output, y, integers=False) * factor)

    return engine.module, engine.kfac, backward, engine.step


def _ddp_loop(cell: Cell, size: int) -> Any:
    net = jobs.make_net(cell)
    model = nn.parallel.DistributedDataParallel(net) if size > 1 else net
    optimizer = jobs._client_optimizer(net, cell)
    kfac = ds_kfac.attach(model, optimizer, cell.kfac)

    def backward(x: Tensor, y: Tensor, factor: float) -> None:
        optimizer.zero_grad()
        (jobs.loss_sum(model(x), y, integers=False) * factor).backward()

    return net, kfac, backward, optimizer.step


def error_of(rank: int, size: int, cell: Cell, bad_step: int) -> None:
    """NaN on the last rank with on_nonfinite='raise'."""
    bad_batches(rank, size, cell, [bad_step], float("nan"))


LOCAL_WORK = (
    "host.gradients",
    "host.stored_scale",
    "host.clip_threshold",
    "host.learning_rates",
    "host.writable",
    "host.after_write",
    "session.input_sums",
    "session.drain",
    "exchange._read",
    "owner.fold",
    "owner.finish",
    "owner.swap",
    "owner.refresh",
    "owner.directions",
)


def local_error(rank: int, size: int, cell: Cell, point: str) -> None:
    """A piece of this rank's own work fails on one rank only, from the third step on."""
    loop = _ddp_loop if cell.host == "ddp" else _engine_loop
    _, kfac, backward, optimizer_step = loop(cell, size)
    part, method = point.split(".")
    holder = kfac._partitions[0] if hasattr(kfac._partitions[0], part) else kfac
    for step in range(5):
        ((x, y, factor),) = jobs.micro_batches(rank, size, cell, step)
        if rank == 1 and step == 2:
            setattr(getattr(holder, part if holder is not kfac else f"_{part}"), method, _fail)
        backward(x, y, factor)
        optimizer_step()


def packing_error(rank: int, size: int, cell: Cell) -> None:
    """Packing that fails on one rank only, between two collectives."""
    from ds_kfac.capture import session

    original = session.pack_upper
    _, _, backward, optimizer_step = _ddp_loop(cell, size)
    try:
        if rank == 1:
            session.pack_upper = _fail
        for step in range(3):
            ((x, y, factor),) = jobs.micro_batches(rank, size, cell, step)
            backward(x, y, factor)
            optimizer_step()
    finally:
        session.pack_upper = original


def _fail(*_: object, **__: object) -> None:
    raise MemoryError("no memory for statistics")


def plain_engine(rank: int, size: int, stage: str, section: Any) -> dict[str, Tensor]:
    """Weights of an engine whose JSON has the given kfac section, or none for 'absent'."""
    deepspeed = deepspeed_cpu.prepare()
    cell = Cell(stage, {}, own=False, clipping=0.3)
    config = jobs.deepspeed_config(cell, size)
    del config["kfac"]
    net = jobs.make_net(cell)
    kwargs = {"model": net, "model_parameters": net.parameters(), "config": config}
    if section == "absent":
        engine, *_ = deepspeed.initialize(**kwargs)
    else:
        config["kfac"] = {} if section == "detached" else section
        engine, *_ = ds_kfac.initialize(**kwargs)
    if section == "detached":
        engine.kfac.detach()
    for step in range(jobs.STEPS):
        ((x, y, factor),) = jobs.micro_batches(rank, size, cell, step)
        engine.backward(jobs.loss_sum(engine(x), y, integers=False) * factor)
        engine.step()
    assert getattr(engine, "kfac", None) is None
    weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    engine.destroy()
    return weights


def norms(rank: int, size: int, stage: str, clipping: float) -> list[tuple[float, float, float]]:
    """Per step: reported norm, true raw norm, norm of the weights' change."""
    cell = Cell(stage, {"direction": "orthogonal"}, own=True, clipping=clipping)
    engine = jobs.make_engine(cell, size)
    results = []
    for step in range(3):
        before = [p.detach().clone() for p in engine.module.parameters()]
        x, y = jobs.batch(step, integers=False)
        twin = jobs.make_net(cell)
        twin.load_state_dict(engine.module.state_dict())
        (jobs.loss_sum(twin(x), y, integers=False) / len(x)).backward()
        true = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm()
        ((mx, my, factor),) = jobs.micro_batches(rank, size, cell, step)
        engine.backward(jobs.loss_sum(engine(mx), my, integers=False) * factor)
        engine.step()
        change = [a - b for a, b in zip(engine.module.parameters(), before, strict=True)]
        moved = torch.cat([c.detach().flatten() for c in change]).norm()
        results.append((float(engine.get_global_grad_norm()), float(true), float(moved)))
    assert engine.gradient_clipping() == clipping
    engine.destroy()
    return results


def scheduled_rates(rank: int, size: int) -> list[tuple[float, float]]:
    """Base rate, and movement of an auxiliary parameter, under DeepSpeed's WarmupLR."""
    deepspeed_cpu.prepare()
    cell = Cell("2", {"direction": "orthogonal"}, own=True)
    config = jobs.deepspeed_config(cell, size)
    config["scheduler"] = {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": jobs.LR,
            "warmup_num_steps": 4,
            "warmup_type": "linear",
        },
    }
    net = jobs.make_net(cell)
    engine, *_ = ds_kfac.initialize(model=net, model_parameters=net.parameters(), config=config)
    rates = []
    for step in range(4):
        ((x, y, factor),) = jobs.micro_batches(rank, size, cell, step)
        engine.backward(jobs.loss_sum(engine(x), y, integers=False) * factor)
        before = net.gain.detach().clone()
        rate = engine.basic_optimizer.param_groups[0]["lr"]
        engine.step()
        # Adam's first steps have size one: the change is the rate.
        rates.append((float(rate), float((net.gain - before).abs().max())))
    engine.destroy()
    return rates

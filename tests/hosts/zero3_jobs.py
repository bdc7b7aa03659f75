"""Jobs about what only ZeRO 3 does: cut weights, adapters, stale gradients, memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.hosts import topology_jobs as jobs
from tests.hosts.deepspeed_cells import config_of, engine_of

SIZES = (7, 5, 3)  # not divisible by 2, 3 or 4, neither weights nor biases
ROWS = 12
STEPS = 3


def odd_net() -> nn.Module:
    """Two layers with odd dimensions."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def odd_batch(step: int) -> Tensor:
    """Inputs of the whole step."""
    return torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(50 + step))


def objective(output: Tensor) -> Tensor:
    """A loss per row, summed."""
    return 0.5 * (output.double() - 1.0).square().sum().to(output.dtype)


class Adapter(nn.Module):
    """A frozen linear layer and a trainable product of two small ones beside it (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


def hand_adapted(net: nn.Module) -> nn.Module:
    """The network with an adapter around both linear layers."""
    torch.manual_seed(12)
    return nn.Sequential(Adapter(net[0]), net[1], Adapter(net[2]))


def adapted(net: nn.Module) -> nn.Module:
    """The network with frozen weights and LoRA adapters on both linear layers, from peft."""
    import peft

    torch.manual_seed(12)
    config = peft.LoraConfig(
        r=2, target_modules=["0", "2"], lora_alpha=4, lora_dropout=0.0, init_lora_weights=False
    )
    return peft.get_peft_model(net, config)


def frozen(net: nn.Module) -> nn.Module:
    """The network with its first layer and the second bias frozen."""
    net[0].requires_grad_(False)
    net[2].bias.requires_grad_(False)
    return net


def build(kind: str) -> nn.Module:
    """``plain``, ``frozen``, ``lora`` or ``peft``."""
    kinds = {"plain": lambda n: n, "frozen": frozen, "lora": hand_adapted, "peft": adapted}
    return kinds[kind](odd_net())


def train_odd(
    rank: int, size: int, kinds: list[str], zero: dict[str, Any], stage: int = 3
) -> list[dict[str, Any]]:
    """Weights, layers and wrapper state after a few steps."""
    results = []
    for kind in kinds:
        engine = engine_of(build(kind), config_of(stage, size, {}, zero=zero))
        share = ROWS // size
        for step in range(STEPS):
            x = odd_batch(step)[rank * share : (rank + 1) * share]
            engine.backward(objective(engine(x)) / share)
            engine.step()
        results.append({"weights": jobs.full_weights(engine), "layers": list(engine.kfac.owners)})
        engine.destroy()
    return results


class TwoBranches(nn.Module):
    """The second branch takes part in chosen calls only."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 5)
        self.sometimes = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, use: bool) -> Tensor:
        y = torch.tanh(self.always(x))
        return y + self.scale * self.sometimes(x) if use else y


def branches(
    rank: int, size: int, stage: int, zero: dict[str, Any], kfac: dict[str, Any], uses: list[bool]
) -> list[dict[str, Tensor]]:
    """Weights before the first step and after each."""
    torch.manual_seed(13)
    engine = engine_of(TwoBranches(), config_of(stage, size, kfac, zero=zero))
    history = [jobs.full_weights(engine)]
    for step, use in enumerate(uses):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        x = x[rank * 8 // size : (rank + 1) * 8 // size]
        engine.backward(engine(x, use).square().mean())
        engine.step()
        history.append(jobs.full_weights(engine))
    engine.destroy()
    return history


def late_branch(rank: int, size: int, stage: int, zero: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Two steps of two micro-batches; the branch joins the second step's second one only."""
    torch.manual_seed(13)
    config = config_of(stage, size, {}, zero=zero)
    config |= {"train_batch_size": 2 * size, "gradient_accumulation_steps": 2}
    engine = engine_of(TwoBranches(), config)
    history = []
    for step, uses in enumerate(((True, True), (False, True))):
        for micro, use in enumerate(uses):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + micro))
            engine.backward(engine(x[rank::size], use).square().mean())
            engine.step()
        history.append(jobs.full_weights(engine))
    engine.destroy()
    return history


def grouped(rank: int, size: int, stage: int, zero: dict[str, Any]) -> dict[str, Tensor]:
    """Weights under a KL clip in force, with a learning rate per layer."""
    import ds_kfac

    net = odd_net()
    groups = [{"params": [*net[0].parameters()], "lr": 0.5}, {"params": [*net[2].parameters()]}]
    config = config_of(stage, size, {"kl_clip": 1e-4}, zero=zero)
    engine = ds_kfac.initialize(model=net, model_parameters=groups, config=config)[0]
    for step in range(STEPS):
        engine.backward(objective(engine(odd_batch(step)[rank::size])) / (ROWS // size))
        engine.step()
        assert engine.kfac.metrics()["kl_scale"] < 0.5
    weights = jobs.full_weights(engine)
    engine.destroy()
    return weights


def gathers(rank: int, size: int, with_kfac: bool) -> dict[str, Any]:
    """All-gathers of weights in a step, external registrations, and what stays gathered."""
    import deepspeed.runtime.zero.partition_parameters as partition

    config = config_of(3, size, {}, zero={"stage3_param_persistence_threshold": 0})
    if not with_kfac:
        del config["kfac"]
    engine = engine_of(odd_net(), config)
    counts = {"gathers": 0}
    original = partition._dist_allgather_fn

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts["gathers"] += 1
        return original(*args, **kwargs)

    partition._dist_allgather_fn = counted
    try:
        for step in range(2):
            engine.backward(objective(engine(odd_batch(step))))
            engine.step()
    finally:
        partition._dist_allgather_fn = original
    statuses = {param.ds_status.name for param in engine.module.parameters()}
    external = sum(len(getattr(m, "_external_params", {})) for m in engine.module.modules())
    engine.destroy()
    return {**counts, "statuses": statuses, "external": external}


class LiveBytes(TorchDispatchMode):
    """Bytes of storages created while active: now, at most at once, and the largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {_key(t) for t in _tensors(args)} | {_key(t) for t in _tensors(kwargs or {})}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            key = _key(tensor)
            if key in known or key in self.live:
                continue
            storage = tensor.untyped_storage()
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key, None)
            self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(self.live.values()))
        return result


class Residual(nn.Module):
    """Sixteen equal layers that leave gradients their size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return x


def memory(rank: int, size: int, direction: str) -> dict[str, Any]:
    """Extra bytes in an ordinary step of ds_kfac, against the bytes of a whole gradient."""
    torch.manual_seed(14)
    net = Residual()
    kfac = {"direction": direction, "factor_update_steps": 100, "inv_update_steps": 100}
    kfac["kl_clip"] = 1e-3
    zero = {"stage3_param_persistence_threshold": 0}
    engine = engine_of(net, config_of(3, size, kfac, zero=zero))
    peak, largest = 0, 0
    for step in range(2):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(size * step + rank))
        engine.backward(engine(x).square().mean())
        engine.kfac.reset_ledger()
        original = engine.kfac.before_step
        with LiveBytes() as tracker:
            engine.kfac.before_step = lambda run=original, mode=tracker: _inside(mode, run)
        engine.step()
        del engine.kfac.before_step
        peak, largest = tracker.peak, tracker.largest
    result = {
        "peak": peak,
        "largest": largest,
        "gradient": 4 * 16 * 64 * 64,
        "owned": sum(owner == rank for owner in engine.kfac.owners.values()),
        "ledger": engine.kfac.ledger(),
        "applied": engine.was_step_applied(),
    }
    engine.destroy()
    return result


def _inside(mode: TorchDispatchMode, run: Any) -> bool:
    with mode:
        return bool(run())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

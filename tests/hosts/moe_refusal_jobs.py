"""Engines with experts that ds_kfac does not serve, each built for real on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import ds_kfac
from tests._harness import deepspeed_cpu
from tests.hosts import moe_jobs
from tests.hosts.moe_jobs import WIDTH, Cell

NATURAL = {"direction": "natural", "damping": 0.3}
CELL = Cell(2, 1, 1, NATURAL)


class Stage(nn.Module):
    """A layer of experts as one stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = moe_jobs.Net(CELL).moe

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


class SwiGlu(nn.Module):
    """An expert as AutoEP looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w2 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, WIDTH, bias=False)


class Sparse(nn.Module):
    """A model's own layer of experts, which AutoEP replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2, bias=False)
        self.experts = nn.ModuleList(SwiGlu() for _ in range(2))


class Sizes:
    """What AutoEP reads of a Hugging Face configuration."""

    num_local_experts, num_experts_per_tok = 2, 1


class OwnExperts(nn.Module):
    """A model with experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.sparse = Sparse()
        self.config = Sizes()


class Slices:
    """A caller's ``mpu`` whose ranks share one copy of the model."""

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> Any:
        if not hasattr(self, "_alone"):
            pairs = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            self._alone = pairs[dist.get_rank()]
        return self._alone


AUTO_EP = {
    "enabled": True,
    "autoep_size": 2,
    "use_grouped_mm": False,
    "moe_layer_pattern": "sparse",
    "router_pattern": "gate",
    "expert_pattern": "experts",
    "expert_w1": "w1",
    "expert_w2": "w2",
    "expert_w3": "w3",
    "num_experts_attr": "num_local_experts",
    "top_k_attr": "num_experts_per_tok",
    "expert_activation": "swiglu",
}


def _start(net: nn.Module, ranks: int, extra: dict[str, Any] | None = None, mpu: Any = None) -> Any:
    config = {**moe_jobs.config_of(CELL, ranks), **(extra or {})}
    return ds_kfac.initialize(model=net, model_parameters=net.parameters(), config=config, mpu=mpu)


def pipeline(rank: int, ranks: int) -> Any:
    """Experts in the second stage."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Stage)]
    net = PipelineModule(layers, num_stages=ranks, loss_fn=nn.functional.mse_loss)
    return _start(net, 1)


def sequences(rank: int, ranks: int) -> Any:
    """Sequences cut over both ranks."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu

    mpu.initialize_sequence_parallel(sequence_parallel_size=ranks)
    return _start(moe_jobs.make_net(CELL, rank), 1, mpu=mpu)


def auto_ep(rank: int, ranks: int) -> Any:
    """Experts that DeepSpeed replaces by layers of its own."""
    adamw = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}
    extra = {"expert_parallel": AUTO_EP, "optimizer": adamw, "kfac": NATURAL}
    return _start(OwnExperts(), ranks, extra)


def slices(rank: int, ranks: int) -> Any:
    """A model that the caller has cut."""
    return _start(moe_jobs.make_net(CELL, rank), 1, mpu=Slices())


def auto_tp(rank: int, ranks: int) -> Any:
    """Experts that AutoTP would cut."""
    layers = [{"patterns": [".*up.weight$"], "partition_type": "column"}]
    tensor = {"autotp_size": ranks, "partition_config": {"layer_specs": layers}}
    return _start(moe_jobs.make_net(CELL, rank), 1, {"tensor_parallel": tensor})


def parameters(rank: int, ranks: int) -> Any:
    """Parameters cut by ZeRO 3."""
    return _start(moe_jobs.make_net(CELL, rank), ranks, {"zero_optimization": {"stage": 3}})


def offload(rank: int, ranks: int) -> Any:
    """Optimizer states on the CPU."""
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    return _start(moe_jobs.make_net(CELL, rank), ranks, {"zero_optimization": zero})


def unfused(rank: int, ranks: int) -> Any:
    """bf16 without ZeRO."""
    extra = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}
    return _start(moe_jobs.make_net(CELL, rank), ranks, extra)


def fp32_sums(rank: int, ranks: int) -> Any:
    """bf16 summed in fp32 under ZeRO 1."""
    extra = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return _start(moe_jobs.make_net(CELL, rank), ranks, extra)


def refused(rank: int, ranks: int, build: Callable[[int, int], Any]) -> str:
    """The message that an engine is refused with."""
    deepspeed_cpu.prepare()
    try:
        build(rank, ranks)
    except ds_kfac.KFACError as error:
        return str(error)
    return "accepted"

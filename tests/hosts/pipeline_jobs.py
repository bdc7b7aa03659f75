"""Jobs with real DeepSpeed pipelines, and the same model in one piece for the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_kfac
from tests._harness import deepspeed_cpu
from tests.hosts import topology_jobs

FEATURES, WIDTH, CLASSES = 6, 8, 3
ROWS, MICRO_BATCHES, STEPS = 24, 3, 4
LR, DECAY, AUX_LR = 0.05, 0.01, 0.02
MAX_ATTEMPTS = 60
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    """A linear layer behind an activation, with a parameter that is not preconditioned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.9, 1.1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.tanh(self.linear(x))


class Gain(nn.Module):
    """No supported layer at all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.8, 1.2, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


def transposed(module: nn.Linear, x: Tensor) -> Tensor:
    """How a tied projection is used a second time: without calling the module."""
    return functional.linear(x, module.weight.t())


# Layers by model: (type, arguments), or ("tied", how it is applied) for the shared projection.
# Cut into equal parts, "holes" has its first stage (of 2) or its first two (of 4) without layers
# to precondition, "tied" its second (of 4), and shares a projection between first and last.
MODELS: dict[str, list[Any]] = {
    "holes": [
        *((Gain, FEATURES), (Gain, FEATURES), (Gain, FEATURES), (Gain, FEATURES)),
        *((nn.Linear, FEATURES, WIDTH), (Block,), (Block,), (nn.Linear, WIDTH, CLASSES)),
    ],
    "tied": [
        *(("tied", None), (Block,), (Gain, WIDTH), (Gain, WIDTH)),
        *((Block,), (nn.Linear, WIDTH, WIDTH), (Block,), ("tied", transposed)),
    ],
    "nothing": [(Gain, FEATURES), (Gain, FEATURES), (Gain, FEATURES), (Gain, FEATURES)],
}


@dataclass(frozen=True)
class Cell:
    """One way to train.

    Attributes:
        model: Key of ``MODELS``.
        stages: Pipeline stages; the remaining ranks are data-parallel.
        zero: ZeRO stage.
        kfac: Settings of the preconditioner; None trains without.
        own: Optimizer type KFAC; otherwise SGD with momentum beside a kfac section.
        clipping: The engine's gradient clipping.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        extra: More DeepSpeed JSON.
        checkpointing: ``activation_checkpoint_interval``; 0 is off.
        reentrant: Which kind of checkpointing.
        poison: Step in which one stage's gradients become NaN.
    """

    model: str
    stages: int
    zero: int
    kfac: dict[str, Any] | None = field(hash=False)
    own: bool = False
    clipping: float = 0.0
    dtype: str = "fp32"
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    checkpointing: int = 0
    reentrant: bool = True
    poison: int | None = None


class Whole(nn.Module):
    """All layers in one piece, with the names that they have in a pipeline."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self._calls: list[Any] = []
        for index, (layer, *arguments) in enumerate(MODELS[kind]):
            torch.manual_seed(100 + index)
            if layer == "tied":
                if "projection" not in self.tied_modules:
                    self.tied_modules["projection"] = nn.Linear(FEATURES, WIDTH, bias=False)
                self._calls.append(("tied_modules.projection", arguments[0]))
            else:
                self.add_module(str(index), layer(*arguments))
                self._calls.append((str(index), None))

    def forward(self, x: Tensor) -> Tensor:
        for name, function in self._calls:
            module = self.get_submodule(name)
            x = module(x) if function is None else function(module, x)
        return x


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean over rows, so that the mean over micro-batches and ranks is that of the batch."""
    return 0.5 * (output.float() - target.float()).square().sum() / len(output)


def batch(kind: str, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a whole step."""
    generator = torch.Generator().manual_seed(500 + step)
    outputs = FEATURES if kind in ("tied", "nothing") else CLASSES
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x.to(dtype), torch.randn(ROWS, outputs, generator=generator).to(dtype)


def make_pipeline(cell: Cell) -> Any:
    """A PipelineModule with the weights of ``Whole``."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    whole = Whole(cell.model)
    layers = [
        TiedLayerSpec("projection", nn.Linear, FEATURES, WIDTH, bias=False, forward_fn=arguments[0])
        if layer == "tied"
        else LayerSpec(layer, *arguments)
        for layer, *arguments in MODELS[cell.model]
    ]
    pipeline = PipelineModule(
        layers,
        num_stages=cell.stages,
        loss_fn=loss,
        partition_method="uniform",
        activation_checkpoint_interval=cell.checkpointing,
    )
    pipeline.load_state_dict(
        {name: whole.state_dict()[name] for name in pipeline.state_dict()}, strict=True
    )
    return pipeline


def make_config(cell: Cell, ranks: int) -> dict[str, Any]:
    """The DeepSpeed JSON of a cell."""
    copies = ranks // cell.stages
    micro = ROWS // MICRO_BATCHES // copies
    config: dict[str, Any] = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": cell.clipping,
        "zero_optimization": {"stage": cell.zero, "reduce_bucket_size": 100},
        "zero_allow_untested_optimizer": True,
        "pipeline": {"use_reentrant": cell.reentrant},
        "steps_per_print": 10**9,
    }
    if cell.dtype != "fp32":
        config[cell.dtype] = {"enabled": True}
    if cell.own:
        params = {"lr": LR, "weight_decay": DECAY, "aux": {"lr": AUX_LR}, **(cell.kfac or {})}
        config["optimizer"] = {"type": "KFAC", "params": params}
    else:
        params = {"lr": LR, "momentum": 0.9, "weight_decay": DECAY}
        config["optimizer"] = {"type": "SGD", "params": params}
        if cell.kfac is not None:
            config["kfac"] = dict(cell.kfac)
    return topology_jobs.merged(config, cell.extra)


def make_engine(cell: Cell, ranks: int) -> Any:
    """A real pipeline engine with K-FAC attached."""
    deepspeed_cpu.prepare(fake_fp16=cell.dtype == "fp16")
    pipeline = make_pipeline(cell)
    engine, *_ = ds_kfac.initialize(
        model=pipeline,
        model_parameters=list(pipeline.parameters()),
        config=make_config(cell, ranks),
    )
    return engine


def micro_batches(cell: Cell, step: int, copy: int, copies: int) -> list[tuple[Tensor, Tensor]]:
    """This pipeline's micro-batches of a step."""
    x, y = batch(cell.model, step, DTYPES[cell.dtype])
    parts = torch.arange(ROWS).chunk(copies * MICRO_BATCHES)
    return [(x[rows], y[rows]) for rows in parts[copy * MICRO_BATCHES :][:MICRO_BATCHES]]


def train(rank: int, ranks: int, cells: list[Cell]) -> list[dict[str, Any]]:
    """Train every cell; each rank reports on its stage."""
    return [train_cell(rank, ranks, cell) for cell in cells]


def train_cell(rank: int, ranks: int, cell: Cell) -> dict[str, Any]:
    """Weights of this stage, and what K-FAC and the engine say about the run."""
    engine = make_engine(cell, ranks)
    grid, kfac = engine.grid, engine.kfac
    norms, scales = [], []
    for attempt in range(MAX_ATTEMPTS):
        # Batches follow applied steps where a loss scale is being looked for.
        step = attempt if cell.dtype != "fp16" else kfac.counters.steps
        if step == STEPS:
            break
        data = micro_batches(
            cell, step, grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()
        )
        if step == cell.poison and engine.is_last_stage() and grid.get_data_parallel_rank() == 0:
            data[0] = (data[0][0], data[0][1] * float("nan"))
        engine.train_batch(data_iter=iter(data))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        if kfac is not None:
            scales.append(kfac.metrics().get("kl_scale"))
    report = {
        "stage": engine.stage_id,
        "weights": {n: p.detach().float().clone() for n, p in engine.module.named_parameters()},
        "norms": norms,
        "scales": scales,
    }
    if kfac is not None:
        report |= {
            "layers": [spec.name for spec in kfac.layers.layers],
            "left out": {item.name: item.reason for item in kfac.layers.left_out},
            "owners": kfac.owners,
            "counters": dict(vars(kfac.counters)),
            "factors": {spec.name: kfac.factors(spec.name) for spec in kfac.layers.layers},
            "table": kfac.table(),
        }
    engine.destroy()
    return report


def refuse(rank: int, ranks: int, cells: list[Cell]) -> list[str]:
    """The message each cell is refused with."""
    messages = []
    for cell in cells:
        try:
            make_engine(cell, ranks)
        except ds_kfac.KFACError as error:
            messages.append(str(error))
        else:
            messages.append("accepted")
    return messages

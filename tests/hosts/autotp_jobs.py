"""Jobs of the AutoTP tests: small models trained by real engines, cut over a tensor group.

A process has one tensor degree for good, so every job runs in processes of its own and trains
all its cells there.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_kfac
from ds_kfac.capture import session
from tests._harness import deepspeed_cpu
from tests.hosts import promise_jobs, topology_jobs

STEPS = 4
BATCH, TOKENS = 8, 8
WIDTH, INNER = 8, 10  # of the net; 10 features cannot be cut evenly over 4 ranks
HIDDEN, MLP, HEADS, VOCABULARY = 16, 20, 4, 16  # of the Llama
LR, DECAY, AUX_LR = topology_jobs.LR, topology_jobs.DECAY, topology_jobs.AUX_LR
INTERVALS = {"factor_update_steps": 1, "inv_update_steps": 2, "factor_decay": 0.9}
LAYERS = ("block.qkv", "block.proj", "block.up", "block.down", "out")


@dataclass(frozen=True)
class Cell:
    """One way to train.

    Attributes:
        kfac: Settings of the preconditioner.
        model: ``net`` (biases, fused rows, an uncut layer) or ``llama`` (no biases).
        stage: ZeRO stage.
        own: Optimizer type KFAC; otherwise SGD with momentum beside a kfac section.
        accumulation: Micro-batches per step.
        clipping: The engine's gradient clipping.
        frozen: Names of layers that are not trained.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        extra: Settings of ``tensor_parallel``.
        json: More DeepSpeed JSON.
        kv_heads: Key-value heads of the Llama.
        checkpointing: Recompute activations (Llama).
        steps: Optimizer steps.
        bad: Before this step comes another one with NaN in its batch.
    """

    kfac: dict[str, Any] = field(hash=False)
    model: str = "net"
    stage: int = 0
    own: bool = True
    accumulation: int = 1
    clipping: float = 0.0
    frozen: tuple[str, ...] = ()
    dtype: str = "fp32"
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    json: dict[str, Any] = field(default_factory=dict, hash=False)
    kv_heads: int = 4
    checkpointing: bool = False
    steps: int = STEPS
    bad: int | None = None


class Block(nn.Module):
    """Fused rows, then a feed-forward part.

    No attention (a bias of its keys has no gradient) and no normalisation, see topology_jobs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.proj(q * torch.tanh(k) + v)
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """One block, a gain that stays with the base optimizer, an uncut output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.8, 1.2, WIDTH))
        self.block = Block()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.gain * x))


PARTITION = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1]},
        {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.proj\.weight$", r".*\.down\.weight$"], "partition_type": "row"},
    ],
}


def make_model(cell: Cell) -> nn.Module:
    """The cell's model with its initial weights, whole."""
    torch.manual_seed(7)
    model = Net() if cell.model == "net" else _language_model(cell)
    for name in cell.frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


def _language_model(cell: Cell) -> nn.Module:
    import transformers

    family = {"llama": "Llama", "phi": "Phi3"}[cell.model]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=cell.kv_heads,
        max_position_embeddings=TOKENS,
        pad_token_id=0,
        use_cache=False,
        initializer_range=0.3,
    )
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    if cell.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def batch(cell: Cell, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the whole step."""
    generator = torch.Generator().manual_seed(100 + step)
    if cell.model != "net":
        ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)
        return ids, ids
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator)
    return x, torch.randn(BATCH, TOKENS, WIDTH, generator=generator)


def loss_of(model: Any, cell: Cell, x: Tensor, y: Tensor) -> Tensor:
    """Mean over the sequences of the (micro-)batch."""
    if cell.model != "net":
        return model(input_ids=x, labels=y).loss
    dtype = topology_jobs.DTYPES[cell.dtype]
    output = model(x if x.dtype == torch.float64 else x.to(dtype))
    return 0.5 * (output.float() - y).square().sum() / len(x)


def configuration(cell: Cell, tensor: int) -> dict[str, Any]:
    """The DeepSpeed JSON of a cell."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": cell.accumulation,
        "gradient_clipping": cell.clipping,
        "zero_optimization": {"stage": cell.stage, "reduce_bucket_size": 300},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if cell.dtype != "fp32":
        config[cell.dtype] = {"enabled": True}
    if tensor > 1:
        config["tensor_parallel"] = {"autotp_size": tensor, **cell.extra}
        if cell.model == "net":
            config["tensor_parallel"].setdefault("partition_config", PARTITION)
    topology_jobs.add_optimizer(config, {**INTERVALS, **cell.kfac}, own=cell.own)
    return topology_jobs.merged(config, cell.json)


def make_engine(cell: Cell, tensor: int) -> Any:
    """A real engine with K-FAC attached."""
    deepspeed_cpu.prepare(fake_fp16=cell.dtype == "fp16")
    model = make_model(cell)
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = ds_kfac.initialize(
        model=model, model_parameters=trained, config=configuration(cell, tensor)
    )
    return engine


def take_step(
    engine: Any, cell: Cell, size: int, tensor: int, step: int, *, bad: bool = False
) -> None:
    """One step on this data rank's share of the batch; neighbours form a tensor group."""
    parts = size // tensor * cell.accumulation
    first = dist.get_rank() // tensor * cell.accumulation
    batches = [values.chunk(parts) for values in batch(cell, step)]
    for x, y in list(zip(*batches, strict=True))[first : first + cell.accumulation]:
        scale = float("nan") if bad else 1.0
        engine.backward(loss_of(engine, cell, x * scale if bad else x, y))
        engine.step()


def train(rank: int, size: int, tensor: int, cells: list[Cell]) -> list[dict[str, Any]]:
    """Train every cell; whole weights and factors, and what this rank counted."""
    return [_train_cell(size, tensor, cell) for cell in cells]


def _train_cell(size: int, tensor: int, cell: Cell) -> dict[str, Any]:
    engine = make_engine(cell, tensor)
    kfac = engine.kfac
    logs, norms = [], []
    for step in range(cell.steps):
        if step == cell.bad:
            take_step(engine, cell, size, tensor, step, bad=True)
        with promise_jobs.only_ours(engine) as log:
            take_step(engine, cell, size, tensor, step)
        for _ in range(topology_jobs.MAX_OVERFLOWS):  # a loss scale that is being looked for
            if engine.was_step_applied():
                break
            take_step(engine, cell, size, tensor, step)
        logs.append(log)
        norms.append(float(engine.get_global_grad_norm()))
    result = {
        "ledger": kfac.ledger(),
        "factors": {spec.name: kfac.factors(spec.name) for spec in kfac.layers.layers},
        "metrics": kfac.metrics(),
        "collectives": logs,
        "norms": norms,
        "owners": kfac.owners,
        "table": kfac.table(),
        "local": {n: p.detach().clone() for n, p in engine.module.named_parameters()},
        "weights": whole_weights(engine),
    }
    engine.destroy()
    return result


def failing_product(rank: int, size: int, tensor: int, cell: Cell, keeps_inputs: bool) -> None:
    """Rank 0 cannot compute products of rows; the others are in the middle of an exchange."""
    engine = make_engine(cell, tensor)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no memory for products")

    if rank == 0:
        session.add_outer_blocks_ = fail  # type: ignore[assignment]
    saving = contextlib.nullcontext() if keeps_inputs else torch.autograd.graph.save_on_cpu()
    with saving:
        take_step(engine, cell, size, tensor, 0)


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Whole weights in fp32, put together by DeepSpeed."""
    from deepspeed.module_inject.layers import TensorParallel_Layer

    weights = {}
    for prefix, module in engine.module.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, TensorParallel_Layer):
            own["weight"].gather_params([module.weight, module.bias])
        for key, param in own.items():
            name = f"{prefix}.{key}" if prefix else key
            weights[name] = param.detach().float().clone()
    return weights


def resumed(
    rank: int, size: int, tensor: int, cells: list[Cell], folder: str
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Per cell, weights of a run and of one that was stopped and resumed in the middle."""
    found = []
    for index, cell in enumerate(cells):
        weights, path = [], f"{folder}/{index}"
        for first in (0, cell.steps // 2):
            engine = make_engine(cell, tensor)
            if first:
                engine.load_checkpoint(path)
                assert engine.kfac.counters.steps == first
            for step in range(first, cell.steps):
                if not first and step == cell.steps // 2:
                    engine.save_checkpoint(path)
                take_step(engine, cell, size, tensor, step)
            weights.append({n: p.detach().clone() for n, p in engine.module.named_parameters()})
            engine.destroy()
        found.append((weights[0], weights[1]))
    return found


def from_file(rank: int, size: int, path: str) -> tuple[int, bool]:
    """Steps that a Llama took with a JSON file as it is, and whether its layers were cut."""
    deepspeed_cpu.prepare()
    cell = Cell({}, model="llama")
    model = make_model(cell)
    engine, *_ = ds_kfac.initialize(model=model, model_parameters=model.parameters(), config=path)
    for step in range(2):
        x, y = batch(cell, step)
        engine.backward(loss_of(engine, cell, x, y))
        engine.step()
    steps, cut = engine.kfac.counters.steps, "column" in engine.kfac.table()
    engine.destroy()
    return steps, cut

"""Tiny GPTs of megatron-core that can be compared whatever their parallel layout.

Weights come from the name a parameter has in the whole model, data from the number of the sample
in the whole batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from launch import megatron_cpu
from tests.hosts import transformer_engine

# Where a gradient is near zero Adam's direction is its sign: rounding errors would be all of it.
ADAM_EPS, WEIGHT_DECAY = 0.3, 0.01
VOCAB, HIDDEN, FFN, HEADS, SEQUENCE, BATCH = 32, 16, 24, 4, 8, 8
EXPERTS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cell:
    """One way to train.

    Attributes:
        kfac: Settings of the preconditioner; None trains without.
        model: ``gpt`` (biases, GELU), ``llama`` (no bias, grouped queries, SwiGLU, RMSNorm) or
            ``moe``.
        tp: Tensor-parallel ranks.
        sp: Sequence parallelism among them.
        pp: Pipeline stages.
        vp: Model chunks per stage; 0 for one that is not in a list of chunks.
        cp: Context-parallel ranks.
        ep: Expert-parallel ranks.
        layers: Transformer layers.
        tied: Embedding and output layer share their weight.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        distributed: Megatron's distributed optimizer.
        instances: Instances of the distributed optimizer.
        overlap: Gradients are reduced, and parameters gathered, during the passes.
        optimizer: ``adam`` or ``sgd``.
        clip: ``clip_grad``.
        per_token: ``calculate_per_token_loss``.
        recompute: ``full``, or a module of selective recomputation.
        steps: Attempts.
        lr: Learning rate.
        scale: fp16 loss scale; 0 looks for one.
        micro: Samples per micro-batch.
        freeze: Parts of names of parameters that are not trained.
        extra: More fields of the model's configuration.
        wrappers: Linear layers are megatron-core's wrappers of Transformer Engine's.
    """

    kfac: dict[str, Any] | None = field(default=None, hash=False)
    model: str = "gpt"
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vp: int = 0
    cp: int = 1
    ep: int = 1
    layers: int = 2
    tied: bool = False
    dtype: str = "fp32"
    distributed: bool = False
    instances: int = 1
    overlap: bool = False
    optimizer: str = "sgd"
    clip: float = 0.0
    per_token: bool = False
    recompute: str = ""
    steps: int = 3
    lr: float = 0.02
    scale: float = 64.0
    micro: int = 2
    freeze: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    wrappers: bool = False


@dataclass
class Training:
    """A model in training.

    Attributes:
        cell: How it is trained.
        config: Megatron's configuration of the model.
        chunks: Model chunks of this rank, in their DDP wrappers.
        optimizer: Megatron's optimizer.
        losses: Mean loss of every step's batch.
        norms: Gradient norms that the optimizer reported.
        applied: Whether each step was applied.
    """

    cell: Cell
    config: Any
    chunks: list[Any]
    optimizer: Any
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)


def build(cell: Cell) -> Training:
    """Model chunks and optimizer; starts Megatron's process groups."""
    if cell.wrappers:
        transformer_engine.install()
    megatron_cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    _close_groups()
    expert_tensor = {"expert_tensor_parallel_size": 1} if cell.model == "moe" else {}
    parallel_state.initialize_model_parallel(
        cell.tp,
        cell.pp,
        cell.vp or None,
        context_parallel_size=cell.cp,
        expert_model_parallel_size=cell.ep,
        num_distributed_optimizer_instances=cell.instances,
        **expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = _config(cell)
    chunks = _wrapped(cell, config, [_chunk(cell, config, i) for i in range(cell.vp or 1)])
    optimizer = _optimizer(cell, chunks)
    _connect(cell, config, chunks, optimizer)
    return Training(cell, config, chunks, optimizer)


def _close_groups() -> None:
    """Megatron leaves dozens of groups behind, each with its own threads and connections."""
    dist.barrier()  # somebody may still be working with them
    for group in list(c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _config(cell: Cell) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = DTYPES[cell.dtype]
    options: dict[str, Any] = {
        "num_layers": cell.layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "tensor_model_parallel_size": cell.tp,
        "sequence_parallel": cell.sp,
        "pipeline_model_parallel_size": cell.pp,
        "virtual_pipeline_model_parallel_size": cell.vp or None,
        "context_parallel_size": cell.cp,
        "expert_model_parallel_size": cell.ep,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": cell.dtype == "bf16",
        "fp16": cell.dtype == "fp16",
        "calculate_per_token_loss": cell.per_token,
    }
    if cell.vp:  # batches of sends between the same two ranks may swap their tensors
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if cell.model == "llama":
        options |= {
            "add_bias_linear": False,
            "num_query_groups": 2 if cell.tp <= 2 else 4,
            "gated_linear_unit": True,
            "activation_func": nn.functional.silu,
            "normalization": "RMSNorm",
        }
    if cell.model == "moe":
        options |= {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_ffn_hidden_size": FFN,
            "expert_tensor_parallel_size": 1,
            "add_bias_linear": False,
        }
    if cell.recompute == "full":
        options |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif cell.recompute:
        options |= {"recompute_granularity": "selective", "recompute_modules": [cell.recompute]}
    return TransformerConfig(**{**options, **cell.extra})


def _chunk(cell: Cell, config: Any, index: int) -> nn.Module:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    stage = {"vp_stage": index} if cell.vp else {}
    ends = {"ignore_virtual": not cell.vp, **stage}
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization=config.normalization
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=transformer_engine.with_wrappers(spec) if cell.wrappers else spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        share_embeddings_and_output_weights=cell.tied,
        position_embedding_type="learned_absolute",
        **stage,
    )
    if cell.vp:
        model.vp_stage = index
    with torch.no_grad():
        for name, param in model.named_parameters():
            whole = global_name(model, name)
            if cell.tied and whole == "output_layer.weight":  # the last stage's copy
                whole = "embedding.word_embeddings.weight"
            param.copy_(Shard.of(model, name, param).take(initial(whole, param, model, name)))
            param.requires_grad_(not any(part in whole for part in cell.freeze))
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


def _wrapped(cell: Cell, config: Any, chunks: list[nn.Module]) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(
        use_distributed_optimizer=cell.distributed,
        num_distributed_optimizer_instances=cell.instances,
        overlap_grad_reduce=cell.overlap,
        overlap_param_gather=cell.overlap and cell.distributed,
        grad_reduce_in_fp32=True,
        bucket_size=2000 if cell.overlap else None,
    )
    return [
        DistributedDataParallel(config, options, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def _optimizer(cell: Cell, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = OptimizerConfig(
        optimizer=cell.optimizer,
        lr=cell.lr,
        min_lr=cell.lr,
        weight_decay=WEIGHT_DECAY,
        bf16=cell.dtype == "bf16",
        fp16=cell.dtype == "fp16",
        params_dtype=DTYPES[cell.dtype],
        use_distributed_optimizer=cell.distributed,
        overlap_param_gather=cell.overlap and cell.distributed,
        clip_grad=cell.clip,
        sgd_momentum=0.0,
        adam_eps=ADAM_EPS,
        loss_scale=cell.scale or None,
        initial_loss_scale=2.0**32,
        loss_scale_window=2,
        hysteresis=1,
    )
    return get_megatron_optimizer(options, chunks)


def _connect(cell: Cell, config: Any, chunks: list[Any], optimizer: Any) -> None:
    """What a training loop tells the schedules."""
    from megatron.core.distributed import finalize_model_grads

    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if cell.overlap:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
        if cell.distributed:
            sync = [chunk.start_param_sync for chunk in chunks]
            config.param_sync_func = sync if len(chunks) > 1 else sync[0]


def bare(chunk: Any) -> Any:
    """The model inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def global_name(model: Any, name: str) -> str:
    """A parameter's name in the whole model: its layer's and its expert's global numbers."""
    from megatron.core import parallel_state

    parts, module = name.split("."), model
    for i, part in enumerate(parts[:-1]):
        module = getattr(module, part)
        if parts[i - 1] == "layers":
            parts[i] = str(module.layer_number - 1)
        if parts[i - 1] == "local_experts":
            local = len(model.get_submodule(".".join(name.split(".")[:i])))
            parts[i] = str(int(part) + local * parallel_state.get_expert_model_parallel_rank())
    return ".".join(parts)


@dataclass(frozen=True)
class Shard:
    """What a rank holds of a parameter.

    Attributes:
        dim: Dimension that is cut; -1 for none.
        rank: Rank in the tensor group.
        size: Ranks of it.
        halves: Matrices that are fused along the dimension (gate and up).
    """

    dim: int
    rank: int
    size: int
    halves: int

    @classmethod
    def of(cls, model: Any, name: str, param: nn.Parameter) -> Shard:
        """Of a parameter of a model."""
        from megatron.core import parallel_state

        expert = ".experts." in name
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        cut = getattr(param, "tensor_model_parallel", False) and not expert  # experts: degree 1
        gated = model.config.gated_linear_unit and "linear_fc1" in name
        return cls(param.partition_dim if cut else -1, rank, size, 2 if gated else 1)

    def whole_shape(self, shape: torch.Size) -> list[int]:
        """Shape of the parameter in the whole model."""
        return [n * self.size if i == self.dim else n for i, n in enumerate(shape)]

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part."""
        if self.dim < 0:
            return whole
        parts = whole.chunk(self.halves, self.dim)
        return torch.cat([part.chunk(self.size, self.dim)[self.rank] for part in parts], self.dim)


def initial(whole: str, param: nn.Parameter, model: Any, name: str) -> Tensor:
    """Initial value of a parameter of the whole model."""
    return value_of(whole, Shard.of(model, name, param).whole_shape(param.shape))


def value_of(name: str, shape: list[int]) -> Tensor:
    """Random numbers that depend on a parameter's name."""
    seed = int(hashlib.md5(name.encode()).hexdigest()[:8], 16)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if "router" in name:
        return 0.05 * noise  # every expert gets some tokens
    if len(shape) > 1:
        return 0.2 * noise
    return 0.05 * noise + float("layernorm" in name and name.endswith("weight"))


def batch(step: int) -> Tensor:
    """Tokens of a step, ``[samples, sequence + 1]``."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator)


def _micro_batches(cell: Cell, step: int) -> Iterator[Tensor]:
    from megatron.core import parallel_state

    ranks = parallel_state.get_data_parallel_world_size()
    mine = batch(step).view(-1, ranks, cell.micro, SEQUENCE + 1)
    return iter(mine[:, parallel_state.get_data_parallel_rank()])


def _own_tokens(cell: Cell, tokens: Tensor) -> Tensor:
    from megatron.core import parallel_state

    from launch.megatron_cpu_patches import context_chunks

    if cell.cp == 1:
        return tokens
    chunks = tokens.chunk(2 * cell.cp, dim=1)
    mine = context_chunks(cell.cp, parallel_state.get_context_parallel_rank())
    return torch.cat([chunks[index] for index in mine], dim=1)


def forward_backward(training: Training, step: int) -> None:
    """Gradients of one batch."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    cell = training.cell

    def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = output.float().sum()
        count = torch.tensor(output.numel(), dtype=torch.int)
        return total, count, {"loss": torch.stack([total.detach(), count.float()])}

    def forward(data: Iterator[Tensor], model: Any) -> Any:
        sample = next(data)
        places = torch.arange(SEQUENCE).expand(cell.micro, -1)
        inputs = [_own_tokens(cell, t) for t in (sample[:, :-1], places, sample[:, 1:])]
        tokens, places, labels = (t.contiguous() for t in inputs)
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
        return model(tokens, places, mask, labels=labels), loss_of

    for chunk in training.chunks:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    ranks = parallel_state.get_data_parallel_world_size()
    data = [_micro_batches(cell, step) for _ in training.chunks]
    reports = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=data if cell.vp else data[0],
        model=training.chunks,
        num_microbatches=BATCH // (ranks * cell.micro),
        seq_length=SEQUENCE,
        micro_batch_size=cell.micro,
        forward_only=False,
    )
    sums = torch.stack([r["loss"] for r in reports]).sum(0) if reports else torch.zeros(2)
    dist.all_reduce(sums)  # copies on tensor ranks cancel
    training.losses.append(float(sums[0] / sums[1]))


def train_step(training: Training, step: int) -> None:
    """One attempt."""
    forward_backward(training, step)
    applied, norm, _ = training.optimizer.step()
    training.applied.append(bool(applied))
    training.norms.append(None if norm is None else float(norm))


def weights(training: Training) -> dict[str, tuple[Tensor, Shard]]:
    """This rank's parameters by their names in the whole model, as the optimizer has them."""
    found = {}
    if training.cell.overlap and training.cell.distributed:
        for chunk in training.chunks:  # the next forward pass would wait for them
            chunk.start_param_sync(force_sync=True)
    masters = _masters(training.optimizer)
    for chunk in training.chunks:
        model = bare(chunk)
        for name, param in model.named_parameters():
            shard = Shard.of(model, name, param)
            value = masters.get(id(param), param).detach().clone()
            if not getattr(param, "shared", False):
                found[global_name(model, name)] = (value, shard)
    return found


def _masters(optimizer: Any) -> dict[int, Tensor]:
    """fp32 copies of half-precision parameters, where every rank has whole ones."""
    found = {}
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for halves, wholes in zip(
            getattr(inner, "float16_groups", []),
            getattr(inner, "fp32_from_float16_groups", []),
            strict=True,
        ):
            found |= {id(p): master for p, master in zip(halves, wholes, strict=True)}
    return found


def whole_weights(reports: list[dict[str, tuple[Tensor, Shard]]]) -> dict[str, Tensor]:
    """Put the parts of all ranks together; copies have to be equal."""
    parts: dict[str, dict[int, tuple[Tensor, Shard]]] = {}
    for report in reports:
        for name, (value, shard) in report.items():
            place = shard.rank if shard.dim >= 0 else 0
            known = parts.setdefault(name, {}).setdefault(place, (value, shard))
            torch.testing.assert_close(value, known[0], rtol=0, atol=1e-6)
    return {name: _joined([by_rank[i] for i in sorted(by_rank)]) for name, by_rank in parts.items()}


def _joined(parts: list[tuple[Tensor, Shard]]) -> Tensor:
    shard = parts[0][1]
    if shard.dim < 0:
        return parts[0][0]
    pieces = [value.chunk(shard.halves, shard.dim) for value, _ in parts]
    return torch.cat([p[half] for half in range(shard.halves) for p in pieces], shard.dim)

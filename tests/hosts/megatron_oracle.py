"""The tiny GPTs in plain torch, in one piece, for the dense fp64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.hosts import megatron_model as models
from tests.hosts.megatron_model import (
    ADAM_EPS,
    BATCH,
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    SEQUENCE,
    VOCAB,
    WEIGHT_DECAY,
    Cell,
)
from tests.reference import DenseKFAC


def _queries(cell: Cell) -> int:
    """Query groups."""
    return 2 if cell.model == "llama" else HEADS


class Experts(nn.Module):
    """Two of some experts per token; probabilities multiply what is inside of an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Module(), nn.Module()
        self.router.weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN))
        self.experts.local_experts = nn.ModuleList(nn.Module() for _ in range(EXPERTS))
        for expert in self.experts.local_experts:
            expert.linear_fc1 = nn.Linear(HIDDEN, FFN, bias=False)
            expert.linear_fc2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, HIDDEN)
        best, chosen = (tokens @ self.router.weight.t()).topk(2, dim=1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts.local_experts):
            rows, which = torch.where(chosen == index)
            share = best.softmax(dim=1)[rows, which]
            inner = functional.gelu(expert.linear_fc1(tokens[rows])) * share.unsqueeze(1)
            out = out.index_add(0, rows, expert.linear_fc2(inner))
        return out.view_as(x)


class Layer(nn.Module):
    """Attention and MLP with Megatron's names and order of rows."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        llama, bias = cell.model == "llama", cell.model == "gpt"
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.groups, self.gated = _queries(cell), llama
        width = HIDDEN // HEADS
        self.input_layernorm, self.pre_mlp_layernorm = norm(HIDDEN, 1e-5), norm(HIDDEN, 1e-5)
        self.self_attention, self.mlp = nn.Module(), nn.Module()
        rows = HIDDEN + 2 * self.groups * width
        self.self_attention.linear_qkv = nn.Linear(HIDDEN, rows, bias)
        self.self_attention.linear_proj = nn.Linear(HIDDEN, HIDDEN, bias)
        if cell.model == "moe":
            self.mlp = Experts()
            return
        self.mlp.linear_fc1 = nn.Linear(HIDDEN, (1 + llama) * FFN, bias)
        self.mlp.linear_fc2 = nn.Linear(FFN, HIDDEN, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.input_layernorm(x))
        if isinstance(self.mlp, Experts):
            return x + self.mlp(self.pre_mlp_layernorm(x))
        inner = self.mlp.linear_fc1(self.pre_mlp_layernorm(x))
        if self.gated:
            gate, up = inner.chunk(2, -1)
            inner = functional.silu(gate) * up
        else:
            inner = functional.gelu(inner)
        return x + self.mlp.linear_fc2(inner)

    def attend(self, x: Tensor) -> Tensor:
        """Causal attention; rows of Q, K and V are ordered by query group."""
        batch, length, _ = x.shape
        width, per_group = HIDDEN // HEADS, HEADS // self.groups
        mixed = self.self_attention.linear_qkv(x)
        mixed = mixed.view(batch, length, self.groups, per_group + 2, width).permute(0, 2, 3, 1, 4)
        q = mixed[:, :, :per_group].reshape(batch, HEADS, length, width)
        k, v = (
            mixed[:, :, per_group + i].repeat_interleave(per_group, dim=1).contiguous()
            for i in (0, 1)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.self_attention.linear_proj(out.transpose(1, 2).reshape(batch, length, HIDDEN))


class Whole(nn.Module):
    """The whole model."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Module(), nn.Module()
        self.embedding.word_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.embedding.position_embeddings = nn.Embedding(SEQUENCE, HIDDEN)
        self.decoder.layers = nn.ModuleList(Layer(cell) for _ in range(cell.layers))
        self.decoder.final_layernorm = type(self.decoder.layers[0].input_layernorm)(HIDDEN, 1e-5)
        self.output_layer = None if cell.tied else nn.Linear(HIDDEN, VOCAB, bias=False)
        with torch.no_grad():
            for name, param in self.named_parameters():
                param.copy_(models.value_of(name, list(param.shape)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding.word_embeddings(tokens)
        x = x + self.embedding.position_embeddings.weight
        for layer in self.decoder.layers:
            x = layer(x)
        x = self.decoder.final_layernorm(x)
        if self.output_layer is None:
            return functional.linear(x, self.embedding.word_embeddings.weight)
        return self.output_layer(x)


def train(
    cell: Cell, skip: Sequence[str] = (), **options: Any
) -> tuple[dict[str, Tensor], list[float], DenseKFAC]:
    """Weights, raw gradient norms and the oracle after the steps of a cell.

    Args:
        cell: Its SGD, weight decay and clipping are those of Megatron's optimizer.
        skip: Modules that are not preconditioned, with what is inside of them.
        options: Of the oracle.
    """
    torch.set_default_dtype(torch.float32)
    model = Whole(cell).double()
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in cell.freeze))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = [
        name
        for name in names
        if not name.startswith(("output_layer", *skip))
        and model.get_submodule(name).weight.requires_grad
    ]
    optimizer: torch.optim.Optimizer
    if cell.optimizer == "adam":
        optimizer = torch.optim.AdamW(
            model.parameters(), cell.lr, (0.9, 0.999), ADAM_EPS, WEIGHT_DECAY
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), cell.lr, weight_decay=WEIGHT_DECAY)
    oracle = DenseKFAC(
        model, names, optimizer=optimizer, gradient_clipping=cell.clip, **{"parts": {}, **options}
    )
    norms = []
    for step in range(cell.steps):
        sample = models.batch(step)

        def objective(sample: Tensor = sample) -> Tensor:
            logits = model(sample[:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1), sample[:, 1:].flatten())

        oracle.step(objective)
        norms.append(oracle.raw_norm)
    assert len(sample) == BATCH
    weights = {name: param.detach() for name, param in model.named_parameters()}
    return weights, norms, oracle

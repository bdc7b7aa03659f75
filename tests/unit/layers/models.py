"""Modules to discover layers in."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """What Hugging Face calls Conv1D: a linear layer that stores its weight as [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.c_attn = Conv1D(3 * width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.norm(x)).chunk(3, dim=-1)
        return self.mlp(x + q + k + v)


class Transformer(nn.Module):
    """Embedding, two blocks, a head tied to the embedding or not."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 6)
        self.h = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(6, 11, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(x)

"""A small byte-level GPT: pre-LayerNorm, bias-free linear layers, fused Q/K/V, untied head."""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

BYTES = 256
EMBEDDING_STD = 0.02
LINEAR_GAIN = 0.5


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model.

    Attributes:
        vocab: number of symbols.
        seq_len: longest sequence (one learned position each).
        layers: number of blocks.
        width: model dimension.
        heads: attention heads; must divide `width`.
    """

    vocab: int = BYTES
    seq_len: int = 128
    layers: int = 6
    width: int = 128
    heads: int = 4

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ValueError: a size is not positive, or the heads do not divide the width.
        """
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


class Block(nn.Module):
    """Causal self-attention and a GELU MLP, each behind a LayerNorm and around a residual."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the layers of one block."""
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.fc1 = nn.Linear(width, 4 * width, bias=False)
        self.fc2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        hidden = F.gelu(self.fc1(self.norm2(x)), approximate="tanh")
        return x + cast(Tensor, self.fc2(hidden))


class GPT(nn.Module):
    """The language model.

    Args:
        config: sizes.
        seed: seed of the initial weights; the global random state is left alone.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        """Build and initialise the model."""
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.vocab, config.width)
        self.pos = nn.Embedding(config.seq_len, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Each block adds two branches to the residual stream; their last layers start smaller so
        # that the stream's variance does not grow with the depth.
        branch_gain = 1 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=EMBEDDING_STD, generator=generator)
            elif isinstance(module, nn.Linear):
                std = LINEAR_GAIN / math.sqrt(module.in_features)
                last = name.endswith((".proj", ".fc2"))
                std *= branch_gain if last else 1.0
                nn.init.normal_(module.weight, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, time] int64 to next-symbol logits [batch, time, vocab]."""
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def hidden_parameters(self) -> list[nn.Parameter]:
        """Weights of the linear layers inside the blocks."""
        return [p for p in self.blocks.parameters() if p.ndim == 2]

    def other_parameters(self) -> list[nn.Parameter]:
        """Embeddings, norms and head."""
        hidden = set(map(id, self.hidden_parameters()))
        return [p for p in self.parameters() if id(p) not in hidden]


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in fp32 over all positions, a scalar in nats per symbol."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

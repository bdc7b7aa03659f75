"""What is trained: data, model and loss behind one interface."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from launch.data import Batches, load_text, validation_sequences
from launch.model import GPT, GPTConfig, next_byte_loss

EVAL_ROWS = 64
GLANCE_SEQUENCES = 128
"""Sequences of a validation during training, which only draws the curves."""


@dataclass(frozen=True)
class Score:
    """A validation.

    Attributes:
        select: Mean loss on the data that settings are chosen by.
        loss: Mean loss on the data that is reported.
        accuracy: On the reported data, None for text.
    """

    select: float
    loss: float
    accuracy: float | None = None


class Task(Protocol):
    """Data, model and loss.

    Attributes:
        kind: ``text`` or ``images``.
        name: Names the task in results.
        description: Identifies the data.
        batch: Usual batch size.
        clip: Bound on the norm of the gradient, for every optimizer.
        skipped: Layers left to the auxiliary optimizer.
    """

    kind: str
    name: str
    description: str
    batch: int
    clip: float | None
    skipped: tuple[str, ...]

    def model(self, seed: int) -> nn.Module:
        """A new model."""

    def batch_at(self, step: int, *, seed: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss, a scalar."""

    def glance(self, model: nn.Module) -> float:
        """Loss on a part of the reported data."""

    def score(self, model: nn.Module) -> Score:
        """A complete validation."""


class TextTask:
    """A byte-level GPT on a text.

    Args:
        name: Names the task in results.
        source: File or folder; None is the source text of the standard library.
        sizes: Of the model.
        batch: Sequences per step.
        sequences: Of the validation: every other one selects, the rest is reported.
    """

    kind = "text"
    clip: float | None = 1.0
    skipped: tuple[str, ...] = ("head",)

    def __init__(
        self,
        name: str,
        source: Path | None = None,
        *,
        sizes: GPTConfig | None = None,
        batch: int = 32,
        sequences: int = 1024,
    ) -> None:
        self.name = name
        self.batch = batch
        self._sizes = sizes or GPTConfig(seq_len=64, layers=2, width=128, heads=4)
        text = load_text(source)
        text.require(self._sizes.seq_len)
        # Results travel; where the text lay on one machine says nothing elsewhere.
        self.description = text.description.replace(str(source), name)
        self._train = text.train
        self._inputs, self._targets = validation_sequences(
            text.val, seq_len=self._sizes.seq_len, count=sequences
        )

    def model(self, seed: int) -> nn.Module:
        """A new GPT."""
        return GPT(self._sizes, seed=seed)

    def batch_at(self, step: int, *, seed: int, size: int) -> tuple[Tensor, Tensor]:
        """Tokens and next tokens ``[size, time]``, a function of seed and step."""
        batches = Batches(self._train, self._sizes.seq_len, size, seed)
        return next(batches.micro_batches(step, rank=0, world=1, count=1))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats per byte."""
        return next_byte_loss(outputs, targets)

    def glance(self, model: nn.Module) -> float:
        """Loss on some of the reported sequences."""
        rows = self._inputs[1::2], self._targets[1::2]
        stride = max(1, len(rows[0]) // GLANCE_SEQUENCES)
        return _mean_loss(model, rows[0][::stride], rows[1][::stride])

    def score(self, model: nn.Module) -> Score:
        """Loss on both halves of the fixed sequences."""
        halves = [(self._inputs[i::2], self._targets[i::2]) for i in (0, 1)]
        select, loss = (_mean_loss(model, *half) for half in halves)
        return Score(select, loss)


@torch.no_grad()
def _mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    total = 0.0
    for x, y in zip(torch.split(inputs, EVAL_ROWS), torch.split(targets, EVAL_ROWS), strict=True):
        total += float(next_byte_loss(model(x), y)) * len(x)
    return total / len(inputs)

"""Train one model with one DeepSpeed configuration and record what happens."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

import ds_kfac
from launch import data, progress, schedule
from launch.model import GPT, GPTConfig, next_byte_loss
from launch.report import Row, RunLog

EVAL_ROWS = 32
PERIODIC_EVAL_SEQUENCES = 128
SECTION = "train_gpt"
SECTION_KEYS = frozenset({"aux_lr", "warmup_steps"})


class ConfigError(ValueError):
    """A configuration file cannot be used by the training script."""


@dataclass(frozen=True)
class Settings:
    """What all runs of one command share.

    Attributes:
        seed: of the initial weights and of the batches.
        warmup: warm-up steps where the configuration names none.
        warmup_override: warm-up steps from the command line, stronger than the configuration.
        eval_every: steps between two validations.
        eval_sequences: fixed sequences of the final validation.
    """

    seed: int = 0
    warmup: int = 40
    warmup_override: int | None = None
    eval_every: int = 50
    eval_sequences: int = 512


@dataclass(frozen=True)
class Recipe:
    """A DeepSpeed configuration file and its `train_gpt` section (learning rates, warm-up).

    DeepSpeed ignores the section; it holds what its own keys cannot say.
    """

    path: Path
    aux_lr: float | None
    warmup_steps: int | None

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        """Read a configuration file.

        Raises:
            ConfigError: the file is missing, is no JSON object, or has an unknown key in its
                `train_gpt` section.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        section = content.get(SECTION, {}) if isinstance(content, dict) else None
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: the file and its '{SECTION}' section must be JSON objects")
        unknown = sorted(set(section) - SECTION_KEYS)
        if unknown:
            raise ConfigError(
                f"{path}: unknown key(s) {unknown} in '{SECTION}'; known: {sorted(SECTION_KEYS)}"
            )
        return cls(path, section.get("aux_lr"), section.get("warmup_steps"))

    def parameter_groups(self, model: GPT) -> list[dict[str, Any]]:
        """One group, or two if embeddings, norms and head have a learning rate of their own."""
        if self.aux_lr is None:
            return [{"params": list(model.parameters())}]
        return [
            {"params": model.hidden_parameters()},
            {"params": model.other_parameters(), "lr": self.aux_lr},
        ]


class Trainer:
    """A model, its DeepSpeed engine and the record of its training.

    Args:
        name: label of the run.
        recipe: DeepSpeed configuration.
        sizes: sizes of the model.
        text: training and validation bytes.
        steps: length of the complete schedule.
        settings: what all runs share.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        *,
        sizes: GPTConfig,
        text: data.Text,
        steps: int,
        settings: Settings,
    ) -> None:
        """Start the engine."""
        self.name, self.steps, self.settings = name, steps, settings
        self.rank = deepspeed.comm.get_rank()
        self.world = deepspeed.comm.get_world_size()
        self.device = get_accelerator().current_device_name()
        chosen = (settings.warmup_override, recipe.warmup_steps, settings.warmup)
        warmup = next(value for value in chosen if value is not None)
        model = GPT(sizes, seed=settings.seed)
        self.engine, *_ = ds_kfac.initialize(
            model=model,
            model_parameters=recipe.parameter_groups(model),
            config=str(recipe.path),
            lr_scheduler=schedule.scheduler(warmup=schedule.fit_warmup(warmup, steps), total=steps),
        )
        self.batches = data.Batches(
            text.train, sizes.seq_len, self.engine.train_batch_size(), settings.seed
        )
        self.val = data.validation_sequences(
            text.val, seq_len=sizes.seq_len, count=settings.eval_sequences
        )
        self.rows: list[Row] = []

    def train(self) -> RunLog:
        """Run the complete schedule and free the engine."""
        stride = max(1, self.settings.eval_sequences // PERIODIC_EVAL_SEQUENCES)
        # The first validation also warms up memory and threads, before the clock starts.
        self.rows.append(Row(0, 0.0, None, self._validate(stride), self.engine.get_lr()[0]))
        seconds, step = 0.0, 0
        with progress.bar(self.name, self.steps, shown=self.rank == 0) as bar:
            while step < self.steps:
                stop = min(self.steps, step + self.settings.eval_every)
                rows = self._train_span(step, stop, seconds, bar)
                val_loss = self._validate(1 if stop == self.steps else stride)
                last = rows[-1]
                rows[-1] = Row(last.step, last.seconds, last.train_loss, val_loss, last.lr)
                self.rows += rows
                seconds, step = last.seconds, stop
        final = self.rows[-1].val_loss
        assert final is not None
        log = RunLog(self.name, self.rows, final, self._coverage())
        self.engine.destroy()
        return log

    def _train_span(self, first: int, stop: int, before: float, bar: Any) -> list[Row]:
        """Train the steps first..stop-1; `before` are the seconds spent in earlier steps."""
        losses = torch.zeros(stop - first, device=self.device)
        times, rates = [], []
        started = time.perf_counter()
        for step in range(first, stop):
            rates.append(self.engine.get_lr()[0])
            losses[step - first] = self._train_step(step)
            own = losses[step - first].item()  # waits for the device
            times.append(before + time.perf_counter() - started)
            rate = (step + 1) * self.batches.global_batch * self.batches.seq_len / times[-1]
            progress.show(bar, loss=own, tokens_per_second=rate)
        deepspeed.comm.all_reduce(losses)
        means = (losses / self.world).tolist()
        columns = zip(range(first, stop), times, means, rates, strict=True)
        return [Row(step + 1, spent, loss, None, lr) for step, spent, loss, lr in columns]

    def _train_step(self, step: int) -> Tensor:
        """Take one optimizer step; returns this rank's mean loss, a detached scalar."""
        count = self.engine.gradient_accumulation_steps()
        total = torch.zeros((), device=self.device)
        pieces = self.batches.micro_batches(step, rank=self.rank, world=self.world, count=count)
        for inputs, targets in pieces:
            logits = self.engine(inputs.to(self.device))
            loss = next_byte_loss(logits, targets.to(self.device))
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / count
        return total

    def _validate(self, stride: int) -> float:
        """Mean loss over every `stride`-th validation sequence, the same number on all ranks."""
        inputs, targets = (part[::stride] for part in self.val)
        own = range(self.rank, len(inputs), self.world)
        total = torch.zeros((), device=self.device)
        self.engine.eval()
        with torch.no_grad():
            for rows in _chunks(own, EVAL_ROWS):
                logits = self.engine(inputs[rows].to(self.device))
                total += next_byte_loss(logits, targets[rows].to(self.device)) * len(rows)
        self.engine.train()
        deepspeed.comm.all_reduce(total)
        return total.item() / len(inputs)

    def _coverage(self) -> str:
        kfac = getattr(self.engine, "kfac", None)
        if kfac is None:
            return "K-FAC is off: every parameter was updated by the base optimizer"
        return str(kfac.coverage())


def _chunks(indices: Iterable[int], size: int) -> Iterable[list[int]]:
    values = list(indices)
    for start in range(0, len(values), size):
        yield values[start : start + size]

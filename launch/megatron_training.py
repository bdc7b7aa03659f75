"""The training loop of launch/pretrain_gpt_megatron.py."""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from launch import data, megatron_checkpoint, megatron_gpt, megatron_optimizer, progress
from launch.report import Row, RunLog

PERIODIC_EVAL_SEQUENCES = 64
NO_KFAC = "K-FAC is off: every parameter was updated by the base optimizer"


class Trainer:
    """A model in training and the record of it.

    Args:
        args: Command line.
        text: Training and validation bytes.
        say: Prints a line on one rank.

    Attributes:
        name: Label of the run.
        iteration: Steps taken, those before a resume included.
        rows: One per step.
    """

    def __init__(
        self, args: argparse.Namespace, text: data.Text, say: Callable[[str], None]
    ) -> None:
        """Build everything; resume if there is something to resume from."""
        self.args, self.say = args, say
        self.name = args.name or ("K-FAC" if args.kfac else args.optimizer.capitalize())
        self.rank = torch.distributed.get_rank()
        self._data_rank = parallel_state.get_data_parallel_rank()
        self._data_size = parallel_state.get_data_parallel_world_size()
        self._micro_batches = micro_batches(args, self._data_size)
        config = megatron_gpt.configuration(args)
        self.chunks = megatron_gpt.build_model(args, config)
        self.optimizer = megatron_optimizer.build(args, self.chunks, megatron_gpt.dtype(args))
        self.kfac = attach(args, self.chunks, self.optimizer)
        self.schedule = megatron_optimizer.build_schedule(args, self.optimizer)
        megatron_gpt.connect(config, self.chunks, self.optimizer)
        self.batches = data.Batches(text.train, args.seq_length, args.global_batch_size, args.seed)
        self.val = data.validation_sequences(
            text.val, seq_len=args.seq_length, count=args.eval_sequences
        )
        self.rows: list[Row] = []
        self.iteration = 0
        if args.load is not None:
            self._resume()

    def _resume(self) -> None:
        found = megatron_checkpoint.load(self.args.load, self.chunks, self.optimizer, self.schedule)
        if found is None:
            self.say(f"no checkpoint in {self.args.load}: training starts from the beginning")
            return
        self.iteration, self.rows = found
        self.say(f"resumed from iteration {self.iteration} in {self.args.load}")

    def train(self) -> RunLog:
        """Run to the end of the schedule, or to `--exit-interval`."""
        args = self.args
        last = min(args.train_iters, args.exit_interval or args.train_iters)
        stride = max(1, args.eval_sequences // PERIODIC_EVAL_SEQUENCES)
        if not self.rows:
            # Also warms up memory and threads, before the clock starts.
            self.rows.append(Row(0, 0.0, None, self.validate(stride), self._rate()))
        with progress.bar(
            self.name, args.train_iters, initial=self.iteration, shown=self.rank == 0
        ) as bar:
            while self.iteration < last:
                started, rate = time.perf_counter(), self._rate()
                loss = self._train_step()
                spent = time.perf_counter() - started
                seconds = self.rows[-1].seconds + spent
                tokens = args.global_batch_size * args.seq_length / spent
                progress.show(bar, loss=loss, tokens_per_second=tokens)
                self.rows.append(Row(self.iteration, seconds, loss, None, rate))
                self._after_step(is_last=self.iteration == last, stride=stride)
        final = self.rows[-1].val_loss
        if final is None:  # resumed at the end already
            final = self.validate(1)
        return RunLog(self.name, self.rows, final, self._coverage())

    def _after_step(self, *, is_last: bool, stride: int) -> None:
        """Validate and save where it is time."""
        args = self.args
        if is_last or self.iteration % args.eval_interval == 0:
            loss = self.validate(1 if self.iteration == args.train_iters else stride)
            self.rows[-1] = replace(self.rows[-1], val_loss=loss)
        due = args.save_interval is not None and self.iteration % args.save_interval == 0
        if args.save is not None and (is_last or due):
            megatron_checkpoint.save(
                args.save,
                self.iteration,
                self.chunks,
                self.optimizer,
                self.schedule,
                rows=self.rows,
            )

    def _train_step(self) -> float:
        """Take one optimizer step; returns the mean loss over the global batch."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        pieces = self.batches.micro_batches(
            self.iteration,
            rank=self._data_rank,
            world=self._data_size,
            count=self._micro_batches,
        )
        loss = self._pass(pieces, self._micro_batches, forward_only=False)
        applied, _, _ = self.optimizer.step()
        if applied:
            self.schedule.step(increment=1)
        self.iteration += 1
        return loss

    def validate(self, stride: int) -> float:
        """Mean loss over every `stride`-th validation sequence, the same number on all ranks."""
        inputs, targets = (part[::stride] for part in self.val)
        size = self.args.micro_batch_size
        count = -(-len(inputs) // (size * self._data_size))
        rows = torch.arange(count * size * self._data_size) % len(inputs)  # some counted twice
        own = rows.view(count, self._data_size, size)[:, self._data_rank]
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            pieces = ((inputs[part], targets[part]) for part in own)
            loss = self._pass(pieces, count, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return loss

    def _pass(
        self, pieces: Iterator[tuple[Tensor, Tensor]], count: int, *, forward_only: bool
    ) -> float:
        """Forward, and backward unless told otherwise, through Megatron's schedule."""
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=pieces,
            model=self.chunks,
            num_microbatches=count,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=forward_only,
        )
        sums = torch.zeros(2, device="cuda")
        for report in reports:  # on the last stage only
            sums += report["loss"]
        torch.distributed.all_reduce(sums)  # tensor ranks repeat each other, in both sums
        return float(sums[0] / sums[1])

    def _rate(self) -> float:
        """Of the first group that holds parameters on this rank."""
        return next(float(group["lr"]) for group in self.optimizer.param_groups if group["params"])

    def _coverage(self) -> str:
        return NO_KFAC if self.kfac is None else str(self.kfac.coverage())


def attach(args: argparse.Namespace, chunks: list[Any], optimizer: Any) -> Any:
    """K-FAC's preconditioner, or None without `--kfac`."""
    from ds_kfac.hosts import megatron_arguments

    config = megatron_arguments.settings(args)
    if config is None:
        return None
    from ds_kfac import megatron

    kfac = megatron.attach(chunks, optimizer, config)
    if kfac is not None and args.optimizer == "kfac":
        names = [spec.name for spec in kfac.layers.layers]
        megatron_optimizer.check_all_preconditioned(chunks, names)
    return kfac


def micro_batches(args: argparse.Namespace, data_size: int) -> int:
    """Micro-batches per step and rank.

    Raises:
        data.DataError: The global batch cannot be cut evenly.
    """
    per_pass = args.micro_batch_size * data_size
    if args.global_batch_size % per_pass:
        raise data.DataError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {data_size} data-parallel rank(s)"
        )
    return int(args.global_batch_size // per_pass)


def forward_step(pieces: Iterator[tuple[Tensor, Tensor]], model: Any) -> Any:
    """What Megatron's schedules call for every micro-batch."""
    inputs, targets = (part.contiguous().cuda() for part in next(pieces))
    length = inputs.shape[1]
    positions = torch.arange(length, device="cuda").expand_as(inputs)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").triu(1)
    return model(inputs, positions, mask, labels=targets), mean_loss


def mean_loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the losses of all bytes, their number, and both for the report."""
    total = output.float().sum()
    count = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
    return total, count, {"loss": torch.stack([total.detach(), count.float()])}

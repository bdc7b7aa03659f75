"""Pending statistics of one optimizer step: added by hooks, then drained or discarded.

Nothing here is averaged or divided: sums and counts of all calls, micro-batches and
ranks add up, and are divided once, by their owner (numerics: the only rule that makes
factors independent of batch size, accumulation and rank count).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ds_kfac.capture.experts import TokenMasks, keep_tokens
from ds_kfac.capture.passes import GradientMarks
from ds_kfac.capture.rows import RowSharing
from ds_kfac.layers.kinds import KINDS
from ds_kfac.layers.spec import LayerSpec
from ds_kfac.math.moments import add_outer_blocks_
from ds_kfac.math.packing import pack_upper
from ds_kfac.plan.program import ReduceItem

logger = logging.getLogger(__name__)

Count = int | Tensor
"""A number of rows; experts count theirs on the device."""


@dataclass
class Pending:
    """Sums of one layer over the calls of one optimizer step, on this rank.

    Attributes:
        a: Per A block, sum of ``a a^T`` over the rows used, ``[n, n]``, factor dtype.
        g: Per G block, sum of ``gamma gamma^T`` over the rows used, ``[n, n]``; gamma is
            the row's gradient of the global objective.
        rows_used: Rows in the sums.
        rows_seen: Rows before subsampling.
        loss_terms: Loss terms those rows stand for.
    """

    a: list[Tensor]
    g: list[Tensor]
    rows_used: Count = 0
    rows_seen: Count = 0
    loss_terms: Count = 0

    @classmethod
    def zeros(cls, spec: LayerSpec, device: torch.device, dtype: torch.dtype) -> Pending:
        """Empty sums for a layer."""
        sides = (spec.a_blocks, spec.g_blocks)
        a, g = (
            [torch.zeros(b.size, b.size, device=device, dtype=dtype) for b in blocks]
            for blocks in sides
        )
        return cls(a, g)

    def counts(self) -> tuple[Count, Count, Count]:
        """``(rows_used, rows_seen, loss_terms)``."""
        return self.rows_used, self.rows_seen, self.loss_terms

    def keep_if(self, condition: Tensor) -> None:
        """Empty the sums unless a 0-d bool on the device holds; nobody waits for it."""
        self.a, self.g = (
            # A choice, not a product: what is dropped may be NaN.
            [torch.where(condition, block, torch.zeros_like(block)) for block in blocks]
            for blocks in (self.a, self.g)
        )
        self.rows_used, self.rows_seen, self.loss_terms = (
            torch.where(condition, count, 0) for count in self.counts()
        )


def packer(
    pending: Mapping[str, Pending], specs: Sequence[LayerSpec]
) -> Callable[[ReduceItem, Tensor], None]:
    """Writes this rank's share of an item of a reduction round.

    Args:
        pending: Statistics of the step; a layer without any leaves its items as they are.
        specs: Layers, which items name by index.
    """

    def pack(item: ReduceItem, out: Tensor) -> None:
        sums = pending.get(specs[item.layer].name)
        if sums is None:
            return
        if item.side == "counts":
            # Filled, not copied: a copy from host memory waits for the device, once per layer.
            for place, count in zip(out, sums.counts(), strict=True):
                place.fill_(count)
        else:
            pack_upper((sums.a if item.side == "a" else sums.g)[item.block], out)

    return pack


@dataclass
class InputSums:
    """One call's share of A, kept in the call's closure until its gradient arrives."""

    blocks: list[Tensor]
    rows_used: Count
    rows_seen: Count

    def copy(self) -> InputSums:
        """The same sums in tensors of their own."""
        return InputSums([block.clone() for block in self.blocks], self.rows_used, self.rows_seen)


@dataclass(frozen=True)
class GradientRows:
    """One call's output gradients: this rank's share of the rows, and the terms it counts."""

    rows: Tensor
    loss_terms: Count


@dataclass
class CaptureSession:
    """Collects the statistics of the current optimizer step.

    Attributes:
        specs: Layers by module name.
        weight_sharing: ``expand`` or ``reduce``.
        dtype: Dtype of all sums (fp32; fp64 for fp64 models).
        sharing: Shares rows out in the tensor group.
        masks: Tell tokens of experts from padding.
        active: Whether calls are captured in this step.
        stride: Every ``stride``-th row is used.
        offset: First row used; rotates with captures so that no position is favoured.
        error: First exception raised inside a hook, carried to the next vote: raising in
            the backward of one rank would leave the others in a collective.
        saw_half: Some layer has got an fp16 gradient since attach.
        handed_out: Sums of passes of ``torch.autograd.grad``. They count where no other pass
            does: users put such gradients into ``param.grad`` themselves.
        marks: What backward passes have left in ``param.grad``.
        dropped: Sums were thrown away in this step, with their gradients.
        skips_rows: Asked at each call: whether it belongs to a micro-batch whose rows are counted
            only.
        unused: Rows and loss terms of calls in micro-batches whose rows are not used, by layer.
        detach: Takes the preconditioner that the session works for off the model.
    """

    specs: dict[str, LayerSpec]
    weight_sharing: str
    dtype: torch.dtype
    sharing: RowSharing = field(default_factory=RowSharing)
    masks: TokenMasks = field(default_factory=TokenMasks)
    active: bool = False
    stride: int = 1
    offset: int = 0
    pending: dict[str, Pending] = field(default_factory=dict)
    error: Exception | None = None
    saw_half: bool = False
    handed_out: dict[str, Pending] = field(default_factory=dict)
    marks: GradientMarks = field(default_factory=GradientMarks)
    dropped: bool = False
    skips_rows: Callable[[], bool] | None = None
    unused: dict[str, tuple[Count, Count]] = field(default_factory=dict)
    detach: Callable[[], None] | None = None
    _warned: set[str] = field(default_factory=set)
    _passes: dict[str, int | None] = field(default_factory=dict)
    _last_pass: int | None = None

    def begin(self, *, active: bool, fraction: float, turn: int) -> None:
        """Start an optimizer step; what an earlier one left behind is dropped.

        Args:
            active: Statistics are due.
            fraction: Share of the rows to use: every ``round(1 / fraction)``-th.
            turn: Captures so far. Steps would not do: those with captures are multiples of the
                interval, and would find the same positions again and again.
        """
        self.discard()
        self.handed_out = {}
        self.unused = {}
        self.dropped = False
        self.active = active
        self.stride = max(1, round(1.0 / fraction))
        self.offset = turn % self.stride

    def discard(self) -> None:
        """Forget what was captured so far in this step; its gradients are thrown away."""
        self.dropped = self.dropped or bool(self.pending)
        self.pending, self.unused = {}, {}

    def enter_backward(
        self, name: str, number: int | None, grad: Tensor | None, *, stays: bool
    ) -> None:
        """Note that a layer's gradient is being computed.

        If an earlier pass of this step computed one that was thrown away since
        (``model.zero_grad()`` after a bad batch), its statistics go the same way.

        Args:
            name: Layer name.
            number: Tells backward passes apart; None if that is not known.
            grad: What ``weight.grad`` is by now.
            stays: Gradients wait there for the step.
        """
        is_new = number is not None and self._passes.get(name, number) != number
        if stays and is_new:
            if grad is None:
                self._forget(name)
            else:
                self._drop_if_cleared(name, grad)
        self._passes[name] = self._last_pass = number

    def _drop_if_cleared(self, name: str, grad: Tensor) -> None:
        """Drop a layer's sums where its gradient has been set to zero in place."""
        if not self.marks.is_touched(name, grad):
            return
        kept = grad.any()
        if name in self.pending:
            self.pending[name].keep_if(kept)
        if name in self.unused:
            rows, terms = (torch.where(kept, count, 0) for count in self.unused[name])
            self.unused[name] = rows, terms

    def _forget(self, name: str) -> None:
        self.pending.pop(name, None)
        self.unused.pop(name, None)

    def warn_once(self, text: str) -> None:
        """Log a warning, the first time that it is given."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def take_error(self) -> Exception | None:
        """Hand over the first error of a hook and forget it."""
        error, self.error = self.error, None
        return error

    def drain(self) -> dict[str, Pending]:
        """Hand over the sums of the step; the session keeps nothing."""
        pending = self.handed_out | self.pending
        for name, sums in pending.items():
            seen, terms = self.unused.get(name, (0, 0))
            sums.rows_seen = sums.rows_seen + seen
            sums.loss_terms = sums.loss_terms + terms
        self.pending, self.handed_out, self.unused = {}, {}, {}
        return pending

    def drain_for(self, gradients: Mapping[str, Tensor]) -> dict[str, Pending]:
        """Hand over the sums whose gradients are still there.

        Args:
            gradients: Flat views of ``param.grad`` by parameter name; absent where there is none.
        """
        weights = {name: gradients.get(self.specs[name].weight.name) for name in self.pending}
        for name, grad in weights.items():
            if grad is None:
                self._forget(name)
            elif self._passes.get(name) != self._last_pass:
                # The layer took no part in the last pass, so that no other has looked yet.
                self._drop_if_cleared(name, grad)
        pending = self.drain()
        return {n: sums for n, sums in pending.items() if self.specs[n].weight.name in gradients}

    def input_sums(
        self, name: str, module: nn.Module, x: Tensor, mask: Tensor | None = None
    ) -> InputSums:
        """Reduce a call's input to its share of A.

        Args:
            name: Layer name.
            module: The layer.
            x: Input of the call, any shape the layer accepts, any float dtype.
            mask: Rows that count, bool ``[T]``; None for all.
        """
        spec = self.specs[name]
        used, seen = self.input_rows(name, module, x, mask)
        blocks = [
            torch.zeros(b.size, b.size, device=x.device, dtype=self.dtype) for b in spec.a_blocks
        ]
        add_outer_blocks_(blocks, used, bounds=spec.a_blocks, bias=spec.bias is not None)
        if mask is None:
            return InputSums(blocks, used.shape[0], seen)
        count = mask[self._sample].sum()
        if spec.bias is not None:
            blocks[-1][-1, -1].copy_(count)  # the constant of padding is not there either
        return InputSums(blocks, count, seen)

    def input_rows(
        self, name: str, module: nn.Module, x: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Count]:
        """The rows of a call's input that this rank works on, and how many it stands for."""
        spec = self.specs[name]
        rows = KINDS[spec.kind].input_rows(module, x.detach(), self._weight_sharing(mask))
        if mask is not None:  # experts have tokens of their own, whatever others share
            return keep_tokens(name, rows, mask)[self._sample], mask.sum()
        used, seen = self.sharing.of_call(rows, spec.shards, "a", self._sample)
        return used, seen or 0

    def gradient_rows(
        self, name: str, module: nn.Module, g: Tensor, mask: Tensor | None = None
    ) -> GradientRows:
        """The rows of a call's output gradient that this rank works on.

        Args:
            name: Layer name.
            module: The layer.
            g: Gradient of the (scaled) loss with respect to the call's output.
            mask: As for the input.
        """
        spec = self.specs[name]
        kind, sharing = KINDS[spec.kind], self._weight_sharing(mask)
        self.saw_half = self.saw_half or g.dtype == torch.float16
        rows = kind.gradient_rows(module, g.detach(), sharing)
        if mask is not None:
            return GradientRows(keep_tokens(name, rows, mask)[self._sample], mask.sum())
        used, seen = self.sharing.of_call(rows, spec.shards, "g", self._sample)
        return GradientRows(used, 0 if seen is None else kind.loss_terms(g, seen, sharing))

    def add(
        self,
        name: str,
        sums: InputSums,
        gradients: GradientRows,
        *,
        scale: float,
        handed_out: bool = False,
    ) -> None:
        """Add one call: its input sums and its output gradient, as a pair.

        Args:
            name: Layer name.
            sums: Result of :meth:`input_sums` for the same call.
            gradients: Result of :meth:`gradient_rows` for the same call.
            scale: Turns the rows into gradients of the global objective: undoes the loss
                scale and applies the average over ranks.
            handed_out: The pass gives its gradients to the user.
        """
        spec = self.specs[name]
        rows = gradients.rows
        kept = self.handed_out if handed_out else self.pending
        pending = kept.get(name)
        if pending is None:
            pending = kept[name] = Pending.zeros(spec, rows.device, self.dtype)
            pending.a = sums.blocks
        else:
            torch._foreach_add_(pending.a, sums.blocks)
        # The scale is applied to the rows' product in factor precision: fp16 gradients
        # times a loss scale would overflow or vanish if they were scaled themselves.
        add_outer_blocks_(pending.g, rows, bounds=spec.g_blocks, bias=False, alpha=scale * scale)
        # Never in place: a count may be a tensor that the call's closure still holds.
        pending.rows_used = pending.rows_used + sums.rows_used
        pending.rows_seen = pending.rows_seen + sums.rows_seen
        pending.loss_terms = pending.loss_terms + gradients.loss_terms

    def count(self, name: str, shape: torch.Size, mask: Tensor | None = None) -> None:
        """Add a call whose rows are not used: those that are stand for it.

        Args:
            name: Layer name.
            shape: Of the call's output.
            mask: Rows that count, bool ``[T]``; None for all.
        """
        if not self.sharing.counts:
            return
        spec = self.specs[name]
        rows: Count
        terms: Count
        if mask is None:
            rows, terms = KINDS[spec.kind].counts(shape, self.weight_sharing)
        else:
            rows = terms = mask.sum()
        seen, counted = self.unused.get(name, (0, 0))
        self.unused[name] = seen + rows, counted + terms

    def rescale_gradients(self, factor: float) -> None:
        """Multiply all output gradients of the step, whose final scale is known now."""
        for sums in self.pending.values():
            torch._foreach_mul_(sums.g, factor * factor)

    @property
    def _sample(self) -> slice:
        """Rows of a call that are used."""
        return slice(self.offset, None, self.stride)

    def _weight_sharing(self, mask: Tensor | None) -> str:
        """Slots of an expert are no sequence: each token is a row of its own."""
        return self.weight_sharing if mask is None else "expand"

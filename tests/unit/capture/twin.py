"""A session on a model, and the slow twin its sums are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_kfac.capture.hooks import install
from ds_kfac.capture.session import CaptureSession, Pending
from ds_kfac.config import KFACConfig
from ds_kfac.layers.discover import discover
from tests.reference.rows import Recorder, call_rows

Run = Callable[[nn.Module], Tensor]


@dataclass
class Sums:
    """What a layer's calls add up to."""

    a: Tensor | float = 0.0
    g: Tensor | float = 0.0
    rows: int = 0
    terms: int = 0
    calls: int = field(default=0, compare=False)


def attach(
    model: nn.Module,
    *,
    dtype: torch.dtype = torch.float64,
    scale: float = 1.0,
    fraction: float = 1.0,
    step: int = 0,
    **settings: Any,
) -> tuple[CaptureSession, list[RemovableHandle]]:
    """Hook a model and begin a step that captures."""
    config = KFACConfig.parse(settings)
    specs = {spec.name: spec for spec in discover(model, config).layers}
    session = CaptureSession(specs, config.weight_sharing, dtype)
    handles = install(model, session, output_scale=lambda: scale)
    session.begin(active=True, fraction=fraction, turn=step)
    return session, handles


def twin(
    model: nn.Module,
    names: list[str],
    runs: list[Run],
    *,
    sharing: str = "expand",
    scale: float = 1.0,
    stride: int = 1,
    offset: int = 0,
) -> dict[str, Sums]:
    """Sums from recorded calls, one product at a time, in double precision.

    Args:
        model: The model without hooks; ``runs`` call it.
        names: Its layers.
        runs: Micro-batches; each returns a loss.
        sharing: ``expand`` or ``reduce``.
        scale: Applied to output gradients.
        stride: Every so many rows.
        offset: First row.
    """
    modules = {name: model.get_submodule(name) for name in names}
    totals = {name: Sums() for name in names}
    for run in runs:
        with Recorder(modules) as recorder:
            loss = run(model)
        outputs = [out for calls in recorder.calls.values() for _, out in calls]
        grads = iter(torch.autograd.grad(loss, outputs, allow_unused=True))
        for name, calls in recorder.calls.items():
            for x, _ in calls:
                g = next(grads)
                if g is not None:
                    part = slice(offset, None, stride)
                    rows = call_rows(modules[name], x.double(), g.double() * scale, sharing)
                    _add(totals[name], rows, part)
    return totals


def _add(total: Sums, rows: tuple[Tensor, Tensor, int], part: slice) -> None:
    a, gamma, terms = rows
    total.calls += 1
    total.rows += a[part].shape[0]
    total.terms += terms
    for row, slope in zip(a[part], gamma[part], strict=True):
        total.a = total.a + torch.outer(row, row)
        total.g = total.g + torch.outer(slope, slope)


def assert_same(
    pending: dict[str, Pending], expected: dict[str, Sums], *, rtol: float = 1e-12
) -> None:
    """Compare a session's sums with the twin's: same layers, counts and matrices."""
    assert set(pending) == {name for name, sums in expected.items() if sums.calls}
    for name, found in pending.items():
        sums = expected[name]
        assert (found.rows_used, found.loss_terms) == (sums.rows, sums.terms), name
        for blocks, whole in ((found.a, sums.a), (found.g, sums.g)):
            start = 0
            for block in blocks:
                end = start + block.shape[0]
                part = whole if isinstance(whole, float) else whole[start:end, start:end]
                target = torch.zeros_like(block) + part
                torch.testing.assert_close(block, target.to(block.dtype), rtol=rtol, atol=rtol)
                start = end

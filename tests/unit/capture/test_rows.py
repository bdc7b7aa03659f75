"""Rows shared out over a tensor group: sums over its ranks are those of one rank with all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_kfac.capture.rows import RowSharing
from ds_kfac.capture.session import CaptureSession
from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.ledger import Ledger
from ds_kfac.layers.shards import Shards, fused_ranges
from ds_kfac.layers.spec import LayerSpec
from tests._harness import world
from tests.unit.plan.cases import make_spec

D_OUT, D_IN, ROWS = 7, 6, 11


def spec_of(rows: bool, whole: bool, size: int) -> LayerSpec:
    """Uneven shards, the last rank's empty where there are three."""
    cut = D_OUT if rows else D_IN
    widths = [cut - 2, 2, 0][:size]
    shards = Shards(D_OUT, D_IN, rows, fused_ranges([widths]), whole)
    return replace(make_spec("fc", D_OUT, D_IN, max_dim=4), shards=shards)


def data() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(ROWS, 2, n, dtype=torch.float64) for n in (D_IN, D_OUT))


def capture(session: CaptureSession, x: Tensor, g: Tensor) -> list[Tensor]:
    module = nn.Linear(1, 1)
    gradients = session.gradient_rows("fc", module, g)
    session.add("fc", session.input_sums("fc", module, x), gradients, scale=0.5)
    sums = session.drain()["fc"]
    counts = torch.tensor(sums.counts(), dtype=torch.float64)
    return [block.triu() for block in (*sums.a, *sums.g)] + [counts]


def _session(spec: LayerSpec, sharing: RowSharing, sharing_rule: str) -> CaptureSession:
    session = CaptureSession({"fc": spec}, sharing_rule, torch.float64, sharing)
    session.begin(active=True, fraction=1 / 3, turn=1)
    return session


def shared(rank: int, size: int, rows: bool, whole: bool, rule: str) -> tuple[list[Tensor], dict]:
    spec = spec_of(rows, whole, size)
    ledger = Ledger()
    session = _session(spec, RowSharing(Communicator(dist.group.WORLD, ledger)), rule)
    x, g = data()
    assert spec.shards is not None
    if not whole:
        x, g = (x, spec.shards.take(g, rank, 2)) if rows else (spec.shards.take(x, rank, 2), g)
    return capture(session, x, g), ledger.report()


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize(("rule", "counts"), [("expand", [7, 22, 22]), ("reduce", [4, 11, 11])])
def test_shares_add_up(rule: str, counts: list[float], rows: bool, whole: bool, size: int) -> None:
    """Every third row, from the second on, of 11 sequences of two positions."""
    alone = _session(make_spec("fc", D_OUT, D_IN, max_dim=4), RowSharing(), rule)
    expected = capture(alone, *data())
    found = world(size).run(shared, rows, whole, rule)
    for index, value in enumerate(expected):
        torch.testing.assert_close(sum(result[0][index] for result in found), value)
    assert expected[-1].tolist() == counts
    for _, report in found:
        rows_sent = report["kinds"].get("rows", {"calls": 0, "bytes": 0, "planned_bytes": 0})
        assert rows_sent["calls"] == int(not whole)
        assert rows_sent["bytes"] == rows_sent["planned_bytes"]


TOKENS = 12


def token_data() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(TOKENS, 2, n, dtype=torch.float64) for n in (D_IN, D_OUT))


def spread(
    rank: int, size: int, rows: bool, fraction: float
) -> tuple[list[Tensor], dict[str, Any]]:
    """A rank has its own tokens where features are whole (sequence parallelism)."""
    spec = spec_of(rows, False, size)
    assert spec.shards is not None
    shards = replace(spec.shards, tokens=True)
    ledger = Ledger()
    session = CaptureSession(
        {"fc": replace(spec, shards=shards)},
        "expand",
        torch.float64,
        RowSharing(Communicator(dist.group.WORLD, ledger)),
    )
    session.begin(active=True, fraction=fraction, turn=1)
    x, g = token_data()
    if rows:
        x, g = x.chunk(size)[rank], shards.take(g, rank, 2)
    else:
        x, g = shards.take(x, rank, 2), g.chunk(size)[rank]
    return capture(session, x, g), ledger.report()


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("fraction", [1.0, 1 / 3])
def test_tokens_of_ranks_are_their_shares(fraction: float, rows: bool, size: int) -> None:
    shares = zip(*(part.chunk(size) for part in token_data()), strict=True)
    expected = []
    for x, g in shares:
        alone = CaptureSession({"fc": make_spec("fc", D_OUT, D_IN, max_dim=4)}, "expand", x.dtype)
        alone.begin(active=True, fraction=fraction, turn=1)
        expected.append(capture(alone, x, g))
    found = world(size).run(spread, rows, fraction)
    for (sums, report), wanted in zip(found, expected, strict=True):
        for value, want in zip(sums, wanted, strict=True):
            torch.testing.assert_close(value, want)
        assert report["calls"] == 1
        assert report["bytes"] == report["planned_bytes"]
    assert sum(wanted[-1][1] for wanted in expected) == 2 * TOKENS  # rows that were seen

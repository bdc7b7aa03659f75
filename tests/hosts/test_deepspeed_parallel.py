"""Half precision of cut layers, cut sequences and experts against the single-process oracle."""

from __future__ import annotations

import pytest

from tests.hosts import parallel_rows
from tests.hosts.engine_rows import PRECISIONS, Choice

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("engines", "precision"),
    [
        ("AutoTP 2 exact, ZeRO 2$", "fp16"),
        ("AutoTP 2 exact, ZeRO 0$", "autocast bf16"),
        ("AutoTP 2 exact, ZeRO 1$", "autocast fp16"),
        ("Ulysses 2, ZeRO [13]$", "bf16"),
        ("Ulysses 2, ZeRO [23]$", "fp16"),
        ("MoE, ep 2, ZeRO 1$", "bf16"),
        ("MoE, ep 2, ZeRO [02]$", "autocast bf16"),
        ("MoE, ep 2, ZeRO 1$", "autocast fp16"),
    ],
)
def test_weights_move_as_the_oracles_do(engines: str, precision: str) -> None:
    """Two ranks, accumulation 1 and more, clipping; limits of ADR 6.

    They are rows of the engine table, which has the other stages and precisions as well.
    """
    rows = parallel_rows.measure(Choice((engines,), (2,), (precision,)))
    assert rows
    for row in rows:
        error = row.cells[precision]
        assert isinstance(error, float), (row.engine, error)
        print(f"{row.engine}, {row.accumulation} micro-batches, {precision}: {error:.1e}")
        assert error <= PRECISIONS[precision][2], (row.engine, row.accumulation, error)

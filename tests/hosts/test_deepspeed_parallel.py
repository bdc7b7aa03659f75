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


def test_cut_layers_round_as_whole_ones_do() -> None:
    """AutoTP's error in bf16 is near its limit because weights move by 5 % of their size there.

    They are stored rounded before and after, and that alone is an error of 5.4e-2 (ADR 6). The
    same model uncut on two data ranks has it too: partial sums of shards add nothing.
    """
    errors = []
    for degree in (1, 2):
        choice = Choice((f"AutoTP {degree} exact, ZeRO 1$",), (2,), ("bf16",))
        rows = parallel_rows.tensor_rows(choice, "exact", 2, degree)
        errors += [error for row in rows if isinstance(error := row.cells["bf16"], float)]
    print([f"{error:.2e}" for error in errors])
    assert len(errors) == 4 and max(errors) <= PRECISIONS["bf16"][2]
    assert max(errors) < 1.02 * min(errors)

"""Backward passes whose gradients DeepSpeed replaces by those of a later one."""

from __future__ import annotations

import pytest

from tests._harness import world
from tests.hosts import deepspeed_cells, replaced_jobs
from tests.hosts import topology_table as table

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.dist


def test_statistics_are_replaced_together_with_gradients() -> None:
    """Rows of a batch that was given up went into the factors although its gradient did not.

    ZeRO 1 and 2 keep the gradient of the last pass alone (offloaded: of two), ZeRO 3 after
    ``optimizer.zero_grad()``.
    """
    ways = [("1", "again"), ("1", "zero_grad"), ("2", "again"), ("3", "zero_grad")]
    cells = [(deepspeed_cells.cell("natural", host), how) for host, how in ways]
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    cells.append((deepspeed_cells.cell("natural", "2", zero=offload), "again"))
    cells.append((deepspeed_cells.cell("natural", "2", accumulation=4, zero=offload), ""))
    cells.append((deepspeed_cells.cell("natural", "2", accumulation=4), ""))
    for found in world(2).run(replaced_jobs.train, cells, timeout=240):
        for (cell, how), weights in zip(cells, found, strict=True):
            error = deepspeed_cells.difference(weights, table.oracle("natural"))
            assert error < 1e-5, (cell.host, how, error)

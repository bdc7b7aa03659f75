"""Jobs that save, damage, reshard and load K-FAC state under DistributedDataParallel."""

from __future__ import annotations

import copy

from tests.unit.checkpoint.training import assert_identical, make


def load_damaged_on_one_rank(rank: int, size: int, what: str) -> None:
    """One rank's state is wrong: nothing may change anywhere, and nobody may wait."""
    settings = {"factor_update_steps": 1, "inv_update_steps": 1}
    run = make(settings, widths=(4, 6, 5, 3), size=size)
    run.step(0, rank, size)
    state = copy.deepcopy(run.kfac.state_dict())
    run.step(1, rank, size)
    if rank == size - 1:
        if what == "version":
            state["version"] = 9
        elif what == "step":
            state["counters"]["steps"] += 1
        else:
            layer = next(iter(state["layers"].values()))
            layer["a.0.total"] = layer["a.0.total"][:-1]
    before = run.fingerprint()
    try:
        run.kfac.load_state_dict(state)
    finally:
        assert_identical(run.fingerprint(), before)
        run.kfac.detach()

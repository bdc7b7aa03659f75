"""Arithmetic of the ledger, and groups of one rank."""

from __future__ import annotations

import pytest
import torch

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.ledger import Ledger
from ds_kfac.comm.vote import Verdict, agree, health, raise_everywhere
from ds_kfac.errors import ConfigError, DistributedError


def test_counts_by_kind_and_in_total() -> None:
    ledger = Ledger()
    ledger.record("gradients", 100)
    ledger.record("gradients", 50)
    ledger.record("vote", 0)
    ledger.plan("gradients", 140)
    ledger.plan("factors", 7)
    ledger.steps += 2
    assert ledger.report() == {
        "steps": 2,
        "calls": 3,
        "bytes": 150,
        "planned_bytes": 147,
        "kinds": {
            "factors": {"calls": 0, "bytes": 0, "planned_bytes": 7},
            "gradients": {"calls": 2, "bytes": 150, "planned_bytes": 140},
            "vote": {"calls": 1, "bytes": 0, "planned_bytes": 0},
        },
    }
    assert list(ledger.report()["kinds"]) == ["factors", "gradients", "vote"]


def test_reset_forgets_everything_and_reports_are_snapshots() -> None:
    ledger = Ledger()
    ledger.record("vote", 8)
    ledger.steps = 3
    before = ledger.report()
    ledger.reset()
    empty = {"steps": 0, "calls": 0, "bytes": 0, "planned_bytes": 0, "kinds": {}}
    assert ledger.report() == empty
    ledger.record("vote", 1)
    assert before["kinds"]["vote"]["bytes"] == 8


def test_one_rank_needs_no_group_and_sends_nothing() -> None:
    ledger = Ledger()
    alone = Communicator(None, ledger)
    values = torch.tensor([3.0, torch.nan])
    assert (alone.size, alone.rank) == (1, 0)
    assert alone.sum_(values, "scalars") is values
    assert alone.broadcast_(values, 0, "inspection") is values
    assert torch.equal(alone.max_(torch.tensor([2]), "vote"), torch.tensor([2]))
    assert alone.gather_objects("x") == ["x"]
    assert ledger.report()["calls"] == 0


def test_votes_are_integers_even_alone() -> None:
    with pytest.raises(TypeError, match="votes are integers"):
        Communicator(None, Ledger()).max_(torch.tensor([1.0]), "vote")


@pytest.mark.parametrize(
    ("finite", "error", "verdict"),
    [
        (True, False, Verdict.GOOD),
        (False, False, Verdict.NONFINITE),
        (True, True, Verdict.ERROR),
        (False, True, Verdict.ERROR),
    ],
)
def test_health_of_one_rank(finite: bool, error: bool, verdict: Verdict) -> None:
    alone = Communicator(None, Ledger())
    assert health(alone, torch.tensor(finite), error=error) is verdict


def test_errors_of_one_rank() -> None:
    alone = Communicator(None, Ledger())
    raise_everywhere(alone, None)
    agree(alone, "anything", "x")
    mine = ConfigError("E201", "wrong")
    with pytest.raises(ConfigError) as caught:
        raise_everywhere(alone, mine)
    assert caught.value is mine
    assert caught.value.__cause__ is None  # not itself: loggers walk the chain
    foreign = ValueError("broken")
    with pytest.raises(DistributedError, match="rank 0 failed: ValueError: broken") as other:
        raise_everywhere(alone, foreign)
    assert other.value.__cause__ is foreign

"""KAISA's strategies: who computes a direction changes bytes and memory, and no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests._harness import world
from tests.hosts import promise_jobs as promises
from tests.hosts import strategy_jobs as strategies
from tests.hosts import topology_jobs as jobs
from tests.hosts import topology_table as table
from tests.hosts.topology_jobs import Cell

pytestmark = pytest.mark.dist

DIRECTIONS = ("natural", "orthogonal", "ekfac", "eigen_adam")
HALF = {"strategy": "hybrid", "grad_worker_fraction": 0.5}
ALL = {"strategy": "communication"}
STRATEGIES = {"communication": ALL, "hybrid": HALF}
MIXED = {**table.INTERVALS, "grafting": "adam", "momentum": 0.9, "kl_clip": None}


def settings(direction: str, **more: Any) -> dict[str, Any]:
    base = {**MIXED, "direction": direction, "max_factor_dim": 7}
    if direction == "orthogonal":
        base["grafting"] = "none"
    return {**base, **more}


def assert_equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        other = second[name]
        same = torch.equal(value, other) if isinstance(value, Tensor) else value == other
        assert same, name


@pytest.mark.parametrize(("size", "host"), [(2, "ddp"), (4, "ddp"), (4, "0")])
def test_weights_match_the_oracle_on_every_rank(size: int, host: str) -> None:
    """As close to it as with one owner per layer; ranks that compute the same agree bit by bit."""
    names = [*table.VARIANTS]
    cells = []
    for strategy in (ALL, HALF) if size > 2 else (ALL,):
        for name in names:
            cell = table.cell_of(name, host, 4, True)
            cells.append(Cell(host, {**cell.kfac, **strategy}, 4, True, cell.own, cell.clipping))
    everyone = world(size).run(jobs.train, cells)
    for index in range(len(cells)):
        name = names[index % len(names)]
        for ranks in everyone:
            assert_equal(ranks[index], everyone[0][index])
        assert table._difference(everyone[0][index], table.oracle(name)) <= table.VARIANTS[name][2]


@pytest.mark.parametrize("size", [2, 4])
def test_exact_sums_give_identical_weights(size: int) -> None:
    """Integer data: as with one owner per layer, on one rank."""
    fixed = {**table.INTERVALS, "factor_decay": 0.5}
    baseline = world(1).run(
        jobs.train, [Cell("ddp", {"direction": d, **fixed}, integers=True) for d in DIRECTIONS]
    )[0]
    for strategy in STRATEGIES.values() if size > 2 else (ALL,):
        for host in ("ddp", "0"):
            cells = [
                Cell(host, {"direction": d, **fixed, **strategy}, 4, True, integers=True)
                for d in DIRECTIONS
            ]
            for found, expected in zip(
                world(size).run(jobs.train, cells)[0], baseline, strict=True
            ):
                assert_equal(found, expected)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_replicas_follow_their_owners(direction: str, background: bool) -> None:
    """Bases and moments have the same bits at all workers, also after failed decompositions."""
    more = {**HALF, "background_inverse": background, "inv_update_steps": 2}
    cell = Cell("ddp", settings(direction, **more))
    found = world(4).run(strategies.train, cell, (4, 5, 6), (1, 3))
    owners = {
        key: (r, v) for r, state in enumerate(found) for key, v in state.items() if "/" in key
    }
    replicas = 0
    for rank, state in enumerate(found):
        for key, value in state.items():
            if key.startswith("replica of "):
                owner, expected = owners[key.removeprefix("replica of ")]
                assert owner != rank and torch.equal(value, expected), key
                replicas += key.endswith("updates")
    assert replicas == 3  # layers: each has one worker beside its owner
    metrics = [state["metrics"] for state in found]
    blocks = sum(2 if n > 7 else 1 for dims in ((7, 10), (10, 10), (11, 4)) for n in dims)
    refreshes = metrics[0]["refreshes"]
    assert sum(m["decompositions"] for m in metrics) == refreshes * blocks
    assert all(m["skipped"] == 2 for m in metrics)
    assert sum(m["failing_blocks"] for m in metrics) == 1
    weights = [{k: v for k, v in s.items() if "/" not in k and k != "metrics"} for s in found]
    for other in weights[1:]:
        assert_equal(other, weights[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("direction", ["natural", "eigen_adam"])
def test_bytes_are_those_of_the_plan(direction: str, strategy: str) -> None:
    """P3. Directions move along rows, bases along columns and only when they are new."""
    kfac = {"direction": direction, **STRATEGIES[strategy]}
    numel = 5 * 12 * 13
    for size in (2, 4) if strategy == "communication" else (4,):  # half of 2 is one owner
        results = world(size).run(strategies.traffic, "0", kfac)
        for result in results:
            for step, kinds in enumerate(result["ledgers"]):
                assert ("bases" in kinds) == (step % 3 == 0)
                for kind, entry in kinds.items():
                    assert entry["bytes"] == entry["planned_bytes"], (kind, entry)
            for step, log in enumerate(result["collectives"]):
                assert "broadcast" not in log
                assert len(log) <= 5 + (step % 3 == 0)
        columns = 1 if strategy == "communication" else 2
        moved = [r["ledgers"][1].get("directions", {"bytes": 0})["bytes"] for r in results]
        # Every rank gets what its column does not compute, once.
        assert sum(moved) == 4 * numel * size * (columns - 1) // columns


def test_bases_may_move_in_any_pieces() -> None:
    """Buffers are bounded whatever the sizes of blocks."""
    cell = Cell("ddp", settings("ekfac", **HALF))
    for numel in (7, 64):
        for whole, pieces in world(4).run(strategies.train_in_pieces, cell, numel):
            for state in (whole, pieces):
                del state["metrics"]
            assert_equal(pieces, whole)


def test_bases_beside_training_are_sent_when_they_are_used() -> None:
    kfac = {"direction": "natural", **ALL, "background_inverse": True}
    for result in world(2).run(strategies.traffic, "0", kfac):
        sent = [step for step, kinds in enumerate(result["ledgers"]) if "bases" in kinds]
        assert sent == [0, 5]  # begun at 3 and 6
        for kinds in result["ledgers"]:
            assert all(entry["bytes"] == entry["planned_bytes"] for entry in kinds.values())


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_resume_is_exact_and_from_any_strategy(
    direction: str, background: bool, tmp_path: Path
) -> None:
    """A load brings bases and moments to all workers, whoever saved them."""
    more = {"inv_update_steps": 4, "background_inverse": background}
    cell = Cell("ddp", settings(direction, **HALF, **more))
    for stop in (5, 7) if background else (5,):
        path = str(tmp_path / f"{stop}")
        for straight, resumed in world(4).run(strategies.stopped, cell, stop, path, {}):
            assert_equal(resumed, straight)
    weights = set(dict(jobs.make_net(cell).named_parameters()))
    for number, other in enumerate(({"strategy": "memory", "grad_worker_fraction": None}, ALL)):
        path = str(tmp_path / f"other{number}")
        change = {**other, "grad_worker_fraction": None}
        for straight, resumed in world(2).run(strategies.stopped, cell, 5, path, change):
            for name in weights:
                assert torch.equal(straight[name], resumed[name]), name


@pytest.mark.parametrize(
    "point", ["owner.refresh", "owner.changed_bases", "owner.take_sent_bases", "owner.directions"]
)
def test_local_error_reaches_all_ranks(point: str) -> None:
    cell = Cell("0", settings("natural", **ALL, inv_update_steps=1), clipping=0.5)
    errors = world(2).run_expecting_errors(promises.local_error, cell, point)
    for error in errors:
        assert error is not None
        assert "rank 1 failed: MemoryError: no memory for statistics" in error.text
    assert errors[0].same_error == errors[1].same_error

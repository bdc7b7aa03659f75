"""Programs, votes and errors between real processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.guard import Guard
from ds_kfac.comm.ledger import Ledger
from ds_kfac.comm.run import GradientExchange, reduce_factors
from ds_kfac.comm.vote import Verdict, agree, health, raise_everywhere
from ds_kfac.errors import ConfigError, DistributedError, KFACError, NumericalError
from ds_kfac.plan import program as program_module
from ds_kfac.plan.program import ReduceItem, build
from tests.unit.plan.cases import REPLICATED, Case, random_case

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")
SIZES = (2, 3)


def communicator() -> Communicator:
    return Communicator(dist.group.WORLD, Ledger())


# ---------------------------------------------------------------- gradients and directions


def whole_gradients(case: Case) -> dict[str, Tensor]:
    """Every element of the model another integer, the same on every rank."""
    start, result = 1, {}
    for spec in case.specs:
        for slot in spec.slots:
            result[slot.name] = torch.arange(start, start + slot.numel, dtype=torch.float32)
            start += slot.numel
    return result


def local_views(case: Case, rank: int, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    views = {}
    for name, layout in case.layouts.items():
        if layout.replicated:
            views[name] = whole[name].clone()
        for piece in layout.pieces:
            if piece.rank == rank:
                views[name] = whole[name][piece.start : piece.start + piece.numel].clone()
    return views


def _round_trip(rank: int, size: int, seeds: list[int], missing: bool) -> int:
    """Gradients to owners, twice of them plus a layer constant back; everything is checked."""
    moved = 0
    for seed in seeds:
        case = random_case(random.Random(seed), size)
        exchange = build(case.specs, case.layouts, case.owners, size=size).exchange
        comm = communicator()
        mover = GradientExchange(
            exchange, comm, wire_dtype=torch.float32, dtype=torch.float64, device=CPU, guard=Guard()
        )
        whole = whole_gradients(case)
        if missing:  # the first parameter got no gradient on any rank
            name = next(iter(whole))
            whole[name].zero_()
        views = local_views(case, rank, whole)
        if missing:
            views.pop(name, None)
        flats = mover.to_owners(views)
        targets = {
            layer: torch.cat([whole[slot.name] for slot in spec.slots])
            for layer, spec in enumerate(case.specs)
        }
        assert set(flats) == set(mover.owned) - exchange.replicated
        for layer, flat in flats.items():
            assert flat.dtype == torch.float32
            assert torch.equal(flat, targets[layer])
        directions = {i: targets[i].double() * 2.0 + 0.125 * i for i in mover.owned}
        slices, shared = mover.from_owners(directions)
        _check_slices(case, rank, targets, slices)
        assert set(shared) == set(exchange.replicated)
        for layer, flat in shared.items():
            assert torch.equal(flat, targets[layer].double() * 2.0 + 0.125 * layer)
        kinds = comm.ledger.report()["kinds"]
        for kind, entry in kinds.items():
            assert entry["bytes"] == entry["planned_bytes"], kind
            assert entry["calls"] <= 2
        out, back = exchange.sent_numel(rank)
        assert kinds.get("gradients", {"bytes": 0})["bytes"] == 4 * out
        assert kinds.get("directions", {"bytes": 0})["bytes"] == 8 * back
        moved += out
    return moved


def _check_slices(
    case: Case, rank: int, targets: dict[int, Tensor], slices: list[tuple[Any, Tensor]]
) -> None:
    held = {
        (name, piece.start, piece.numel)
        for name, layout in case.layouts.items()
        for piece in layout.pieces
        if piece.rank == rank
    }
    assert {(s.param, s.offset, s.numel) for s, _ in slices} == held
    assert len(slices) == len(held)
    for segment, values in slices:
        part = targets[segment.layer][segment.start : segment.start + segment.numel]
        assert values.dtype == torch.float64
        assert torch.equal(values, part.double() * 2.0 + 0.125 * segment.layer)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("missing", [False, True])
def test_round_trip_of_random_layouts(
    run_world: Callable[..., list[Any]], size: int, missing: bool
) -> None:
    moved = run_world(size, _round_trip, list(range(25)), missing)
    assert min(moved) > 0


def _deal_out(rank: int, size: int, seeds: list[int]) -> list[int]:
    """Replicated layers, owners very unequal: in equal shares what one all-gather brings, too."""
    sent = []
    for seed in seeds:
        case = random_case(random.Random(seed), size)
        layouts = dict.fromkeys(case.layouts, REPLICATED)
        owners = [owner * (seed % 2) for owner in case.owners]
        whole = whole_gradients(case)
        targets = [torch.cat([whole[slot.name] for slot in spec.slots]) for spec in case.specs]
        for padding in (float("inf"), 0.0):
            with mock.patch.object(program_module, "MAX_PADDING", padding):
                exchange = build(case.specs, layouts, owners, size=size).exchange
                assert (exchange.spread is None) == (padding > 0)
            comm = communicator()
            mover = GradientExchange(
                exchange,
                comm,
                wire_dtype=torch.float32,
                dtype=torch.float64,
                device=CPU,
                guard=Guard(),
            )
            slices, shared = mover.from_owners({i: targets[i].double() for i in mover.owned})
            assert not slices and sorted(shared) == list(range(len(targets)))
            assert all(torch.equal(shared[i], t.double()) for i, t in enumerate(targets))
            entry = comm.ledger.report()["kinds"]["directions"]
            assert entry["bytes"] == entry["planned_bytes"] == 8 * exchange.sent_numel(rank)[1]
            assert entry["calls"] == (1 if padding else 2)
            sent.append(entry["bytes"])
    return sent


@pytest.mark.parametrize("size", [2, 4])
def test_directions_are_dealt_out_in_equal_shares(
    run_world: Callable[..., list[Any]], size: int
) -> None:
    run_world(size, _deal_out, list(range(8)))


def test_round_trip_alone() -> None:
    case = random_case(random.Random(3), 1)
    exchange = build(case.specs, case.layouts, case.owners, size=1).exchange
    comm = Communicator(None, Ledger())
    mover = GradientExchange(
        exchange, comm, wire_dtype=torch.float32, dtype=torch.float32, device=CPU, guard=Guard()
    )
    whole = whole_gradients(case)
    flats = mover.to_owners(local_views(case, 0, whole))
    targets = {
        layer: torch.cat([whole[slot.name] for slot in spec.slots])
        for layer, spec in enumerate(case.specs)
    }
    assert all(torch.equal(flat, targets[layer]) for layer, flat in flats.items())
    slices, shared = mover.from_owners(targets)
    assert sum(s.numel for s, _ in slices) + sum(t.numel() for t in shared.values()) == sum(
        spec.numel for spec in case.specs
    )
    assert comm.ledger.report()["calls"] == 0


# ---------------------------------------------------------------- factors


def _fill(item: ReduceItem, rank: int) -> Tensor:
    """Integers that differ by layer, side, block, position and rank."""
    base = 1000 * item.layer + 100 * item.block + {"a": 0, "g": 50, "counts": 70}[item.side]
    return (torch.arange(item.numel) + base).float() * (rank + 1)


def _reduce(rank: int, size: int, seeds: list[int], limit: int) -> int:
    program_module.REDUCE_BUFFER_NUMEL = limit
    try:
        programs = []
        for seed in seeds:
            case = random_case(random.Random(seed), size)
            programs.append((case, build(case.specs, case.layouts, case.owners, size=size)))
    finally:
        program_module.REDUCE_BUFFER_NUMEL = 1 << 26
    rounds = 0
    for case, program in programs:
        comm = communicator()

        def pack(item: ReduceItem, out: Tensor) -> None:
            assert not out.any()
            if (item.layer + rank) % 3:  # some ranks saw nothing of some layers
                out.copy_(_fill(item, rank))

        found = reduce_factors(program.rounds, comm, pack, dtype=torch.float32, device=CPU)
        expected = [item for round_ in program.rounds for item in round_.items[rank]]
        assert [item for item, _ in found] == expected
        for item, values in found:
            total = torch.zeros(item.numel)
            for other in range(size):
                if (item.layer + other) % 3:
                    total += _fill(item, other)
            assert torch.equal(values, total)
        sent = comm.ledger.report()["kinds"]["factors"]
        assert sent["calls"] == len(program.rounds)
        away = sum(round_.part_numel for round_ in program.rounds) * (size - 1)
        assert sent["bytes"] == sent["planned_bytes"] == 4 * away
        assert all(case.owners[item.layer] == rank for item, _ in found)
        rounds += len(program.rounds)
    return rounds


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("limit", [1 << 26, 30])
def test_factors_are_summed_exactly_at_their_owner(
    run_world: Callable[..., list[Any]], size: int, limit: int
) -> None:
    rounds = run_world(size, _reduce, list(range(12)), limit)
    assert len(set(rounds)) == 1
    assert (rounds[0] > 12) == (limit == 30)


# ---------------------------------------------------------------- votes


def _votes(rank: int, size: int) -> list[Verdict]:
    comm = communicator()
    verdicts = [health(comm, torch.tensor(True), error=False)]
    for bad in range(size):
        finite = torch.isfinite(torch.tensor(torch.nan if rank == bad else 1.0))
        verdicts.append(health(comm, finite, error=False))
        verdicts.append(health(comm, torch.tensor(True), error=rank == bad))
        # Another rank's NaN does not hide an error.
        finite = torch.tensor(rank != (bad + 1) % size)
        verdicts.append(health(comm, finite, error=rank == bad))
    assert comm.ledger.report()["kinds"]["vote"]["calls"] == 1 + 3 * size
    return verdicts


@pytest.mark.parametrize("size", SIZES)
def test_one_bad_rank_decides_for_all(run_world: Callable[..., list[Any]], size: int) -> None:
    per_bad_rank = [Verdict.NONFINITE, Verdict.ERROR, Verdict.ERROR]
    expected = [Verdict.GOOD, *per_bad_rank * size]
    assert run_world(size, _votes) == [expected] * size


def _float_vote(rank: int, size: int) -> str:
    try:
        communicator().max_(torch.tensor([0.5]), "vote")
    except TypeError as error:
        return str(error)
    return "accepted"


def test_float_votes_are_refused_before_any_communication(
    run_world: Callable[..., list[Any]],
) -> None:
    assert run_world(2, _float_vote) == ["votes are integers"] * 2


def _errors(rank: int, size: int, raised: dict[int, Exception]) -> tuple[Any, ...]:
    mine = raised.get(rank)
    try:
        raise_everywhere(communicator(), mine)
    except KFACError as error:
        same = error.__cause__ is mine or (error.__cause__ is None and mine is None)
        return type(error).__name__, error.code, str(error), same
    return ("nothing",)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "make",
    [
        lambda rank: NumericalError("E110", f"layer {rank} failed"),
        lambda rank: ConfigError("E201", f"damping {rank}"),
        lambda rank: ValueError(f"bug on {rank}"),
        lambda rank: MemoryError(),
    ],
)
def test_an_error_of_one_rank_is_everybodys(
    run_world: Callable[..., list[Any]], size: int, make: Callable[[int], Exception]
) -> None:
    for bad in range(size):
        error = make(bad)
        results = run_world(size, _errors, {bad: error})
        assert len({result[:3] for result in results}) == 1
        name, code, text, _ = results[0]
        if isinstance(error, KFACError):
            assert (name, code, text) == (type(error).__name__, error.code, str(error))
        else:
            assert (name, code) == ("DistributedError", "E121")
            assert text == f"KFAC-E121 rank {bad} failed: {type(error).__name__}: {error}"
        assert results[bad][3]


def test_of_several_errors_the_first_ranks_is_raised(run_world: Callable[..., list[Any]]) -> None:
    errors = {1: NumericalError("E110", "one"), 2: ConfigError("E201", "two")}
    results = run_world(3, _errors, errors)
    assert {result[:3] for result in results} == {("NumericalError", "E110", "KFAC-E110 one")}


def test_without_errors_nothing_is_raised(run_world: Callable[..., list[Any]]) -> None:
    assert run_world(2, _errors, {}) == [("nothing",)] * 2


def _agree(rank: int, size: int, values: list[str]) -> str:
    try:
        agree(communicator(), "the set of layers", values[rank])
    except DistributedError as error:
        return str(error)
    return "agreed"


def test_agreement(run_world: Callable[..., list[Any]]) -> None:
    assert run_world(3, _agree, ["x", "x", "x"]) == ["agreed"] * 3
    text = "KFAC-E203 the set of layers differs between ranks: rank 0: x; rank 1: y; rank 2: x"
    assert run_world(3, _agree, ["x", "y", "x"]) == [text] * 3


# ---------------------------------------------------------------- the primitives


def _subgroup(rank: int, size: int) -> Any:
    group = dist.new_group([2, 1] if size > 2 else [1, 0])
    members = sorted(dist.get_process_group_ranks(group))
    if rank not in members:
        return None
    comm = Communicator(group, Ledger())
    place = members.index(rank)
    assert (comm.size, comm.rank) == (2, place)
    received = [comm.broadcast_(torch.tensor([float(rank)]), s, "x").item() for s in (0, 1)]
    assert received == members
    gathered = comm.all_gather(torch.tensor([float(rank), 5.0]), "y")
    assert gathered.tolist() == [[members[0], 5.0], [members[1], 5.0]]
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (place + 1)
    assert comm.reduce_scatter(rows, "z").tolist() == [[3.0, 6.0], [9.0, 12.0]][place]
    total = comm.sum_(torch.ones(3, dtype=torch.float64), "w")
    assert total.tolist() == [2.0] * 3
    dist.destroy_process_group(group)
    return {kind: entry["bytes"] for kind, entry in comm.ledger.report()["kinds"].items()}


@pytest.mark.parametrize("size", SIZES)
def test_collectives_of_a_subgroup_and_their_bytes(
    run_world: Callable[..., list[Any]], size: int
) -> None:
    """Ranks of the group are counted from 0, whatever they are in the world."""
    results = run_world(size, _subgroup, compare_collectives=False)
    counted = [result for result in results if result is not None]
    assert counted == [{"w": 24, "x": 4, "y": 8, "z": 8}] * 2

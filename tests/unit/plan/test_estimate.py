"""What is derived from a program: bytes and memory of every rank, times."""

from __future__ import annotations

import pytest
from hypothesis import given

from ds_kfac.config import KFACConfig
from ds_kfac.plan.cost import capture_flops, direction_flops, refresh_flops
from ds_kfac.plan.estimate import Machine, estimate, wire_of
from ds_kfac.plan.memory import layer_state, moment_count, rank_memory
from ds_kfac.plan.program import build
from ds_kfac.plan.topology import Layout
from ds_kfac.plan.traffic import Wire, capture_bytes, moved, ordinary_bytes, run_bytes
from tests.unit.plan.cases import Case, cases, make_spec

WHOLE = Layout(replicated=True)


@given(cases())
def test_one_pass_finds_what_every_rank_says_of_itself(case: Case) -> None:
    program = build(case.specs, case.layouts, case.owners, size=case.size)
    exchange = program.exchange
    ordinary = ordinary_bytes(program, Wire(2, 4, 1))
    for rank, part in enumerate(moved(exchange)):
        out, back = exchange.sent_numel(rank)
        assert ordinary[rank]["gradients"] == 2 * out
        assert ordinary[rank]["directions"] == 4 * back
        received = exchange.incoming(rank, sources_only=True)
        assert part.gradients_in == sum(s.numel for peer in received for s in peer)
        assert part.directions_in == sum(s.numel for peer in exchange.outgoing(rank) for s in peer)
    parts = moved(exchange)
    assert sum(p.gradients_out for p in parts) == sum(p.gradients_in for p in parts)
    assert sum(p.directions_out for p in parts) == sum(p.directions_in for p in parts)


@given(cases())
def test_state_is_stored_once_in_the_whole_job(case: Case) -> None:
    program = build(case.specs, case.layouts, case.owners, size=case.size)
    ranks = rank_memory(case.specs, program, Wire(4, 4, 1), solver="eigen", moments=2)
    layers = [layer_state(spec, solver="eigen", moments=2, item=4) for spec in case.specs]
    assert sum(memory.state for memory in ranks) == sum(sum(layer) for layer in layers)
    for memory in ranks:
        assert memory.peak == memory.state + memory.buffers
        assert memory.statistics == ranks[0].statistics


def test_a_layer_by_hand() -> None:
    spec = make_spec(d_out=4, d_in=3, bias=False)
    counters = (2 + 3) * 8
    factors = (6 + 10) * 4 + counters
    assert layer_state(spec, solver="eigen", moments=1, item=4) == (
        factors,
        (9 + 3 + 1 + 16 + 4 + 1) * 4,
        12 * 4,
    )
    assert layer_state(spec, solver="cholesky", moments=0, item=4)[1:] == ((10 + 17) * 4, 0)


def test_bases_beside_training_by_hand() -> None:
    spec = make_spec(d_out=4, d_in=3, bias=False)
    program = build([spec], {"fc.weight": WHOLE}, [1], size=2)
    wire = Wire(4, 4, 1)
    plain = rank_memory([spec], program, wire, solver="eigen", moments=0)
    beside = rank_memory([spec], program, wire, solver="eigen", moments=0, background=True)
    assert [memory.background for memory in beside] == [0, beside[1].bases + (6 + 10) * 4]
    assert beside[1].peak == plain[1].peak + beside[1].background


@pytest.mark.parametrize(
    ("settings", "momentum", "count"),
    [
        ({}, 0.0, 0),
        ({"direction": "orthogonal"}, 0.95, 1),
        ({"direction": "ekfac"}, 0.0, 1),
        ({"direction": "eigen_adam"}, 0.95, 2),
        ({"direction": "ekfac", "grafting": "adam"}, 0.9, 4),
    ],
)
def test_moments(settings: dict[str, object], momentum: float, count: int) -> None:
    assert moment_count(KFACConfig(**settings), momentum) == count


def test_bytes_of_replicated_layers_by_hand() -> None:
    specs = [make_spec("a", 4, 3, bias=False), make_spec("b", 2, 2, bias=False)]
    layouts = {"a.weight": WHOLE, "b.weight": WHOLE}
    program = build(specs, layouts, [0, 1], size=4)
    wire = wire_of(KFACConfig(), stage=0, gradient_bytes=4, compute_bytes=4)
    assert wire.scalars == 1  # the KL clip
    ordinary = ordinary_bytes(program, wire)[3]
    # The largest owner's part goes to three others; eight bytes twice, three quarters of them.
    assert ordinary == {"vote": 12, "scalars": 12, "gradients": 0, "directions": 12 * 3 * 4}
    assert capture_bytes(program, wire) == (6 + 10 + 3) * 3 * 4
    assert run_bytes(ordinary, 7, steps=10, captures=2) == {
        "vote": 120,
        "scalars": 120,
        "directions": 1440,
        "factors": 14,
    }


def test_times_by_hand() -> None:
    specs = [make_spec("a", 4, 3, bias=False), make_spec("b", 4, 3, bias=False)]
    layouts = {"a.weight": WHOLE, "b.weight": WHOLE}
    config = KFACConfig(factor_update_steps=2, inv_update_steps=10, factor_token_fraction=0.5)
    result = estimate(
        specs,
        layouts,
        config,
        Wire(4, 4, 1),
        size=2,
        momentum=0.0,
        machine=Machine(rows=9, flops=100.0, bandwidth=10.0, model_flops=1000.0),
    )
    stages = {name: stage.seconds for name, stage in result.stages.items()}
    assert stages["capture"] == 2 * capture_flops(specs[0], 5) / 100
    assert stages["reduce"] == result.capture / 10
    assert stages["refresh"] == refresh_flops(specs[0], "eigen") / 100
    assert stages["exchange"] == 12 * 4 / 10
    assert stages["direction"] == direction_flops(specs[0], "natural", "eigen") / 100
    assert result.seconds == pytest.approx(
        (stages["capture"] + stages["reduce"]) / 2
        + stages["refresh"] / 10
        + stages["exchange"]
        + stages["direction"]
    )
    assert result.loads[0] == result.loads[1] > 0

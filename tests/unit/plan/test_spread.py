"""Directions in equal shares: every element once, and only where it moves much less."""

from __future__ import annotations

from hypothesis import given

from ds_kfac.plan.program import build
from ds_kfac.plan.spread import Spread
from tests.unit.plan.cases import REPLICATED, Case, cases, make_spec, sharded


@given(cases())
def test_shares_hold_every_element_once(case: Case) -> None:
    layouts = dict.fromkeys(case.layouts, REPLICATED)
    exchange = build(case.specs, layouts, case.owners, size=case.size).exchange
    spread = Spread.of(exchange)
    places = [
        (part.share * spread.share_numel + part.position + i, part.layer, part.start + i)
        for part in spread.slices
        for i in range(part.numel)
    ]
    expected = [(layer, i) for layer, spec in enumerate(case.specs) for i in range(spec.numel)]
    assert [place[1:] for place in places] == expected
    assert [place[0] for place in places] == list(range(len(expected)))
    for rank in range(case.size):
        own = [s.numel for s in spread.slices if s.owner == rank != s.share]
        assert spread.sent_numels[rank] == sum(own) + spread.share_numel * (case.size - 1)
        assert spread.sent_numels[rank] <= spread.most_sent(exchange.gather_numel)


def test_few_layers_on_many_ranks() -> None:
    """One layer on each of four ranks out of 64: all-gather would send 64 times a whole layer."""
    specs = [make_spec(f"fc{i}", 16, 16, bias=False) for i in range(4)]
    layouts = {f"{spec.name}.weight": REPLICATED for spec in specs}
    exchange = build(specs, layouts, range(4), size=64).exchange
    assert exchange.spread is not None
    assert exchange.sent_numel(0)[1] == 256 - 16 + 16 * 63  # its layer, but for its own share
    assert exchange.sent_numel(63)[1] == 16 * 63
    assert exchange.gather_numel * 63 == 256 * 63
    # As many layers as ranks: nothing is padded, one collective does.
    specs = [make_spec(f"fc{i}", 16, 16, bias=False) for i in range(64)]
    layouts = {f"{spec.name}.weight": REPLICATED for spec in specs}
    assert build(specs, layouts, range(64), size=64).exchange.spread is None
    # Slices of cut layers have an exchange of their own already.
    layouts["fc0.weight"] = sharded(256, [100], [0, 1])
    assert build(specs, layouts, [0] * 64, size=64).exchange.spread is None

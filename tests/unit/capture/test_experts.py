"""Experts: slots with a token count, padding does not, and what would mix them up is an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_kfac.capture.experts import TokenMasks, watch_experts
from ds_kfac.capture.hooks import install
from ds_kfac.capture.session import CaptureSession
from ds_kfac.config import KFACConfig
from ds_kfac.layers.discover import discover
from tests.unit.capture.twin import assert_same, twin


class Expert(nn.Module):
    """What padding becomes behind the first layer depends on its bias."""

    def __init__(self, *, inner_checkpoint: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 3)
        self.inner_checkpoint = inner_checkpoint

    def forward(self, x: Tensor) -> Tensor:
        if self.inner_checkpoint:
            x = checkpoint(self.up, x, use_reentrant=True)
        else:
            x = self.up(x)
        return self.down(torch.sigmoid(x))


class Mixture(nn.Module):
    """Two experts, the second one a single layer, behind a dense one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 3)
        self.experts = nn.ModuleList([Expert(**options), nn.Linear(3, 3, bias=False)])

    def forward(self, slots: Tensor) -> Tensor:
        """``[experts, slots, 3]``, rows of zeros hold no token."""
        filled = (slots != 0).any(-1, keepdim=True)
        slots = torch.where(filled, torch.tanh(self.dense(slots)), 0.0)
        pairs = zip(self.experts, slots, strict=True)
        out = [expert(part[None, None])[0, 0] for expert, part in pairs]
        return torch.where(filled, torch.stack(out), 0.0).square().sum()


EXPERTS = ("experts.0", "experts.1")


def attach(
    model: nn.Module, fraction: float = 1.0, **settings: Any
) -> tuple[CaptureSession, list[Any]]:
    config = KFACConfig.parse(settings)
    specs = {spec.name: spec for spec in discover(model, config).layers}
    masks = TokenMasks(EXPERTS, list(specs))
    session = CaptureSession(specs, config.weight_sharing, torch.float64, masks=masks)
    handles = install(model, session, output_scale=lambda: 1.0)
    handles += watch_experts(model, masks, wanted=lambda: session.active)
    session.begin(active=True, fraction=fraction, turn=0)
    return session, handles


def slots(tokens: tuple[int, int]) -> Tensor:
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    for expert, count in enumerate(tokens):
        x[expert, count:] = 0.0
    return x


def packed(x: Tensor, tokens: tuple[int, int]) -> Any:
    """The same tokens without padding, one expert at a time."""

    def run(model: nn.Module) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for expert, count in enumerate(tokens):
            if count:
                rows = torch.tanh(model.dense(x[expert, :count]))
                loss = loss + model.experts[expert](rows).square().sum()
        return loss

    return run


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("settings", [{}, {"max_factor_dim": 2}])
def test_sums_are_those_of_the_tokens(sharing: str, settings: dict[str, Any]) -> None:
    """Slots are no sequence: also with ``reduce`` every token is a row."""
    model = Mixture().double()
    x, tokens = slots((4, 2)), (4, 2)
    names = ["experts.0.up", "experts.0.down", "experts.1"]
    expected = twin(model, names, [packed(x, tokens), packed(x, tokens)])
    session, _ = attach(model, weight_sharing=sharing, **settings)
    for _ in range(2):
        model(x).backward()
    found = session.drain()
    found.pop("dense")
    assert session.error is None
    assert [int(found[name].rows_used) for name in names] == [8, 8, 4]
    assert_same(found, expected)


def test_an_expert_without_tokens_has_empty_sums() -> None:
    model = Mixture().double()
    session, _ = attach(model)
    model(slots((0, 3))).backward()
    pending = session.drain()["experts.0.down"]
    assert not any(block.any() for block in (*pending.a, *pending.g))
    assert [float(count) for count in pending.counts()] == [0.0, 0.0, 0.0]


def test_a_share_of_the_rows_counts_the_tokens_among_them() -> None:
    model = Mixture().double()
    session, _ = attach(model, fraction=0.5)
    model(slots((3, 6))).backward()
    pending = session.drain()
    counts = [float(count) for count in pending["experts.0.up"].counts()]
    assert counts == [2.0, 3.0, 3.0]  # slots 0, 2 and 4, of which the last is empty
    assert float(pending["experts.0.up"].a[-1][-1, -1]) == 2.0


def test_recomputation_inside_of_an_expert_is_an_error() -> None:
    """The expert is not called again, and which slots are filled is not known any more."""
    model = Mixture(inner_checkpoint=True).double()
    session, _ = attach(model)
    model(slots((4, 2))).backward()
    error = session.take_error()
    assert error is not None and "checkpoint activations of the whole MoE layer" in str(error)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_of_the_whole_layer_counts_once(reentrant: bool) -> None:
    model = Mixture().double()
    x = slots((4, 2)).requires_grad_()
    session, _ = attach(model)
    model(x).backward()
    plain = session.drain()
    checkpoint(model, x, use_reentrant=reentrant).backward()
    again = session.drain()
    assert session.error is None
    for name, sums in plain.items():
        for one, other in zip((*sums.a, *sums.g), (*again[name].a, *again[name].g), strict=True):
            assert torch.equal(one, other), name


def test_other_rows_than_slots_are_an_error() -> None:
    class Folding(Expert):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(0, 2)[:3]).sum() + x

    model = Mixture().double()
    model.experts[0] = Folding().double()
    session, _ = attach(model)
    model(slots((4, 2))).backward()
    error = session.take_error()
    assert error is not None and "works on 3 rows, its expert on 6 slots" in str(error)


def test_copies_and_removal_leave_nothing() -> None:
    model = Mixture().double()
    session, handles = attach(model)
    copy.deepcopy(model)(slots((4, 2))).backward()
    assert session.pending == {} and session.error is None
    for handle in handles:
        handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

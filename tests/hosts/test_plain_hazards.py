"""Things users of plain loops do that ds_kfac is not told about: noticed, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_kfac
from ds_kfac.errors import CoverageError
from tests._harness import world
from tests.hosts import topology_jobs as jobs
from tests.hosts.test_plain import SETTINGS, batch, loss_of, net, sgd, train, weights
from tests.hosts.topology_jobs import Cell


def clear_model(model: nn.Module) -> None:
    model.zero_grad()


def clear_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def clear_model_in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def clear_by_hand_in_place(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()


CLEARING: list[Callable[[nn.Module], None]] = [
    clear_model,
    clear_by_hand,
    clear_model_in_place,
    clear_by_hand_in_place,
]


@pytest.mark.parametrize("clear", CLEARING)
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_gradients_thrown_away_take_their_statistics_along(
    clear: Callable[[nn.Module], None], value: float
) -> None:
    """A batch given up by ``model.zero_grad()``: NaN statistics made the next good step drop."""
    model, twin = net(), net()
    for candidate in (model, twin):
        optimizer = sgd(candidate)
        kfac = ds_kfac.attach(candidate, optimizer, SETTINGS)
        assert kfac is not None
        for step in range(3):
            if candidate is model:
                (candidate(batch(7)) * value).square().mean().backward()
                clear(candidate)
            loss_of(candidate, step).backward()
            optimizer.step()
            clear(candidate)
        assert kfac.metrics()["steps"] == 3
    assert torch.equal(weights(model), weights(twin))


class Sometimes(nn.Module):
    """The second layer is used on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


@pytest.mark.parametrize("clear", CLEARING)
def test_a_layer_unused_after_its_gradient_was_thrown_away(
    clear: Callable[[nn.Module], None],
) -> None:
    """No later backward passes the layer, so that nothing else would drop its NaN."""
    model = Sometimes()
    optimizer = sgd(model)
    kfac = ds_kfac.attach(model, optimizer, SETTINGS)
    assert kfac is not None
    (model(batch(0), True) * float("nan")).sum().backward()
    clear(model)
    model(batch(1), False).square().mean().backward()
    optimizer.step()
    assert kfac.metrics()["steps"] == 1
    assert not kfac.factors("second")[0].any()


class Twice(nn.Module):
    """One layer called twice, with or without checkpoints that run backward passes inside one."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.mode = mode
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "none":
            return self.layer(torch.tanh(self.layer(x)))
        reentrant = self.mode == "reentrant"
        x = torch.tanh(checkpoint(self.layer, x, use_reentrant=reentrant))
        return checkpoint(self.layer, x, use_reentrant=reentrant)


def test_a_layer_used_twice_keeps_both_uses() -> None:
    """Its first use in a backward pass finds no gradient, as after a batch that was given up."""
    found = []
    for mode in ("none", "reentrant", "non-reentrant"):
        model = Twice(mode)
        optimizer = sgd(model)
        kfac = ds_kfac.attach(model, optimizer, SETTINGS)
        assert kfac is not None
        for micro in range(2):
            model(batch(micro).requires_grad_()).square().mean().backward()
        optimizer.step()
        found.append(torch.cat([factor.flatten() for factor in kfac.factors("layer")]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-7)


def test_fp16_without_a_known_scaler_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A scaler that was not passed made G grow with the square of its scale, in silence."""
    for known in (False, True):
        caplog.clear()
        model = net()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        ds_kfac.attach(model, optimizer, SETTINGS, grad_scaler=scaler if known else None)
        with caplog.at_level(logging.WARNING):
            for step in range(2):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = loss_of(model, step)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        said = [record for record in caplog.records if "KFAC-W114" in record.message]
        assert len(said) == (0 if known else 1)


def test_a_layer_unfrozen_after_attach_is_an_error() -> None:
    """Gradual unfreezing: its raw gradient was applied beside directions and nothing said so."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    kfac = ds_kfac.attach(model, optimizer, SETTINGS)
    assert kfac is not None
    train(model, optimizer, range(1))
    model[0].requires_grad_(True)
    with pytest.raises(CoverageError, match="E130 layer 0 was frozen when K-FAC was attached"):
        train(model, optimizer, range(1))
    kfac.detach()
    assert ds_kfac.attach(model, optimizer, SETTINGS) is not None
    train(model, optimizer, range(1))


def test_what_is_unfrozen_but_not_preconditioned_counts() -> None:
    """A norm that is trained later: its NaN would be applied if the vote did not see it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).requires_grad_(True)
    model[1].requires_grad_(False)
    optimizer = sgd(model)
    kfac = ds_kfac.attach(model, optimizer, SETTINGS)
    assert kfac is not None
    train(model, optimizer, range(1))
    model[1].requires_grad_(True)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    assert model[1].bias.grad is not None
    model[1].bias.grad[0] = float("nan")
    optimizer.step()
    assert kfac.metrics()["skipped"] == 1
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def _joined(rank: int, size: int) -> None:
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = sgd(model)
    ds_kfac.attach(model, optimizer, SETTINGS)
    with model.join():
        for step in range(2 + rank):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()


@pytest.mark.dist
def test_uneven_inputs_with_join_are_refused() -> None:
    """``DDP.join`` shadows its own collectives, not ds_kfac's: the last rank waited for ever."""
    for error in world(2).run_expecting_errors(_joined, compare_collectives=False):
        assert error is not None and "KFAC-E154 DistributedDataParallel.join()" in error.text


def _given_up(rank: int, size: int, cell: Cell, give_up: bool) -> tuple[dict[str, Any], Tensor]:
    engine = jobs.make_engine(cell, size)
    for step in range(3):
        ((x, y, factor),) = jobs.micro_batches(rank, size, cell, step)
        if give_up:
            engine.backward(jobs.loss_sum(engine(x * float("nan")), y, integers=False))
            engine.zero_grad()
        engine.backward(jobs.loss_sum(engine(x), y, integers=False) * factor)
        engine.step()
    counters = dict(vars(engine.kfac.counters))
    found = torch.cat([w.flatten() for w in jobs.full_weights(engine).values()])
    engine.destroy()
    return counters, found


@pytest.mark.dist
def test_deepspeed_stage_0_forgets_a_batch_given_up() -> None:
    """``engine.zero_grad()`` after a bad batch. ZeRO itself keeps its gradients through it."""
    cell = Cell("0", {"direction": "natural", **SETTINGS}, own=False)
    expected = world(2).run(_given_up, cell, False)
    for (_, clean), (counters, found) in zip(
        expected, world(2).run(_given_up, cell, True), strict=True
    ):
        assert (counters["steps"], counters["skipped"]) == (3, 0)
        assert torch.equal(clean, found)


def test_the_kl_clip_takes_the_biases_own_rate() -> None:
    """Biases in a group of their own (no decay, higher rate) counted with the weights' rate."""
    free = net()
    before = {name: param.detach().clone() for name, param in free.named_parameters()}
    optimizer = sgd(free, 1.0)
    ds_kfac.attach(free, optimizer, {"kl_clip": None, **SETTINGS})
    loss_of(free, 0).backward()
    gradients = {
        name: param.grad.clone()
        for name, param in free.named_parameters()
        if param.grad is not None
    }
    optimizer.step()
    rates = {"weight": 0.1, "bias": 3.0}
    change = sum(
        rates[name.split(".")[1]] ** 2
        * float((before[name] - param.detach()).double().mul(gradients[name]).sum())
        for name, param in free.named_parameters()
    )
    model = net()
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith(kind)], "lr": rate}
        for kind, rate in rates.items()
    ]
    clipped = torch.optim.SGD(groups)
    kfac = ds_kfac.attach(model, clipped, {"kl_clip": 1e-4, **SETTINGS})
    assert kfac is not None
    loss_of(model, 0).backward()
    clipped.step()
    assert kfac.metrics()["kl_scale"] == pytest.approx((1e-4 / change) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("how", ["grad", "backward"])
@pytest.mark.parametrize("when", ["first", "between", "last"])
def test_gradients_of_inputs_are_no_statistics(how: str, when: str) -> None:
    """Adversarial examples and penalties: passes that train nothing were counted in A and G."""

    def attack(model: nn.Module) -> None:
        x = (3 * batch(9)).requires_grad_()
        loss = model(x).square().mean()
        if how == "grad":
            torch.autograd.grad(loss, x)
        else:
            loss.backward(inputs=[x])

    model, twin = net(), net()
    for candidate in (model, twin):
        optimizer = sgd(candidate)
        kfac = ds_kfac.attach(candidate, optimizer, SETTINGS)
        assert kfac is not None
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                if candidate is model and when == ("first", "between")[micro]:
                    attack(candidate)
                (loss_of(candidate, 2 * step + micro) / 2).backward()
            if candidate is model and when == "last":
                attack(candidate)
            optimizer.step()
    assert torch.equal(weights(model), weights(twin))

"""Loops that handle gradients in their own way: statistics go where the gradients go."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_kfac
from ds_kfac.errors import ConfigError
from tests._harness import world
from tests.hosts.test_plain import SETTINGS, batch, loss_of, net, sgd, weights


def warnings(caplog: pytest.LogCaptureFixture, code: str) -> int:
    return sum(code in record.getMessage() for record in caplog.records)


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


@pytest.mark.parametrize("when", ["first", "between", "last"])
def test_diagnosis_with_autograd_grad_is_no_statistics(when: str) -> None:
    """A gradient computed for a plot beside ``backward()`` counted as a batch of its own."""
    model, twin = net(), net()
    for candidate in (model, twin):
        optimizer = sgd(candidate)
        assert ds_kfac.attach(candidate, optimizer, SETTINGS) is not None
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                if candidate is model and when == ("first", "between")[micro]:
                    torch.autograd.grad(5 * loss_of(candidate, 9), parameters(candidate))
                (loss_of(candidate, 2 * step + micro) / 2).backward()
            if candidate is model and when == "last":
                torch.autograd.grad(5 * loss_of(candidate, 9), parameters(candidate))
            optimizer.step()
    assert torch.equal(weights(model), weights(twin))


@pytest.mark.parametrize("clear", ["before", "after"])
def test_gradients_from_autograd_grad_bring_their_statistics(clear: str) -> None:
    """Loops that accumulate by hand trained with the last micro-batch's factors, or none."""
    model, twin = net(), net()
    for candidate in (model, twin):
        optimizer = sgd(candidate)
        assert ds_kfac.attach(candidate, optimizer, SETTINGS) is not None
        for step in range(2):
            losses = [loss_of(candidate, 2 * step + micro) / 2 for micro in range(2)]
            if candidate is twin:
                optimizer.zero_grad()
                for loss in losses:
                    loss.backward()
            else:
                if clear == "before":
                    optimizer.zero_grad()
                found = [torch.autograd.grad(loss, parameters(model)) for loss in losses]
                if clear == "after":
                    optimizer.zero_grad()
                for param, *grads in zip(parameters(model), *found, strict=True):
                    param.grad = grads[0] + grads[1]
            optimizer.step()
    assert torch.equal(weights(model), weights(twin))


def test_gradients_set_aside_and_combined_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Gradient surgery over tasks clears gradients in between, and statistics with them."""
    model = net()
    optimizer = sgd(model)
    kfac = ds_kfac.attach(model, optimizer, SETTINGS)
    assert kfac is not None
    for step in range(3):
        kept = []
        for task in range(2):
            optimizer.zero_grad()
            loss_of(model, 2 * step + task).backward()
            kept.append([param.grad for param in parameters(model)])
        for param, *grads in zip(parameters(model), *kept, strict=True):
            param.grad = torch.stack(grads).mean(dim=0)
        optimizer.step()
    assert warnings(caplog, "KFAC-W115") == 1
    assert kfac.metrics()["steps"] == 3


def test_clipping_and_batches_given_up_are_no_surgery(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = sgd(model)
    assert ds_kfac.attach(model, optimizer, SETTINGS) is not None
    for step in range(3):
        loss_of(model, 7).backward()
        optimizer.zero_grad()
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert not caplog.records


def accumulate_under_ddp(rank: int, world_size: int, synchronise: bool) -> torch.Tensor:
    """Two micro-batches per step, gradients averaged after the last one or after each."""
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    assert ds_kfac.attach(model, optimizer, SETTINGS) is not None
    for step in range(3):
        model.require_backward_grad_sync = synchronise
        (loss_of(model, 2 * step) / 2).backward()
        model.require_backward_grad_sync = True
        (loss_of(model, 2 * step + 1) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model.module)


def test_averaging_after_each_micro_batch_drops_nothing() -> None:
    """DDP writes to gradients after every backward, which must not look like clearing them."""
    often = world(2).run(accumulate_under_ddp, True)
    once = world(2).run(accumulate_under_ddp, False)
    torch.testing.assert_close(often[0], once[0], rtol=1e-5, atol=1e-7)


def test_training_in_eval_mode_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """One rank of a job in eval mode left its rows out of all statistics without a word."""
    model = net().eval()
    optimizer = sgd(model)
    assert ds_kfac.attach(model, optimizer, SETTINGS) is not None
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    assert warnings(caplog, "KFAC-W116") == 1


def test_layers_have_one_preconditioner() -> None:
    """A second one through another optimizer preconditioned what the first had preconditioned."""
    model = net()
    kfac = ds_kfac.attach(model, sgd(model), SETTINGS)
    assert kfac is not None
    second = sgd(model)
    with pytest.raises(ConfigError, match=r"E212.*layer 0 has K-FAC already.*detach"):
        ds_kfac.attach(model, second, SETTINGS)
    kfac.detach()
    other = ds_kfac.attach(model, second, SETTINGS)
    assert other is not None
    loss_of(model, 0).backward()
    second.step()
    assert other.metrics()["steps"] == 1


def test_two_preconditioners_share_a_model_without_common_layers() -> None:
    model = net()
    for layer in (model[0], model[-1]):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        assert ds_kfac.attach(model, optimizer, SETTINGS) is not None


def test_a_model_compiled_before_attach_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Its graph has no hooks; the warning said nothing of torch.compile."""
    torch._dynamo.reset()
    model = net()
    compiled = torch.compile(model, backend="eager")
    compiled(batch(0)).sum().backward()
    optimizer = sgd(model)
    optimizer.zero_grad()
    with caplog.at_level(logging.WARNING):
        assert ds_kfac.attach(model, optimizer, SETTINGS) is not None
        for step in range(2):
            loss_of(compiled, step).backward()
            optimizer.step()
    assert "torch.compile" in caplog.text

"""Plain PyTorch loops: what users do around ``backward`` and ``step``, and nobody may notice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_kfac

SETTINGS = {"factor_update_steps": 1, "inv_update_steps": 1}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(batch(step)).square().mean()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=rate)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_the_rates_are_those_of_the_loaded_optimizer() -> None:
    """Loading an optimizer's state replaces its groups: the KL clip went on with the old rate."""
    model = net()
    optimizer = sgd(model)
    kfac = ds_kfac.attach(model, optimizer, {"kl_clip": 1e-6, **SETTINGS})
    assert kfac is not None
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.001
    train(model, optimizer, range(1))
    twin = net()
    other = sgd(twin, 0.001)
    expected = ds_kfac.attach(twin, other, {"kl_clip": 1e-6, **SETTINGS})
    train(twin, other, range(1))
    assert expected is not None
    assert kfac.metrics()["kl_scale"] == expected.metrics()["kl_scale"]


def test_groups_added_after_attach_count() -> None:
    """Their rate is asked for like any other."""
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    kfac = ds_kfac.attach(model, optimizer, SETTINGS)
    assert kfac is not None
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    assert kfac._host.learning_rates()["2.weight"] == 0.5


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_batch_that_was_given_up_leaves_no_trace(value: float) -> None:
    """A loop that drops a batch after backward: its statistics joined those of the next batch.

    Out of memory, a loss that looks wrong: the user clears the gradients and goes on. With NaN
    the next, good step was dropped as well.
    """
    model, twin = net(), net()
    for candidate in (model, twin):
        optimizer = sgd(candidate)
        kfac = ds_kfac.attach(candidate, optimizer, SETTINGS)
        assert kfac is not None
        if candidate is model:
            (candidate(batch(7)) * value).square().mean().backward()
        train(candidate, optimizer, range(3))
        assert kfac.metrics()["steps"] == 3
        kfac.detach()
        assert "zero_grad" not in vars(optimizer)
    assert torch.equal(weights(model), weights(twin))


@pytest.mark.parametrize("direction", ["natural", "ekfac", "eigen_adam", "orthogonal"])
def test_two_preconditioners_may_load_one_state(direction: str) -> None:
    """Counts of a loaded state were those of the run it came from, and advanced twice."""
    model = net()
    optimizer = sgd(model)
    kfac = ds_kfac.attach(model, optimizer, {**SETTINGS, "direction": direction})
    assert kfac is not None
    train(model, optimizer, range(3))
    state = kfac.state_dict()
    saved = copy.deepcopy(state)
    other = net()
    second = sgd(other)
    loaded = ds_kfac.attach(other, second, {**SETTINGS, "direction": direction})
    assert loaded is not None
    loaded.load_state_dict(state)
    train(other, second, range(2))
    for name, layer in saved["layers"].items():
        for key, value in layer.items():
            same = state["layers"][name][key]
            assert torch.equal(value, same) if isinstance(value, Tensor) else value == same


@pytest.mark.parametrize("direction", ["natural", "ekfac", "eigen_adam", "orthogonal"])
def test_resume_between_two_captures_is_bit_identical(direction: str) -> None:
    """Step 5 of captures every 2 and refreshes every 4 steps."""
    settings = {"factor_update_steps": 2, "inv_update_steps": 4, "direction": direction}
    model = net()
    optimizer = sgd(model)
    kfac = ds_kfac.attach(model, optimizer, settings)
    assert kfac is not None
    train(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), kfac.state_dict()))
    train(model, optimizer, range(5, 11))
    resumed = net()
    optimizer = sgd(resumed)
    kfac = ds_kfac.attach(resumed, optimizer, settings)
    assert kfac is not None
    resumed.load_state_dict(saved[0])
    kfac.load_state_dict(saved[1])
    train(resumed, optimizer, range(5, 11))
    assert torch.equal(weights(model), weights(resumed))


def scaled_steps(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler) -> None:
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_changes_nothing(fused: bool) -> None:
    """Fused optimizers undo the scale inside their step: the KL clip saw the scaled gradient."""
    results = []
    for scale in (1.0, 1024.0):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        kfac = ds_kfac.attach(model, optimizer, SETTINGS, grad_scaler=scaler)
        assert kfac is not None
        scaled_steps(model, optimizer, scaler)
        metrics = kfac.metrics()
        results.append((metrics["grad_norm"], metrics["kl_scale"], weights(model)))
    for plain, scaled in zip(*results, strict=True):
        torch.testing.assert_close(torch.as_tensor(scaled), torch.as_tensor(plain))


def test_an_unknown_gradient_scaler_is_refused_where_it_shows() -> None:
    """E213: G was taken from scaled gradients, wrong by the square of the scale."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    ds_kfac.attach(model, optimizer, SETTINGS)
    with pytest.raises(ds_kfac.KFACError, match="E213 .*grad_scaler=scaler"):
        scaled_steps(model, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0))


def test_preconditioners_sharing_a_scaler_detach_in_any_order() -> None:
    """Two models, one scaler: detaching the first blinded the second to changes of the scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    models = [net(), net()]
    optimizers = [sgd(model) for model in models]
    first, second = (
        ds_kfac.attach(model, optimizer, SETTINGS, grad_scaler=scaler)
        for model, optimizer in zip(models, optimizers, strict=True)
    )
    assert first is not None and second is not None
    first.detach()
    assert second._host.output_scale() == 1 / 8
    scaler.scale(loss_of(models[1], 0)).backward()
    scaler.step(optimizers[1])
    scaler.update(4.0)
    assert second._host.output_scale() == 1 / 4
    second.detach()
    assert "update" not in vars(scaler)


class _WithEmbedding(nn.Module):
    """A layer behind an embedding with sparse gradients and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(9, 4, sparse=True)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.out = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.out((self.table(tokens) * self.phase).abs())
        return result


def test_sparse_and_complex_gradients_stay_with_the_base_optimizer() -> None:
    """Neither can be flattened or measured like others: the first step ended in a RuntimeError."""
    model = _WithEmbedding()
    optimizer = sgd(model)
    kfac = ds_kfac.attach(model, optimizer, SETTINGS)
    assert kfac is not None
    tokens = torch.tensor([1, 2, 2, 5])
    model(tokens).square().mean().backward()
    grads = [p.grad.to_dense().abs().flatten() for p in model.parameters() if p.grad is not None]
    before = model.table.weight.detach().clone()
    optimizer.step()
    assert kfac.metrics()["grad_norm"] == pytest.approx(float(torch.cat(grads).norm()))
    assert (before != model.table.weight).any(dim=1).tolist() == [i in (1, 2, 5) for i in range(9)]


def _damaged(state: dict[str, Any], what: str) -> Any:
    layer = state["layers"]["0"]
    damage: dict[str, Any] = {
        "not a mapping": lambda: "state",
        "no counters": lambda: state.pop("counters"),
        "unknown counter": lambda: state["counters"].update(bogus=3),
        "negative counter": lambda: state["counters"].update(steps=-1),
        "no layers": lambda: state.pop("layers"),
        "no layer": lambda: state["layers"].update({"0": None}),
        "no scalar": lambda: layer.pop("updates"),
        "no average": lambda: layer.pop("g.0.weight"),
        "factor": lambda: layer.update({"a.0.total": torch.zeros(3)}),
        "basis": lambda: layer.update({"a.0.basis.vectors": torch.eye(2)}),
        "moment": lambda: layer.update({"moments.momentum": torch.zeros(2, 2)}),
        "unknown entry": lambda: layer.update({"a.7.total": torch.zeros(3)}),
    }
    result = damage[what]()
    return result if isinstance(result, str) else state


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("not a mapping", "E308 .*'str'"),
        ("no counters", "E302 .*counters"),
        ("unknown counter", "E302 .*bogus"),
        ("negative counter", "E302 .*-1"),
        ("no layers", "E302 .*no layers"),
        ("no layer", "E302 .*layer 0: missing"),
        ("no scalar", "E302 .*layer 0: updates is missing"),
        ("no average", "E302 .*layer 0: g.0.weight is missing"),
        ("factor", r"E302 .*layer 0: a.0.total is \(3,\), expected \(15,\)"),
        ("basis", r"E302 .*layer 0: a.0.basis.vectors is \(2, 2\), expected \(5, 5\)"),
        ("moment", r"E302 .*layer 0: moments.momentum is \(2, 2\), expected \(6, 5\)"),
        ("unknown entry", "E302 .*layer 0: a.7.total is unknown"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(what: str, text: str) -> None:
    """Bases of another size were loaded and failed at the next step, missing entries halfway."""
    model = net()
    optimizer = sgd(model)
    kfac = ds_kfac.attach(model, optimizer, {**SETTINGS, "direction": "orthogonal"})
    assert kfac is not None
    train(model, optimizer, range(2))
    damaged = _damaged(copy.deepcopy(kfac.state_dict()), what)
    train(model, optimizer, range(2, 3))
    before = copy.deepcopy(kfac.state_dict())
    with pytest.raises(ds_kfac.KFACError, match=text):
        kfac.load_state_dict(damaged)
    after = kfac.state_dict()
    assert after["counters"] == before["counters"]
    for name, layer in before["layers"].items():
        for key, value in layer.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after["layers"][name][key]))


def test_layers_without_statistics_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """A model trained in eval mode: K-FAC changed no direction and said nothing."""
    model = net()
    model[0].eval()
    optimizer = sgd(model)
    ds_kfac.attach(model, optimizer, SETTINGS)
    train(model, optimizer, range(4))
    warnings = [r.getMessage() for r in caplog.records if "KFAC-W113" in r.getMessage()]
    assert len(warnings) == 1
    assert "1 layers have gradients but no statistics" in warnings[0]
    assert "with: 0. Are they" in warnings[0]

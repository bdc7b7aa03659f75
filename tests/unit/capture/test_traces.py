"""What must leave no trace: evaluation, copies, errors, detaching; and what memory is held."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_kfac.capture.session import CaptureSession, InputSums
from ds_kfac.layers.kinds import LinearKind
from tests.unit.capture.twin import assert_same, attach, twin


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(rows: int = 5) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64)


def run(model: nn.Module, x: Tensor | None = None) -> Tensor:
    return model(batch() if x is None else x).square().mean()


def living_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


@pytest.mark.parametrize("how", ["no_grad", "inference", "eval", "forward_only"])
def test_a_thousand_calls_leave_nothing_behind(how: str) -> None:
    model = small()
    session, _ = attach(model)
    if how == "eval":
        model.eval()
    x = batch()
    contexts: dict[str, Any] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    model(x)
    before = living_tensors()
    for _ in range(1000):
        with contexts.get(how, torch.enable_grad)():
            model(x)
    assert living_tensors() <= before
    assert session.pending == {} and session.error is None


def test_evaluation_between_forward_and_backward() -> None:
    model = small()
    x = batch()
    expected = twin(model, ["0", "2"], [lambda net: run(net, x)])
    session, _ = attach(model)
    loss = run(model, x)
    model.eval()
    run(model).backward()
    model.train()
    with torch.no_grad():
        model(batch())
    loss.backward()
    assert_same(session.drain(), expected)


def test_inactive_steps_capture_nothing_and_hook_no_output() -> None:
    model = small()
    session, _ = attach(model)
    session.begin(active=False, fraction=1.0, turn=1)
    output = model(batch())
    assert output._backward_hooks is None
    output.sum().backward()
    assert session.pending == {}


def test_a_backward_after_the_step_was_closed_counts_nothing() -> None:
    model = small()
    session, _ = attach(model)
    loss = run(model)
    session.begin(active=False, fraction=1.0, turn=1)
    loss.backward()
    assert session.pending == {}


def test_begin_drops_what_an_earlier_step_left() -> None:
    model = small()
    session, _ = attach(model)
    run(model).backward()
    session.begin(active=True, fraction=1.0, turn=1)
    assert session.pending == {}


def test_a_layer_frozen_later_stops_contributing() -> None:
    model = small()
    session, _ = attach(model)
    model[2].weight.requires_grad_(False)
    run(model).backward()
    assert set(session.drain()) == {"0"}
    model[2].weight.requires_grad_(True)
    run(model).backward()
    assert set(session.drain()) == {"0", "2"}


def test_removed_handles_leave_the_model_as_it_was() -> None:
    model = small()
    before = [(len(m._forward_hooks), len(m._forward_hooks_with_kwargs)) for m in model.modules()]
    session, handles = attach(model)
    assert len(handles) == 2
    for handle in handles:
        handle.remove()
    after = [(len(m._forward_hooks), len(m._forward_hooks_with_kwargs)) for m in model.modules()]
    assert after == before
    run(model).backward()
    assert session.pending == {}


# ---------------------------------------------------------------- copies of a hooked model


def test_a_copy_does_not_feed_the_originals_statistics() -> None:
    model = small()
    session, _ = attach(model)
    ema = copy.deepcopy(model)
    run(ema).backward()
    assert session.pending == {} and session.error is None
    x = batch()
    run(model, x).backward()
    run(ema).backward()
    expected = twin(small_like(model), ["0", "2"], [lambda net: run(net, x)])
    assert_same(session.drain(), expected)


def small_like(model: nn.Module) -> nn.Module:
    other = small()
    other.load_state_dict(model.state_dict())
    return other


def test_a_copy_can_be_attached_on_its_own() -> None:
    model = small()
    first, _ = attach(model)
    twin_model = copy.deepcopy(model)
    second, _ = attach(twin_model)
    run(twin_model).backward()
    assert first.pending == {}
    assert set(second.pending) == {"0", "2"}


def test_a_copy_shares_no_session() -> None:
    """A bound method as hook would copy session and statistics with the model."""
    model = small()
    session, _ = attach(model)
    run(model).backward()
    gc.collect()  # sessions of other tests do not go in between
    sessions = sum(type(item) is CaptureSession for item in gc.get_objects())
    ema = copy.deepcopy(model)
    assert sum(type(item) is CaptureSession for item in gc.get_objects()) == sessions
    assert ema is not model and session.pending


# ---------------------------------------------------------------- errors


def test_a_model_saved_whole_is_inert() -> None:
    """`torch.save(model)` failed on an attached model: its hooks were closures."""
    model = small()
    session, _ = attach(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    run(loaded).backward()
    assert session.pending == {}
    x = batch()
    assert torch.equal(loaded(x), model(x))


class _TwoOutputs(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.bias


def test_a_layer_that_returns_no_tensor_waits_for_the_vote() -> None:
    """A subclass with two outputs: an AttributeError of ours came out of the user's forward."""
    layer = _TwoOutputs(3, 2).double()
    session, _ = attach(layer, plain_layers=["_TwoOutputs"])
    layer(batch())[0].sum().backward()
    assert isinstance(session.error, TypeError)
    assert "_TwoOutputs) returns tuple instead of a tensor" in str(session.error)


def test_an_error_in_a_forward_hook_waits_for_the_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    session, _ = attach(model)

    def broken(self: Any, module: nn.Module, x: Tensor, sharing: str) -> Tensor:
        raise ValueError("broken input rows")

    monkeypatch.setattr(LinearKind, "input_rows", broken)
    model.half().double()
    with torch.autograd.graph.save_on_cpu():  # not kept by autograd: reduced in forward
        loss = run(model)
    assert "broken input rows" in str(session.error)
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


def test_an_error_in_a_gradient_hook_waits_for_the_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    session, _ = attach(model)
    calls = []

    def broken(self: Any, module: nn.Module, g: Tensor, sharing: str) -> Tensor:
        calls.append(module)
        raise ValueError(f"broken gradient rows {len(calls)}")

    monkeypatch.setattr(LinearKind, "gradient_rows", broken)
    run(model).backward()
    assert len(calls) == 2
    assert str(session.error) == "broken gradient rows 1"  # the first is kept
    assert all(param.grad is not None for param in model.parameters())


def test_gradients_are_the_same_with_and_without_hooks() -> None:
    model = small()
    x = batch()
    run(model, x).backward()
    plain = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    attach(model)
    run(model, x).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))


# ---------------------------------------------------------------- memory


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="torch before 2.5: inputs are reduced at once",
)
def test_kept_inputs_are_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    session, _ = attach(model)
    seen: list[tuple[str, int]] = []
    original = CaptureSession.input_sums

    def watched(
        self: CaptureSession, name: str, module: nn.Module, x: Tensor, *mask: None
    ) -> InputSums:
        seen.append((name, x.data_ptr()))
        return original(self, name, module, x, *mask)

    monkeypatch.setattr(CaptureSession, "input_sums", watched)
    x = batch()
    loss = run(model, x)
    assert seen == []  # nothing was reduced yet, so no [d_in, d_in] buffer is held
    loss.backward()
    assert [name for name, _ in seen] == ["2", "0"]
    assert seen[1][1] == x.data_ptr()


@pytest.mark.parametrize("kept", [True, False])
def test_inputs_are_released_after_backward(kept: bool) -> None:
    model = small()
    session, _ = attach(model)
    x = batch()
    watch = weakref.ref(x)
    if kept:
        loss = run(model, x)
    else:
        with torch.autograd.graph.save_on_cpu():
            loss = run(model, x)
    loss.backward()
    del x, loss
    gc.collect()
    assert watch() is None
    assert set(session.pending) == {"0", "2"}


def test_a_discarded_graph_releases_its_inputs() -> None:
    model = small()
    attach(model)
    x = batch()
    watch = weakref.ref(x)
    loss = run(model, x)
    del loss, x
    gc.collect()
    assert watch() is None


def test_saved_tensor_hooks_reduce_inputs_at_once() -> None:
    """Offloading exists to release activations: holding them would defeat it."""
    model = small()
    session, _ = attach(model)
    x = batch()
    expected = twin(small_like(model), ["0", "2"], [lambda net: run(net, x)])
    with torch.autograd.graph.save_on_cpu():
        loss = run(model, x)
    loss.backward()
    assert_same(session.drain(), expected)


def test_a_detached_model_can_be_collected() -> None:
    model = small()
    session, handles = attach(model)
    run(model).backward()
    for handle in handles:
        handle.remove()
    watch = weakref.ref(model)
    del model, handles
    gc.collect()
    assert watch() is None
    assert session.pending

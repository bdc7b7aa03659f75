"""Low precision, autocast, and inputs that change after the layer has read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.unit.capture.twin import Sums, assert_same, attach, twin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rows_are_summed_in_factor_precision(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    x = torch.randn(500, 3).to(dtype)

    def run(net: nn.Module) -> Tensor:
        return net(x).square().float().sum()

    expected = twin(model, ["0", "2"], [run])
    session, _ = attach(model, dtype=torch.float32)
    run(model).backward()
    pending = session.drain()
    assert pending["0"].a[0].dtype == torch.float32
    assert_same(pending, expected, rtol=2e-5)


def test_large_half_precision_rows_do_not_overflow() -> None:
    model = nn.Linear(2, 2, bias=False).half()
    nn.init.zeros_(model.weight)
    session, _ = attach(model, dtype=torch.float32)
    model(torch.full((10_000, 2), 300.0).half()).sum().backward()
    torch.testing.assert_close(session.drain()[""].a[0], torch.full((2, 2), 9e8), rtol=1e-3, atol=0)


def overwriting(x: Tensor) -> Callable[[nn.Module], Tensor]:
    def run(net: nn.Module) -> Tensor:
        mine = x.clone()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = net[0](mine)
            mine.zero_()  # legal: autocast saved its own copy for backward
            return net[1](hidden.tanh()).float().square().mean()

    return run


def test_inputs_may_be_overwritten_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    run = overwriting(torch.randn(6, 3))
    expected = twin(model, ["0", "1"], [run])
    session, _ = attach(model, dtype=torch.float32)
    run(model).backward()
    assert session.error is None
    assert_same(session.drain(), expected, rtol=1e-5)


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_inputs_may_be_overwritten_behind_a_padding_mode(mode: str) -> None:
    """The convolution reads a padded copy, so autograd does not notice."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)).double()
    base = torch.randn(2, 2, 4, 4, dtype=torch.float64)

    def run(net: nn.Module, *, overwrite: bool) -> Tensor:
        mine = base.clone()
        output = net(mine)
        if overwrite:
            mine.zero_()
        return output.square().mean()

    found = []
    for overwrite in (False, True):
        session, handles = attach(model)
        run(model, overwrite=overwrite).backward()
        assert session.error is None
        found.append(session.drain()["0"])
        for handle in handles:
            handle.remove()
    assert torch.equal(found[0].a[0], found[1].a[0])
    assert found[0].a[0].abs().sum() > 0


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="torch before 2.5: inputs are reduced at once, so that overwriting them is harmless",
)
def test_an_overwritten_kept_input_is_an_error_not_a_wrong_factor() -> None:
    """Where autograd would not notice (here its saved copy is swapped), ds_kfac does."""

    class Copying(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone())

    model = Copying(3, 2)
    session, _ = attach(model, dtype=torch.float32, plain_layers=["Copying"])
    x = torch.randn(4, 3)
    output = model(x)
    x.zero_()
    output.sum().backward()
    assert session.pending == {}
    assert "was overwritten between its forward and backward" in str(session.error)


def test_mixed_inputs_and_weights() -> None:
    """An fp32 weight may meet bf16 input under autocast only; both sides are exact there."""
    model = nn.Sequential(nn.Linear(3, 4))
    x = torch.randn(6, 3).bfloat16()
    session, _ = attach(model, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    output.sum().backward()
    ones = torch.ones(6, 1, dtype=torch.float64)
    rows = torch.cat([x.double(), ones], dim=1)
    slopes = torch.ones(6, 4, dtype=torch.float64)
    sums = Sums(rows.t() @ rows, slopes.t() @ slopes, 6, 6, 1)
    assert_same(session.drain(), {"0": sums}, rtol=1e-6)

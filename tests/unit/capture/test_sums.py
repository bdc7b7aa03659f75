"""Sums of one step against the slow twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.unit.capture.twin import assert_same, attach, twin
from tests.unit.layers.models import Conv1D, Transformer


class Mixed(nn.Module):
    """Convolution, a sequence layer, a layer used twice, in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.proj = Conv1D(5, 4)
        self.twice = nn.Linear(5, 5)
        self.out = nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv(x), inplace=True)
        x = functional.elu(self.proj(x.flatten(2).transpose(1, 2)), inplace=True)
        x = torch.tanh(self.twice(x))
        x = self.twice(x).tanh_()
        return self.out(x)


def images(rows: int) -> Tensor:
    return torch.randn(rows, 2, 5, 5, dtype=torch.float64)


def loss_of(x: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(x).square().mean()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("settings", [{}, {"max_factor_dim": 3}])
def test_one_step(sharing: str, settings: dict[str, Any]) -> None:
    """A layer used twice, in-place activations, every kind, cut factors."""
    model = Mixed().double()
    runs = [loss_of(images(4))]
    expected = twin(model, ["conv", "proj", "twice", "out"], runs, sharing=sharing)
    session, _ = attach(model, weight_sharing=sharing, **settings)
    for run in runs:
        run(model).backward()
    assert expected["twice"].calls == 2
    assert_same(session.drain(), expected)
    assert session.pending == {} and session.error is None


def test_micro_batches_add_up_whatever_their_size() -> None:
    model = Mixed().double()
    runs = [loss_of(images(rows)) for rows in (1, 4, 2)]
    expected = twin(model, ["conv", "proj", "twice", "out"], runs)
    session, _ = attach(model)
    for run in runs:
        run(model).backward()
    assert_same(session.drain(), expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_micro_batches_in_flight(order: tuple[int, int]) -> None:
    model = Mixed().double()
    runs = [loss_of(images(2)), loss_of(images(3))]
    expected = twin(model, ["conv", "proj", "twice", "out"], runs)
    session, _ = attach(model)
    losses = [run(model) for run in runs]
    for index in order:
        losses[index].backward()
    assert_same(session.drain(), expected)


def test_one_backward_of_two_forwards() -> None:
    model = Mixed().double()
    x, y = images(2), images(3)

    def both(net: nn.Module) -> Tensor:
        return loss_of(x)(net) + 2.0 * loss_of(y)(net)

    expected = twin(model, ["conv", "proj", "twice", "out"], [both])
    session, _ = attach(model)
    both(model).backward()
    assert_same(session.drain(), expected)


def test_the_scale_is_squared_in_g_and_absent_from_a() -> None:
    model = Mixed().double()
    run = loss_of(images(3))
    expected = twin(model, ["conv", "proj", "twice", "out"], [run], scale=0.125)
    session, _ = attach(model, scale=0.125)
    run(model).backward()
    assert_same(session.drain(), expected)


def test_a_power_of_two_loss_scale_changes_no_bit() -> None:
    found = []
    model = Mixed()
    x = images(3).float()
    for loss_scale in (1.0, 2.0**10, 2.0**16):
        session, handles = attach(model, dtype=torch.float32, scale=1.0 / loss_scale)
        (loss_of(x)(model) * loss_scale).backward()
        found.append(session.drain())
        for handle in handles:
            handle.remove()
    for other in found[1:]:
        for name, sums in found[0].items():
            assert all(map(torch.equal, sums.a + sums.g, other[name].a + other[name].g))


@pytest.mark.parametrize(("fraction", "stride"), [(1.0, 1), (0.5, 2), (0.34, 3), (0.1, 10)])
@pytest.mark.parametrize("step", [0, 1, 7])
def test_subsampling_takes_the_same_rows_of_both_sides(
    fraction: float, stride: int, step: int
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    run = loss_of(torch.randn(13, 3, dtype=torch.float64))
    expected = twin(model, ["0", "2"], [run], stride=stride, offset=step % stride)
    session, _ = attach(model, fraction=fraction, step=step)
    run(model).backward()
    pending = session.drain()
    for sums in pending.values():
        assert (sums.rows_seen, sums.loss_terms) == (13, 13)
        assert sums.rows_used == len(range(step % stride, 13, stride))
    assert_same(pending, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once_with_the_same_sums(reentrant: bool) -> None:
    model = Mixed().double()
    x = images(3)

    def checkpointed(net: nn.Module) -> Tensor:
        inner = functional.relu(net.conv(x), inplace=True)
        rest = lambda h: net.out(  # noqa: E731
            net.twice(net.twice(net.proj(h.flatten(2).transpose(1, 2))).tanh_())
        )
        return checkpoint(rest, inner, use_reentrant=reentrant).square().mean()

    def plain(net: nn.Module) -> Tensor:
        h = functional.relu(net.conv(x), inplace=True).flatten(2).transpose(1, 2)
        return net.out(net.twice(net.twice(net.proj(h)).tanh_())).square().mean()

    expected = twin(model, ["conv", "proj", "twice", "out"], [plain])
    session, _ = attach(model)
    checkpointed(model).backward()
    assert session.error is None
    assert_same(session.drain(), expected)


def test_transformer_with_every_block_checkpointed() -> None:
    model = Transformer().double()
    tokens = torch.randint(0, 11, (2, 4))
    names = [f"h.{i}.{n}" for i in (0, 1) for n in ("c_attn", "mlp.0", "mlp.2")]
    expected = twin(model, names, [lambda net: net(tokens).square().mean()])
    for reentrant in (True, False):
        session, handles = attach(model)
        x = model.wte(tokens)
        for block in model.h:
            x = checkpoint(block, x, use_reentrant=reentrant)
        model.lm_head(x).square().mean().backward()
        assert_same(session.drain(), expected)
        for handle in handles:
            handle.remove()


def test_keyword_arguments() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(3, 4), "proj": Conv1D(2, 4)}).double()
    x = torch.randn(5, 3, dtype=torch.float64)

    def positional(net: Any) -> Tensor:
        return net["proj"](net["fc"](x)).square().mean()

    expected = twin(model, ["fc", "proj"], [positional])
    session, _ = attach(model)
    model["proj"](x=model["fc"](input=x)).square().mean().backward()
    assert session.error is None
    assert_same(session.drain(), expected)


def test_an_unused_branch_has_no_sums() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}).double()
    x = torch.randn(4, 3, dtype=torch.float64)

    def run(net: Any) -> Tensor:
        net["unused"](x)  # its output never reaches the loss
        return net["used"](x).square().mean()

    expected = twin(model, ["used", "unused"], [run])
    session, _ = attach(model)
    run(model).backward()
    assert expected["unused"].calls == 0
    assert_same(session.drain(), expected)


@pytest.mark.parametrize("shape", [(0, 3), (0, 4, 3)])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_empty_batches_count_nothing(shape: tuple[int, ...], sharing: str) -> None:
    model = nn.Linear(3, 2).double()
    session, _ = attach(model, weight_sharing=sharing)
    model(torch.zeros(*shape, dtype=torch.float64)).sum().backward()
    assert session.error is None
    pending = session.drain()[""]
    assert pending.counts() == (0.0, 0.0, 0.0)
    assert all(not block.any() for block in pending.a + pending.g)
    # A rank without rows and one with them add up to the latter.
    x = torch.randn(5, *shape[1:], dtype=torch.float64)
    expected = twin(copy.deepcopy(model), [""], [loss_of(x)], sharing=sharing)
    model(torch.zeros(*shape, dtype=torch.float64)).sum().backward()
    loss_of(x)(model).backward()
    assert_same(session.drain(), expected)


def test_views_and_expanded_inputs() -> None:
    model = nn.Linear(3, 2).double()
    base = torch.randn(3, 4, dtype=torch.float64)
    x = base.t().unsqueeze(0).expand(2, 4, 3)
    expected = twin(copy.deepcopy(model), [""], [loss_of(x)])
    session, _ = attach(model)
    loss_of(x)(model).backward()
    assert_same(session.drain(), expected)


def test_two_losses_of_one_graph_and_a_layer_used_twice() -> None:
    """Two losses with `retain_graph` under checkpointing: A counted some calls three times.

    Where a call's input is reduced in forward, its sums serve every backward of the graph; those
    of the first call to arrive were also the sums that all others were added to.
    """
    layer = nn.Linear(3, 3).double()
    xs = [torch.randn(4, 3, dtype=torch.float64) for _ in range(2)]

    def use(net: nn.Module) -> Tensor:
        return sum(net(x).square().sum() for x in xs)  # type: ignore[return-value]

    session, _ = attach(layer)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = use(layer)
    loss.backward(retain_graph=True)
    loss.backward()
    found = session.drain()[""]
    rows = torch.cat([torch.cat(xs), torch.ones(8, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(found.a[0], 2.0 * rows.mT @ rows)


def test_double_use_of_one_graph_counts_each_backward() -> None:
    """``retain_graph``: two backward passes are two contributions to the gradient."""
    model = nn.Linear(3, 2).double()
    run = loss_of(torch.randn(4, 3, dtype=torch.float64))
    expected = twin(copy.deepcopy(model), [""], [run, run])
    session, _ = attach(model)
    loss = run(model)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same(session.drain(), expected)


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (2, 2, 2, 3), (3,)])
@pytest.mark.parametrize("kind", ["linear", "linear_nobias", "conv1d", "addmm_conv1d"])
def test_in_place_activations_on_outputs_that_are_views(kind: str, shape: tuple[int, ...]) -> None:
    """With more than two dimensions a linear layer returns a view of a product.

    An in-place operation on it replaces the view's history, and with it a hook on the view.
    """
    layer = {
        "linear": lambda: nn.Linear(3, 4),
        "linear_nobias": lambda: nn.Linear(3, 4, bias=False),
        "conv1d": lambda: Conv1D(4, 3),
        "addmm_conv1d": lambda: ViewConv1D(4, 3),
    }[kind]()
    model = nn.Sequential(layer, nn.ELU(inplace=True)).double()
    run = loss_of(torch.randn(*shape, dtype=torch.float64))
    expected = twin(model, ["0"], [run])
    session, _ = attach(model)
    run(model).backward()
    assert_same(session.drain(), expected)
    assert session.error is None


class ViewConv1D(Conv1D):
    """As transformers writes it."""

    def forward(self, x: Tensor) -> Tensor:
        product = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return product.view(*x.shape[:-1], self.nf)


ViewConv1D.__name__ = "Conv1D"


class Odd(nn.Linear):
    """Returns part of a larger product, in another order."""

    def forward(self, x: Tensor) -> Tensor:
        both = functional.linear(x, torch.cat([self.weight, self.weight]), None)
        return both.transpose(0, 1)[:, :, : self.out_features]


def test_in_place_activations_on_any_other_view() -> None:
    model = nn.Sequential(Odd(3, 4, bias=False), nn.ELU(inplace=True)).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    session, _ = attach(model, plain_layers=["Odd"])
    loss_of(x)(model).backward()
    sums = session.drain()["0"]
    weight = model[0].weight.detach().requires_grad_()
    output = x.transpose(0, 1) @ weight.t()
    (gamma,) = torch.autograd.grad(functional.elu(output).square().mean(), [output])
    rows, slopes = x.transpose(0, 1).flatten(0, 1), gamma.flatten(0, 1)
    torch.testing.assert_close(sums.g[0], slopes.t() @ slopes)
    torch.testing.assert_close(sums.a[0], rows.t() @ rows)
    assert session.error is None


def test_outputs_are_not_replaced_without_need() -> None:
    model = nn.Linear(3, 4)
    attach(model)
    output = model(torch.randn(2, 5, 3))
    assert output._base is not None and output._base.grad_fn.name() == "AddmmBackward0"

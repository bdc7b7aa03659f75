"""Finite checks of a step against the definition, without a value read back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_kfac.capture.session import Pending
from ds_kfac.soundness import gradient_norm, is_finite

CPU = torch.device("cpu")


@pytest.mark.parametrize("first", [torch.float16, torch.float32, torch.float64])
def test_gradients_of_several_dtypes_have_one_norm(first: torch.dtype) -> None:
    """torch refuses to narrow: an fp64 gradient behind an fp32 one made the step raise."""
    views = [torch.tensor([3.0], dtype=first), torch.tensor([4.0, 12.0], dtype=torch.float64)]
    for tensors in (views, views[::-1]):
        norm = gradient_norm(tensors, CPU)
        assert norm.dtype == torch.float64
        assert norm.item() == pytest.approx(13.0, rel=1e-15)  # two roots, each rounded


def test_half_precision_is_summed_in_fp32() -> None:
    """The square of 300 is infinite in fp16."""
    assert gradient_norm([torch.full((4,), 300.0, dtype=torch.float16)], CPU).item() == 600.0


def test_no_gradient_has_norm_zero() -> None:
    assert gradient_norm([], CPU).item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["gradient", "a", "g"])
def test_anything_not_finite_is_seen(bad: float, where: str) -> None:
    rows = {name: torch.ones(2, 3) for name in ("gradient", "a", "g")}

    def verdict() -> bool:
        outer = {name: [x.t() @ x] for name, x in rows.items()}
        norm = gradient_norm([rows["gradient"].flatten()], CPU)
        return bool(is_finite(norm, [Pending(outer["a"], outer["g"])]))

    assert verdict()
    rows[where][1, 2] = bad
    assert not verdict()


def test_nothing_is_read_back_to_the_host() -> None:
    """Meta tensors have no values: any item(), bool() or float() on one raises."""

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    norm = gradient_norm([meta(3), meta(4)], torch.device("meta"))
    assert is_finite(norm, [Pending([meta(2, 2)], [meta(3, 3)])]).shape == ()

"""One rank's share of a reduction round."""

from __future__ import annotations

import torch

from ds_kfac.capture.session import Pending, packer
from ds_kfac.layers.blocks import cut
from ds_kfac.layers.spec import LayerSpec, ParamSlot
from ds_kfac.plan.program import COUNTS_PER_LAYER, ReduceItem

SPEC = LayerSpec(
    "fc", "linear", 2, 3, ParamSlot("fc.weight", (3, 2), 0), None, 1, cut(2, 8), cut(3, 8)
)


def counts_item() -> ReduceItem:
    return ReduceItem(layer=0, side="counts", block=0, numel=COUNTS_PER_LAYER, offset=0)


def test_counts_are_rows_used_rows_seen_and_terms() -> None:
    pending = Pending([torch.zeros(2, 2)], [torch.zeros(3, 3)], 5, 20, 7)
    out = torch.zeros(COUNTS_PER_LAYER)
    packer({"fc": pending}, [SPEC])(counts_item(), out)
    assert out.tolist() == [5.0, 20.0, 7.0]


def test_blocks_are_packed_and_missing_layers_leave_zeros() -> None:
    a = torch.tensor([[1.0, 2.0], [-9.0, 3.0]])  # below the diagonal nothing is valid
    pack = packer({"fc": Pending([a], [torch.eye(3)])}, [SPEC])
    out = torch.zeros(3)
    pack(ReduceItem(layer=0, side="a", block=0, numel=3, offset=0), out)
    assert out.tolist() == [1.0, 2.0, 3.0]
    empty = torch.zeros(COUNTS_PER_LAYER)
    packer({}, [SPEC])(counts_item(), empty)
    assert not empty.any()


def test_counts_are_not_copied_from_host_memory() -> None:
    """Such a copy waits for the device: once per layer on every capture step."""
    pending = Pending([torch.zeros(2, 2)], [torch.zeros(3, 3)], 5, 20, 7)
    out = torch.zeros(COUNTS_PER_LAYER)
    with torch.profiler.profile() as profile:
        packer({"fc": pending}, [SPEC])(counts_item(), out)
    assert "aten::copy_" not in {event.key for event in profile.key_averages()}

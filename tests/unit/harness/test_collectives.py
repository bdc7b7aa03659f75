"""The collective log and its comparison."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests._harness import collectives
from tests._harness.collectives import CollectiveRecord, compare


def _record(op, numel=4, dtype="float32", group=(0, 1), detail=""):
    return CollectiveRecord(op, numel, dtype, group, detail)


def _many_calls(rank, world_size):
    pair = torch.ones(2)
    with collectives.recording() as log:
        dist.all_reduce(pair)
        dist.all_reduce(pair, dist.ReduceOp.MAX, async_op=True).wait()
        dist.broadcast(pair, src=1)
        gathered = torch.empty(2 * world_size)
        dist.all_gather_into_tensor(gathered, pair)
        dist.reduce_scatter_tensor(torch.empty(2), gathered)
        counts = [1, 2] if rank == 0 else [2, 3]
        received = torch.empty(sum([1, 2] if rank == 0 else [2, 3]))
        dist.all_to_all_single(received, torch.ones(sum(counts)), counts, counts)
        objects = [None] * world_size
        dist.all_gather_object(objects, rank)
        dist.barrier()
        if rank == 0:
            dist.send(pair, dst=1)
        else:
            dist.recv(pair, src=0)
    return log


def _sub_groups(rank, world_size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    other = groups[1 - rank // 2]
    with collectives.recording() as log:
        dist.all_reduce(torch.ones(1 + rank // 2), group=mine)
        dist.all_reduce(torch.ones(7), group=other)  # not a member: no call
    return log


def _point_to_point_list(rank, world_size):
    tensor = torch.full((2,), float(rank))
    kind = dist.isend if rank == 0 else dist.irecv
    for work in dist.batch_isend_irecv([dist.P2POp(kind, tensor, 1 - rank)]):
        work.wait()
    return tensor


def test_calls_are_recorded_with_size_dtype_and_group(run_world):
    logs = run_world(2, _many_calls)
    shown = [(r.op, r.numel, r.detail) for r in logs[0]]
    assert shown == [
        ("all_reduce", 2, "SUM"),
        ("all_reduce", 2, "MAX"),
        ("broadcast", 2, "src=1"),
        ("all_gather_into_tensor", 2, ""),
        ("reduce_scatter_tensor", 4, "SUM"),
        ("all_to_all_single", 3, ""),
        ("all_gather_object", None, ""),
        ("barrier", None, ""),
        ("send", 2, "dst=1"),
    ]
    assert {r.group for r in logs[0]} == {(0, 1)}
    assert logs[0][0].dtype == "float32" and "test_collectives.py" in logs[0][0].site
    assert compare(logs) is None


def test_sub_groups_are_compared_apart(run_world):
    logs = run_world(4, _sub_groups)
    assert [[(r.numel, r.group) for r in log] for log in logs] == [
        [(1, (0, 1))],
        [(1, (0, 1))],
        [(2, (2, 3))],
        [(2, (2, 3))],
    ]


def test_point_to_point_operations_keep_their_identity(run_world):
    assert all(torch.equal(t, torch.zeros(2)) for t in run_world(2, _point_to_point_list))


@pytest.mark.parametrize(
    "other",
    [
        [_record("all_reduce"), _record("broadcast")],
        [_record("broadcast", detail="src=1"), _record("all_reduce")],
        [_record("broadcast", numel=5), _record("all_reduce")],
        [_record("broadcast", dtype="float64"), _record("all_reduce")],
        [_record("broadcast")],
    ],
    ids=["order", "root", "numel", "dtype", "missing"],
)
def test_differences_are_found(other):
    log = [_record("broadcast"), _record("all_reduce")]
    message = compare([log, other])
    assert message is not None and "group (0, 1)" in message
    assert compare([log, log]) is None


def test_uneven_and_point_to_point_sizes_may_differ():
    left = [_record("all_to_all_single", numel=1), _record("send", numel=3)]
    right = [_record("all_to_all_single", numel=9)]
    assert compare([left, right]) is None

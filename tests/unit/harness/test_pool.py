"""The pool: results, errors, hangs, dead ranks, fresh processes."""

from __future__ import annotations

import functools
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests._harness import CollectiveMismatchError, World, WorldError, faults
from tests._harness.faults import Fault


def _sum_ranks(rank, world_size, scale):
    value = torch.full((3,), float(rank + 1), dtype=torch.float64) * scale
    dist.all_reduce(value)
    return rank, world_size, value


def _pid(rank, world_size):
    return os.getpid()


def _global_state(rank, world_size):
    state = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        os.environ.get("LEFT_BEHIND"),
        torch.rand(()).item(),
        {key: os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    )
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "yes"
    return state


def _raise_everywhere(rank, world_size):
    dist.barrier()
    raise KeyError("same text")


def _raise_on_one(rank, world_size, bad):
    if rank == bad:
        print("about to fail")
        raise ValueError(f"bad rank {rank}")
    return rank


class _UnpicklableError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.lock = threading.Lock()


def _raise_unpicklable(rank, world_size):
    raise _UnpicklableError("one", "two")


def _return_unpicklable(rank, world_size):
    return threading.Lock()


def _exit(rank, world_size):
    raise SystemExit(3)


def _hang_in_python(rank, world_size):
    if rank == 1:
        time.sleep(60)
    return rank


def _hang_in_collective(rank, world_size):
    if rank == 1:
        raise RuntimeError("left the group alone")
    dist.barrier()


def _fault_at_step(rank, world_size, fault):
    faults.arm(fault)
    tensor = torch.ones(2, 3)
    for step in range(3):
        faults.maybe("before", rank, step, tensor)
        tensor = tensor.clone()
    dist.all_reduce(torch.ones(1))
    return tensor


def _leave_group(rank, world_size):
    dist.destroy_process_group()


def _collective_timeout(rank, world_size):
    if rank == 0:
        dist.barrier()
    else:
        time.sleep(2.5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_back_by_rank(run_world, size):
    results = run_world(size, _sum_ranks, 10.0)
    expected = torch.full((3,), 10.0 * size * (size + 1) / 2, dtype=torch.float64)
    assert [result[:2] for result in results] == [(rank, size) for rank in range(size)]
    for result in results:
        assert torch.equal(result[2], expected)


def test_partial_functions_are_jobs(world):
    job = functools.partial(_sum_ranks, scale=2.0)
    assert torch.equal(world(2).run(job)[1][2], torch.full((3,), 6.0, dtype=torch.float64))


def test_workers_are_reused_and_isolated_ones_are_not(world):
    shared = world(2).run(_pid)
    assert world(2).run(_pid) == shared
    fresh = world(2).run(_pid, isolated=True)
    assert not set(fresh) & set(shared)
    assert world(2).run(_pid) == shared
    assert not any(_alive(pid) for pid in fresh)


def test_every_job_starts_from_the_same_process_state(world):
    first = world(2).run(_global_state)
    second = world(2).run(_global_state)
    assert first == second
    assert first[1][:4] == (torch.float32, 1, True, None)
    assert first[1][5] == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


def test_symmetric_error_keeps_the_pool(world):
    pids = world(2).run(_pid)
    errors = world(2).run_expecting_errors(_raise_everywhere)
    assert [(e.rank, e.type_name, e.text) for e in errors] == [
        (0, "KeyError", "'same text'"),
        (1, "KeyError", "'same text'"),
    ]
    assert "LookupError" in errors[0].bases
    assert world(2).run(_pid) == pids


def test_one_sided_error_shows_every_rank_and_renews_the_pool(world):
    pids = world(2).run(_pid)
    with pytest.raises(WorldError) as caught:
        world(2).run(_raise_on_one, 1)
    text = str(caught.value)
    assert "_raise_on_one failed on 1 of 2 ranks" in text
    assert "[rank 0] returned" in text
    assert "[rank 1] ValueError: bad rank 1" in text
    assert "in _raise_on_one" in text and "about to fail" in text
    assert caught.value.errors[0] is None
    assert not set(world(2).run(_pid)) & set(pids)


def test_unpicklable_exception_arrives_as_text(world):
    errors = world(2).run_expecting_errors(_raise_unpicklable)
    assert {(e.type_name, e.text) for e in errors} == {("_UnpicklableError", "one and two")}


def test_unpicklable_result_is_an_error_of_the_job(world):
    with pytest.raises(WorldError, match="cannot pickle"):
        world(2).run(_return_unpicklable)


def test_local_function_is_refused_in_the_parent(world):
    with pytest.raises((AttributeError, TypeError), match="local|pickle"):
        world(2).run(lambda rank, world_size: rank)


def test_system_exit_is_an_error_not_a_dead_worker(world):
    errors = world(2).run_expecting_errors(_exit)
    assert [e.type_name for e in errors] == ["SystemExit", "SystemExit"]


def test_hang_is_killed_with_its_stack_and_the_next_job_works(world):
    start = time.monotonic()
    pids = world(2).run(_pid)
    with pytest.raises(WorldError) as caught:
        world(2).run(_hang_in_python, timeout=1.0)
    assert time.monotonic() - start < 15
    error = caught.value.errors[1]
    assert caught.value.errors[0] is None
    assert error.type_name == "JobTimeout"
    assert "in _hang_in_python" in error.traceback
    assert not any(_alive(pid) for pid in pids)
    assert world(2).run(_sum_ranks, 1.0)[0][2][0] == 3


def test_rank_left_in_a_collective_is_reported_as_straggler(world):
    errors = world(2).run_expecting_errors(_hang_in_collective, grace=1.0)
    assert errors[0].type_name == "Straggler"
    assert "barrier" in errors[0].traceback
    assert errors[1].text == "left the group alone"


@pytest.mark.parametrize(
    ("kind", "type_name"), [("sigkill", "ProcessDied"), ("sigstop", "JobTimeout")]
)
def test_killed_and_stopped_ranks_are_named(world, kind, type_name):
    fault = Fault(rank=1, step=1, point="before", kind=kind)
    errors = world(2).run_expecting_errors(_fault_at_step, fault, timeout=3.0, grace=3.0)
    assert errors[1].type_name == type_name
    if kind == "sigkill":
        assert errors[1].text == "killed by SIGKILL"
        assert "onnection" in errors[0].text  # gloo notices a dead peer
    assert world(2).run(_sum_ranks, 1.0)[0][2][0] == 3


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_poison_hits_one_rank_and_is_disarmed_afterwards(world, kind):
    fault = Fault(rank=1, step=2, point="before", kind=kind)
    clean, poisoned = world(2).run(_fault_at_step, fault)
    assert torch.isfinite(clean).all()
    assert not torch.isfinite(poisoned[0, 0]) and torch.isfinite(poisoned.flatten()[1:]).all()
    other = Fault(rank=0, step=0, point="elsewhere", kind="raise")
    assert all(torch.isfinite(t).all() for t in world(2).run(_fault_at_step, other))


def test_injected_exception_and_sleep(world):
    fault = Fault(rank=None, step=0, point="before", kind="raise")
    errors = world(2).run_expecting_errors(_fault_at_step, fault)
    assert {e.type_name for e in errors} == {"InjectedFaultError"}
    start = time.monotonic()
    world(2).run(_fault_at_step, Fault(None, 0, "before", "sleep", seconds=0.3))
    assert time.monotonic() - start >= 0.3


def test_job_that_leaves_the_group_does_not_spoil_the_next(world):
    world(2).run(_leave_group)
    assert world(2).run(_sum_ranks, 1.0)[0][2][0] == 3


def test_collective_timeout_is_configurable(world):
    errors = world(2).run_expecting_errors(_collective_timeout, pg_timeout=1.0)
    assert "imed out" in errors[0].text and errors[1] is None


@pytest.mark.parametrize("size", [0, 5])
def test_world_size_is_checked(size):
    with pytest.raises(ValueError, match=str(size)):
        World(size)


def test_close_leaves_no_process():
    private = World(2)
    pids = private.run(_pid)
    assert sorted(private.pids()) == sorted(pids)
    private.close()
    assert private.pids() == []
    assert not any(_alive(pid) for pid in pids)


def _swapped(rank, world_size):
    first, second = ("max", "sum") if rank == 0 else ("sum", "max")
    ops = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
    for name in (first, second):
        dist.all_reduce(torch.ones(2), op=ops[name])


def test_collective_mismatch_fails_the_job_and_renews_the_pool(world):
    with pytest.raises(CollectiveMismatchError, match=r"collective 0 of group \(0, 1\)"):
        world(2).run(_swapped)
    world(2).run(_swapped, compare_collectives=False)
    assert world(2).run(_sum_ranks, 1.0)[0][2][0] == 3


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

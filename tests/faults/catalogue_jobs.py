"""Jobs of the fault catalogue that need several ranks, in plain PyTorch."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

import ds_kfac
from tests.unit.checkpoint.training import Run, make

EVERY_STEP = {"factor_update_steps": 1, "inv_update_steps": 1}


def messages() -> list[str]:
    """Collects what the package logs from here on."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_kfac").addHandler(handler)
    return found


def attached(model: nn.Module, size: int, **settings: Any) -> tuple[nn.Module, Any, Any]:
    """The model as it is called, its optimizer and its K-FAC."""
    wrapped: nn.Module = model
    if size > 1:
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = ds_kfac.attach(wrapped, optimizer, {**EVERY_STEP, **settings})
    return wrapped, optimizer, kfac


def two_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def bad_input(rank: int, size: int) -> list[str]:
    """NaN in the second layer's input on rank 1, at step 1."""
    model = two_layers()
    wrapped, optimizer, kfac = attached(model, size)
    found = messages()
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(5, 4)
        if rank == 1 and step == 1:
            x[2, 1] = float("nan")
        wrapped(x).square().mean().backward()
        optimizer.step()
    kfac.detach()
    return [text for text in found if "W101" in text]


def no_rows(rank: int, size: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All rows of the step are on rank 0; losses are sums, scaled to the global mean."""
    model = two_layers()
    wrapped, optimizer, kfac = attached(model, size)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        part = x if rank == 0 else x[:0]
        (wrapped(part).square().sum() * size / 24).backward()
        optimizer.step()
    factors = {name: kfac.factors(name) for name in ("0", "2")}
    kfac.detach()
    return weights(model), factors


class Dropping(nn.Module):
    """Its middle layer is left out where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, drop: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x if drop else x + torch.tanh(self.middle(x)))


def dropped_layer(rank: int, size: int, steps: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """A layer that rank 1 leaves out in every step, and all ranks in step 2."""
    model = Dropping()
    wrapped, optimizer, kfac = attached(model, size)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        for index, part in enumerate(x.chunk(2)):
            if size == 1 or index == rank:
                drop = index == 1 or step == 2
                (wrapped(part, drop).square().sum() * size / 16).backward()
        optimizer.step()
    factors = {"a": kfac.factors("middle")[0], "g": kfac.factors("middle")[1]}
    metrics = kfac.metrics()
    kfac.detach()
    return weights(model) | factors, metrics


def other_order(rank: int, size: int) -> None:
    """The same layers, found in another order on rank 1."""
    names = ["one", "two"] if rank == 0 else ["two", "one"]
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = ds_kfac.Groups(data=torch.distributed.group.WORLD)
    ds_kfac.attach(model, optimizer, EVERY_STEP, groups=groups)


def replaced(rank: int, size: int, what: str) -> None:
    """A module or its weight is replaced on one rank after attach."""
    model = two_layers()
    wrapped, optimizer, kfac = attached(model, size)
    for step in range(3):
        if step == 1 and rank == size - 1:
            if what == "module":
                model[2] = copy.deepcopy(model[2])
            else:
                model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        optimizer.zero_grad()
        wrapped(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()


def other_accumulation(rank: int, size: int, folder: str, parts: tuple[int, int]) -> Any:
    """Micro-batches per step before and after a resume; weights at the end."""

    def run_steps(run: Run, steps: range, parts: int) -> None:
        for step in steps:
            run.optimizer.zero_grad()
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            for part in x.chunk(size)[rank].chunk(parts):
                (run.wrapped(part).square().sum() * size / 48).backward()
            run.optimizer.step()

    run = make(EVERY_STEP, size=size)
    run_steps(run, range(3), parts[0])
    run.kfac.save(folder)
    state = run.host_state()
    run.kfac.detach()
    run = make(EVERY_STEP, size=size)
    run.load_host_state(state)
    assert run.kfac.load(folder)
    run_steps(run, range(3, 6), parts[1])
    run.kfac.detach()
    return weights(run.model)


def forgotten(rank: int, size: int) -> tuple[bool, int]:
    """Whether a K-FAC that nobody refers to goes away, and how many of its threads stay."""
    model = two_layers()
    earlier = set(threading.enumerate())  # of jobs that ended with an error
    wrapped, optimizer, kfac = attached(model, size, watchdog_timeout=20.0)
    wrapped(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    threads = set(threading.enumerate()) - earlier
    assert len(threads) == 2
    kfac.detach()
    seen = weakref.ref(kfac)
    del kfac, wrapped, optimizer, model
    gc.collect()
    for thread in threads:
        thread.join(5.0)
    return seen() is None, sum(thread.is_alive() for thread in threads)

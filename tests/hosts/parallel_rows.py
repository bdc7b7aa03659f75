"""Rows of the engine table for AutoTP, Ulysses and mixtures of experts.

They train beside SGD without weight decay. Adam would make the sign of a small gradient, which
rounding flips, a full step of the parameters that are not preconditioned; and the step that stage 0
takes before training in half precision, with zero gradients, would decay weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests._harness import world
from tests.hosts import (
    autotp_jobs,
    deepspeed_cells,
    moe_jobs,
    test_deepspeed_autotp,
    ulysses_jobs,
)
from tests.hosts import topology_jobs as jobs
from tests.hosts.engine_rows import PRECISIONS, Choice, Row, attempt
from tests.reference import DenseKFAC

WITHOUT_DECAY: dict[str, Any] = {"optimizer": {"params": {"weight_decay": 0.0}}}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
STAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO 0": (0, {}),
    "ZeRO 1": (1, {}),
    "ZeRO 1, offload": (1, OFFLOAD),
    "ZeRO 2": (2, {}),
    "ZeRO 3": (3, {}),
    "ZeRO 3, offload": (3, OFFLOAD),
}
NATURAL = {"direction": "natural", "damping": 0.3, "kl_clip": 0.01}
INTERVALS = {"factor_update_steps": 1, "inv_update_steps": 2, "factor_decay": 0.9}
CLIPPING = 0.5
Weights = dict[str, Tensor]


def measure(choice: Choice) -> list[Row]:
    """The chosen rows; fp32 on all numbers of ranks, other precisions on two."""
    return [*_tensor_rows(choice), *_sequence_rows(choice), *_expert_rows(choice)]


def oracle(
    model: nn.Module,
    layers: Sequence[str],
    settings: Mapping[str, Any],
    *,
    loss: Callable[[int], Tensor],
    steps: int,
    clipping: float = 0.0,
) -> Weights:
    """Weights of the dense float64 run beside SGD with momentum and without weight decay.

    Args:
        model: fp64; trained.
        layers: Names of the layers to precondition.
        settings: Of K-FAC.
        loss: Of a step's whole batch.
        steps: Optimizer steps.
        clipping: Of the raw gradient.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=jobs.LR, momentum=0.9)
    reference = DenseKFAC(
        model, layers, optimizer=optimizer, gradient_clipping=clipping, **dict(settings)
    )
    for step in range(steps):
        reference.step(lambda step=step: loss(step))
    return {name: param.detach() for name, param in model.named_parameters()}


def _rows(
    choice: Choice,
    label: str,
    size: int,
    keys: Sequence[tuple[str, int]],
    train: Callable[[str, dict[str, Any]], list[list[Weights | str]]],
    measured: Callable[[int, str, Weights], float],
) -> Iterator[Row]:
    """One row per engine and accumulation.

    Args:
        choice: Says which precisions to measure on two ranks.
        label: Of the engine.
        size: Ranks.
        keys: ZeRO and accumulation of every row.
        train: Trains all rows with a dtype and JSON; what every rank has to say of each.
        measured: Difference of a row, by index, in a precision, to the oracle.
    """
    rows = [Row(f"{label}, {engine}", size, acc, {}) for engine, acc in keys]
    for name in choice.precisions if size == 2 else ("fp32",):
        dtype, extra, _ = PRECISIONS[name]
        by_rank = train(dtype, jobs.merged(WITHOUT_DECAY, extra))
        for index, row in enumerate(rows):
            weights: Weights = {}
            for found in (answers[index] for answers in by_rank):
                if isinstance(found, str):
                    row.cells[name] = found
                    break
                weights |= found
            else:
                row.cells[name] = measured(index, name, weights)
    yield from rows


def _error(name: str, found: Weights, exact: Weights, start: nn.Module) -> float:
    if name == "fp32":
        return deepspeed_cells.difference(found, exact)
    return deepspeed_cells.movement_error(found, exact, start)


# ------------------------------------------------------------------ AutoTP


class Shards(nn.Module):
    """The AutoTP net in one process with every shard a layer of its own, as block mode sees it."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        width, inner = autotp_jobs.WIDTH, autotp_jobs.INNER
        self.gain = nn.Parameter(torch.empty(width))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width // ranks) for _ in range(ranks))
        self.proj = nn.ModuleList(
            nn.Linear(width // ranks, width, bias=False) for _ in range(ranks)
        )
        self.proj_bias = nn.Parameter(torch.empty(width))
        self.up = nn.ModuleList(nn.Linear(width, inner // ranks) for _ in range(ranks))
        self.down = nn.ModuleList(
            nn.Linear(inner // ranks, width, bias=False) for _ in range(ranks)
        )
        self.down_bias = nn.Parameter(torch.empty(width))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gain * x
        parts = zip(*(layer(x).chunk(3, dim=-1) for layer in self.qkv), strict=True)
        q, k, v = (torch.cat(part, dim=-1) for part in parts)
        x = x + _summed(self.proj, q * torch.tanh(k) + v) + self.proj_bias
        h = torch.tanh(torch.cat([layer(x) for layer in self.up], dim=-1))
        return self.out(x + _summed(self.down, h) + self.down_bias)

    def pieces(self, whole: Mapping[str, Tensor]) -> Weights:
        """Weights of the uncut net under the names they have here."""
        ranks = len(self.qkv)
        result = {name: whole[name] for name in ("gain", "out.weight", "out.bias")}
        for part in ("weight", "bias"):
            fused = whole[f"block.qkv.{part}"].unflatten(0, (3, ranks, -1)).transpose(0, 1)
            for index in range(ranks):
                result[f"qkv.{index}.{part}"] = fused[index].flatten(0, 1)
                result[f"up.{index}.{part}"] = whole[f"block.up.{part}"].chunk(ranks)[index]
        for name in ("proj", "down"):
            result[f"{name}_bias"] = whole[f"block.{name}.bias"]
            for index, columns in enumerate(whole[f"block.{name}.weight"].chunk(ranks, dim=1)):
                result[f"{name}.{index}.weight"] = columns
        return result


def _summed(layers: nn.ModuleList, x: Tensor) -> Tensor:
    chunks = x.chunk(len(layers), dim=-1)
    return torch.stack([layer(part) for layer, part in zip(layers, chunks, strict=True)]).sum(0)


def tensor_outcomes(
    rank: int, size: int, tensor: int, cells: list[autotp_jobs.Cell]
) -> list[Weights | str]:
    """Whole weights of each cell, or why its engine does not start."""
    return [
        attempt(lambda cell=cell: autotp_jobs.train(rank, size, tensor, [cell])[0]["weights"])
        for cell in cells
    ]


def _tensor_rows(choice: Choice) -> Iterator[Row]:
    for size, degree in test_deepspeed_autotp.TOPOLOGIES:
        yield from tensor_rows(choice, "exact", size, degree)
        if degree == 2:  # what block means depends on the degree
            yield from tensor_rows(choice, "block", size, degree)


def tensor_rows(choice: Choice, mode: str, size: int, degree: int) -> Iterator[Row]:
    """Rows with layers cut over ``degree`` of ``size`` ranks (1: not cut), in one ``mode``."""
    label = f"AutoTP {degree} {mode}"
    keys = choice.keys(label, size, [(stage, acc) for stage in STAGES for acc in (1, 4)])
    if not keys:
        return
    copies = size // degree
    # Steps that are large beside the rounding of a weight that is stored in bf16.
    settings = {**NATURAL, "kl_clip": 1.0}
    base = autotp_jobs.Cell(
        {**settings, "tensor_parallel": mode}, own=False, clipping=CLIPPING, steps=8
    )
    start = autotp_jobs.make_model(base)
    view = Shards(degree) if mode == "block" else None
    model = autotp_jobs.make_model(base) if view is None else view
    if view is not None:
        view.load_state_dict(view.pieces(dict(start.named_parameters())))
    begun = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.double()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]

    def loss(step: int) -> Tensor:
        x, y = autotp_jobs.batch(base, step)
        return autotp_jobs.loss_of(model, base, x.double(), y.double())

    exact = oracle(
        model,
        layers,
        {**settings, **INTERVALS},
        loss=loss,
        steps=base.steps,
        clipping=CLIPPING,
    )
    origin = Start(begun)

    def train(dtype: str, extra: dict[str, Any]) -> list[list[Weights | str]]:
        cells = [
            replace(
                base,
                stage=STAGES[stage][0],
                json=jobs.merged(STAGES[stage][1], extra),
                accumulation=acc,
                dtype=dtype,
            )
            for stage, acc in keys
        ]
        found: list[list[Weights | str]] = world(size).run(
            tensor_outcomes, degree, cells, isolated=True, timeout=280
        )
        return found[:1]

    def measured(index: int, name: str, weights: Weights) -> float:
        return _error(name, weights if view is None else view.pieces(weights), exact, origin)

    assert copies * 4 <= autotp_jobs.BATCH
    yield from _rows(choice, label, size, keys, train, measured)


class Start(nn.Module):
    """Weights before training, by the names they had.

    Args:
        weights: By name.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self._weights = weights

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As a module's."""
        yield from ((name, nn.Parameter(value)) for name, value in self._weights.items())


# ------------------------------------------------------------------ Ulysses


def sequence_outcomes(
    rank: int, size: int, sequence: int, cells: list[ulysses_jobs.Cell]
) -> list[Weights | str]:
    """Whole weights of each cell, or why its engine does not start."""
    mpu = ulysses_jobs.start(sequence, fake_fp16=cells[0].dtype == "fp16")
    place = (rank // sequence, rank % sequence, size // sequence)
    return [
        attempt(lambda cell=cell: ulysses_jobs.train_cell(*place, mpu, cell)["weights"])
        for cell in cells
    ]


def _sequence_rows(choice: Choice) -> Iterator[Row]:
    for size in (2, 4):
        yield from _sequence_rows_of(choice, size)


def _sequence_rows_of(choice: Choice, size: int) -> Iterator[Row]:
    label = "Ulysses 2"
    keys = choice.keys(label, size, [(stage, acc) for stage in STAGES for acc in (1, 8 // size)])
    if not keys:
        return
    settings = {**NATURAL, **INTERVALS}

    def exact(scale: float) -> Weights:
        net = ulysses_jobs.make_net().double()

        def loss(step: int) -> Tensor:
            x, y = ulysses_jobs.batch(step)
            return scale * ulysses_jobs.loss(net(x.double()), y.double())

        return oracle(
            net,
            ulysses_jobs.LAYERS,
            settings,
            loss=loss,
            steps=ulysses_jobs.STEPS,
            clipping=CLIPPING,
        )

    # DeepSpeed divides by the number of whole sequences below ZeRO 3, by that of ranks there.
    expected = {scale: exact(scale) for scale in (1.0, 2.0)}

    def train(dtype: str, extra: dict[str, Any]) -> list[list[Weights | str]]:
        cells = [
            ulysses_jobs.Cell(
                STAGES[stage][0],
                settings,
                own=False,
                accumulation=acc,
                clipping=CLIPPING,
                dtype=dtype,
                extra=jobs.merged(STAGES[stage][1], extra),
            )
            for stage, acc in keys
        ]
        found: list[list[Weights | str]] = world(size).run(
            sequence_outcomes, 2, cells, isolated=True, timeout=280
        )
        return found[:1]

    def measured(index: int, name: str, weights: Weights) -> float:
        scale = 1.0 if keys[index][0].startswith("ZeRO 3") else 2.0
        return _error(name, weights, expected[scale], ulysses_jobs.make_net())

    yield from _rows(choice, label, size, keys, train, measured)


# ------------------------------------------------------------------ experts


def expert_outcomes(rank: int, size: int, cells: list[moe_jobs.Cell]) -> list[Weights | str]:
    """Weights of this rank's experts and of all dense layers, or why its engine does not start."""
    return [
        attempt(lambda cell=cell: moe_jobs.train_cell(rank, size, cell)["weights"][-1])
        for cell in cells
    ]


def _expert_rows(choice: Choice) -> Iterator[Row]:
    for size in (1, 2, 4):
        for degree in (1, 2)[:size]:
            yield from _expert_rows_of(choice, size, degree)


def _expert_rows_of(choice: Choice, size: int, degree: int) -> Iterator[Row]:
    """The batch is cut into the same parts everywhere, whose tokens are routed by themselves."""
    label = f"MoE, ep {degree}"
    keys = choice.keys(label, size, [(stage, moe_jobs.PARTS // size) for stage in STAGES])
    if not keys:
        return
    # Routes are so clear that rounding does not flip them.
    base = moe_jobs.Cell(
        *(2, degree, 0, {**NATURAL, **INTERVALS}),
        own=False,
        sgd=True,
        clipping=CLIPPING,
        starved=True,
    )
    net = moe_jobs.Whole(base).double()
    layers = [*moe_jobs.DENSE]
    layers += [f"experts.{index}.{part}" for index in range(2) for part in ("up", "down")]

    def loss(step: int) -> Tensor:
        x, y = moe_jobs.batch(base, step)
        return moe_jobs.objective(*net(x.double()), y.double())

    exact = oracle(
        net,
        layers,
        {**NATURAL, **INTERVALS},
        loss=loss,
        steps=moe_jobs.STEPS,
        clipping=CLIPPING,
    )

    def train(dtype: str, extra: dict[str, Any]) -> list[list[Weights | str]]:
        cells = [
            replace(
                base,
                zero=STAGES[stage][0],
                dtype=dtype,
                extra=jobs.merged(STAGES[stage][1], extra),
            )
            for stage, _ in keys
        ]
        found: list[list[Weights | str]] = world(size).run(
            expert_outcomes, cells, isolated=True, timeout=280
        )
        return found

    def measured(index: int, name: str, weights: Weights) -> float:
        return _error(name, weights, exact, moe_jobs.Whole(base))

    yield from _rows(choice, label, size, keys, train, measured)

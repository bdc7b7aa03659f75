"""DeepSpeed AutoTP: weights do not depend on the tensor degree, and what that costs."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_kfac.errors import UnsupportedError
from ds_kfac.hosts.deepspeed_support import check_config
from tests._harness import world
from tests.hosts import autotp_jobs as jobs
from tests.hosts.autotp_jobs import Cell
from tests.reference import AuxOptions, DenseKFAC, formulas

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

CONFIGS = Path(__file__).parents[2] / "configs"
NATURAL = {"direction": "natural", "damping": 0.3, "kl_clip": 1.0}
ORTHOGONAL = {"direction": "orthogonal", "damping": 0.1, "max_factor_dim": 6}  # 10 rows: 5 + 5
HEAD = {"skip_layers": []}
ROW_HEAD = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.(q|k|v|gate|up)_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*lm_head\.weight$"], "partition_type": "row"},
    ],
}

MATRIX = {
    f"{name} Z{stage}": Cell(settings, stage=stage, clipping=0.5)
    for name, settings in (("natural", NATURAL), ("orthogonal", ORTHOGONAL))
    for stage in (0, 1, 2)
} | {"llama": Cell(ORTHOGONAL, model="llama", stage=1)}
MIXED = {  # two data ranks with two tensor ranks each
    "natural, SGD": Cell(NATURAL, stage=1, own=False),
    "accumulation": Cell(ORTHOGONAL, stage=2, accumulation=2),
    "sparse": Cell({**NATURAL, "factor_update_steps": 3, "inv_update_steps": 3}, stage=1),
    "sparse Z0": Cell({**NATURAL, "factor_update_steps": 3, "inv_update_steps": 3}),
}
WIDE = {  # four tensor ranks
    "ekfac": Cell({"direction": "ekfac", "damping": 0.1}, stage=1),
    "eigen_adam": Cell({"direction": "eigen_adam"}, stage=2),
    # Key-value heads for two ranks: the others hold no part of the attention.
    "llama, few heads": Cell(NATURAL, model="llama", stage=1, kv_heads=2),
    "llama, few heads Z0": Cell(NATURAL, model="llama", kv_heads=2),
}
SMALL = {  # once: what does not depend on the degrees
    "natural Z1": MATRIX["natural Z1"],
    "frozen layer": Cell(NATURAL, stage=1, frozen=("block.up",)),
    "bad step": Cell(NATURAL, stage=1, bad=2),
    "gathered head": Cell({**NATURAL, **HEAD}, model="llama"),
    "row-parallel head": Cell(
        {**NATURAL, **HEAD}, model="llama", stage=1, extra={"partition_config": ROW_HEAD}
    ),
    "vocabulary-parallel head": Cell(
        {**NATURAL, **HEAD}, model="llama", stage=1, extra={"vocab_parallel_lm_head": True}
    ),
    "checkpointing": Cell(NATURAL, model="llama", stage=1, checkpointing=True),
    "overlap": Cell(NATURAL, model="llama", stage=1, extra={"tp_overlap_comm": True}),
    "exact bf16 Z0": Cell(NATURAL, stage=0, dtype="bf16"),
    "exact bf16 Z1": Cell(NATURAL, stage=1, dtype="bf16"),
    "exact bf16 Z2": Cell(NATURAL, stage=2, dtype="bf16"),
}
SHARDWISE = {"direction": "natural", "damping": 0.3, "kl_clip": 0.01, "momentum": 0.0}
BLOCK = {
    "block Z0": Cell({**SHARDWISE, "tensor_parallel": "block"}, steps=1),
    "block Z1": Cell({**SHARDWISE, "tensor_parallel": "block"}, stage=1, steps=1),
    "block bf16 Z1": Cell(
        {**SHARDWISE, "tensor_parallel": "block"}, stage=1, steps=1, dtype="bf16"
    ),
    "block orthogonal": Cell({**ORTHOGONAL, "tensor_parallel": "block"}, stage=1),
}
TOPOLOGIES = [(2, 2), (4, 2), (4, 4)]  # ranks, tensor degree
CELLS = {(2, 2): SMALL | BLOCK, (4, 2): MATRIX | MIXED | BLOCK, (4, 4): MATRIX | WIDE}
# See topology_table: what depends on eigenvectors amplifies rounding.
LOOSE = ("ekfac", "eigen_adam")


@functools.cache
def results(size: int, tensor: int) -> dict[str, list[dict[str, Any]]]:
    """By cell, the results of all ranks."""
    cells = CELLS[size, tensor]
    by_rank = world(size).run(jobs.train, tensor, list(cells.values()), timeout=280, isolated=True)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(cells)}


class Oracle:
    """The dense float64 run of a cell."""

    def __init__(self, cell: Cell, layers: list[str]) -> None:
        model = jobs.make_model(cell).double()
        self.start = {n: p.detach().clone() for n, p in model.named_parameters()}
        foreign = ("skip_layers", "tensor_parallel", "momentum")
        settings = {k: v for k, v in cell.kfac.items() if k not in foreign}
        averages = cell.own or settings["direction"] in ("orthogonal", "eigen_adam")
        optimizer = None
        if not cell.own:
            optimizer = torch.optim.SGD(
                model.parameters(), lr=jobs.LR, momentum=0.9, weight_decay=jobs.DECAY
            )
        kl_clip = 0.001 if settings["direction"] == "ekfac" else None
        self.kfac = DenseKFAC(
            model,
            layers,
            momentum=0.95 if averages else 0.0,
            optimizer=optimizer,
            lr=jobs.LR,
            weight_decay=jobs.DECAY,
            gradient_clipping=cell.clipping,
            aux=AuxOptions(lr=jobs.AUX_LR, betas=(0.9, 0.95), weight_decay=jobs.DECAY),
            parts={name: 3 for name in layers if name.endswith("qkv")},
            **{"kl_clip": kl_clip, "damping": 0.1, **jobs.INTERVALS, **settings},
        )
        self.norms = []
        for step in range(cell.steps):
            x, y = (v.double() if v.is_floating_point() else v for v in jobs.batch(cell, step))
            self.kfac.step(lambda x=x, y=y: jobs.loss_of(model, cell, x, y))
            self.norms.append(self.kfac.raw_norm)
        self.weights = {n: p.detach() for n, p in model.named_parameters()}


@functools.cache
def oracle(size: int, tensor: int, name: str) -> Oracle:
    found = results(size, tensor)[name][0]
    return Oracle(CELLS[size, tensor][name], list(found["factors"]))


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def exact_cells() -> list[tuple[int, int, str]]:
    return [
        (size, tensor, name)
        for size, tensor in TOPOLOGIES
        for name, cell in CELLS[size, tensor].items()
        if cell.dtype == "fp32" and cell.kfac.get("tensor_parallel", "exact") == "exact"
    ]


@pytest.mark.parametrize(("size", "tensor", "name"), exact_cells())
def test_exact_mode_matches_the_oracle(size: int, tensor: int, name: str) -> None:
    """{2, 4} ranks x degree {2, 4} x ZeRO {0, 1, 2} x all directions, whole on every rank."""
    expected = oracle(size, tensor, name)
    tolerance = 1e-3 if name in LOOSE else 1e-5
    moved = 0.0
    for found in results(size, tensor)[name]:
        assert found["weights"].keys() == expected.weights.keys()
        for key, value in expected.weights.items():
            assert difference(found["weights"][key], value) < tolerance, key
            # The weights must not be right only because they have hardly moved.
            change = value - expected.start[key]
            error = found["weights"][key].double() - value
            assert error.norm() <= 300 * tolerance * change.norm() + 1e-7, key
            moved = max(moved, difference(value, expected.start[key]))
        for layer, factors in found["factors"].items():
            for factor, reference in zip(factors, expected.kfac.factors(layer), strict=True):
                assert difference(factor, reference) < tolerance, layer
        assert found["norms"] == pytest.approx(expected.norms, rel=tolerance)
    assert moved > 1e-3


@pytest.mark.parametrize(("size", "tensor"), TOPOLOGIES)
def test_every_factor_is_decomposed_once_in_the_whole_job(size: int, tensor: int) -> None:
    """P2, with blocks that no shard edge divides."""
    for name in ("natural Z1", "orthogonal Z0", "orthogonal Z2", "llama", "frozen layer"):
        if name not in CELLS[size, tensor]:
            continue
        found = results(size, tensor)[name]
        cell = CELLS[size, tensor][name]
        limit = cell.kfac.get("max_factor_dim")
        bases = [
            formulas.block_bounds(factor.shape[0], limit)
            for factors in found[0]["factors"].values()
            for factor in factors
        ]
        refreshes = len(range(0, jobs.STEPS, jobs.INTERVALS["inv_update_steps"]))
        done = sum(result["metrics"]["decompositions"] for result in found)
        assert done == refreshes * sum(map(len, bases)), name
        assert all(result["owners"] == found[0]["owners"] for result in found)


@pytest.mark.parametrize(("size", "tensor"), [(4, 2), (4, 4)])
def test_work_is_spread_over_tensor_ranks(size: int, tensor: int) -> None:
    """Shards are of equal size on all tensor ranks: the first one must not own everything."""
    for name in ("orthogonal Z0", "orthogonal Z1", "llama"):
        owners = set(results(size, tensor)[name][0]["owners"].values())
        assert len(owners) > 1 and {owner % tensor for owner in owners} != {0}, (name, owners)


@pytest.mark.parametrize(("size", "tensor"), TOPOLOGIES)
def test_ledger_equals_the_plan(size: int, tensor: int) -> None:
    """P3: rows of calls included; tensor ranks send each other only what is missing."""
    for name, found in results(size, tensor).items():
        for result in found:
            for kind, entry in result["ledger"]["kinds"].items():
                assert entry["bytes"] == entry["planned_bytes"], (name, kind)


@pytest.mark.parametrize(("size", "tensor"), [(2, 2), (4, 2)])
def test_rows_cost_what_the_guide_says(size: int, tensor: int) -> None:
    """Of a cut side a rank sends its features of the rows that others work on, nothing else."""
    rows = jobs.BATCH * jobs.TOKENS // (size // tensor)
    cut_features = 3 * jobs.WIDTH + jobs.WIDTH + 2 * jobs.INNER  # qkv, proj, up, down
    for result in results(size, tensor)["natural Z1"]:
        entry = result["ledger"]["kinds"]["rows"]
        assert entry["calls"] == 4 * jobs.STEPS
        assert entry["bytes"] == jobs.STEPS * 4 * (rows // 2) * cut_features // tensor


@pytest.mark.parametrize("name", ["sparse", "sparse Z0"])
def test_at_most_five_collectives_on_an_ordinary_step(name: str) -> None:
    """Rows are exchanged where statistics are captured, in steps 0 and 3."""
    for result in results(4, 2)[name]:
        assert result["ledger"]["kinds"]["rows"]["calls"] == 4 * 2
        capture, *ordinary, last = result["collectives"]
        assert all(len(log) <= 5 for log in ordinary), ordinary
        assert len(capture) == len(last) == len(ordinary[0]) + 1  # one reduce-scatter more


def test_the_table_says_what_is_cut() -> None:
    table = results(2, 2)["natural Z1"][0]["table"]
    assert "24 x 8 + bias (3 parts) (rows over 2 ranks)" in table
    assert "8 x 10 + bias (columns over 2 ranks)" in table


def test_a_bad_step_leaves_no_trace() -> None:
    for result in results(2, 2)["bad step"]:
        assert (result["metrics"]["skipped"], result["metrics"]["steps"]) == (1, jobs.STEPS)


@pytest.mark.parametrize(("size", "tensor"), TOPOLOGIES)
def test_what_is_whole_everywhere_stays_the_same(size: int, tensor: int) -> None:
    """Biases of row-parallel layers and uncut layers: bit for bit, in exact and block mode."""
    whole = ("gain", "block.proj.bias", "block.down.bias", "out.weight", "out.bias")
    for name, found in results(size, tensor).items():
        if CELLS[size, tensor][name].model != "net":
            continue
        for key in whole:
            for result in found[1:]:
                assert torch.equal(result["local"][key], found[0]["local"][key]), (name, key)


@pytest.mark.parametrize("name", [name for name in BLOCK if name.startswith("block")])
def test_block_mode_sends_nothing_between_tensor_ranks(name: str) -> None:
    """One data rank: what is left are the vote and the scalars of the whole model."""
    for result in results(2, 2)[name]:
        assert result["ledger"]["kinds"].keys() <= {"vote", "scalars"}
    for result in results(4, 2)[name]:
        assert "rows" not in result["ledger"]["kinds"]
        assert all(len(log) <= 6 for log in result["collectives"])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [name for name in BLOCK if name.startswith("block Z")])
def test_block_mode_preconditions_every_shard_by_itself(size: int, name: str) -> None:
    """Factors are diagonal blocks of the whole layer's; the KL clip covers the whole model."""
    cell = BLOCK[name]
    model = jobs.make_model(cell).double()
    expected = Oracle(cell, list(jobs.LAYERS)).kfac
    x, y = (value.double() for value in jobs.batch(cell, 0))
    jobs.loss_of(model, cell, x, y).backward()
    raw = {key: param.grad for key, param in model.named_parameters()}
    start = {key: param.detach() for key, param in model.named_parameters()}
    directions, change = {}, 0.0
    for layer in jobs.LAYERS:
        a, g = expected.factors(layer)
        m = raw[f"{layer}.weight"]
        if layer in ("block.proj", "block.down"):  # the bias is left to AdamW
            a = a[:-1, :-1]
        else:
            m = torch.cat([m, raw[f"{layer}.bias"].unsqueeze(1)], 1)
        d = torch.empty_like(m)
        for rows, columns in _shards_of(layer):
            tile = m[rows][:, columns]
            d[rows.unsqueeze(1), columns] = formulas.natural_kronecker(
                tile, g[rows][:, rows], a[columns][:, columns], formulas.Damping(0.3, True)
            )
        directions[layer] = d
        change += jobs.LR**2 * float((d * m).sum())
    nu = min(1.0, (0.01 / change) ** 0.5)
    assert nu < 1.0
    for result in results(size, 2)[name]:
        for layer, d in directions.items():
            before, found = start[f"{layer}.weight"], result["weights"][f"{layer}.weight"]
            step = (before * (1 - jobs.LR * jobs.DECAY) - found.double()) / jobs.LR
            assert difference(step, nu * d[:, : before.shape[1]]) < 1e-4, layer
        assert result["metrics"]["kl_scale"] == pytest.approx(nu, rel=1e-5)
        assert "is whole on every tensor rank" in result["table"]


def _shards_of(layer: str) -> list[tuple[Tensor, Tensor]]:
    """Rows and columns (bias included) of each of two ranks, in a layer of the net."""
    width, inner = jobs.WIDTH, jobs.INNER
    sizes = {
        "block.qkv": (3 * width, width + 1),
        "block.proj": (width, width),
        "block.up": (inner, width + 1),
        "block.down": (width, inner),
        "out": (width, width + 1),
    }
    rows, columns = (torch.arange(n) for n in sizes[layer])
    if layer == "block.qkv":
        halves = rows.view(3, 2, width // 2).transpose(0, 1).reshape(2, -1)
        return [(half, columns) for half in halves]
    if layer == "block.up":
        return [(half, columns) for half in rows.chunk(2)]
    if layer == "out":
        return [(rows, columns)]
    return [(rows, half) for half in columns.chunk(2)]


@pytest.mark.parametrize(
    "mode", ["exact bf16 Z0", "exact bf16 Z1", "exact bf16 Z2", "block bf16 Z1"]
)
def test_bf16_moves_weights_as_fp32_does(mode: str) -> None:
    """bf16 rounds rows and gradients (2^-9): the same way, not the same numbers."""
    start = dict(jobs.make_model(Cell(NATURAL)).named_parameters())
    rounded, exact = (
        torch.cat([(result["weights"][k] - v.detach()).flatten() for k, v in start.items()])
        for result in (
            results(2, 2)[mode][0],
            results(2, 2)["block Z1" if mode.startswith("block") else "natural Z1"][0],
        )
    )
    assert torch.cosine_similarity(rounded, exact, dim=0) > 0.99


@pytest.mark.parametrize("keeps_inputs", [True, False])
def test_an_error_amid_an_exchange_of_rows_reaches_all_ranks(keeps_inputs: bool) -> None:
    """P6: rank 0 fails between two exchanges of the same step, the others go on.

    Inputs that autograd does not keep (saved-tensor hooks) are worked on in the forward pass.
    """
    errors = world(2).run_expecting_errors(
        jobs.failing_product, 2, Cell(NATURAL), keeps_inputs, isolated=True
    )
    for error in errors:
        assert error is not None
        assert "rank 0 failed: MemoryError: no memory for products" in error.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero_optimization": {"stage": 3}}, "use stage 0, 1 or 2"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer",
        ),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel"),
    ],
)
def test_what_does_not_go_with_autotp_is_refused(changes: dict[str, Any], words: str) -> None:
    config = {"tensor_parallel": {"autotp_size": 2}, **changes}
    with pytest.raises(UnsupportedError, match="E150") as refusal:
        check_config(config)
    assert words in str(refusal.value)
    check_config({**config, "zero_optimization": {"stage": 2}, "expert_parallel": {}})


def test_resume_is_exact(tmp_path: Path) -> None:
    """In block mode tensor ranks have layers of the same name: one overwrote the other's file."""
    names = ["natural Z1", "block Z1", "block orthogonal"]
    cells = [replace((SMALL | BLOCK)[name], steps=jobs.STEPS) for name in names]
    by_rank = world(2).run(jobs.resumed, 2, cells, str(tmp_path), isolated=True, timeout=120)
    for found in by_rank:
        for name, (straight, resumed) in zip(names, found, strict=True):
            for key, value in straight.items():
                assert torch.equal(value, resumed[key]), (name, key)


def test_the_configuration_file_trains() -> None:
    """configs/zero1_kfac_autotp.json on two ranks that hold one Llama between them."""
    for steps, cut in world(2).run(
        jobs.from_file, str(CONFIGS / "zero1_kfac_autotp.json"), isolated=True
    ):
        assert steps == 2 and cut

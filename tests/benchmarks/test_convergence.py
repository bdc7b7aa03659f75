"""The convergence benchmarks: resuming, search, comparison, and tiny runs of every optimizer."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.convergence import __main__ as cli
from benchmarks.convergence.cells import Cell, Record, Results, Setting
from benchmarks.convergence.compare import Reach, rows, steps_to
from benchmarks.convergence.cost import Cost, measure, read_costs
from benchmarks.convergence.images import ResNet
from benchmarks.convergence.optimizers import BUILDERS, Matrices, build, split
from benchmarks.convergence.search import AXES, TEXT_GRID, search
from benchmarks.convergence.table import text as table_text
from benchmarks.convergence.tasks import TextTask
from benchmarks.convergence.train import Trainer, run_cell
from launch.model import GPT, GPTConfig

SETTING = Setting(4e-3, 8e-3, 2)
NEEDS_SOAP = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None, reason="needs pytorch-optimizer"
)
NAMES = [pytest.param(n, marks=NEEDS_SOAP) if n == "soap" else n for n in sorted(BUILDERS)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


@pytest.fixture
def task(source: Path) -> TextTask:
    sizes = GPTConfig(seq_len=8, layers=1, width=8, heads=2)
    return TextTask("fox", source, sizes=sizes, batch=4, sequences=8)


def cell(optimizer: str = "adamw", steps: int = 4, seed: int = 0) -> Cell:
    return Cell("fox", optimizer, SETTING, steps, seed, 4)


def record(optimizer: str, steps: int, seed: int, loss: float) -> Record:
    return Record(cell(optimizer, steps, seed), loss, loss, None, 1.0, ((1, loss),), "fox")


def test_results_survive_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "x.jsonl"
    results = Results(path)
    first, second = record("adamw", 4, 0, 2.0), record("adamw", 4, 1, math.inf)
    results.add(first)
    results.add(second)
    with path.open("a") as stream:
        stream.write('{"cell": {"tas')
    again = Results(path)
    assert again.records[first.cell] == first
    assert again.records[second.cell].loss == math.inf
    third = record("kfac", 4, 0, 1.0)
    again.add(third)
    assert list(Results(path).records) == [first.cell, second.cell, third.cell]


def test_the_tuned_setting_is_the_best_at_the_tuned_length(tmp_path: Path) -> None:
    results = Results(tmp_path / "x.jsonl")
    for lr, steps, seed, loss in ((1, 4, 0, 2.0), (2, 4, 0, 1.5), (3, 8, 0, 1.0), (4, 4, 1, 0.1)):
        found = record("adamw", steps, seed, loss)
        results.add(replace(found, cell=replace(found.cell, setting=Setting(lr, 1.0, 1))))
    assert results.best(cell()).lr == 2
    with pytest.raises(LookupError, match="kfac"):
        results.best(cell("kfac"))


def test_search_ends_where_no_neighbour_is_better() -> None:
    def loss(setting: Setting) -> float:
        # Rates that depend on each other, so that an axis has to be visited twice.
        x, y = math.log2(setting.lr / 2e-3), math.log2(setting.aux_lr / 1.6e-2)
        return x * x + y * y + 1.2 * x * y + abs(setting.warmup - 40) / 100

    start = Setting(3.2e-2, 2e-3, 120)
    best = search(TEXT_GRID, start, loss)
    around = [other for axis in AXES for other in TEXT_GRID.neighbours(best, axis)]
    assert loss(best) < loss(start)
    assert all(loss(best) <= loss(other) for other in around)
    assert TEXT_GRID.edges(replace(best, warmup=120)) == ["warmup"]


def test_steps_to_a_target_come_from_complete_runs() -> None:
    losses = {100: 2.0, 200: 1.0, 300: 0.9}
    assert steps_to(1.5, losses) == Reach(150.0)
    assert steps_to(2.0, losses) == Reach(100)
    assert steps_to(2.5, losses) == Reach(100, "<=")
    assert steps_to(0.5, losses) == Reach(300, ">")


def test_rows_compare_seed_by_seed_and_leave_out_incomplete_methods() -> None:
    records = [record("adamw", 400, seed, 1.0 + seed) for seed in (1, 2)]
    records += [record("kfac", 100, seed, 2.0 + seed) for seed in (1, 2)]
    records += [record("kfac", 200, seed, seed) for seed in (1, 2)]
    records += [record("muon", 200, 1, 0.5)]
    cost = Cost("fox", 4, "adamw", "kfac", "{}", 1.5, 1.4, 1.6, 0.1)
    costs = {("fox", 4, "adamw", "kfac", "{}"): cost}
    table = rows(records, costs, baseline="adamw", target_steps=400, seeds=[1, 2])
    first, last = table
    assert (first.method[0], last.method[0]) == ("kfac", "adamw")
    assert first.shares == [150 / 400, 150 / 400] and first.time == pytest.approx(1.5 * 0.375)
    assert last.steps == 1.0 and last.bound == ""
    assert "| kfac | 0.004 / 0.008 / 2 | 37.5 % | 150, 150 | 1.50 | 56 % |" in table_text(table)
    assert first.spread == last.spread == 0.0
    uneven = [*records, record("kfac", 150, 1, 1.5)]
    first = rows(uneven, costs, baseline="adamw", target_steps=400, seeds=[1, 2])[0]
    assert first.shares == [pytest.approx(133.333 / 400, abs=1e-5), 150 / 400]
    assert first.spread == pytest.approx(0.029463, abs=1e-5) and "± 2.9 %" in table_text([first])
    bounded = [r for r in records if r.cell.optimizer == "adamw" or r.cell.steps == 200]
    below = rows(bounded, costs, baseline="adamw", target_steps=400, seeds=[1, 2])[0]
    assert below.bound == "<=" and below.spread is None
    with pytest.raises(LookupError, match="no runs of adamw over 400"):
        rows(records[2:], {}, baseline="adamw", target_steps=400, seeds=[1, 2])


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_trains_the_same_way_twice(task: TextTask, name: str) -> None:
    found = run_cell(task, cell(name))
    again = run_cell(task, cell(name))
    assert math.isfinite(found.loss) and found.loss != found.select
    assert (found.loss, found.select, found.curve) == (again.loss, again.select, again.curve)
    assert found.curve[-1] == (4, found.loss)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_moves(task: TextTask, name: str) -> None:
    trainer = Trainer(task, cell(name))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    for _ in range(3):
        trainer.step()
    # Positions beyond the sequence and bytes outside the text only decay.
    for (label, now), then in zip(trainer.model.named_parameters(), before, strict=True):
        assert not torch.equal(now, then), label


def test_a_run_that_diverges_ends_early(task: TextTask) -> None:
    found = run_cell(task, replace(cell("sgd", steps=40), setting=Setting(1e30, 1e30, 0)))
    assert found.loss == math.inf and '"loss": null' in found.line()


def test_matrices_share_memory_with_weights() -> None:
    model = GPT(GPTConfig(seq_len=8, layers=1, width=8, heads=2))
    hidden, rest = split(model, ("head",))
    assert len(hidden) == 4 and all(p is not model.head.weight for p in hidden.values())
    assert len(hidden) + len(rest) == len(list(model.parameters()))
    matrices = Matrices(hidden)
    assert len(matrices.parameters) == 6  # Q, K and V apart
    weight = hidden["blocks.0.qkv.weight"]
    weight.grad = torch.arange(weight.numel(), dtype=torch.float32).view_as(weight)
    grads = weight.grad.chunk(3)
    matrices.take_gradients()
    assert weight.grad is None
    assert all(p.grad is not None for p in matrices.parameters[:3])
    for part, grad in zip(matrices.parameters[:3], grads, strict=True):
        assert part.grad is not None and torch.equal(part.grad, grad)
        with torch.no_grad():
            part.zero_()
    assert weight.abs().sum() == 0


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "kfac", "kfac_sgd"])
def test_images_train_with(name: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = ResNet(4)
    images, labels = torch.randn(16, 1, 28, 28), torch.arange(16) % 10
    bundle = build(model, Cell("x", name, Setting(1e-2, 1e-2, 0), 8, 0, 16), ("head",))
    losses = []
    for _ in range(8):
        bundle.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        bundle.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_cost_is_a_ratio_of_processor_times(task: TextTask) -> None:
    (found,) = measure(task, cell(), [cell("muon")], rounds=2, block=1)
    assert found.low <= found.ratio <= found.high and found.unit > 0


def test_commands_resume_and_print(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "runs.jsonl"
    shared = ["--results", str(results), "--task", "fox", "--text", f"fox={source}", "--batch", "2"]
    setting = ["--setting", "4e-3", "8e-3", "1"]
    for optimizer, steps in (("adamw", ["2"]), ("kfac", ["1", "2"])):
        given = ["run", *shared, "--optimizer", optimizer, "--steps", *steps, "--seeds", "1"]
        assert cli.main([*given, *setting]) == 0
    lines = results.read_text()
    assert lines.count("\n") == 3
    again = ["run", *shared, "--optimizer", "adamw", "--steps", "2", "--seeds", "1", *setting]
    assert cli.main(again) == 0
    assert results.read_text() == lines
    assert cli.main(["cost", *shared, "--optimizers", "kfac", "--rounds", "1"]) == 0
    assert len(read_costs(results)) == 1
    chosen = [*shared, "--target-steps", "2", "--seeds", "1"]
    capsys.readouterr()
    assert cli.main(["table", *chosen]) == 0
    assert capsys.readouterr().out.startswith("| optimizer |")
    assert cli.main([*again[:11], "--steps", "2", "--seeds", "0", *setting]) == 0
    capsys.readouterr()
    assert cli.main(["tries", *shared]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3 and printed[2].startswith("| adamw, 2 | 0.004 / 0.008 / 1 | ")
    assert cli.main(["plot", *chosen, "--out", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").stat().st_size > 0
    assert cli.main(["table", *shared, "--target-steps", "9"]) == 2
    assert "no runs of adamw over 9 steps" in capsys.readouterr().err

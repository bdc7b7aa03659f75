"""Bad input: one clear error on every rank, before the first step, never a hang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ds_kfac
from tests._harness import deepspeed_cpu, world
from tests.hosts import topology_jobs as jobs
from tests.hosts.topology_jobs import Cell

ROOT = Path(__file__).resolve().parents[2]
SGD = {"type": "SGD", "params": {"lr": 0.1}}
ADAM = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}


def _kfac(**params: Any) -> dict[str, Any]:
    return {"type": "KFAC", "params": {"lr": 0.1, **params}}


# name: (JSON beyond the batch size, model, fragments of the message)
CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "unknown key": (
        {"optimizer": SGD, "kfac": {"inv_update_step": 10}},
        "net",
        ["E201", "inv_update_step", "did you mean 'inv_update_steps'?", "Known keys"],
    ),
    "unknown key of type KFAC": (
        {"optimizer": _kfac(wieght_decay=0.1)},
        "net",
        ["E201", "wieght_decay", "did you mean 'weight_decay'?"],
    ),
    "wrong type": (
        {"optimizer": SGD, "kfac": {"damping": "1e-3"}},
        "net",
        ["E201", "damping", "'1e-3' (str)", "number"],
    ),
    "section is null": ({"optimizer": SGD, "kfac": None}, "net", ["E202", "got None"]),
    "misspelt section": ({"optimizer": SGD, "KFAC": {}}, "net", ["E201", "KFAC", "mean 'kfac'"]),
    "optimizer is a text": (
        {"optimizer": "KFAC", "kfac": {}},
        "net",
        ["E201", "optimizer: expected an object, got 'KFAC' (str)"],
    ),
    "parameters are a text": (
        {"optimizer": {"type": "KFAC", "params": "lr"}},
        "net",
        ["E201", "optimizer.params: expected an object, got 'lr' (str)"],
    ),
    "ZeRO is a switch": (
        {"optimizer": SGD, "kfac": {}, "zero_optimization": True},
        "net",
        ["E201", "zero_optimization: expected an object, got True (bool)"],
    ),
    "rate in the section": (
        {"optimizer": SGD, "kfac": {"lr": 0.1}},
        "net",
        ["E201", "'lr'; it belongs to optimizer.params.lr"],
    ),
    "section is not an object": ({"optimizer": SGD, "kfac": 3}, "net", ["E202", "got 3 (int)"]),
    "missing learning rate": (
        {"optimizer": {"type": "KFAC", "params": {}}},
        "net",
        ["E201", "lr: required"],
    ),
    "contradiction": (
        {"optimizer": SGD, "kfac": {"factor_update_steps": 10, "inv_update_steps": 15}},
        "net",
        ["inv_update_steps (15)", "multiple", "(10)"],
    ),
    "setting in both places": (
        {"optimizer": _kfac(damping=0.1), "kfac": {"damping": 0.2}},
        "net",
        ["E207", "damping"],
    ),
    "type KFAC switched off": ({"optimizer": _kfac(enabled=False)}, "net", ["E208"]),
    "no supported layer": (
        {"optimizer": SGD, "kfac": {}},
        "norms",
        ["E132", "no layer", "LayerNorm is not supported"],
    ),
    "pattern without a match": (
        {"optimizer": SGD, "kfac": {"skip_layers": ["frist"]}},
        "net",
        ["E134", "'frist'", "did you mean 'first'?"],
    ),
    "direction under Adam": (
        {"optimizer": ADAM, "kfac": {"direction": "orthogonal"}},
        "net",
        ["E205", "AdamW", "optimizer type 'KFAC'"],
    ),
    "unsupported stage": (
        {"optimizer": SGD, "kfac": {}, "zero_optimization": {"stage": 7}},
        "net",
        ["E150", "stage=7"],
    ),
    "unsupported wrapper": (
        {
            "optimizer": SGD,
            "kfac": {},
            "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}},
        },
        "net",
        ["E150", "zenflow"],
    ),
    **{
        f"strategy {strategy} where gradients are cut": (
            {"optimizer": SGD, "kfac": {"strategy": strategy, "grad_worker_fraction": fraction}},
            "net",
            ["E156", f"'{strategy}'", "whole on every rank", "3 layers", "use 'zero_aligned'"],
        )
        for strategy, fraction in (("communication", None), ("hybrid", 1.0))
    },
    "workers that do not divide the ranks": (
        {
            "optimizer": SGD,
            "kfac": {"strategy": "hybrid", "grad_worker_fraction": 0.7},
            "zero_optimization": {"stage": 0},
        },
        "net",
        ["E214", "0.7 of 2 ranks is 1.4 ranks", "1/2, 2/2"],
    ),
}


def _initialize(rank: int, size: int, name: str) -> None:
    deepspeed_cpu.prepare()
    extra, model, _ = CASES[name]
    net = jobs.make_net(Cell("2", {})) if model == "net" else nn.Sequential(nn.LayerNorm(4))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        **extra,
    }
    ds_kfac.initialize(model=net, model_parameters=net.parameters(), config=config)


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_every_rank_raises_the_same_clear_error(name: str) -> None:
    """The message shows the value, what is allowed and the fix."""
    errors = world(2).run_expecting_errors(_initialize, name)
    for error in errors:
        assert error is not None
        for fragment in CASES[name][2]:
            assert fragment in error.text, error.text
    assert errors[0].same_error == errors[1].same_error


def _different_config(rank: int, size: int) -> None:
    deepspeed_cpu.prepare()
    net = jobs.make_net(Cell("2", {}))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": SGD,
        "kfac": {"damping": 0.1 + rank},
    }
    ds_kfac.initialize(model=net, model_parameters=net.parameters(), config=config)


@pytest.mark.dist
def test_settings_that_differ_between_ranks_are_refused() -> None:
    """E203 shows both; otherwise ranks would refresh with different damping."""
    for error in world(2).run_expecting_errors(_different_config):
        assert error is not None
        assert "KFAC-E203" in error.text
        assert '"damping":1.1' in error.text


def _only_one_asks(rank: int, size: int, section: Any) -> None:
    deepspeed_cpu.prepare()
    net = jobs.make_net(Cell("2", {}))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": SGD, "kfac": {}}
    if rank == 1:
        config |= {"kfac": section}
        if section is None:
            del config["kfac"]
    ds_kfac.initialize(model=net, model_parameters=net.parameters(), config=config)


@pytest.mark.dist
@pytest.mark.parametrize("section", [None, {"enabled": False}])
def test_ranks_that_are_not_asked_for_it_stop_all(section: Any) -> None:
    """A node with an old JSON trained without K-FAC, and the others waited for it."""
    for error in world(2).run_expecting_errors(_only_one_asks, section):
        assert error is not None
        assert "KFAC-E203 whether K-FAC is asked for differs" in error.text


def _other_base_optimizer(rank: int, size: int) -> None:
    deepspeed_cpu.prepare()
    net = jobs.make_net(Cell("2", {}))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9 * rank)
    config = {"train_micro_batch_size_per_gpu": 1, "kfac": {"direction": "orthogonal"}}
    ds_kfac.initialize(model=net, optimizer=optimizer, config=config)


@pytest.mark.dist
def test_an_engine_that_one_rank_refuses_stops_all() -> None:
    """What is checked between DeepSpeed's start and ours raised on one rank alone."""
    errors = world(2).run_expecting_errors(_other_base_optimizer)
    for error in errors:
        assert error is not None
        assert "KFAC-E205" in error.text


def _bare_model(rank: int, size: int) -> None:
    net = jobs.make_net(Cell("2", {}))
    ds_kfac.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), {})


@pytest.mark.dist
def test_bare_model_in_a_distributed_job_is_refused() -> None:
    """Without DDP nobody averages gradients, or somebody does whom ds_kfac does not know."""
    for error in world(2).run_expecting_errors(_bare_model):
        assert error is not None
        assert "KFAC-E204" in error.text
        assert "DistributedDataParallel" in error.text


def test_attaching_twice_is_refused() -> None:
    """Two preconditioners on one optimizer would apply the curvature twice."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kfac = ds_kfac.attach(net, optimizer, {})
    with pytest.raises(ds_kfac.KFACError, match="E212"):
        ds_kfac.attach(net, optimizer, {})
    kfac.detach()
    ds_kfac.attach(net, optimizer, {}).detach()


def _unreadable_on_one_rank(rank: int, size: int, folder: str) -> None:
    deepspeed_cpu.prepare()
    net = jobs.make_net(Cell("2", {}))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": SGD, "kfac": {}}
    path = Path(folder) / "config.json"
    if rank == 0:
        path.write_text(json.dumps(config))
    torch.distributed.barrier()
    name = str(path if rank == 0 else path.with_name("absent.json"))
    ds_kfac.initialize(model=net, model_parameters=net.parameters(), config=name)


@pytest.mark.dist
def test_one_rank_without_its_file_stops_all(tmp_path: Path) -> None:
    """A node without the mounted folder: its peers would wait for it in the first collective."""
    errors = world(2).run_expecting_errors(_unreadable_on_one_rank, str(tmp_path))
    for error in errors:
        assert error is not None
        assert "KFAC-E206" in error.text
        assert "absent.json" in error.text


def test_closures_are_refused() -> None:
    """A closure evaluates gradients after the preconditioner has run."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ds_kfac.attach(net, optimizer, {})
    with pytest.raises(ds_kfac.KFACError, match="E152"):
        optimizer.step(lambda: net(torch.randn(4, 3)).sum())


def test_optimizers_that_cannot_consume_directions_are_refused() -> None:
    """Muon orthogonalises its input again; LBFGS evaluates the loss inside its step."""
    net = nn.Linear(3, 2, bias=False)
    for optimizer in (torch.optim.LBFGS(net.parameters()), torch.optim.Muon(net.parameters())):
        with pytest.raises(ds_kfac.KFACError, match="E153"):
            ds_kfac.attach(net, optimizer, {})


def _wrapped(name: str) -> nn.Module:
    """What a wrapper leaves of a model; fully_shard mixes a base class into every module."""
    if name == "DataParallel":
        return nn.DataParallel(nn.Linear(3, 2))
    net = nn.Sequential(nn.Linear(3, 2))
    base = type(name, (), {})
    net[0].__class__ = type("FSDPLinear", (base, nn.Linear), {})
    return net


@pytest.mark.parametrize("name", ["DataParallel", "FSDPModule", "FullyShardedDataParallel"])
def test_wrappers_that_split_the_model_are_refused(name: str) -> None:
    """FSDP2 leaves no class of its own name: it was attached to, and shards taken for weights."""
    net = _wrapped(name)
    with pytest.raises(ds_kfac.KFACError, match=f"E151 {name} is not supported; use"):
        ds_kfac.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), {})


def test_the_refused_wrappers_exist_under_these_names() -> None:
    """A renamed class would be let through."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    assert {"FSDPModule", "FullyShardedDataParallel"} <= set(vars(fsdp))


@pytest.mark.launcher
def test_launcher_ends_with_an_error_code(tmp_path: Path) -> None:
    """The deepspeed launcher passes the failure on and leaves no process behind."""
    config = json.loads((ROOT / "configs/zero2_kfac.json").read_text())
    config["optimizer"]["params"]["dampng"] = 0.1
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(config))
    command = [
        str(Path(sys.executable).parent / "deepspeed"),
        "--num_gpus",
        "2",
        str(ROOT / "launch/train_gpt.py"),
        "--steps",
        "2",
        "--out",
        str(tmp_path / "out"),
        "--deepspeed",
        "--deepspeed_config",
        str(path),
    ]
    environment = _environment()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "KFAC-E201" in output
    assert "did you mean 'damping'?" in output


def _environment() -> dict[str, str]:
    import os

    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return {
        **os.environ,
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }

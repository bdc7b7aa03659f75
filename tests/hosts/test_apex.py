"""NVIDIA Apex against the unrelated PyPI package of the same name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_kfac
from ds_kfac.errors import ConfigError
from ds_kfac.hosts import apex
from tests._harness import deepspeed_cpu, world
from tests.hosts import topology_jobs as jobs
from tests.hosts.topology_jobs import Cell

IMPORT_BOMB = "raise RuntimeError('the wrong package was imported')\n"
# Stands where NVIDIA's package stands; its optimizer is torch's AdamW under Apex's name.
FUSED_ADAM = (
    "import torch\n"
    "class FusedAdam(torch.optim.AdamW):\n"
    "    def __init__(self, params, lr=1e-3, weight_decay=0.0):\n"
    "        super().__init__(params, lr=lr, weight_decay=weight_decay)\n"
)


def _unrelated(folder: Path) -> None:
    package = folder / "apex"
    package.mkdir()
    (package / "__init__.py").write_text(IMPORT_BOMB)
    (package / "lib").mkdir()


def _nvidia(folder: Path) -> None:
    package = folder / "apex"
    (package / "multi_tensor_apply").mkdir(parents=True)
    (package / "optimizers").mkdir()
    (package / "__init__.py").write_text("")
    (package / "optimizers" / "__init__.py").write_text("from .fused_adam import FusedAdam\n")
    (package / "optimizers" / "fused_adam.py").write_text(FUSED_ADAM)


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "apex"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in _loaded():
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    yield tmp_path
    # What a test imported from here would be found by every later test of this process.
    for name in _loaded():
        del sys.modules[name]


def test_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of most machines."""
    monkeypatch.setitem(sys.modules, "apex", None)
    assert apex.apex_status() == "absent"
    with pytest.raises(ConfigError, match=r"E211.*no package apex is installed.*Adam or AdamW"):
        apex.fused_adam({})


def test_unrelated_package_is_recognised_without_importing_it(folder: Path) -> None:
    """``pip install apex`` brings a web-login toolkit; importing it runs foreign code."""
    _unrelated(folder)
    assert apex.apex_status() == "unrelated"
    with pytest.raises(ConfigError, match=r"E211.*unrelated one of that name on PyPI"):
        apex.fused_adam({})


def test_nvidia_package_is_recognised(folder: Path) -> None:
    """By its own files, not by its name."""
    _nvidia(folder)
    assert apex.apex_status() == "nvidia"
    optimizer = apex.fused_adam({"lr": 0.5})([torch.nn.Parameter(torch.ones(2))])
    assert type(optimizer).__name__ == "FusedAdam"
    assert optimizer.param_groups[0]["lr"] == 0.5


def _engine_with_fused_adam(rank: int, size: int, folder: str | None) -> str:
    if folder is not None:
        sys.path.insert(0, folder)
    deepspeed_cpu.prepare()
    net = jobs.make_net(Cell("2", {}))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "FusedAdam", "params": {"lr": 0.01}},
        "kfac": {"direction": "natural", "factor_update_steps": 1, "inv_update_steps": 1},
    }
    engine, *_ = ds_kfac.initialize(model=net, model_parameters=net.parameters(), config=config)
    ((x, y, factor),) = jobs.micro_batches(rank, size, Cell("2", {}), 0)
    engine.backward(jobs.loss_sum(engine(x), y, integers=False) * factor)
    engine.step()
    name = f"{type(engine.basic_optimizer).__module__}.{type(engine.basic_optimizer).__name__}"
    assert engine.kfac.metrics()["preconditions"] == 1
    engine.destroy()
    return name


@pytest.mark.dist
def test_fused_adam_as_base_optimizer(tmp_path: Path) -> None:
    """Accepted where Apex is installed, otherwise one clear error on every rank."""
    _nvidia(tmp_path)
    names = world(2).run(_engine_with_fused_adam, str(tmp_path), isolated=True)
    assert names == ["apex.optimizers.fused_adam.FusedAdam"] * 2
    errors = world(2).run_expecting_errors(_engine_with_fused_adam, None)
    assert all(error is not None and "KFAC-E211" in error.text for error in errors)

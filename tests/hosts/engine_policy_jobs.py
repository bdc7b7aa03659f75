"""Jobs that load engines' checkpoints in every way, and with DeepSpeed's own tools."""

from __future__ import annotations

import inspect
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_kfac
from ds_kfac.checkpoint import disk
from ds_kfac.errors import KFACError
from tests._harness import deepspeed_cpu
from tests.faults.checkpoint_jobs import at_tick, no_space
from tests.hosts import topology_jobs as jobs
from tests.hosts.engine_checkpoint_jobs import SETTINGS, differences, fingerprint, train
from tests.hosts.topology_jobs import Cell
from tests.unit.checkpoint import forging

CELL = Cell("2", {"direction": "natural", **SETTINGS}, own=False)


class Script:
    """One engine with checkpoints of steps 3 (tag "a") and 5 (latest), itself at step 7."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        self.rank, self.folder = rank, Path(folder)
        self.engine = jobs.make_engine(CELL, size)
        self.kfac = self.engine.kfac
        self.prints: dict[int, dict[str, Any]] = {}
        self.seen: list[tuple[bool, bool]] = []
        commit = self.engine.checkpoint_engine.commit
        self.engine.checkpoint_engine.commit = lambda info: self._note(info) or commit(info)
        for step, tag in ((3, "a"), (5, None)):
            train(self.engine, rank, size, CELL, step)
            self.engine.save_checkpoint(folder, tag)
            self.prints[step] = fingerprint(self.engine)
        train(self.engine, rank, size, CELL, 7)
        self.messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ds_kfac").addHandler(handler)

    def _note(self, info: Any) -> None:
        """When DeepSpeed commits a tag: K-FAC's state is complete, ``latest`` has not moved."""
        manifest = Path(info.save_dir, info.tag, "kfac", "manifest.json")
        latest = Path(info.save_dir, "latest")
        pointed = latest.read_text() if latest.exists() else ""
        self.seen.append((manifest.exists(), pointed != info.tag))

    def policy(self, resume: str) -> None:
        self.kfac.config = self.kfac.config.model_copy(update={"resume": resume})

    def once(self, change: Callable[[], object]) -> None:
        """Change files, on one rank and while no other looks."""
        dist.barrier()
        if self.rank == 0:
            change()
        dist.barrier()

    def put(self, source: str, target: str = "b") -> None:
        """Give a tag the K-FAC state of another one."""
        folder = self.folder / target / "kfac"
        self.once(lambda: shutil.copytree(self.folder / source / "kfac", folder))

    def drop(self, target: str = "b") -> None:
        self.once(lambda: shutil.rmtree(self.folder / target / "kfac"))

    def outcome(self, *args: Any, **kwargs: Any) -> str:
        """What a load does: the error, or K-FAC's step afterwards; errors change nothing."""
        before = fingerprint(self.engine)
        try:
            path, _ = self.engine.load_checkpoint(*args, **kwargs)
        except KFACError as error:
            if error.code != "E305":  # only known once the engine is loaded
                assert differences(fingerprint(self.engine), before) == []
            return str(error)
        return f"{'loaded' if path else 'nothing'} {self.kfac.counters.steps}"


def policies(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Every value of ``resume`` with every kind of checkpoint."""
    script = Script(rank, size, folder)
    engine, kfac = script.engine, script.kfac
    result: dict[str, Any] = {"order": script.seen}
    names = inspect.signature(engine.save_checkpoint).parameters
    result["signature"] = "exclude_frozen_parameters" in names
    result["module only"] = script.outcome(folder, load_module_only=True)
    result["without optimizer"] = script.outcome(folder, load_optimizer_states=False)
    result["latest"] = script.outcome(folder)
    result["latest state"] = differences(fingerprint(engine), script.prints[5])
    result["tag"] = script.outcome(folder, "a")
    result["tag state"] = differences(fingerprint(engine), script.prints[3])
    engine.save_checkpoint(folder, "c")
    script.policy("fresh")
    result["fresh"] = script.outcome(folder)
    script.once(lambda: shutil.copytree(script.folder / "a", script.folder / "b"))
    script.drop()
    script.policy("require")
    result["require absent"] = script.outcome(folder, "b")
    result["require nothing"] = script.outcome(f"{folder}/nowhere")
    result["require present"] = script.outcome(folder, "a")
    script.policy("auto")
    result["auto nothing"] = script.outcome(f"{folder}/nowhere")
    script.messages.clear()
    result["auto absent"] = script.outcome(folder, "b")
    result["warning"] = [text for text in script.messages if "W304" in text]
    script.put("global_step5")
    result["other step"] = script.outcome(folder, "b")
    script.drop()
    script.put("c")
    result["other save"] = script.outcome(folder, "b")
    script.drop()
    script.put("a")
    result["right one"] = script.outcome(folder, "b")
    damage = forging.raw(forging.flip, hashed=False)
    script.once(lambda: damage(script.folder / "b" / "kfac"))
    result["damaged"] = script.outcome(folder, "b")
    script.policy("fresh")
    result["damaged, fresh"] = script.outcome(folder, "b")
    result["full disk"] = save_without_space(script)
    kfac.detach()
    wrapped = ("save_checkpoint", "load_checkpoint")
    result["detached"] = [name for name in wrapped if name in engine.__dict__]
    engine.save_checkpoint(folder, "d")
    result["without"] = (script.folder / "d" / "kfac").exists()
    engine.destroy()
    return result


def save_without_space(script: Script) -> tuple[str, str, bool]:
    """A save that fails on one rank: its error, where ``latest`` points, and what DeepSpeed did."""
    original = disk.tick
    if script.rank == 1:
        at_tick(2, no_space)
    text = "saved"
    try:
        script.engine.save_checkpoint(str(script.folder), "full")
    except KFACError as error:
        text = str(error)
    disk.tick = original
    models = list(script.folder.glob("full/*.pt"))
    return text, (script.folder / "latest").read_text(), bool(models)


def convertible_engine(cell: Cell, size: int, **extra: Any) -> Any:
    """Type KFAC, or a section beside Adam: DeepSpeed's conversion looks for Adam's states."""
    deepspeed_cpu.prepare()
    config = jobs.deepspeed_config(cell, size) | extra
    if not cell.own:
        config |= {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
    net = jobs.make_net(cell)
    return ds_kfac.initialize(model=net, model_parameters=net.parameters(), config=config)[0]


def convertible_cell(name: str, **settings: Any) -> Cell:
    """From "3" or "3 KFAC"."""
    stage, _, kind = name.partition(" ")
    return Cell(stage, {"direction": "ekfac", **SETTINGS, **settings}, own=kind == "KFAC")


def convert(rank: int, size: int, folder: str, stages: list[str]) -> list[dict[str, Tensor]]:
    """Save at 2 ranks; collect fp32 weights and convert, as DeepSpeed's scripts do."""
    import argparse

    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    results = []
    for stage in stages:
        cell = convertible_cell(stage)
        engine = convertible_engine(cell, size)
        train(engine, rank, size, cell, 5)
        base = Path(folder, stage)
        engine.save_checkpoint(str(base))
        weights = jobs.full_weights(engine)
        train(engine, rank, size, cell, 8)
        results.append(jobs.full_weights(engine))
        engine.destroy()
        if rank == 0:
            collected = get_fp32_state_dict_from_zero_checkpoint(str(base))
            assert collected.keys() == weights.keys()
            assert all(torch.equal(collected[name], weights[name]) for name in weights)
            arguments = argparse.Namespace(
                input_folder=str(base / "global_step5"),
                output_folder=str(base / "global_step5_universal"),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
            ds_to_universal.main(arguments)
            (base / "latest_universal").write_text("global_step5_universal")
        dist.barrier()
    return results


def load_universal(
    rank: int, size: int, folder: str, stages: list[str]
) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """K-FAC's state after loading a universal checkpoint, and weights after three more steps."""
    results = []
    for stage in stages:
        cell = convertible_cell(stage, resume="require")
        engine = convertible_engine(cell, size, checkpoint={"load_universal": True})
        engine.load_checkpoint(f"{folder}/{stage}")
        loaded = {
            f"{name}/{key}": torch.as_tensor(value).clone()
            for name, layer in engine.kfac.state_dict()["layers"].items()
            for key, value in layer.items()
        }
        states = engine.basic_optimizer.state
        if cell.own:  # of the one auxiliary parameter alone
            assert sum(state["exp_avg"].numel() for state in states.values()) < 2 * jobs.WIDTH
        train(engine, rank, size, cell, 8)
        results.append((loaded, jobs.full_weights(engine)))
        engine.destroy()
    return results

"""``ds-kfac doctor``: whether this machine can train with K-FAC, and what to do if not."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from ds_kfac.cli import build_locks, dry_run

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: ``fail`` keeps K-FAC from working; ``warn`` may be meant so.
        found: What was found.
        fix: What to do about it; empty where nothing is to be done.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Package:
    """A package that ds_kfac works with.

    Attributes:
        name: On the registry.
        minimum: Oldest version that is supported.
        lacking: Status where it is not installed.
        use: What it is needed for.
    """

    name: str
    minimum: str
    lacking: Status
    use: str


MINIMUM_PYTHON = "3.11"
PACKAGES = (
    Package("torch", "2.4", "fail", "everything"),
    Package("pydantic", "2", "fail", "reading settings"),
    Package("safetensors", "0.4", "fail", "saving and loading K-FAC's state"),
    Package("deepspeed", "0.19", "warn", "ds_kfac.initialize; ds_kfac.attach works without it"),
    Package("transformers", "4.50", "ok", "Hugging Face models and its Trainer"),
    Package("megatron-core", "0.14", "ok", "Megatron-Core models"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds that the dry run may take (120)"
    )
    parser.add_argument("--no-dry-run", action="store_true", help="start no processes")


def report(options: argparse.Namespace) -> tuple[str, int]:
    """Run all checks.

    Args:
        options: From :func:`add_arguments`.

    Returns:
        What to print, and the exit code: 1 if a check has failed.
    """
    checks = run_checks(None if options.no_dry_run else options.timeout)
    failed = any(check.status == "fail" for check in checks)
    if options.json:
        whole = {"ok": not failed, "checks": [asdict(check) for check in checks]}
        return json.dumps(whole, indent=2) + "\n", int(failed)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<15}  {check.found}")
        if check.fix:
            lines.append(f"{'':<23}  fix: {check.fix}")
    count = {status: sum(c.status == status for c in checks) for status in ("fail", "warn")}
    lines.append(f"{len(checks)} checks: {count['fail']} failed, {count['warn']} with a warning")
    return "\n".join(lines) + "\n", int(failed)


def run_checks(dry_run_seconds: float | None) -> list[Check]:
    """All checks in order; one that cannot be made has failed.

    Args:
        dry_run_seconds: Time limit of the dry run; None leaves it out.
    """
    works: list[tuple[str, Callable[[], Check]]] = [("python", _python)]
    works += [(package.name, lambda p=package: _package(p)) for package in PACKAGES]  # type: ignore[misc]
    works += [
        ("accelerator", _accelerator),
        ("backends", _backends),
        ("apex", _apex),
        ("build locks", _locks),
    ]
    if dry_run_seconds is not None:
        works.append(("dry run", lambda: _dry_run(dry_run_seconds)))
    return [_guarded(name, work) for name, work in works]


def _guarded(name: str, work: Callable[[], Check]) -> Check:
    try:
        return work()
    except Exception as error:
        text = f"cannot be checked: {type(error).__name__}: {error}"
        return Check(name, "fail", text, "repair the installation of what is named here")


def _python() -> Check:
    found = f"{platform.python_version()} ({sys.executable})"
    if _numbers(platform.python_version()) < _numbers(MINIMUM_PYTHON):
        return Check("python", "fail", found, f"use Python {MINIMUM_PYTHON} or later")
    return Check("python", "ok", found)


def _package(package: Package) -> Check:
    """From what is recorded about it: importing DeepSpeed alone takes seconds."""
    name, wanted = package.name, f"pip install '{package.name}>={package.minimum}'"
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        text = f"not installed; it is for {package.use}"
        return Check(name, package.lacking, text, "" if package.lacking == "ok" else wanted)
    if _numbers(found) < _numbers(package.minimum):
        status: Status = "fail" if package.lacking == "fail" else "warn"
        return Check(name, status, f"{found}, older than {package.minimum}", wanted)
    if name == "torch":
        importlib.import_module("torch")  # its libraries may be missing
    return Check(name, "ok", found)


def _accelerator() -> Check:
    import torch

    chosen = os.environ.get("DS_ACCELERATOR")
    note = f"; DS_ACCELERATOR={chosen}" if chosen else ""
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Check("accelerator", "ok", f"{len(names)} x {names[0]}{note}")
    if Path("/proc/driver/nvidia/version").exists():
        built = torch.version.cuda or "no CUDA"
        return Check(
            "accelerator",
            "warn",
            f"an NVIDIA driver is loaded, but torch (built for {built}) finds no device{note}",
            "install a torch built for CUDA that this driver serves, and look at "
            "CUDA_VISIBLE_DEVICES",
        )
    return Check("accelerator", "ok", f"none: training runs on the CPU{note}")


def _backends() -> Check:
    import torch

    from ds_kfac.hosts.dry_run import backends

    found = backends()
    text = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in found.items())
    if not any(found.values()):
        return Check("backends", "fail", text, "install a torch that was built with distributed")
    if torch.cuda.is_available() and not found["nccl"]:
        return Check("backends", "warn", text, "install a torch that was built with NCCL")
    return Check("backends", "ok", text)


def _apex() -> Check:
    from ds_kfac.hosts.apex import apex_status

    status = apex_status()
    if status == "unrelated":
        return Check(
            "apex",
            "warn",
            "the installed apex is the unrelated package of that name on PyPI, not NVIDIA's",
            "pip uninstall apex; for optimizer FusedAdam build Apex from NVIDIA's repository",
        )
    if status == "nvidia":
        return Check("apex", "ok", "NVIDIA's")
    return Check("apex", "ok", "not installed; it is for optimizer FusedAdam")


def _locks() -> Check:
    root = build_locks.extensions_folder()
    held, stale = build_locks.find(root)
    if stale:
        paths = " ".join(str(path) for path in stale)
        return Check(
            "build locks",
            "fail",
            f"{len(stale)} left behind in {root}: DeepSpeed waits for them for ever",
            f"unless another machine builds there right now: rm {paths}",
        )
    if held:
        text = f"a build is under way in {held[0].parent}"
        return Check("build locks", "warn", text, "wait for it before starting a run")
    return Check("build locks", "ok", f"none in {root}")


def _dry_run(seconds: float) -> Check:
    outcome = dry_run.run(seconds)
    return Check("dry run", "ok" if outcome.ok else "fail", outcome.text, outcome.fix)


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers: ``2.13.0+cpu`` is (2, 13, 0), ``2.4rc1`` is (2, 4)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()

"""Environment of DeepSpeed on a machine without an accelerator."""

import os

import pytest
import torch

from launch import cpu


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_ACCELERATOR", "OMP_NUM_THREADS", "TORCH_EXTENSIONS_DIR", "LOCAL_SIZE"):
        monkeypatch.setenv(name, "")  # restored at the end, whatever the code under test sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def test_named_accelerator_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert cpu.has_accelerator()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert not cpu.has_accelerator()


def test_cores_are_shared_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    cpu.prepare_environment()
    assert os.environ["OMP_NUM_THREADS"] == "4"


def test_a_rank_always_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_SIZE", "4")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    cpu.prepare_environment()
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_the_users_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    cpu.prepare_environment()
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/somewhere"


def test_extensions_stay_inside_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    cpu.prepare_environment()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(cpu.EXTENSIONS)

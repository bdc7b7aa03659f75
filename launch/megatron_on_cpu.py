"""Run a Megatron-LM script on a machine without an accelerator, for trying things out.

    torchrun --nproc-per-node 2 -m launch.megatron_on_cpu -m ds_kfac.run \
        --megatron Megatron-LM/pretrain_gpt.py --kfac --distributed-backend gloo ...

See docs/guide/megatron.md for the flags of Megatron-LM that a CPU needs.
"""

import importlib.machinery
import importlib.util
import multiprocessing.spawn
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from launch import megatron_cpu, megatron_repairs

HELPERS = "megatron.core.datasets.helpers_cpp"


def prepare() -> None:
    """Everything that the training scripts want beyond megatron-core; idempotent."""
    megatron_cpu.install()
    megatron_repairs.apply()
    _spawn_without_main()
    _use_built_helpers()


def _spawn_without_main() -> None:
    """Checkpoints are written by a spawned process, which would run the script once more."""
    original = multiprocessing.spawn.get_preparation_data

    def data(name: str) -> dict[str, Any]:
        return {k: v for k, v in original(name).items() if not k.startswith("init_main")}

    multiprocessing.spawn.get_preparation_data = data


def _use_built_helpers() -> None:
    """A checkout compiles its index helpers; the installed megatron-core has brought them."""
    from megatron.core.datasets import utils

    relative = HELPERS.rpartition(".")[0].replace(".", os.sep)
    for folder in (os.path.join(path, relative) for path in sys.path):
        spec = importlib.machinery.PathFinder.find_spec(HELPERS, [folder])
        if spec is not None and spec.loader is not None:
            sys.modules[HELPERS] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[HELPERS])
            utils.compile_helpers = _nothing
            return


def _without_kernels() -> None:
    """Megatron-LM before 0.17 compiles kernels when it starts."""
    try:
        from megatron.legacy import fused_kernels
    except ImportError:
        return
    fused_kernels.load = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def main() -> None:
    """Run the script, or with `-m` the module, that the command line names."""
    words = sys.argv[1:]
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words or words[0].startswith("-"):
        sys.exit(f"usage: python -m launch.megatron_on_cpu SCRIPT ... | -m MODULE ...\n{__doc__}")
    checkout = _checkout(words)
    if checkout is not None:
        sys.path.insert(1, checkout)  # its megatron.core has to be the one that is patched
    prepare()
    if checkout is not None:
        _without_kernels()
    run: Callable[..., Any] = runpy.run_module if is_module else runpy.run_path
    sys.argv = words
    if is_module:
        run(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        run(words[0], run_name="__main__")


def _checkout(words: list[str]) -> str | None:
    """Folder of the Megatron-LM checkout that one of the words is a script of."""
    for word in words:
        folder = os.path.dirname(os.path.abspath(word))
        if word.endswith(".py") and os.path.isdir(os.path.join(folder, "megatron", "training")):
            return folder
    return None


if __name__ == "__main__":
    main()

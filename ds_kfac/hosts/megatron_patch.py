"""K-FAC in unmodified Megatron-LM scripts: flags beside Megatron's, K-FAC around its optimizer.

Facts about Megatron-LM that this file relies on:

* ``parse_args`` calls ``megatron.training.arguments.add_megatron_arguments`` by its global name;
* ``megatron.training.training`` imports ``get_megatron_optimizer`` by name and calls it once, with
  the model chunks as ``model_chunks`` or second argument, before it loads a checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_kfac.errors import ConfigError, UnsupportedError
from ds_kfac.hosts import megatron_arguments

_MARK = "_ds_kfac_patched"


def find_checkout(script: str | os.PathLike[str]) -> Path:
    """Folder of the Megatron-LM checkout that a script belongs to.

    Args:
        script: Path of the script, at any depth of the checkout.

    Raises:
        ConfigError: No folder above it has ``megatron/training``, and none can be imported (E215).
    """
    path = Path(script).resolve()
    for folder in path.parents:
        if (folder / "megatron" / "training").is_dir():
            return folder
    try:
        found = importlib.util.find_spec("megatron.training")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(
            "E215",
            f"--megatron {script}: no folder above it has megatron/training, and it cannot be "
            "imported either. Give a script of a Megatron-LM checkout, or put the checkout on "
            "PYTHONPATH; megatron-core alone has no training scripts",
        )
    return path.parent


def patch(script: str | os.PathLike[str]) -> None:
    """Prepare this process for a Megatron-LM script; again without effect.

    Args:
        script: The script that will be run.

    Raises:
        ConfigError: There is no Megatron-LM beside it (E215).
        UnsupportedError: Its version lacks what is to be wrapped (E150).
    """
    root = str(find_checkout(script))
    if root not in sys.path:
        sys.path.insert(1, root)  # the script's own folder comes first
    arguments: Any = importlib.import_module("megatron.training.arguments")
    training: Any = importlib.import_module("megatron.training.training")
    for module, name in (
        (arguments, "add_megatron_arguments"),
        (training, "get_megatron_optimizer"),
    ):
        if not hasattr(module, name):
            raise UnsupportedError(
                "E150", f"this version of Megatron-LM has no {module.__name__}.{name}"
            )
    _wrap(arguments, "add_megatron_arguments", _with_flags)
    _wrap(training, "get_megatron_optimizer", _with_kfac)
    if hasattr(training, "get_megatron_muon_optimizer"):
        _wrap(training, "get_megatron_muon_optimizer", _without_kfac)


def _wrap(module: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(module, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(wrapper, _MARK, True)
    setattr(module, name, wrapper)


def _with_flags(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Megatron's parser with ours; wrong settings stop the run before it builds a model."""
    parser: argparse.ArgumentParser = original(*args, **kwargs)
    megatron_arguments.add_arguments(parser)
    parse = parser.parse_known_args

    def parse_and_check(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse(*args, **kwargs)
        megatron_arguments.settings(namespace)
        return namespace, rest

    parser.parse_known_args = parse_and_check  # type: ignore[method-assign]
    return parser


def _with_kfac(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Megatron's optimizer; K-FAC in its step if the command line says so."""
    optimizer = original(*args, **kwargs)
    training: Any = importlib.import_module("megatron.training")
    config = megatron_arguments.settings(training.get_args())
    if config is None:
        return optimizer
    _check_format(training.get_args())
    from ds_kfac.hosts.megatron import attach

    chunks = kwargs["model_chunks"] if "model_chunks" in kwargs else args[1]
    kfac = attach(chunks, optimizer, config)
    if kfac is not None:
        training.print_rank_0(f"ds_kfac: {kfac.coverage()}")
    return optimizer


def _check_format(args: Any) -> None:
    """A checkpoint that would lack most of K-FAC's state is refused before it is needed."""
    ranks = getattr(args, "data_parallel_size", 1)
    if getattr(args, "save", None) and getattr(args, "ckpt_format", "") == "torch" and ranks > 1:
        raise UnsupportedError(
            "E150",
            f"not available with kfac: --ckpt-format torch with {ranks} data-parallel ranks, of "
            "which the first writes its own layers alone; use --ckpt-format torch_dist",
        )


def _without_kfac(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    training: Any = importlib.import_module("megatron.training")
    if megatron_arguments.settings(training.get_args()) is not None:
        raise UnsupportedError(
            "E153",
            "base optimizer Muon orthogonalises its input itself: leave out --kfac, or take "
            "--optimizer adam or sgd",
        )
    return original(*args, **kwargs)

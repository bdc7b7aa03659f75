"""Replace ``deepspeed.initialize`` by ``ds_kfac.initialize`` for scripts that do not know of it."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_original: Callable[..., Any] | None = None


def original_initialize() -> Callable[..., Any]:
    """DeepSpeed's own ``initialize``, whether or not it was replaced."""
    if _original is not None:
        return _original
    import deepspeed

    function: Callable[..., Any] = deepspeed.initialize
    return function


def patch() -> None:
    """Replace ``deepspeed.initialize`` in this process; again without effect.

    Code that runs ``from deepspeed import initialize`` later gets the replacement too.
    """
    global _original
    if _original is not None:
        return
    import deepspeed

    _original = deepspeed.initialize

    @functools.wraps(_original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        import ds_kfac

        return ds_kfac.initialize(*args, **kwargs)

    deepspeed.initialize = initialize


def unpatch() -> None:
    """Undo :func:`patch`; names that were imported meanwhile stay bound to the replacement."""
    global _original
    if _original is None:
        return
    import deepspeed

    deepspeed.initialize, _original = _original, None


def patch_on_import() -> None:
    """Patch as soon as DeepSpeed is imported; at once if it is already.

    A script may set variables that DeepSpeed reads while it is imported (``DS_ACCELERATOR``,
    ``TORCH_EXTENSIONS_DIR``), so it is not imported on the script's behalf.
    """
    if "deepspeed" in sys.modules:
        patch()
    elif not any(isinstance(finder, _PatchingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchingFinder())


class _PatchingFinder(MetaPathFinder):
    """Finds DeepSpeed like everybody else and patches it at the end of its import; once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "deepspeed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                patch()

            # Every search makes a new loader, so this one is nobody else's.
            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec

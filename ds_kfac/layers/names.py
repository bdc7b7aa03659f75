"""Module names: which module is inside which."""

from __future__ import annotations

from collections.abc import Iterable


def enclosing(name: str, modules: Iterable[str]) -> str | None:
    """The first of some modules that is the named one or has it inside.

    Args:
        name: Dotted module name.
        modules: Dotted names of candidates.
    """
    return next((module for module in modules if f"{name}.".startswith(f"{module}.")), None)

"""The package's source files and what they import, from their syntax trees alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "ds_kfac"


@dataclass(frozen=True)
class Import:
    """One import of a module.

    Attributes:
        module: Dotted name; ``from package import module`` counts as ``package.module``.
        line: Line of the statement.
        runtime: False under ``if TYPE_CHECKING``.
        lazy: Inside a function.
    """

    module: str
    line: int
    runtime: bool
    lazy: bool


class Source:
    """A Python file of the package."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    def __repr__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Path inside the repository."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Dotted module name."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def imports(self) -> list[Import]:
        """Every import statement of the file, resolved to modules."""
        return list(_imports(self.tree, runtime=True, lazy=False))


def _imports(node: ast.AST, *, runtime: bool, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, runtime, lazy)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0 and child.module, "imports are absolute"
            for alias in child.names:
                yield Import(_resolve(child.module, alias.name), child.lineno, runtime, lazy)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            for statement in child.body:
                yield from _imports_of(statement, runtime=False, lazy=lazy)
            for statement in child.orelse:
                yield from _imports_of(statement, runtime=runtime, lazy=lazy)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, runtime=runtime, lazy=lazy or function)


def _imports_of(statement: ast.stmt, *, runtime: bool, lazy: bool) -> Iterator[Import]:
    yield from _imports(ast.Module([statement], []), runtime=runtime, lazy=lazy)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _resolve(module: str, name: str) -> str:
    """``from a.b import c``: module ``a.b.c`` if there is such a file or torch submodule."""
    target = ROOT.joinpath(*module.split("."), name)
    is_file = module.split(".")[0] == "ds_kfac" and (
        target.with_suffix(".py").exists() or target.is_dir()
    )
    is_torch = (module, name) == ("torch", "distributed")
    return f"{module}.{name}" if is_file or is_torch else module


def sources(folder: Path = PACKAGE) -> list[Source]:
    """All Python files below a folder."""
    return [Source(path) for path in sorted(folder.rglob("*.py"))]


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""

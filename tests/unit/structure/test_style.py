"""Rules of the house that no linter checks, or that hold even where linters are switched off."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.unit.structure.sources import ROOT, Source, dotted, sources

SOURCES = sources()
SIZED = [*SOURCES, *sources(ROOT / "launch")]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
_LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def calls(source: Source) -> Iterator[ast.Call]:
    return (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))


@pytest.mark.parametrize("source", SIZED, ids=repr)
def test_sizes(source: Source) -> None:
    assert len(source.text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{source.name}: {node.name} has {lines} lines"


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_nothing_is_printed(source: Source) -> None:
    if source.name.startswith("ds_kfac/cli/"):
        return
    for call in calls(source):
        name = dotted(call.func)
        assert name not in ("print", "sys.stdout.write", "sys.stderr.write", "warnings.warn"), (
            f"{source.name}:{call.lineno} calls {name}"
        )


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_log_messages_are_formatted_by_logging(source: Source) -> None:
    """A message is a constant with placeholders: it costs nothing when the level is off."""
    for call in calls(source):
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in _LOGGING:
            continue
        if "log" not in dotted(call.func.value).lower():
            continue
        message = call.args[1] if call.func.attr == "log" else call.args[0]
        assert isinstance(message, ast.Constant), f"{source.name}:{call.lineno}"


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_modules_do_no_work_at_import(source: Source) -> None:
    """Definitions, imports and constants only."""
    allowed = (
        ast.Import,
        ast.ImportFrom,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Assign,
        ast.AnnAssign,
    )
    for node in source.tree.body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        guard = isinstance(node, ast.If) and (
            dotted(node.test) == "TYPE_CHECKING"
            or (isinstance(node.test, ast.Compare) and dotted(node.test.left) == "__name__")
        )
        assert isinstance(node, allowed) or text or guard, f"{source.name}:{node.lineno}"


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_every_module_says_what_it_is_for(source: Source) -> None:
    text = ast.get_docstring(source.tree)
    assert text and text.splitlines()[0].endswith(".")


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_errors_carry_a_code_of_their_class(source: Source) -> None:
    """KFACError subclasses are raised with ``Ennn`` in the range their docstring states."""
    ranges = {
        "ConfigError": range(200, 300),
        "UnsupportedError": range(150, 200),
        "CoverageError": range(130, 140),
        "NumericalError": range(100, 120),
        "StateError": range(300, 320),
    }
    for call in calls(source):
        name = dotted(call.func).rpartition(".")[2]
        if name not in ranges or not call.args or not isinstance(call.args[0], ast.Constant):
            continue
        code = str(call.args[0].value)
        assert code.startswith("E") and int(code[1:]) in ranges[name], (
            f"{source.name}:{call.lineno}: {name} with {code}"
        )

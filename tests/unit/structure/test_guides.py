"""The guides name tests: all of them exist, and the fault catalogue is complete."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.unit.structure.sources import ROOT

GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
QUOTED = re.compile(r"`([^`\s]*)`")
# 15 and 20 were never given, 43 is Megatron-Core's.
CASES = sorted(set(range(1, 61)) - {15, 20, 43})


def files() -> dict[str, list[Path]]:
    """Test files by name."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in (ROOT / "tests").rglob("*.py"):
        found[path.name].append(path)
    return found


FILES = files()


def named_tests(line: str) -> list[tuple[str, str]]:
    """File and function of every test that a line of a guide names; ``::test`` repeats the file."""
    found = []
    current = ""
    for text in QUOTED.findall(line):
        file, separator, function = text.partition("::")
        is_file = file.endswith(".py") and Path(file).name.startswith("test_")
        if is_file:
            current = file
        if is_file or (separator and not file):
            found.append((current, function))
    return found


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_named_tests_exist(guide: Path) -> None:
    for number, line in enumerate(guide.read_text(encoding="utf-8").splitlines(), start=1):
        for file, function in named_tests(line):
            where = f"{guide.name}:{number}: {file}::{function}"
            matching = [
                path for path in FILES[Path(file).name] if path.as_posix().endswith("/" + file)
            ]
            assert len(matching) == 1, f"{where}: {len(matching)} such files"
            assert not function or function in functions(matching[0]), where


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_named_configurations_exist(guide: Path) -> None:
    for name in re.findall(r"configs/([\w.]+\.(?:json|args))", guide.read_text(encoding="utf-8")):
        assert (ROOT / "configs" / name).is_file(), f"{guide.name}: {name}"


def test_every_case_of_the_catalogue_has_a_test() -> None:
    text = (ROOT / "docs" / "guide" / "reliability.md").read_text(encoding="utf-8")
    table = text.split("## The fault catalogue")[1].split("\n## ")[0]
    rows = {int(row[1]): row[0] for row in re.finditer(r"^\| (\d+) .*$", table, re.M)}
    assert sorted(rows) == CASES
    for number, row in rows.items():
        assert any(function for _, function in named_tests(row)), f"case {number}"

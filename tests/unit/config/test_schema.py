"""The published JSON schema: up to date, and in agreement with what is accepted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_kfac.config import KFACConfig, schema
from tests.unit.config.tables import pairs

ROOT = Path(__file__).parents[3]
FILE = ROOT / "configs" / "kfac.schema.json"
_TYPES: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": (list, tuple),
}


def fits(value: Any, node: dict[str, Any], root: dict[str, Any]) -> bool:
    """The part of JSON schema that the file uses."""
    if "$ref" in node:
        node = root["$defs"][node["$ref"].rpartition("/")[2]]
    for branches in ("anyOf", "oneOf"):
        if branches in node and not any(fits(value, branch, root) for branch in node[branches]):
            return False
    if "enum" in node and value not in node["enum"]:
        return False
    if "const" in node and value != node["const"]:
        return False
    kind = _TYPES.get(node.get("type", ""), object)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        return False
    if isinstance(value, int | float) and not isinstance(value, bool):
        return node.get("minimum", value) <= value <= node.get("maximum", value) and (
            node.get("exclusiveMinimum", -1e999) < value < node.get("exclusiveMaximum", 1e999)
        )
    if isinstance(value, list | tuple):
        items = node.get("prefixItems") or [node.get("items", {})] * len(value)
        longest = node.get("maxItems", len(value))
        return node.get("minItems", 0) <= len(value) <= longest and all(
            fits(item, part, root) for item, part in zip(value, items, strict=True)
        )
    if isinstance(value, dict):
        known = node.get("properties", {})
        rest = node.get("additionalProperties", True)
        return all(name in value for name in node.get("required", ())) and all(
            fits(item, known[name], root)
            if name in known
            else rest is not False and (rest is True or fits(item, rest, root))
            for name, item in value.items()
        )
    return True


def test_the_file_is_the_commands_output() -> None:
    command = [sys.executable, "-m", "ds_kfac.cli", "schema"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output == FILE.read_text(encoding="utf-8")
    assert json.loads(output) == json.loads(json.dumps(schema()))


def test_every_setting_is_described() -> None:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    assert set(content["properties"]) == set(KFACConfig.model_fields)
    assert content["additionalProperties"] is False
    for name, node in content["properties"].items():
        choices = "enum" in node or any("enum" in part for part in node.get("anyOf", ()))
        assert choices or node.get("description"), name


@pytest.mark.parametrize(("key", "value"), pairs("good"))
def test_good_values_fit_the_schema(key: str, value: Any) -> None:
    root = json.loads(FILE.read_text(encoding="utf-8"))
    assert fits({key: value}, root, root)


@pytest.mark.parametrize("name", sorted(p.stem for p in FILE.parent.glob("zero*.json")))
def test_example_sections_fit_the_schema(name: str) -> None:
    root = json.loads(FILE.read_text(encoding="utf-8"))
    content = json.loads((FILE.parent / f"{name}.json").read_text(encoding="utf-8"))
    assert fits(content.get("kfac", {}), root, root)
    optimizer = content.get("optimizer", {})
    if optimizer.get("type") == "KFAC":
        params = {k: v for k, v in optimizer["params"].items() if k in KFACConfig.model_fields}
        assert fits(params, root, root)


@pytest.mark.parametrize(
    "section",
    [
        {"dampng": 1},
        {"damping": "1"},
        {"direction": "x"},
        {"damping": {"type": "linear"}},
        {"betas": [1]},
    ],
)
def test_the_check_itself_refuses(section: dict[str, Any]) -> None:
    root = json.loads(FILE.read_text(encoding="utf-8"))
    assert not fits(section, root, root)

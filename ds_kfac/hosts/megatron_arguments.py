"""Command-line flags ``--kfac-*`` beside Megatron's own, one per setting of ``KFACConfig``.

Megatron configures everything by flags, so that is how K-FAC is switched on in its scripts.
A flag that is not given leaves its setting to the configuration file or to the default.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError

PREFIX = "kfac_"
_NO_FLAG = frozenset({"enabled"})
"""``--kfac`` itself says it."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags in a group of their own.

    Args:
        parser: Megatron's parser, or a script's own.

    Returns:
        The parser.
    """
    group = parser.add_argument_group(
        "ds_kfac",
        "K-FAC preconditioning of linear layers. Lists and objects may be given as JSON, and "
        "numbers may be schedules.",
    )
    group.add_argument("--kfac", action="store_true", help="precondition gradients with K-FAC")
    group.add_argument(
        "--kfac-config", metavar="FILE", help="JSON with settings; flags are stronger"
    )
    meanings = _meanings()
    for name, field in KFACConfig.model_fields.items():
        if name in _NO_FLAG:
            continue
        text = [meanings.get(name, ""), f"expected: {_expected(name)}"]
        default = field.get_default(call_default_factory=True)
        if default is not None:
            text.append(f"default: {json.dumps(default)}")
        options: dict[str, Any] = {}
        if field.annotation is bool:
            options = {"nargs": "?", "const": "true"}
        elif isinstance(default, tuple):
            options = {"nargs": "+"}
        group.add_argument(
            "--" + (PREFIX + name).replace("_", "-"),
            dest=PREFIX + name,
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help="; ".join(filter(None, text)).replace("%", "%%"),
            **options,
        )
    return parser


def settings(args: argparse.Namespace | Mapping[str, Any]) -> KFACConfig | None:
    """The configuration that parsed arguments ask for.

    Args:
        args: What a parser with :func:`add_arguments` returned.

    Returns:
        None without ``--kfac``.

    Raises:
        ConfigError: Flags without ``--kfac``, a file that is no JSON object, or wrong values;
            every problem is listed.
    """
    values = dict(args) if isinstance(args, Mapping) else vars(args)
    given = {
        name: _value(values[PREFIX + name])
        for name in KFACConfig.model_fields
        if PREFIX + name in values and name not in _NO_FLAG
    }
    path = values.get("kfac_config")
    if not values.get("kfac"):
        if given or path is not None:
            flags = [*given, *(["config"] if path is not None else [])]
            listed = ", ".join("--kfac-" + name.replace("_", "-") for name in flags)
            raise ConfigError("E214", f"{listed} without --kfac: add --kfac, or leave it out")
        return None
    return KFACConfig.parse({**_read(path), **given})


def _read(path: Any) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("E214", f"--kfac-config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError("E214", f"--kfac-config {path}: expected an object with settings")
    return {str(key): value for key, value in content.items()}


def _value(words: list[str] | str) -> Any:
    """Several words are a list, unless the only one is a list already."""
    if isinstance(words, str):
        return _parsed(words)
    values = [_parsed(word) for word in words]
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def _parsed(word: str) -> Any:
    """JSON where it is some, plain text (names, patterns) otherwise."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def _expected(name: str) -> str:
    field = KFACConfig.model_fields[name]
    if field.description:
        return field.description
    schema = KFACConfig.model_json_schema()["properties"][name]
    variants = schema.get("anyOf", [schema])
    choices = [json.dumps(c) for part in variants for c in part.get("enum", ())]
    return " or ".join(choices) if choices else "a value"


def _meanings() -> dict[str, str]:
    """What the class says about its attributes: one place to explain a setting."""
    text = KFACConfig.__doc__ or ""
    attributes = text.partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for name, meaning in re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", attributes, re.MULTILINE):
        found[name] = re.sub(r"\s+", " ", meaning).replace("``", "").strip().rstrip(".")
    return found

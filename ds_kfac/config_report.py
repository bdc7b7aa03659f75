"""Wrong settings in the user's words: which key, what is allowed, what was given.

pydantic reports every member of a union that it tried, with paths that users never wrote;
here each wrong key becomes one text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ds_kfac.errors import nearest
from ds_kfac.schedules import SCHEDULES

_MAX_VALUE = 200
"""Characters of a wrong value that are shown."""


def explain(
    error: ValidationError, data: Mapping[str, Any], model: type[BaseModel]
) -> tuple[list[str], set[str]]:
    """Describe every problem of a validation.

    Args:
        error: What pydantic found.
        data: What was validated.
        model: The model it was validated against.

    Returns:
        One text per wrong key, and the top-level keys that are wrong.
    """
    texts: dict[str, str] = {}
    for item in error.errors():
        loc = item["loc"]
        value = data.get(str(loc[0]))
        if isinstance(value, dict) and len(loc) > 1 and str(loc[1]).startswith("union["):
            continue  # the number side of "number or schedule", although a schedule was meant
        place = _Place(data, model)
        place.follow(loc)
        path, text = place.describe(item)
        texts.setdefault(path, f"{path}: {text}" if text[:11] != "unknown key" else text)
    return list(texts.values()), {str(item["loc"][0]) for item in error.errors()}


_ELSEWHERE = {
    "lr": "optimizer.params.lr",
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "eps": "optimizer.params.aux.eps",
}


def unknown_key(name: str, known: Iterable[str]) -> str:
    """``unknown key 'x'``, and where it belongs or the nearest known one."""
    key = name.rpartition(".")[2]
    home = _ELSEWHERE.get(key.lower())
    hint = f" it belongs to {home}" if home else nearest(key, known)
    return f"unknown key {name!r}" + (f";{hint}" if hint else "")


def known_keys(names: Iterable[str]) -> str:
    """``Known keys: a, b``, sorted."""
    return "Known keys: " + ", ".join(sorted(names))


class _Place:
    """Follows pydantic's path through the user's data, as far as keys reach."""

    def __init__(self, data: Any, model: type[BaseModel]) -> None:
        self._keys: list[str] = []
        self._value = data
        self._model: type[BaseModel] | None = model
        self._field: FieldInfo | None = None

    def follow(self, loc: tuple[int | str, ...]) -> None:
        for part in loc:
            name = str(part)
            if self._model is not None and name in self._model.model_fields:
                self._field = self._model.model_fields[name]
                self._keys.append(name)
                self._value = self._value.get(name) if isinstance(self._value, Mapping) else None
                self._model = _submodel(self._field)
            elif self._model is None and name in SCHEDULES and isinstance(self._value, Mapping):
                self._model, self._field = SCHEDULES[name], None

    def describe(self, item: Any) -> tuple[str, str]:
        """Path and text of a problem found here."""
        path = ".".join(self._keys)
        if item["type"] == "extra_forbidden":
            name = ".".join([*self._keys, str(item["loc"][-1])])
            known = list(self._model.model_fields) if self._model is not None else []
            text = unknown_key(name, known)
            return name, text if not self._keys else f"{text} ({known_keys(known)})"
        if item["type"] == "missing" and not (self._field and self._is_list()):
            return path, "required, but missing"
        if self._model in SCHEDULES.values() and item["type"] == "value_error":
            return path, f"{item['ctx']['error']}, got {_show(self._value)}"
        if item["type"].startswith("union_tag"):
            types = ", ".join(repr(name) for name in SCHEDULES)
            return path, f"a schedule needs a type, one of {types}, got {_show(self._value)}"
        return path, f"expected {self._expected()}, got {_show(self._value)}"

    def _is_list(self) -> bool:
        return isinstance(self._value, list | tuple)

    def _expected(self) -> str:
        if self._field is None:
            return "an object"
        if self._field.description:
            return self._field.description
        choices = _choices(self._field.annotation)
        hint = nearest(self._value, choices) if isinstance(self._value, str) else ""
        text = "one of " + ", ".join(repr(name) for name in choices)
        if type(None) in get_args(self._field.annotation):
            text += ", or null"
        return text + (f" ({hint.strip()})" if hint else "")


def _submodel(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _choices(annotation: Any) -> list[str]:
    members = get_args(annotation)
    return [
        name
        for member in members
        for name in ([member] if isinstance(member, str) else _choices(member))
    ]


def _show(value: Any) -> str:
    text = repr(value)
    if len(text) > _MAX_VALUE:
        text = text[:_MAX_VALUE] + "..."
    return f"{text} ({type(value).__name__})"

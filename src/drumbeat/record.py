"""Frozen dataclasses to and from plain JSON values.

Every file drumbeat writes for a later reader is one of these records. A reader ignores keys it does not know (a newer
minor version wrote them) and refuses, by name, a value of the wrong type.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, Dict, Mapping, Tuple, Type, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_PLAIN = frozenset((int, float, str, bool, type(None)))


class RecordError(ValueError):
    """A JSON value does not fit the record it should become; the message names the place."""


def to_plain(value: Any) -> Any:
    """Dataclasses become dicts and tuples lists, all the way down."""
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def to_json(value: Any, indent: int | None = 2) -> str:
    return json.dumps(to_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def from_plain(cls: Type[T], data: Any, where: str = "") -> T:
    """Build the record `cls` from what `to_plain` made of it, checking every type on the way."""
    where = where or cls.__name__
    if not isinstance(data, Mapping):
        raise RecordError(f"{where}: expected an object, got {_kind(data)}")
    hints = _hints(cls)  # type: ignore[arg-type]
    values: Dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in data:
            values[field.name] = _convert(hints[field.name], data[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{where}: '{field.name}' is missing")
    return cls(**values)


@functools.cache  # evaluated once per class: a job of 4,096 nodes makes as many records
def _hints(cls: Any) -> Dict[str, Any]:
    return get_type_hints(cls)


def from_json(cls: Type[T], text: str, where: str = "") -> T:
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RecordError(f"{where or cls.__name__}: not JSON: {error}") from None
    return from_plain(cls, data, where)


def check_schema(schema: str, ours: str, where: str) -> None:
    """A newer major version is refused by name; a newer minor one only adds keys."""
    try:
        major = int(schema.split(".")[0])
    except ValueError:
        raise RecordError(f"{where}: '{schema}' is not a schema version") from None
    if major > int(ours.split(".")[0]):
        raise RecordError(
            f"{where}: written by a newer drumbeat (schema {schema}, this one reads {ours}); update drumbeat"
        )


@functools.cache
def _shape(hint: Any) -> Tuple[Any, Tuple[Any, ...]]:
    """The origin and the arguments of a type, worked out once: the lead of a large job reads hundreds of records per second."""
    return get_origin(hint), get_args(hint)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint is Any or (type(value) is hint and hint in _PLAIN):
        return value
    origin, args = _shape(hint)
    if origin is Union:
        if value is None:
            if type(None) in args:
                return None
            raise RecordError(f"{where}: must not be null")
        (inner,) = [arg for arg in args if arg is not type(None)]
        return _convert(inner, value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise RecordError(f"{where}: expected a list, got {_kind(value)}")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_convert(args[0], item, f"{where}[{index}]") for index, item in enumerate(value))
        if len(args) != len(value):
            raise RecordError(f"{where}: expected {len(args)} items, got {len(value)}")
        return tuple(_convert(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, value)))
    if origin in (dict, Mapping) or origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise RecordError(f"{where}: expected an object, got {_kind(value)}")
        item_hint = args[1]
        return {str(key): _convert(item_hint, item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, value, where)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise RecordError(f"{where}: expected {hint.__name__}, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__

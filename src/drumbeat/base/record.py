"""Frozen dataclasses to and from plain JSON values.

Every file drumbeat writes for a later reader is one of these records. A reader ignores keys it does not know (a newer
minor version wrote them) and refuses, by name, a value of the wrong type.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, Tuple, Type, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_Reader = Callable[[Any], Any]

_PLAIN = frozenset((int, float, str, bool, type(None)))


class RecordError(ValueError):
    """A JSON value does not fit the record it should become; the message names the place."""


def to_plain(value: Any) -> Any:
    """Turn dataclasses into dicts and tuples into lists, recursively."""
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
    return plain_json(to_plain(value), indent=indent, allow_nan=False)


def plain_json(plain: Any, **how: Any) -> str:
    """Write non-ASCII letters as they are, unless the text is not valid Unicode: a file name may hold any bytes."""
    text = json.dumps(plain, ensure_ascii=False, **how)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(plain, **how)
    return text


def from_plain(cls: Type[T], data: Any, where: str = "") -> T:
    """Build the record `cls` from the output of `to_plain`, checking every type on the way."""
    try:
        record: T = _read_record(cls, data)
    except _Misfit as misfit:
        raise RecordError(f"{where or cls.__name__}{misfit.place}: {misfit.what}") from None
    return record


def from_json(cls: Type[T], text: str, where: str = "") -> T:
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RecordError(f"{where or cls.__name__}: not JSON: {error}") from None
    return from_plain(cls, data, where)


def check_schema(schema: str, ours: str, where: str) -> None:
    """Refuse a newer major version by name; a newer minor one only adds keys."""
    schema = "".join(letter for letter in schema[:40] if letter.isprintable())  # the message may go to a terminal
    try:
        major = int(schema.split(".")[0])
    except ValueError:
        raise RecordError(f"{where}: '{schema}' is not a schema version") from None
    if major > int(ours.split(".")[0]):
        raise RecordError(
            f"{where}: written by a newer drumbeat (schema {schema}, this one reads {ours}); update drumbeat"
        )


class _Misfit(Exception):
    """A value of the wrong type; `place` is built while the error propagates, so that valid values cost nothing."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.place = what, ""

    def inside(self, place: str) -> _Misfit:
        self.place = place + self.place
        return self


def _read_record(cls: Any, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise _Misfit(f"expected an object, got {_kind(data)}")
    values: Dict[str, Any] = {}
    for name, read, required in _fields(cls):
        if name in data:
            try:
                values[name] = read(data[name])
            except _Misfit as misfit:
                raise misfit.inside(f".{name}") from None
        elif required:
            raise _Misfit(f"'{name}' is missing")
    return cls(**values)


@functools.cache  # worked out once per class: the lead of a large job reads hundreds of records per second
def _fields(cls: Any) -> List[Tuple[str, _Reader, bool]]:
    """Return name, reader and required flag of each field."""
    hints, missing = get_type_hints(cls), dataclasses.MISSING
    return [
        (field.name, _reader(hints[field.name]), field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(cls)
    ]


@functools.cache
def _reader(hint: Any) -> _Reader:
    """Return the function that turns a JSON value into this type, or raises _Misfit."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is Union:
        (inner,) = [arg for arg in args if arg is not type(None)]
        return functools.partial(_read_optional, _reader(inner), type(None) in args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return functools.partial(_read_list, _reader(args[0]))
    if origin is tuple:
        return functools.partial(_read_tuple, tuple(map(_reader, args)))
    if origin is not None and issubclass(origin, Mapping):
        return functools.partial(_read_mapping, _reader(args[1]))
    return functools.partial(_read_record if dataclasses.is_dataclass(hint) else _read_plain, hint)


def _read_optional(read: _Reader, may_be_null: bool, value: Any) -> Any:
    if value is not None:
        return read(value)
    if not may_be_null:
        raise _Misfit("must not be null")
    return None


def _read_list(read: _Reader, value: Any) -> Tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _Misfit(f"expected a list, got {_kind(value)}")
    return tuple([_read_at(read, item, f"[{index}]") for index, item in enumerate(value)])


def _read_tuple(readers: Tuple[_Reader, ...], value: Any) -> Tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _Misfit(f"expected a list, got {_kind(value)}")
    if len(readers) != len(value):
        raise _Misfit(f"expected {len(readers)} items, got {len(value)}")
    return tuple([_read_at(read, item, f"[{i}]") for i, (read, item) in enumerate(zip(readers, value))])


def _read_mapping(read: _Reader, value: Any) -> Dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _Misfit(f"expected an object, got {_kind(value)}")
    return {str(key): _read_at(read, item, f".{key}") for key, item in value.items()}


def _read_at(read: _Reader, value: Any, place: str) -> Any:
    try:
        return read(value)
    except _Misfit as misfit:
        raise misfit.inside(place) from None


def _read_plain(hint: Any, value: Any) -> Any:
    if type(value) is hint:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise _Misfit(f"expected {hint.__name__}, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__

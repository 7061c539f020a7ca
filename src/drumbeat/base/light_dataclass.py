"""The standard library's dataclass without the methods that it writes and compiles for each class.

A process of drumbeat imports two hundred dataclasses; compiling their methods took half of the time that it needs to start. Here
the classes share their methods; to make, compare or hash an instance takes some microseconds longer. To type checkers, to
`dataclasses.fields` and to `replace` it is the same.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Tuple

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, *, frozen=False):
        return _with_methods(cls, frozen) if cls else lambda cls: _with_methods(cls, frozen)


_put = object.__setattr__  # that of a frozen instance refuses


def _with_methods(cls: Any, frozen: bool) -> Any:
    # A class with an __eq__ has None as its __hash__.
    own = {name for name, value in vars(cls).items() if value is not None}
    documented = cls.__doc__
    cls.__doc__ = documented or cls.__name__  # where there is none, dataclass works out a signature, which takes long
    dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    cls.__doc__ = documented
    fields = [*dataclasses.fields(cls)]
    compared = [field.name for field in fields if field.compare]

    def key(self: Any) -> Tuple[Any, ...]:
        return tuple([getattr(self, name) for name in compared])

    def equal(self: Any, other: Any) -> Any:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    def hashed(self: Any) -> int:
        return hash(key(self))

    methods: Dict[str, Any] = {"__init__": _init(cls, fields), "__repr__": _repr, "__eq__": equal, "__hash__": None}
    if frozen:
        methods.update({"__hash__": hashed, "__setattr__": _refuse, "__delattr__": _refuse})
    for name, method in methods.items():
        if name not in own:
            setattr(cls, name, method)
    return cls


def _init(cls: Any, fields: List[Any]) -> Callable[..., None]:
    names = tuple(field.name for field in fields if field.init)
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    factories = {
        field.name: field.default_factory for field in fields if field.default_factory is not dataclasses.MISSING
    }
    never_given = tuple(name for name in factories if name not in names)
    has_post_init = hasattr(cls, "__post_init__")

    def __init__(self: Any, *values: Any, **named: Any) -> None:
        for name, value in zip(names, values):
            _put(self, name, value)
        used = 0
        for name in names[len(values) :]:
            if name in named:
                _put(self, name, named[name])
                used += 1
            elif name in defaults:
                _put(self, name, defaults[name])
            elif name in factories:
                _put(self, name, factories[name]())
            else:
                raise TypeError(f"{cls.__name__}() has no '{name}'")
        if used < len(named) or len(values) > len(names):
            wrong = [name for name in named if name not in names[len(values) :]]
            raise TypeError(
                f"{cls.__name__}({', '.join(names)}): got {len(values)} values by place; unknown or given twice: {wrong}"
            )
        for name in never_given:
            _put(self, name, factories[name]())
        if has_post_init:
            self.__post_init__()

    return __init__


def _repr(self: Any) -> str:
    shown = [f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse(self: Any, name: str, value: Any = None) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot change '{name}': {type(self).__name__} is frozen")

"""The standard library's dataclass without the methods that it writes and compiles for each class.

A process of drumbeat imports two hundred dataclasses and uses a few; compiling their methods took half of the time that it needs
to start. Here the classes share their methods, and the fields of a class are worked out when the first instance is made or
`dataclasses.fields` is called; to make, compare or hash an instance takes some microseconds longer. To type checkers and to
`replace` it is the same.
"""

from __future__ import annotations

import dataclasses
from _thread import RLock
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Tuple

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, *, frozen=False):
        return _with_methods(cls, frozen) if cls else lambda cls: _with_methods(cls, frozen)


_put = object.__setattr__  # that of a frozen instance refuses
_TABLE = "__dataclass_fields__"
_one_at_a_time = RLock()  # a class's base is worked out within it


class _Fields:
    """The table of a class's fields, worked out when it is first read: most classes are imported and never used."""

    def __init__(self, cls: Any, own_init: bool) -> None:
        self.cls, self.own_init = cls, own_init

    def __get__(self, instance: Any, owner: Any) -> Any:
        cls = self.cls
        with _one_at_a_time:
            if vars(cls)[_TABLE] is self:  # not worked out by another thread meanwhile
                documented = cls.__doc__
                cls.__doc__ = documented or cls.__name__  # if empty, dataclass works out a signature, which takes long
                dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
                cls.__doc__ = documented
                if not self.own_init:
                    cls.__init__ = _init(cls, [*dataclasses.fields(cls)])
        return vars(cls)[_TABLE]


def _with_methods(cls: Any, frozen: bool) -> Any:
    # A class with an __eq__ has None as its __hash__.
    own = {name for name, value in vars(cls).items() if value is not None}
    compared: List[str] = []

    def first(self: Any, *values: Any, **named: Any) -> None:
        getattr(cls, _TABLE)  # gives the class its __init__
        cls.__init__(self, *values, **named)

    def key(self: Any) -> Tuple[Any, ...]:
        nonlocal compared
        compared = compared or [field.name for field in dataclasses.fields(cls) if field.compare]
        return tuple([getattr(self, name) for name in compared])

    def equal(self: Any, other: Any) -> Any:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    def hashed(self: Any) -> int:
        return hash(key(self))

    methods: Dict[str, Any] = {"__init__": first, "__repr__": _repr, "__eq__": equal, "__hash__": None}
    if frozen:
        methods.update({"__hash__": hashed, "__setattr__": _refuse, "__delattr__": _refuse})
    for name, method in methods.items():
        if name not in own:
            setattr(cls, name, method)
    setattr(cls, _TABLE, _Fields(cls, "__init__" in own))
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

"""A reader of pickles that hold plain data only, with bounds on time and memory.

Python's own reader trusts its input: twenty bytes can make it allocate a gigabyte, and shared containers can make a later
`str` or `hash` run for hours. Here there are no classes, keys are text or numbers, every container is counted, and any opcode
that plain data does not need is refused. The standard library only splits the bytes into opcodes.
"""

from __future__ import annotations

import pickletools
from typing import Any, Callable, Dict, List, Tuple

MAX_OPERATIONS = 12_000_000
MAX_CONTAINERS = 1_000_000
MAX_MEMO = 4_000_000
_MARK = object()
# torch marks typed lists by a function that returns its argument.
_LISTS = frozenset(f"torch.jit._pickle.build_{kind}list" for kind in ("int", "double", "bool", "tensor"))


class PlainPickleError(ValueError):
    """Damaged, too large, or not plain data."""


def load(data: bytes) -> Any:
    """Return the value of the pickle; PlainPickleError says why it cannot be read."""
    try:
        return _value(data)
    except PlainPickleError:
        raise
    except (IndexError, TypeError, ValueError) as error:
        raise PlainPickleError(f"damaged: {type(error).__name__}") from None


def _value(data: bytes) -> Any:
    machine = _Machine()
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name == "STOP":
            return machine.stack.pop()
        operation = _OPERATIONS.get(opcode.name)
        if operation is None:
            raise PlainPickleError(f"opcode {opcode.name} has no place in plain data")
        if count >= MAX_OPERATIONS:
            raise PlainPickleError(f"more than {MAX_OPERATIONS} operations")
        operation(machine, argument)
    raise PlainPickleError("it has no end")


class _Machine:
    def __init__(self) -> None:
        self.stack: List[Any] = []
        self.memo: Dict[int, Any] = {}
        self.containers = 0

    def add(self, value: Any) -> None:
        """Push a container."""
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise PlainPickleError(f"more than {MAX_CONTAINERS} lists and mappings")
        self.stack.append(value)

    def last(self, count: int) -> Tuple[Any, ...]:
        """Take this many values off the stack."""
        found = tuple(self.stack[-count:])
        if len(found) < count or any(value is _MARK for value in found):
            raise PlainPickleError("damaged tuple")
        self.drop(count)
        return found

    def drop(self, count: int) -> None:
        del self.stack[-count:]

    def items(self) -> List[Any]:
        """Take off the stack what was pushed since the last mark."""
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise PlainPickleError("no mark")
        found = self.stack[place + 1 :]
        del self.stack[place:]
        return found

    def remember(self, key: int) -> None:
        if len(self.memo) >= MAX_MEMO:
            raise PlainPickleError("it remembers too much")
        self.memo[key] = self.stack[-1]

    def recall(self, key: int) -> None:
        if key not in self.memo:
            raise PlainPickleError("it recalls what it did not store")
        self.stack.append(self.memo[key])

    def set_items(self, pairs: List[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise PlainPickleError("damaged mapping")
        for key, value in zip(pairs[::2], pairs[1::2]):
            if not isinstance(key, (str, int, float, bytes)):  # hashing a nest of shared tuples can take for ever
                raise PlainPickleError("a key that is neither text nor a number")
            target[key] = value

    def extend(self, values: List[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise PlainPickleError("damaged list")
        target.extend(values)

    def long(self, value: int) -> None:
        if value.bit_length() > 512:
            raise PlainPickleError("a number of more than 64 bytes")
        self.stack.append(value)

    def name(self, text: str) -> None:
        if text not in _LISTS:
            raise PlainPickleError(f"the pickle wants to load {text}; a flight-recorder dump holds plain data only")
        self.stack.append(text)

    def reduce(self) -> None:
        function, arguments = self.last(2)
        if function not in _LISTS or not isinstance(arguments, tuple) or len(arguments) != 1:
            raise PlainPickleError("the pickle wants to call something; a flight-recorder dump holds plain data only")
        self.stack.append(arguments[0])


_PLAIN = (
    "BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING",
    "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
)  # fmt: skip
_OPERATIONS: Dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(_PLAIN, lambda machine, value: machine.stack.append(value)),
    **dict.fromkeys(("LONG1", "LONG4"), _Machine.long),
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, _: None),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    "MEMOIZE": lambda machine, _: machine.remember(len(machine.memo)),
    "MARK": lambda machine, _: machine.stack.append(_MARK),
    "POP": lambda machine, _: machine.drop(1),
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "EMPTY_LIST": lambda machine, _: machine.add([]),
    "EMPTY_DICT": lambda machine, _: machine.add({}),
    "EMPTY_TUPLE": lambda machine, _: machine.add(()),
    "LIST": lambda machine, _: machine.add(machine.items()),
    "TUPLE": lambda machine, _: machine.add(tuple(machine.items())),
    "TUPLE1": lambda machine, _: machine.add(machine.last(1)),
    "TUPLE2": lambda machine, _: machine.add(machine.last(2)),
    "TUPLE3": lambda machine, _: machine.add(machine.last(3)),
    "APPEND": lambda machine, _: machine.extend(list(machine.last(1))),
    "APPENDS": lambda machine, _: machine.extend(machine.items()),
    "SETITEM": lambda machine, _: machine.set_items(list(machine.last(2))),
    "SETITEMS": lambda machine, _: machine.set_items(machine.items()),
    "GLOBAL": lambda machine, text: machine.name(text.replace(" ", ".")[:200]),
    "STACK_GLOBAL": lambda machine, _: machine.name("{}.{}".format(*machine.last(2))[:200]),
    "REDUCE": lambda machine, _: machine.reduce(),
}

"""A reader of pickles that hold plain data only, with bounds on time and memory.

Python's own reader trusts its input: twenty bytes can make it allocate a gigabyte, and shared containers can make a later
`str` or `hash` run for hours. Here there are no classes, keys are text or numbers, every container is counted, and any opcode
that plain data does not need is refused.
"""

from __future__ import annotations

import struct
from typing import Any, Callable, Dict, List

MAX_OPERATIONS = 12_000_000
MAX_CONTAINERS = 1_000_000
MAX_MEMO = 4_000_000


class PlainPickleError(ValueError):
    """Damaged, too large, or not plain data."""


class _Mark:
    pass


_MARK = _Mark()
# torch marks typed lists by a function that returns its argument.
_LISTS = frozenset(f"torch.jit._pickle.build_{kind}list" for kind in ("int", "double", "bool", "tensor"))


def load(data: bytes) -> Any:
    """Return the value of the pickle; PlainPickleError says why it cannot be read."""
    try:
        return _Machine(data).run()
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise PlainPickleError(f"damaged: {type(error).__name__}") from None


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: List[Any] = []
        self.memo: Dict[int, Any] = {}
        self.containers = 0

    def run(self) -> Any:
        for _ in range(MAX_OPERATIONS):
            code = self.data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                return self.stack.pop()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise PlainPickleError(f"opcode 0x{code:02x} has no place in plain data")
            operation(self)
        raise PlainPickleError(f"more than {MAX_OPERATIONS} operations")

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise PlainPickleError("it ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        size = struct.calcsize(form)
        value = struct.unpack(form, self.take(size))[0]
        return int(value)

    def line(self) -> str:
        end = self.data.index(b"\n", self.at) if b"\n" in self.data[self.at : self.at + 512] else -1
        if end < 0:
            raise PlainPickleError("a name without end")
        text = self.data[self.at : end].decode("ascii", "replace")
        self.at = end + 1
        return text

    def container(self, value: Any) -> None:
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise PlainPickleError(f"more than {MAX_CONTAINERS} lists and mappings")
        self.stack.append(value)

    def items(self) -> List[Any]:
        """Return the items pushed since the last mark."""
        place = len(self.stack) - 1
        while not isinstance(self.stack[place], _Mark):
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

    def long(self, size: int) -> None:
        if size > 64:
            raise PlainPickleError("a number of more than 64 bytes")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def name(self, text: str) -> None:
        if text not in _LISTS:
            raise PlainPickleError(f"the pickle wants to load {text}; a flight-recorder dump holds plain data only")
        self.stack.append(text)

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if function not in _LISTS or not isinstance(arguments, tuple) or len(arguments) != 1:
            raise PlainPickleError("the pickle wants to call something; a flight-recorder dump holds plain data only")
        self.stack.append(arguments[0])


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.name(f"{module}.{name}"[:200])


def _pop(machine: _Machine) -> None:
    machine.stack.pop()


def _set_one(machine: _Machine) -> None:
    pair = machine.stack[-2:]
    del machine.stack[-2:]
    machine.set_items(pair)


def _append_one(machine: _Machine) -> None:
    value = machine.stack.pop()
    machine.extend([value])


def _tuple(count: int) -> Callable[[_Machine], None]:
    def make(machine: _Machine) -> None:
        values = tuple(machine.stack[-count:])
        if len(values) < count:
            raise PlainPickleError("damaged tuple")
        del machine.stack[-count:]
        machine.container(values)

    return make


def _skip(count: int) -> Callable[[_Machine], None]:
    def skip(machine: _Machine) -> None:
        machine.take(count)

    return skip


def _push(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _text(form: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(form)).decode("utf-8", "replace"))


def _bytes(form: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(form)))


def _integer(form: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.number(form))


_OPERATIONS: Dict[int, Callable[[_Machine], None]] = {
    0x80: _skip(1),  # PROTO
    0x95: _skip(8),  # FRAME
    ord("("): lambda machine: machine.stack.append(_MARK),
    ord("0"): _pop,
    ord("N"): _push(None),
    0x88: _push(True),
    0x89: _push(False),
    ord("J"): _integer("<i"),
    ord("K"): _integer("<B"),
    ord("M"): _integer("<H"),
    0x8A: lambda machine: machine.long(machine.number("<B")),
    0x8B: lambda machine: machine.long(machine.number("<i")),
    ord("G"): lambda machine: machine.stack.append(struct.unpack(">d", machine.take(8))[0]),
    ord("X"): _text("<I"),
    0x8C: _text("<B"),
    0x8D: _text("<Q"),
    ord("U"): _text("<B"),
    ord("T"): _text("<i"),
    ord("C"): _bytes("<B"),
    ord("B"): _bytes("<I"),
    0x8E: _bytes("<Q"),
    ord("]"): lambda machine: machine.container([]),
    ord("}"): lambda machine: machine.container({}),
    ord(")"): lambda machine: machine.container(()),
    ord("l"): lambda machine: machine.container(machine.items()),
    ord("t"): lambda machine: machine.container(tuple(machine.items())),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("a"): _append_one,
    ord("e"): lambda machine: machine.extend(machine.items()),
    ord("s"): _set_one,
    ord("u"): lambda machine: machine.set_items(machine.items()),
    ord("q"): lambda machine: machine.remember(machine.number("<B")),
    ord("r"): lambda machine: machine.remember(machine.number("<I")),
    0x94: lambda machine: machine.remember(len(machine.memo)),
    ord("h"): lambda machine: machine.recall(machine.number("<B")),
    ord("j"): lambda machine: machine.recall(machine.number("<I")),
    ord("c"): lambda machine: machine.name(f"{machine.line()}.{machine.line()}"),
    0x93: _stack_global,
    ord("R"): lambda machine: machine.reduce(),
}

"""Input and output that commands share: scripts, amounts, JSON, and files that the user names."""

from __future__ import annotations

import os
import stat
import sys
from typing import Any, Optional

from drumbeat.base.problem import Problem
from drumbeat.base.redact import printable

MAX_BYTES = 1_000_000  # of a script


def print_json(value: Any, indent: Optional[int] = 2) -> None:
    """Print records, lists and mappings as JSON. NaN and infinity, which it does not have, become null."""
    from drumbeat.base.record import plain_json, to_plain

    print(plain_json(_finite(to_plain(value)), indent=indent))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value


def quantity(text: str, flag: str, unit: str = "") -> float:
    """Read an amount above 0 as people write it: 8e9, 300b, 350m; `unit` may follow it."""
    number = text.strip().lower()
    if unit and number.endswith(unit):
        number = number[: -len(unit)].strip()
    times = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(number[-1:], 1.0)
    try:
        value = float(number if times == 1.0 else number[:-1]) * times
    except ValueError:
        value = 0.0
    if not 0 < value < 1e30:
        raise Problem(
            f"{flag} {text}: a number above 0 is needed", f"such as {f'20000{unit}' if unit else '300e9, 8b or 350m'}"
        )
    return value


def warn(order: Any) -> None:
    """Say which settings of an order the scheduler would accept but are probably mistakes."""
    from drumbeat import backends
    from drumbeat.plan.binding import requested_without_gpu
    from drumbeat.plan.exported import against_expected

    own = {variable.name: variable.value for variable in order.env if variable.source == "user"}
    found = [
        *requested_without_gpu(order),
        *against_expected(own, order.expect.transport, order.expect.gdr, order.nodes),
    ]
    said = [f"{each.title}: {each.cause}; {each.fix}" for each in found]
    for note in [*backends.get(order.backend).notes(order), *said]:
        print(f"{'warning':<9} {note}", file=sys.stderr)


def write_file(path: str, text: str) -> None:
    """Write a file that the user named, and say so."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Problem(f"cannot write {path}: {error.strerror}") from None
    print(f"written to {printable(path)}", file=sys.stderr)


def read_script(name: str, what: str = "a batch script") -> str:
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise Problem(
                        f"{printable(name)} is not a regular file", "name a script or a page; - reads standard input"
                    )
                data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Problem(f"{printable(name)}: {error.strerror}", f"give the path of {what}") from None
    if len(data) > MAX_BYTES:
        raise Problem(
            f"{printable(name)} has more than {MAX_BYTES // 1_000_000} MB, too large for a script",
            "for a log: drumbeat diagnose",
        )
    if b"\0" in data:
        raise Problem(f"{printable(name)} is not text", "name a script or a page")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = data.count(b"\n", 0, error.start) + 1
        raise Problem(
            f"{printable(name)}: line {place} is not UTF-8", "save it as UTF-8 (iconv -f latin1 -t utf-8)"
        ) from None

"""The job file in the making: keys with where they come from, and what was left out."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.convert.literal import plain
from drumbeat.findings.model import shown


class LeftOut(NamedTuple):
    line: int
    text: str
    why: str


@dataclass
class Draft:
    keys: Dict[str, Any] = field(default_factory=dict)
    lines: Dict[str, int] = field(default_factory=dict)  # key -> line of the script that it comes from
    env: Dict[str, str] = field(default_factory=dict)
    setup: List[str] = field(default_factory=list)
    modules: List[str] = field(default_factory=list)
    own_modules: bool = False  # from here on modules come from a folder of the user's own
    options: List[str] = field(default_factory=list)  # of sbatch, that no key has
    computed: Dict[str, Tuple[int, str]] = field(default_factory=dict)  # variables that the script works out itself
    unknown: Optional[Tuple[int, str]] = None  # a line that starts something, where none is known to start a training
    left_out: List[LeftOut] = field(default_factory=list)
    to_check: List[LeftOut] = field(default_factory=list)  # carried over, but a person should look

    def set(self, key: str, value: Any, line: int) -> None:
        self.keys[key] = value
        self.lines[key] = line

    def drop(self, line: int, text: str, why: str) -> None:
        text = " ".join(shown(plain(text)).split())
        self.left_out.append(LeftOut(line, text if len(text) <= 160 else text[:157] + "...", why))

    def question(self, line: int, text: str, why: str) -> None:
        self.to_check.append(LeftOut(line, " ".join(shown(plain(text)).split())[:100], " ".join(shown(why).split())))

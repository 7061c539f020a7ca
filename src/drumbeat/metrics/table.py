"""Formats that the grammar cannot know, as data in formats/*.yaml.

rules.yaml has lines whose meaning is not in their words: `<loss>` stands for a number that becomes the value `loss`, `{N}` for
a number that is not kept, one space for any run of spaces and tabs. tests/metrics/rule_lines.yaml has examples. owners.yaml
tells whose the rates of known programs are.
"""

from __future__ import annotations

import re
from dataclasses import field
from functools import cache, lru_cache
from typing import Any, Dict, Mapping, Optional, Pattern, Sequence, Tuple

from drumbeat.base import data
from drumbeat.base.light_dataclass import dataclass
from drumbeat.metrics.tokens import NUMBER, number
from drumbeat.metrics.vocab import VALUES, WHOLE

FORMATS = "drumbeat.metrics.formats"


@dataclass(frozen=True)
class Rule:
    id: str
    has: str  # plain text that every line of this format contains
    find: str
    kind: str = "step"
    reached: bool = False  # target reached, for lines that report a target
    also: Sequence[str] = ()  # what else the line may hold
    scale: Mapping[str, float] = field(default_factory=dict)  # from the line's unit to the record's
    per: Mapping[str, str] = field(default_factory=dict)  # owner of the rates: one of WHOSE

    def read(self, line: str) -> Optional[Dict[str, Any]]:
        """Return the record of a line; None for another format, {} for this format with counts that are not whole numbers."""
        match = pattern(self.find).search(line)
        if match is None:
            return None
        texts = match.groupdict()
        for more in self.also:
            found = pattern(more).search(line)
            texts.update(found.groupdict() if found else {})
        values = {name: number(name, text) for name, text in texts.items() if text is not None}
        if any(isinstance(values.get(name), float) for name in WHOLE) or not abs(values.get("epoch", 0)) < 1e15:
            return {}
        for name, factor in self.scale.items():
            if name in values:
                values[name] = round(values[name] * factor, 12)
        record: Dict[str, Any] = {"kind": self.kind}
        record.update((name, values[name]) for name in VALUES if name in values)
        if self.kind == "target":
            record["target_reached"] = self.reached
        return record


@cache
def pattern(text: str) -> Pattern[str]:
    """Compile a rule's pattern when its plain text is first seen."""
    text = text.replace("{N}", f"(?:{NUMBER})")
    text = re.sub(r"(?<!\(\?)(?<!\(\?P)<([a-z_]+)>", lambda found: f"(?P<{found.group(1)}>{NUMBER})", text)
    return re.compile(re.sub(r"(?<!\\) (?![*?+])", r"[ \\t]+", text))


@lru_cache(maxsize=1)
def rules() -> Tuple[Rule, ...]:
    return tuple(Rule(**entry) for entry in data.load(FORMATS, "rules"))


@lru_cache(maxsize=1)
def owners() -> Mapping[str, Sequence[Sequence[str]]]:
    return dict(data.load(FORMATS, "owners"))


def owner_of(line: str) -> str:
    """Return whose the rates of a known program's line are: one of WHOSE."""
    programs = ((whose, texts) for whose, each in owners().items() for texts in each)
    return next((whose for whose, texts in programs if all(text in line for text in texts)), "unknown")

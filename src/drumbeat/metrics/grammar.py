"""The rules by which printed lines are read: one per format, as data in formats/*.yaml.

A rule's `find` must match; `also` adds what else the line may hold. `<loss>` stands for a number that becomes the value
`loss`, `{N}` for a number that is not kept, one space for any run of spaces and tabs, `{LOSS}` and its like for what
stands in _PARTS. A general rule is tried after all others: lines that people print from loops of their own have no author
to cite.
"""

from __future__ import annotations

import re
from dataclasses import field
from functools import lru_cache
from typing import Any, Dict, List, Mapping, Optional, Pattern, Sequence, Tuple, Union

from drumbeat.base import data
from drumbeat.base.light_dataclass import dataclass

FORMATS = "drumbeat.metrics.formats"
KINDS = ("step", "validation", "throughput", "summary", "target")
# The values of a metrics record: docs/metrics.md explains each.
VALUES = (
    "step", "steps", "epoch", "epochs", "batch", "batches", "loss", "validation", "accuracy", "lr", "grad_norm",
    "step_time", "tokens_per_s", "samples_per_s", "tflops_per_device", "memory_gib", "target_reached", "total_s", "nodes",
    "gpus_per_node", "gpus",
)  # fmt: skip
# The printing rank's own, the average of one device, the whole job's; `unknown` where the line does not say.
WHOSE = ("rank", "device", "all", "unknown")

_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?[KMBT]?|[-+]?(?:nan|NaN|NAN|[Ii]nf(?:inity)?|INF)"
_WHOLE = ("step", "steps", "last_step", "epochs", "batch", "batches", "nodes", "gpus_per_node", "gpus")
_TOO_LARGE = 1e15  # for a count, or an epoch
_PARTS = {
    "{IS}": r"[\"']?[\s:=#(\[]{1,4}[\"']?",  # between a name and its value
    "{END}": r"(?![\w%]|\.\d)",  # of a number
    "{STEP}": r"(?<![\w/.-])(?:[Gg]lobal[_\s]?)?(?:[Ss]tep|STEP|[Ii]ter(?:ation)?|[Ii]t|[Uu]pdate)",
    "{VAL}": r"(?<!\w)(?:[Vv]al(?:id(?:ation)?)?|[Ee]val(?:uation)?|[Tt]est(?:ing)?|[Dd]ev)(?![A-Za-z])",
    # The loss itself, after a sign, a number or the line's beginning: not `aux loss`, `cls_loss`, `the loss`.
    "{LOSS}": r"(?:^\s*|[|,;:)\]}\"'>]\s*|-\s+|\d\s+|\dm?s\s+|/s(?:ec)?\s+)"
    r"(?:(?:[Tt]rain(?:ing)?|[Tt]otal|[Aa]v(?:g|erage)|[Mm]ean|[Rr]unning|[Bb]atch|[Ee]poch|[Ll][Mm])[\s_./-]){0,2}[Ll]oss",
}
# A value in another unit than the record's: the value's name, and the factor.
_CONVERTED = {
    "accuracy_percent": ("accuracy", 0.01),
    "step_time_ms": ("step_time", 1e-3),
    "step_time_us": ("step_time", 1e-6),
}
_FACTORS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

Value = Union[int, float, bool]


@dataclass(frozen=True)
class Rule:
    id: str
    has: str  # plain text that every line of this format contains
    program: str
    source: str
    find: str
    example: str
    near: str  # looks similar, and must not be read
    gives: Mapping[str, Value]
    kind: str = "step"
    also: Sequence[str] = ()
    unless: Sequence[str] = ()  # a line with one of these belongs to another format
    scale: Mapping[str, float] = field(default_factory=dict)  # from the line's unit to the record's
    per: Mapping[str, str] = field(default_factory=dict)  # whose the loss and the rates are: one of WHOSE
    general: bool = False  # tried when no other rule fits
    first_epoch: int = 0  # from which the program counts


class Compiled:
    """A rule ready for use; its patterns are compiled when its plain text is first seen."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._patterns: Optional[Tuple[Pattern[str], List[Pattern[str]], List[Pattern[str]]]] = None

    def read(self, line: str) -> Optional[Dict[str, Any]]:
        """None for a line of another format; nothing ({}) for one of this format whose counts are no whole numbers."""
        if self._patterns is None:
            rule = self.rule
            self._patterns = (
                _ready(rule.find),
                [_ready(text) for text in rule.also],
                [_ready(text) for text in rule.unless],
            )
        find, also, unless = self._patterns
        match = find.search(line)
        if match is None or any(other.search(line) for other in unless):
            return None
        texts = match.groupdict()
        for more in also:
            found = more.search(line)
            texts.update(found.groupdict() if found else {})
        return self._record(texts)

    def _record(self, texts: Mapping[str, Optional[str]]) -> Dict[str, Any]:
        values = {name: number(name, text) for name, text in texts.items() if text is not None}
        if any(isinstance(values.get(name), float) for name in _WHOLE):
            return {}
        epoch = values.get("epoch")
        if epoch is not None and not abs(epoch) < _TOO_LARGE:  # nan, too
            del values["epoch"]
        for name, (known, factor) in _CONVERTED.items():
            if name in values:
                values[known] = round(values.pop(name) * factor, 12)
        for name, factor in self.rule.scale.items():
            if name in values:
                values[name] = round(values[name] * factor, 12)
        if "last_step" in values:  # counted from 0
            values["steps"] = values.pop("last_step") + 1
        stepless = "step" not in values and {"batch", "batches"} <= set(values)
        if stepless and epoch is not None and self.rule.gives.get("step"):
            if "epoch" not in values or epoch != int(epoch):
                return {}
            values["step"] = (int(epoch) - self.rule.first_epoch) * values["batches"] + values["batch"]
            if abs(values["step"]) >= _TOO_LARGE:
                return {}
        for count, total in (("step", "steps"), ("batch", "batches")) if self.rule.general else ():
            if total in values and values.get(count, 0) > values[total]:  # no counter goes beyond its total
                values = {name: value for name, value in values.items() if name not in (count, total)}
        record: Dict[str, Any] = {"kind": self.rule.kind}
        record.update((name, values[name]) for name in VALUES if name in values)
        if self.rule.kind == "target":
            record["target_reached"] = bool(self.rule.gives["target_reached"])
        return record


def pattern(text: str) -> str:
    """A rule's pattern as a regular expression."""
    for name, part in _PARTS.items():
        text = text.replace(name, part)
    text = text.replace("{N}", f"(?:{_NUMBER})")
    text = re.sub(r"(?<!\(\?)(?<!\(\?P)<([a-z_]+)>", lambda found: f"(?P<{found.group(1)}>{_NUMBER})", text)
    return re.sub(r"(?<!\\) (?![*?+])", r"[ \\t]+", text)


def _ready(text: str) -> Pattern[str]:
    return re.compile(pattern(text))


def number(name: str, text: str) -> Union[int, float]:
    """A count is an int, unless it is not whole, not finite or too large."""
    factor = _FACTORS.get(text[-1:], 1.0)
    value = float(text.rstrip("KMBT").replace(",", "")) * factor
    if name not in _WHOLE:
        return value
    whole = round(value, 3)  # 1.13K is 1130, and not the float next to it
    return int(whole) if abs(whole) < _TOO_LARGE and whole == int(whole) else value


@lru_cache(maxsize=1)
def rules() -> Tuple[Rule, ...]:
    return tuple(Rule(**entry) for name in data.names(FORMATS) for entry in data.load(FORMATS, name))


@lru_cache(maxsize=1)
def compiled() -> Tuple[Compiled, ...]:
    return tuple(Compiled(rule) for rule in rules())


@lru_cache(maxsize=1)
def by_plain_text() -> Tuple[Tuple[str, Tuple[Compiled, ...]], ...]:
    """The rules by the plain text that their lines contain: each text is looked for once, those of general rules last."""
    grouped: Dict[Tuple[bool, str], List[Compiled]] = {}
    for rule in sorted(compiled(), key=lambda each: each.rule.general):
        grouped.setdefault((rule.rule.general, rule.rule.has), []).append(rule)
    return tuple((plain, tuple(group)) for (_, plain), group in grouped.items())

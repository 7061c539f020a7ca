"""In what runs differ besides their size. Pure."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.report.figures import Figures

# Words of a command that change with the size of a job, and say nothing else.
_SIZES = regex(
    r"--?(?:nnodes|nproc[-_]per[-_]node|node[-_]rank|nodes|ranks[-_]per[-_]node|num[-_]processes|num[-_]machines|gpus)"
    r"(?:[= ]\S+)?|--(?:master|rdzv)[-_]\w+(?:[= ]\S+)?"
)
_MOST = 60  # characters of a value
_MINOR = ("cores",)  # part of a node's description that may change with its ranks


@dataclass(frozen=True)
class Difference:
    what: str
    values: Dict[str, str]  # run -> value; `not known` where it does not say
    breaks: bool  # the comparison does not measure scaling alone

    def text(self) -> str:
        groups: Dict[str, List[str]] = {}
        for run, value in self.values.items():
            groups.setdefault(value, []).append(run)
        return f"{self.what}: " + "; ".join(f"{value} ({', '.join(runs)})" for value, runs in groups.items())


def differences(runs: Sequence[Figures], batch_is_explained: bool) -> List[Difference]:
    """`batch_is_explained`: it stays, or grows with the size. A value that only some runs tell counts as a difference that
    may be one."""
    found: List[Difference] = []
    if not batch_is_explained:
        batches = {run.name: f"{run.batch:,.0f} {run.batch_unit}" if run.batch else "" for run in runs}
        found += _difference("batch of a step", batches, breaks=True)
    settings = {run.name: run.setting for run in runs}
    for what in ("precision", "code", "image", "site"):
        values = {name: str(getattr(setting, what)) for name, setting in settings.items()}
        found += _difference(what, values, breaks=what != "site")
    commands = {name: " ".join(_SIZES.sub("", setting.command).split()) for name, setting in settings.items()}
    found += _difference("command", _cut_alike(commands), breaks=True)
    found += _each("hardware", {name: setting.hardware for name, setting in settings.items()})
    found += _each("software", {name: setting.software for name, setting in settings.items()})
    return found


def _each(room: str, values: Mapping[str, Mapping[str, str]]) -> List[Difference]:
    names = sorted({key for each in values.values() for key in each})
    found: List[Difference] = []
    for name in names:
        told = {run: each.get(name, "") for run, each in values.items()}
        found += _difference(f"{room}: {name}", told, breaks=name not in _MINOR)
    if room == "software" and len(found) > 8:
        found = found[:8] + [Difference(f"software: {len(found) - 8} more packages", {}, True)]
    return found


def _difference(what: str, values: Mapping[str, str], breaks: bool) -> List[Difference]:
    """Nothing where all say the same, or none says anything."""
    told = {value for value in values.values() if value}
    if len(set(values.values())) < 2:
        return []
    shown = {run: value if len(value) <= _MOST else value[: _MOST - 3] + "..." for run, value in values.items()}
    return [Difference(what, {run: value or "not known" for run, value in shown.items()}, breaks and len(told) > 1)]


def _cut_alike(commands: Mapping[str, str]) -> Dict[str, str]:
    """Only the words in which commands differ, so that two long ones can be told apart."""
    words = {name: command.split() for name, command in commands.items() if command}
    common = set.intersection(*map(set, words.values())) if words else set()
    if len({tuple(each) for each in words.values()}) == 1:
        return dict(commands)
    return {
        name: " ".join(word for word in words[name] if word not in common) or "(without them)" if name in words else ""
        for name in commands
    }

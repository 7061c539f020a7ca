"""Strip what launchers, containers and loggers put before a line's message.

mpirun's tags, srun -l, torchrun's [rank3]:, pdsh, Ray, docker, Kubernetes, kernel logs, timestamps and colours: each gives
information (a rank, a host, a time, a level) and none of it belongs to the message.
"""

from __future__ import annotations

import json
import re
from typing import Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex

MAX_LINE = 8192  # characters kept of a line; a log may have lines of any length
_MAX_PREFIXES = 10
_SEQUENCE = r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,200}(?:\x07|\x1b\\)|[@-Z\\^_])"
_ANSI, _ANSI_BYTES = regex(_SEQUENCE), regex(_SEQUENCE.encode())
ESCAPE = b"\x1b"
_DATE = r"\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z| ?[+-]\d\d:?\d\d(?!\S))?"
_LEVELS = r"(?P<level>INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|FATAL)"
# Starts of a program's own line: a word with a colon before one of these is a host.
_OWN_START = (
    r"(?=\s*(?:\[rank ?\d|\[\d{4}-\d\d|Traceback \(most|File \"|[\w.-]+:\d+:\d+ \["
    r"|(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b))"
)


def _patterns(*patterns: str) -> Tuple[re.Pattern[str], ...]:
    return tuple(map(regex, patterns))


# A label of one kind of parallelism, whose number is the rank: SGLang's [2026-01-02 03:04:05 TP3], vLLM's (Worker_TP3 pid=7).
_PARALLEL = r"(?:[TPECS]P)[ _=]?(?P<rank>\d{1,5})"
# Keyed by the first character of the remaining line; applied repeatedly until none matches.
_BRACKET = _patterns(
    r"\[(?:\d+,)?(?P<task>\d+)\]\s?<std(?:out|err|diag)>: ?",  # mpirun --tag-output, horovodrun
    r"\[(?:rank|Rank|RANK)[ :=]{0,2}(?P<rank>\d+)\]:?\s?",  # torch, Lightning
    r"\[[A-Za-z_]\w{0,30}?(?P<local>\d+)\]:\s?",  # torchrun's role and local rank
    r"\[(?:(?P<time>" + _DATE + r") )?" + _PARALLEL + r"\]:? ?",
    r"\[(?P<time>" + _DATE + r")\] ?",
    r"\[(?P<time>" + _DATE + r"): (?P<level>[IWEF]) [\w./-]{1,120}:\d+\] ?",  # Horovod
    r"\[(?P<time>" + _DATE + r") (?P<level>[IWEF]) \d{1,9} \d{1,9}\] ?",  # Ray's own processes
    r"\[(?P<level>[IWEF]) (?P<time>" + _DATE + r")[^\]]{0,60}\] ?",  # Optuna, Jupyter
    r"\[\d\d:\d\d:\d\d(?:[.,]\d+)?\] ?",
    r"\[" + _LEVELS + r"\s{0,4}\] ?",  # DeepSpeed: [2026-01-02 03:04:05,678] [ERROR] [launch.py:325:sigkill_handler]
    r"\[[\w./-]{1,80}\.py:\d+(?::[\w<>]{1,60})?\] ?",
    r"\[(?P<host>(?![\w.-]+\.(?:cc?|cpp|cu|h|hpp|rs|go|jl):)[A-Za-z][\w.-]{0,60}):\d{3,9}\] (?=\S)",  # Open MPI
    r"\[ *\+?\d{1,9}\.\d{3,9}\] ",  # dmesg, seconds since boot
    r"\[[A-Z][a-z]{2} (?P<time>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) \d{4}\] ",  # dmesg -T
    r"\[\d{9,11}\.\d{3,9}\] \[(?P<host>[A-Za-z][\w.-]{0,60}):\d{1,9}:\d{1,6}\] +",  # UCX
    r"\[\d{1,9}\.(?:\d{1,2}|batch|extern|interactive)\] (?=\w{1,20}: )",  # slurmd's own log, the step
    r"\[pod/(?P<host>[\w.-]+)/[\w.-]+\] ?",  # kubectl logs --prefix
    r"\[(?P<host>[a-z][a-z-]*\d[a-z0-9.-]{0,60})\] (?=[\w.-]+:\d+:\d+ )",
    r"\[(?P<task>\d{1,6})\] (?=Traceback \(most|\s+File \"|(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b)",  # hydra -l
    r"\[\d{1,9}\] (?=[\w.-]+:\d+:\d+ \[|\[)",  # hydra -l, line numbers of a log viewer
)
_ROUND = _patterns(
    r"\(\w{0,30}[_ ]" + _PARALLEL + r"(?: pid=\d+)?\)\s?",
    r"\([^()=]{0,60}(?:\brank=(?P<rank>\d+) )?\bpid=\d+(?:, ip=(?P<host>[\w.:-]+))?\)\s?",  # Ray, vLLM
)
_DIGIT = _patterns(
    r"(?P<time>" + _DATE + r") (?:stdout|stderr) [FP] ",  # a container runtime's own log
    r"(?P<time>" + _DATE + r")(?: -|:|,)? (?:\| )?(?:" + _LEVELS + r"\s{0,5}[|:-]\s?)?",
    r"\d\d:\d\d:\d\d(?:[.,]\d+)? (?:(?P<level>[IWEF]) )?(?=\S)",
    r"(?P<host>\d{1,3}(?:\.\d{1,3}){3}): ",  # pdsh
    r" {0,5}(?P<task>\d{1,6}):(?: |$)",  # srun -l
    r" {0,5}(?P<task>\d{1,6}):(?=\[|Traceback|[\w.-]+:\d+:\d+ \[)",
    r" {1,20}(?=\[[Rr]ank ?\d{1,6}\])",  # a log that was indented as a whole
)
_KERNEL = _patterns(
    r"kern +:\w+ *: (?:(?P<time>" + _DATE + r") )?",  # dmesg -x
    r"(?P<time>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)(?:\.\d{1,9})? (?P<host>[\w.-]{1,80}) "
    r"(?:kernel|[\w./@-]{1,60}\[\d{1,9}\]): ",  # syslog, journalctl
    r"(?P<host>[\w.-]{1,80}) kernel: ",  # the same, where its time was read as a logger's
)
_LOGGER = _patterns(
    _LEVELS + r" \d\d-\d\d \d\d:\d\d:\d\d (?:\[?[\w./-]{1,80}:\d+\]\s?)?",  # vLLM
    r"(?P<level>[IWE]) \d\d-\d\d \d\d:\d\d:\d\d [\w./-]{1,80}:\d+\] ?",  # SkyPilot
    _LEVELS + r"(?=:[\w.]{1,100}:)",  # Python's logging.basicConfig; the logger's name stays
)
_TIMESTAMPED = _patterns(  # mpirun --timestamp-output --tag-output
    r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}(?=\[(?:\d+,)?\d+\]<std)"
)
_QUOTE = _patterns(
    r"[>\u2502|] {0,2}(?=\S)",  # an issue's quotation, a terminal's frame
    r"[>\u2502]$",
    r"# (?=\s*(?:\[|Traceback|File \"))",  # a log kept as comments
)
_COMPOSE = _patterns(
    r"(?P<redirected>std(?:out|err)) \| ",  # FastChat: its logger calls all that is printed there an error
    r"[\w.-]{1,60} +\| ",  # docker compose
)
_HOST = _patterns(
    r"Abort\(\d+\) on node \d+ \(rank (?P<rank>\d+) in comm \w+\): ",  # MPICH
    r"(?!(?:hsn|eth|cxi|mlx|bond|hfi|ib|efa|eno|en[ps])\d)"  # an interface is no host
    r"(?P<host>[a-z][a-z-]*\d[a-z0-9.-]{0,60}|localhost): ",  # pdsh, clush, ssh loops, DeepSpeed
    r"(?!error|warning|python|bash)(?P<host>[a-z][a-z0-9.-]{1,60}): " + _OWN_START,
)


def _candidates(text: str) -> Tuple[re.Pattern[str], ...]:
    first = text[:1]
    if first == "[":
        return _BRACKET
    if first == "(":
        return _ROUND
    if first.isdigit() or first == " ":
        return _DIGIT
    if first in (">", "\u2502", "#"):
        return _QUOTE
    start = text[:72]
    if "]<std" in start:
        return _TIMESTAMPED
    if " | " in start:
        return _COMPOSE
    if text.startswith(("INFO", "WARN", "ERROR", "DEBUG", "CRITICAL", "I ", "W ", "E ")):
        return _LOGGER
    if ": " in start:
        of_system = " kernel: " in start or start.startswith("kern ") or (start[3:4] == " " and start[9:10] == ":")
        return _KERNEL if of_system else _HOST
    return ()


# A progress bar that did not end its line before the next writer's text: `33%|###   | 3/9 [00:04<00:08,  1.2it/s]Killed`
_BAR = regex(r"[^|\n]{0,80}\d{1,3}%\|[^|\n]{0,300}\| ?\d\S{0,20}/\d\S{0,20} \[[^\]\n]{0,300}\]\s{0,200}(?=\S)")
_SUFFIX = regex(r" ?\[repeated \d+x across cluster\].*$")
# glog: [E810 03:04:11.061727749 File.cpp:683] or E0516 10:49:24.165000 10143 path.py:874]
_GLOG = regex(r"(?:^|\[)[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d(?:\.\d+)?)\b")
# The same, or without a time: [W socket.cpp:426]; W external/xla/file.cc:291]
_GLOG_LEVEL = regex(
    r"(?:^|\[)([IWEF])(?:\d{3,4} \d\d:\d\d:\d\d\S*)?(?: {1,9}\d{1,9})? {1,9}\S{1,200}?\.(?:cpp|cc|cu|h|hpp|py|go):\d+\]"
)
_LIBFABRIC = regex(r"libfabric:\S{1,200}<(info|warn|debug|trace)>")
_PYTHON_WARNING = regex(r"\b[A-Z]\w*Warning: ")
_WARNED_AT = regex(r"/\S{1,300}\.py:\d+: (?!\w*(?:Error|Exception)\b)")  # warnings.warn, whatever the category's name
# INFO: text; INFO     text; root - INFO - text
_SAID_LEVEL = regex(
    r"(?:\S{1,60} [-:|] )?(?:(INFO|DEBUG|TRACE|NOTE|NOTICE)\s*[:|-]?\s|(WARNING|WARN|ERROR|CRITICAL|FATAL)\s{0,5}[:|-]\s)"
    r"|wandb: (WARNING) "
    r"|[\w.]{1,100}: \[(INFO|DEBUG|WARNING|ERROR|CRITICAL)\] "  # torch elastic, 2.1
    r"|(?:[A-Za-z]\w{0,15} )?(INFO|DEBUG|WARNING|WARN|ERROR|CRITICAL|FATAL) \(?\d{4}-\d\d-\d\d[ T]"  # Paddle, submitit
    r"|(?:\[[\w.-]{1,40}\] )?\[((?i:info|debug|warning|warn|error|critical|fatal))\][ :]"  # LightGBM: [LightGBM] [Fatal]
    r"|\d\d/\d\d/\d\d \d\d:\d\d:\d\d (INFO|DEBUG|WARN|ERROR|FATAL) "  # Spark
    r"|(WARNING|ERROR|CRITICAL) \[\d\d/\d\d \d\d:\d\d:\d\d \S{1,80}: "  # detectron2
)
# level=info msg=text; "level": "info"
# What programs without a logger put before their last words: `Error: no shard is left`, `train: fatal: ...`
_LAST_WORDS = regex(
    r"(?:[\w./-]{1,60}: )?(?:Error|error|Fatal|fatal)(?: error)?: (?!not a git)(?=[A-Za-z_'\"(])"
    r"|Exception has occurred: (?=[A-Za-z])"  # an editor's debugger
)
_ASCEND = regex(r"E[A-Z]\d{4}: (?=\S)")  # CANN's numbers of errors
_GIVES_UP = ("Aborting", "Giving up", "Exiting")  # at the end of a line
_WHY = regex(r"(?i)\b(?:cannot|can't|could not|no|not|fail\w*|error|invalid|missing|abort\w*|giv\w*)\b")
_LEVEL_FIELD = regex(
    r"(?:\b(?:level(?:name)?|lvl|severity)\"?[=:] ?\"?|^<)"
    r"((?i:info|debug|trace|notice|warning|warn|error|err|critical|crit|fatal|alert))\b"
)
_LEVEL_BEHIND_TIME = regex(r"\[?(WARNING|WARN|ERROR|CRITICAL|FATAL)\b(?!\.|_)")
_WORDS_OF_LEVELS = {
    "I": "I INFO DEBUG TRACE NOTE NOTICE",
    "W": "W WARN WARNING",
    "E": "E ERR ERROR",
    "F": "F CRIT CRITICAL FATAL ALERT",
}
_LEVEL_LETTER = {word: letter for letter, words in _WORDS_OF_LEVELS.items() for word in words.split()}
_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTHS = {name: number for number, name in enumerate(_NAMES, 1)}
_TORCH_RANK = regex(r"\[(?:PG (?:ID )?\S+(?: PG GUID \S+)? )?Rank (\d+)\]|, RankID:(\d+)\)")
_DAYS = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)  # before each month of a leap year


@dataclass(frozen=True)
class Line:
    """A cleaned line. `rank` comes from the prefix (a task number for srun -l). `time` is in seconds since the start of its
    year."""

    text: str
    rank: Optional[int] = None
    host: Optional[str] = None
    time: Optional[float] = None
    level: str = ""  # I, W, E or F, where a logger says so; I and W are never errors by themselves
    task: Optional[int] = None  # number printed by srun -l and the like: a rank, or a node with its own launcher
    fields: str = ""  # other fields of a structured record: `pool=hbm want=2.1`
    rank_is_task: bool = False  # no other words name the rank
    local: Optional[int] = None  # the local rank, where the prefix names only that

    @property
    def only_warns(self) -> bool:
        return self.level in ("I", "W")


def decode(raw: bytes) -> str:
    return raw[: MAX_LINE * 2].decode("utf-8", "replace")


def without_escapes(raw: bytes) -> bytes:
    """Remove colours, which may be in the middle of a word, before any word is searched for."""
    return _ANSI_BYTES.sub(b"", raw) if ESCAPE in raw else raw


def without_colour(text: str) -> str:
    """Remove colours, and the counter that Ray appends to repeated lines."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return _SUFFIX.sub("", text) if "[repeated " in text else text


def clean(raw: str) -> Line:
    """Return the message, with rank, host, time and level from its prefixes."""
    text = without_colour(raw[:MAX_LINE])
    bar = _BAR.match(text) if "%|" in text[:120] else None
    text = text[bar.end() :] if bar else text
    rank: Optional[int] = None
    task: Optional[int] = None  # a launcher's number: a rank, or a node on which another launcher starts them
    local: Optional[int] = None
    host: Optional[str] = None
    when: Optional[float] = None
    level = ""
    for _ in range(_MAX_PREFIXES):
        for prefix in _candidates(text):
            match = prefix.match(text)
            if match:
                break
        else:
            break
        if not match.end():
            break
        found = match.groupdict()
        rank = int(found["rank"]) if found.get("rank") and rank is None else rank
        task = int(found["task"]) if found.get("task") and task is None else task
        local = int(found["local"]) if found.get("local") else local
        host = found.get("host") or host
        when = seconds_in_year(found["time"]) if found.get("time") and when is None else when
        level = "" if found.get("redirected") else level or _LEVEL_LETTER.get(found.get("level") or "", "")
        text = text[match.end() :]
    rank_is_task = rank is None and task is not None
    rank = task if rank is None else rank
    record = _record(text) if text[:1] == "{" or "=" in text[:40] else None
    if record is not None:
        text, _, spoken, of_rank, of_host = record
        level, host = level or spoken, host or of_host
        rank = of_rank if rank is None else rank
    if when is None:
        when = _glog_seconds(text)
    if rank is None and "Rank" in text:
        named = _TORCH_RANK.search(text)
        rank = int(named[1] or named[2]) if named else None
    level = level or _level(text)
    if not level and when is not None:  # 2026-01-02 03:04:05 ERROR text
        behind = _LEVEL_BEHIND_TIME.match(text)
        level = _LEVEL_LETTER[behind[1]] if behind else ""
    return Line(text, rank, host, when, level, task, record[1] if record else "", rank_is_task, local)


# Records of loggers that write fields: JSON, and `level=error rank=3 msg="..."`.
_FIELD = regex(r"\s*([A-Za-z_][\w.]{0,40})=(\"(?:[^\"\\]|\\.)*\"|[^\s\"]*)")
_MESSAGE = ("msg", "message", "text", "log", "event", "detail")
_SEVERITY = ("level", "lvl", "severity", "sev", "levelname", "priority")
_HOSTS = ("host", "hostname", "node")
_WHEN = ("ts", "t", "time", "timestamp", "asctime")
_LOUD = regex(r"(?i)err|fatal|crit|grave|severe|panic|emerg|alert|dire|serious|fail|bad")
_SOFT = regex(r"(?i)warn|caution|attention")


def _record(text: str) -> Optional[Tuple[str, str, str, Optional[int], Optional[str]]]:
    """Parse a structured record: message, other fields, level, rank and host; None if it is not one or has no message."""
    if text[:1] == "{":
        try:
            entries = json.loads(text)
        except ValueError:
            return None
        pairs = list(entries.items()) if isinstance(entries, dict) else []
    else:
        pairs, end = [], 0
        found = _FIELD.match(text)
        while found:
            pairs.append((found[1], found[2].strip('"')))
            end = found.end()
            found = _FIELD.match(text, end)
        if text[end:].strip():
            return None
    named = {name.lower(): value for name, value in pairs}
    message = next(
        (named[key] for key in _MESSAGE if isinstance(named.get(key), str) and " " in named[key].strip()), None
    )
    if message is None or len(named) < 2:
        return None
    severity = str(next((named[key] for key in _SEVERITY if key in named), ""))
    level = "E" if _LOUD.match(severity) else "W" if _SOFT.match(severity) else "I" if severity else ""
    rank = str(next((named[key] for key in ("rank", "global_rank", "rank_id") if key in named), ""))
    host = next((named[key] for key in _HOSTS if isinstance(named.get(key), str)), None)
    others = (
        f"{name}={value}"
        for name, value in named.items()
        if name not in (*_SEVERITY, *_WHEN, *_HOSTS) and value != message and not isinstance(value, (dict, list))
    )
    return message, " ".join(others), level, int(rank) if rank.isdigit() else None, host


def _level(text: str) -> str:
    if "NCCL INFO" in text:
        return "I"
    glog = _GLOG_LEVEL.search(text[:400]) if "]" in text else None
    if glog:
        return glog[1]
    fabric = _LIBFABRIC.match(text)
    if fabric:
        return "W" if fabric[1] == "warn" else "I"
    said = _SAID_LEVEL.match(text)
    if said:
        return _LEVEL_LETTER[next(filter(None, said.groups())).upper()]
    head = text[:230]
    named = "level" in head or "lvl" in head or "severity" in head or head[:1] == "<"
    field = _LEVEL_FIELD.search(head) if named else None
    if field:
        return _LEVEL_LETTER[field[1].upper()]
    if _ASCEND.match(text):
        return "E"
    if _WARNED_AT.match(text) or "arning: " in text and _PYTHON_WARNING.search(text):
        return "W"
    gives_up = text.rstrip(" .!").endswith(_GIVES_UP) and _WHY.search(text)
    return "E" if gives_up or _LAST_WORDS.match(text) else ""


def seconds_in_year(text: str) -> Optional[float]:
    """Return the seconds since the start of the year; the year is ignored because half the formats have none."""
    if text[0].isdigit():
        month, day, clock = int(text[5:7]), int(text[8:10]), text[11:].replace(",", ".")
    else:
        month, day, clock = _MONTHS.get(text[:3], 0), int(text[4:6]), text[7:]
    return _in_year(month, day, clock)


def _glog_seconds(text: str) -> Optional[float]:
    match = _GLOG.search(text[:400]) if text[:1] in _LEVEL_LETTER or "[" in text else None
    if not match:  # a progress bar may stand before it
        return None
    return _in_year(int(match[1]), int(match[2]), f"{match[3]}:{match[4]}:{match[5]}")


_CLOCK = regex(r"(\d\d):(\d\d):(\d\d(?:\.\d{1,9})?)")


def _in_year(month: int, day: int, clock: str) -> Optional[float]:
    match = _CLOCK.match(clock)
    if not match or not 1 <= month <= 12 or not 1 <= day <= 31:
        return None
    hours, minutes, seconds = match.groups()
    return (_DAYS[month - 1] + day - 1) * 86400.0 + int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def split_carriage_returns(raw: bytes) -> Tuple[bytes, ...]:
    """Split a line at carriage returns: progress bars overwrite one line many times."""
    if b"\r" not in raw:
        return (raw,)
    return tuple(part for part in raw.rstrip(b"\r\n").split(b"\r") if part)[-64:]

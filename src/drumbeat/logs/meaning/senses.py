"""Meaning of an error, whatever program words it.

An error's words become concepts: things (a GPU, a port, a file) and what befell them (missing, exhausted, refused). A row
of the table gives the code of each combination; numbers and names with a fixed meaning (errno, signals, exit statuses, HTTP)
are read first. A sense is the code of a rule, whose cause and fix are used; a rule with a pattern of its own only refines.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import signal as signals
from typing import Callable, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.data import load
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.causes.events import fault_in, is_stated
from drumbeat.causes.table import OF_ERRNO
from drumbeat.logs.meaning.essence import without_names

# Names, numbers and texts of errno all mean the same.
_TEXTS = {os.strerror(number).lower(): code for number, code in OF_ERRNO.items()}
_NAMES = {errno.errorcode[number]: code for number, code in OF_ERRNO.items()}
_ERRNO = regex(
    r"(?i)\b(?:errno|os error|error code)[\s:=#(]{0,3}(?P<number>\d{1,3})\b|\b(?:FI_)?(?P<name>(?-i:"
    + "|".join(_NAMES)
    + r"))\b"
)
_TEXT = regex("(?i)(?:" + "|".join(map(re.escape, _TEXTS)) + ")")

# The code of a process that a signal ended.
CODE_OF_SIGNAL = {
    signals.SIGKILL: "killed",
    signals.SIGSEGV: "segfault",
    signals.SIGBUS: "bus-error",
    signals.SIGABRT: "aborted",
    signals.SIGILL: "illegal-instruction",
    signals.SIGFPE: "illegal-instruction",
}
_SIGNALS = frozenset(map(int, signals.Signals))
# `exited with status 137`, `exit code: 1`, `returned non-zero exit status 3`, `RC=9`, `terminated by signal 9 (SIGKILL)`
STATUS = regex(
    r"(?i)\b(?:(?:exit(?:ed|s|ing)?|end(?:ed|s)|terminated|return(?:ed|s)?|finished|fail(?:ed|s)|die[ds]|stopped|quit|crashed|left)\b"
    r"(?: with)?(?: an?)?(?: non-?zero)?[\s:=(]{0,3}(?:(?:exit|return)[ _-]?)?(?:status|code|value)"
    r"|(?:exit|return)[ _-]?(?:status|code)|exitcode|rc|exit(?:ed)?(?= -?[1-9]))"
    r"[\s:=(]{1,3}(?P<status>-?\d{1,3})(?![\w%]|\.\d)"
    r"|\b(?:signal|sig)[\s:=#(]{0,3}(?P<signal>\d{1,2})(?![\w.%])|\bSIG(?P<name>KILL|SEGV|BUS|ABRT|ILL|FPE)\b"
)
# A process died, as shells, kernels, launchers and Python say it: by the signal's name or number, or by an exit status.
_WORD_OF_SIGNAL = {
    "killed": signals.SIGKILL,
    "segmentation fault": signals.SIGSEGV,
    "bus error": signals.SIGBUS,
    "aborted": signals.SIGABRT,
    "illegal instruction": signals.SIGILL,
    "floating point exception": signals.SIGFPE,
}
_WORDS_OF_SIGNALS = "Killed|Segmentation fault|Bus error|Aborted|Illegal instruction|Floating point exception"
_DEATH = regex(
    r"(?:: line \d+:\s+\d+|\btasks? [\d,-]+:|[Ss]ignal(?: termination)?:|[Ss]ignal \(\d+(?:\.\d+)?\):|Python error:)"
    rf"\s+(?P<a>{_WORDS_OF_SIGNALS})"
    rf"|(?P<b>{_WORDS_OF_SIGNALS})\s*\((?:core dumped|signal|\d+\))|(?:^|[^\w\s]|\d)(?P<c>{_WORDS_OF_SIGNALS})$"
    rf"|^\[\d+\]\s+[+-]?\s*\d+ (?P<d>(?i:{_WORDS_OF_SIGNALS}))\s{{3,}}"
    r"|(?:[Gg]ot|[Cc]aught|[Rr]eceived|[Bb]y|[Ff]rom|[Ww]ith|[Ss]ignal:?|\*\*\*|[<(]) ?"
    r"(?:signal |Signals\.)?SIG(?P<name>KILL|SEGV|BUS|ABRT|ILL|FPE)\b"
    r"|(?i:\b(?:from|on|by|caught|with) signal:? |^signal )(?P<number>\d{1,2})\b|Signal (?P<upper>\d{1,2}) \("
    r"|(?i:exit ?code\"?|exit status|return code|exited with code)\s{0,4}[:=]?\s{0,4}"
    r"(?:-(?P<minus>\d{1,2})\b|1(?P<plus>[2-5]\d)(?=[\s.,;:)]*(?:$|\()))|^=\s+EXIT CODE: (?P<hydra>\d{1,2})$"
)
# A line without any of these says no such thing.
DEATH_WORDS = (
    *_WORDS_OF_SIGNALS.split("|"), "killed", *(f"SIG{name}" for name in ("KILL", "SEGV", "BUS", "ABRT", "ILL", "FPE")),
    "signal", "Signal", "SIGNAL", "exitcode", "exitCode", "exit code", "Exit Code", "EXIT CODE", "exit status", "return code",
    "exited with code",
)  # fmt: skip
# An interface to the network, and the state in which it carries nothing: `cxi2: Link is DOWN`, `IBV_EVENT_PORT_ERR`.
_OF_RDMA = r"mlx\d\w*|bnxt_re\w*|irdma\w*|hfi\d\w*|rocep\w*|IBV?|[Ii]nfini[Bb]and|HCA|RDMA|async event"
_INTERFACE = (
    rf"\b(?:(?P<rdma>{_OF_RDMA})|cxi\w*|hsn\d+|bnxt_en|efa_?\d+|(?:bond|eth|eno|en[ps]|ib[sp]?)\d\w*|i40e|ice|ixgbe"
    r"|NIC|nic)\b"
)
_TO = (
    r"(?: \d)?(?: of \S+)?(?: (?!up\b|active\b)[a-z]+\b){0,2}?(?: ?[:=(-] ?| |_)(?:changed )?"
    r"(?:(?:from |to )?\w+ ?(?:->|to) ?)?"
)
_CARRIES_NOTHING = (
    rf"(?i:(?<!\b0 )\b(?:(?:link|carrier)\b{_TO}(?:down|lost|inactive|err(?:or)?|fail(?:ed|ure)|flapp(?:ed|ing))\b(?!\w*[=:] ?0)"
    rf"|port\b{_TO}(?:down|lost|inactive|err(?:or)?)\b|(?:lost|no) (?:carrier|link)\b|cable is unplugged"
    r"|state (?:is |changed ).{0,30}?\bdown\b))"
)
_LINK = regex(
    rf"\b(?P<event>[A-Z]{{2,8}}_EVENT_(?:PORT|LINK)_(?:ERR|DOWN))\b|{_INTERFACE}.{{0,80}}?{_CARRIES_NOTHING}"
    rf"|{_CARRIES_NOTHING}.{{0,40}}?{_INTERFACE.replace('<rdma>', '<verbs>')}"
)
LINK_WORDS = (
    "down", "Down", "DOWN", "inactive", "INACTIVE", "unplugged", "carrier", "Carrier", "flapped", "flapping",
    "PORT_ERR", "port error", "link error", "Link error", "link lost", "link failure",
)  # fmt: skip
Reading = Tuple[str, Tuple[int, int], bool]  # a code, the place of its words, and True if they only hint at it
NOTHING: Reading = ("", (0, 0), False)
_INITIALS = regex(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@functools.lru_cache(maxsize=1)
def gpu_errors() -> Mapping[str, str]:
    """Return names and texts of GPU runtime errors -> the code of their cause."""
    found = {}
    for code, row in load("drumbeat.logs.meaning", "gpu_errors").items():
        for name in row["names"]:
            driver = f"CUDA_ERROR_{_INITIALS.sub('_', name).upper()}"
            found.update(dict.fromkeys((f"cudaError{name}", f"hipError{name}", driver), code))
        found.update(dict.fromkeys(row["texts"], code))
    return found


@functools.lru_cache(maxsize=64)
def gpu_error_in(text: str) -> Reading:
    """Read the first such error in the text."""
    found = [(text.find(words), -len(words), code) for words, code in gpu_errors().items() if words in text]
    start, length, code = min(found, default=(0, 0, ""))
    return code, (start, start - length), False


@functools.lru_cache(maxsize=64)
def link_in(text: str) -> Reading:
    """Read a network link that is reported as down."""
    found = _LINK.search(text)
    if found is None:
        return NOTHING
    of_rdma = (found["event"] or "").startswith("IBV") or found["rdma"] or found["verbs"]
    return "ib-port-error" if of_rdma else "link-down", found.span(), False


_HTTP = regex(
    r"(?i)\b(?:https?|(?-i:GET|POST) \S{1,200} \S{0,2}|status(?: code)?"
    r"|answer(?:ed|s)?|return(?:ed|s)?|response|repl(?:ied|ies)|gave|got|sa(?:id|ys))"
    r"(?: with| error| status| code)*\W{1,3}(?P<http>[45]\d\d)\b(?! ?(?:[a-z]?i?b|ms|s|steps|samples)\b)"
)

_APOSTROPHE = regex(r"(?<=\w)n['\u2019]t\b")

_DO = r"(?:\w+ ){0,3}?"  # what may stand between `not` and its verb
_PART = regex(r"\{([a-z][a-z-]*)\}")


@dataclass(frozen=True)
class Words:
    names: Sequence[Tuple[re.Pattern[str], str]]
    spellings: Sequence[Tuple[re.Pattern[str], str]]
    concepts: Mapping[str, re.Pattern[str]]
    rows: Sequence[Tuple[str, Sequence[str]]]  # code and concepts
    like: Mapping[str, str]  # code -> the code of which it is a kind
    owners: Sequence[Tuple[re.Pattern[str], str, Sequence[str]]]  # whose lines, their code, codes that are not theirs


@functools.lru_cache(maxsize=1)
def words() -> Words:
    """Spellings, concepts and rows of words.yaml."""
    data = load("drumbeat.logs.meaning", "words")
    concepts = {**data["things"], **data["happenings"]}
    names, spellings = ([(regex(_joined(one)), word) for one, word in data[key]] for key in ("names", "spellings"))
    parts = {"do": _DO, **data["parts"], **concepts}
    whole = {name: _joined(text, parts) for name, text in concepts.items()}
    patterns = {name: regex(rf"(?<![\w-])(?:{text})(?!\w|-\d)") for name, text in whole.items()}
    rows = [(code, row.split()) for each in data["rows"] for code, rows in each.items() for row in rows]
    owners = [(regex(_joined(line)), code, others.split()) for line, code, others in data["owners"]]
    return Words(names, spellings, patterns, rows, data["like"], owners)


def senses() -> FrozenSet[str]:
    """Return every code that the grammar or the model of likely.py can give."""
    known = (*OF_ERRNO.values(), *gpu_errors().values(), *CODE_OF_SIGNAL.values(), *(code for code, _ in words().rows))
    known = (*known, *(code for _, code, _ in words().owners))
    return frozenset((*known, "configuration", *load("drumbeat.logs.meaning", "weights")["codes"])) - {PROGRAM}


def _joined(text: str, parts: Mapping[str, str] = {}) -> str:
    """Join a pattern that spans several lines, broken after `|`, and fill in its parts."""
    return _PART.sub(lambda found: f"(?:{_joined(parts[found[1]], parts)})", text.replace("|\n", "|"))


_NEAR = 60  # maximum characters between two concepts that belong together
# What an assertion can find: it compares values that the program was given, and has seen no kernel, no network, no process.
_COMPARED = ("layout-mismatch", "checkpoint-mismatch", "launcher-arguments", "world-not-set", "nan-loss")
_REMEDY = regex(
    r"(?i)\b(?P<how>(?:(?:python3? -m )?pip3?|conda|mamba|apt(?:-get)?|module) (?:install|load)"
    r"(?: -[cnr] [\w./-]+| -[\w-]+)* [\w.\[\]=~<>,/-]*\w\]?)"
    r"|\bexport (?P<set>[A-Z][A-Z0-9_]*=[\w./:-]*\w)"
    r"|(?:[.;:,(!] |\b(?:please|then|should|must) )(?:run|execute|try|type):? "
    r"(?P<quote>[`'\"])(?P<command>[a-z./][^`'\"]{2,120})(?P=quote)"
    r"|\b(?:(?:to|can) (?:fix|repair|solve) (?:this|it)|hint|fix|remedy|solution)\b\W{1,3}(?:please )?(?:run|execute|try|type):?"
    r" (?P<bare>[a-z][\w.-]*(?: [\w./=:-]*\w)+)"
    r"|\b(?P<option>(?:use|pass|add|give) --[a-z][\w-]*(?:=\S*\w)?)(?= (?:to|for|in order)\b)"
)
_ONLY_HELP = regex(r"(?<![\w-])(?:-h|--help|help|man)(?![\w-])")  # it shows what can be done, and does nothing
_SET = regex(
    r"\b(?:require\w*|must|needs?|[Pp]lease|have to)\b[^.]{0,60}?\b(?:[Ss]et(?:ting)?|export)"
    r"(?: the)?(?: environment)?(?: variable)? [`'\"]?(?P<name>[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)[`'\"]?"
    r"(?: to |=)[`'\"]?(?P<value>[\w./:-]*\w)"
)
MAX = 600  # characters of an error that are read


def owned(text: str, code: str) -> str:
    """Correct an error's code for the library that wrote the line: a network library's I/O error is a network error."""
    owner = _owner(text)
    return owner[1] if owner and code in owner[2] else code


def _owner(text: str) -> Optional[Tuple[re.Pattern[str], str, Sequence[str]]]:
    return next((each for each in words().owners if each[0].search(text)), None)


@functools.lru_cache(maxsize=4096)
def sense(text: str) -> str:
    """Return the code of what this error means; empty if its words do not tell."""
    text = text[:MAX]
    message = fault_in(text)
    if message:
        code = sense(text[message:]) if is_stated(text) else ""
        return code if code in _COMPARED else ""
    code = _sense(text)
    return owned(text, code) if code else ""


# Packages that read settings: what they raise is about a file or a command line, whatever the words are.
_CONFIGURATION = regex(
    r"(?:omegaconf|hydra|ruamel\.yaml|yaml|pydantic\w*|jsonargparse|tomli|tomllib|toml|configparser|marshmallow|voluptuous"
    r"|cerberus|dacite|draccus|tyro|ml_collections)\.(?:[\w]+\.)*[A-Z]\w*|Config(?:Attribute|Key|Composition|Value|Type)\w*:"
)


def of_library(exception: str) -> bool:
    """Return True if a library raised this whose errors are about what it is for, whoever called it."""
    return bool(_CONFIGURATION.match(exception) or _owner(exception))


def _sense(text: str) -> str:
    if _CONFIGURATION.match(text):
        return "configuration"
    runtime = gpu_error_in(text)[0]
    if runtime:
        return runtime
    found = _ERRNO.search(text)
    exact = (OF_ERRNO.get(int(found["number"])) if found["number"] else _NAMES[found["name"]]) if found else None
    if exact is None:
        said = _TEXT.search(text)
        exact = _TEXTS[said[0].lower()] if said else None
    meant = row_of(text)[0]
    if "os error" in text and "peer-lost" in (exact, meant):  # Rust's words, of a client that fetches something
        return "connect-failed"
    if exact and meant not in _NAMES_OBJECT.get(exact, ()):
        return exact
    if not exact and meant in ("", "peer-lost", "node-failure", "oom-kill"):
        number = signal_of(text)
        ended = CODE_OF_SIGNAL.get(signals.Signals(number)) if number in _SIGNALS else None
        meant = ended if ended and meant != "oom-kill" else meant
    if not meant and _HTTP.search(text):
        return "hub-access"
    return meant or _of_versions(text)


_OF_VERSIONS = regex(r"(?i)\b(?:version|release|driver|revision)s?\b")
_VERSION = (
    r"(?:(?:version|release|driver|cuda|rocm|torch|python|glibc\w*)s? )?v?"
    r"(?P<{}>\d{{2,4}}(?=[ ,;:)]|$)|\d+(?:\.\d+)+)\S*"
)
_AT_LEAST = (
    r"at least|minimum(?: of)?|needs?|requires?|required|wants?|expects?|asks? for|or (?:later|newer|higher)|and up"
    r"|newer than"
)
_BUILT = r"(?:built|compiled|made|linked|meant|written|targets?)(?: \w+){0,2}? (?:for|against|with|on|under)"
_HERE = r"(?:found|got|has|have|is|runs?|running|installed|here|loaded|sees?|this is|offers?|provides?|but|only|under|holds|uses)"
# The version that is asked for and the one that is there: `needs at least 2.6, found 2.4`, `built for 2.1, running under 2.4`.
_NEEDED = regex(
    rf"(?i)(?:(?P<least>{_AT_LEAST})|{_BUILT}) (?:[^\s\d]\S* ){{0,4}}?{_VERSION.format('first')}"
    rf"(?P<later> or (?:later|newer|higher|above))?\W+(?:[^\s\d]\S* ){{0,3}}?"
    rf"{_HERE} (?:[^\s\d]\S* ){{0,4}}?{_VERSION.format('second')}"
)


def _of_versions(text: str) -> str:
    """Return the code of a requirement on a version that is not met: the thing whose version it is decides."""
    found = _NEEDED.search(without_names(text))
    if found is None or "." not in found["first"] + found["second"] and not _OF_VERSIONS.search(text):
        return ""
    needed, here = (tuple(map(int, found[name].split("."))) for name in ("first", "second"))
    least = min(len(needed), len(here))
    met = here[:least] >= needed[:least] if found["least"] or found["later"] else here[:least] == needed[:least]
    concepts, plain = words().concepts, spelt(text)
    kind = "driver-too-old" if concepts["driver"].search(plain) else "import-error"
    return "" if met else "nccl-versions-differ" if concepts["nccl"].search(plain) else kind


# What an errno befell, where the object says more than the number.
_NAMES_OBJECT = {
    "file-missing": ("import-error", "command-not-found", "bad-image", "shm-full"),
    "disk-full": ("shm-full",),
    "permission": ("hub-access", "memlock-low", "process-limit"),
    "host-out-of-memory": ("gpu-out-of-memory", "memlock-low", "shm-full", "oom-kill"),
    "connect-failed": ("collective-timeout", "hub-access", "peer-lost"),
    "store-refused": ("hub-access",),
    "peer-lost": ("hub-access",),
}


_MEMBER = regex(
    r"(?i)\b(?:rank|worker|trainer|member|replica|(?<!kill )(?<!killed )process(?! \d+ \()|proc|peer|task|child"
    r"|actor|participant)[\s#=:]{1,2}(\d{1,6})\b"
)


def rank_in(text: str, speaker: Optional[int] = None) -> Optional[int]:
    """Return the only rank that an error names beside the one that speaks: `Worker 0 has failed`."""
    numbers = set(map(int, _MEMBER.findall(text))) - {speaker}
    return numbers.pop() if len(numbers) == 1 else None


def missed(text: str) -> Tuple[bool, Optional[int]]:
    """Return True if the text names who is missing (`worker 6 vanished`, `no word from node 3`), and the rank if it is one."""
    text, concepts = spelt(text), words().concepts
    found = concepts["member-away"].search(text) or concepts["member-absent"].search(text)
    if found is None:
        return bool(concepts["node-away"].search(text)), None
    return True, rank_in(found[0])


def is_about(concept: str, word: str) -> bool:
    """Return True if the word is one of the grammar's words for this thing."""
    return bool(words().concepts[concept].fullmatch(word))


def signal_of(text: str) -> Optional[int]:
    """Return the signal that a line's exit status stands for: 137, -9, SIGKILL and `signal 9` are all the same."""
    found = STATUS.search(text)
    if found is None:
        return None
    if found["name"]:
        return int(getattr(signals, f"SIG{found['name']}"))
    number = int(found["signal"] or found["status"])
    number = number if found["signal"] else -number if number < 0 else number - 128
    return number if 0 < number < 65 else None


@functools.lru_cache(maxsize=64)
def death_in(text: str) -> Reading:
    """Read the signal that a process died from."""
    found = _DEATH.search(text)
    if found is None:
        return NOTHING
    kind = found.lastgroup or ""
    if kind in "abcd":
        number = int(_WORD_OF_SIGNAL[found[kind].lower()])
    elif kind == "name":
        number = int(getattr(signals, f"SIG{found['name']}"))
    else:
        number = int(found[kind]) - 28 * (kind == "plus")
    code = CODE_OF_SIGNAL.get(signals.Signals(number), "") if number in _SIGNALS else ""
    return code, found.span(kind), kind in ("plus", "hydra")


# Readers of lines whose words have a fixed meaning; a rule names its own.
READERS: Mapping[str, Callable[[str], Reading]] = {"death": death_in, "gpu-error": gpu_error_in, "link": link_in}


def words_of(reader: str, code: str) -> Tuple[str, ...]:
    """Return the words of this reader without which no line has this code."""
    if reader == "gpu-error":
        return tuple(text for text, meant in gpu_errors().items() if meant == code)
    return DEATH_WORDS if reader == "death" else LINK_WORDS


PROGRAM = "exception"  # the program's own fault: a code that no rule has


@functools.lru_cache(maxsize=4096)
def row_of(text: str) -> Tuple[str, bool]:
    """Return the code of the first row that fits, and True if that row only says that something is bad."""
    text, patterns = spelt(text), words().concepts
    spans: Dict[str, List[Tuple[int, int]]] = {}

    def find(name: str) -> List[Tuple[int, int]]:
        if name not in spans:
            spans[name] = [match.span() for match in patterns[name].finditer(text)]
        return spans[name]

    for code, row in words().rows:
        if all(map(find, row)) and _together([spans[name] for name in row]):
            return code, "bad" in row
    return "", False


def _together(places: Sequence[Sequence[Tuple[int, int]]]) -> bool:
    """Return True if every other concept occurs within _NEAR characters of the first one."""
    return any(
        all(any(start - _NEAR <= end and begin <= stop + _NEAR for begin, end in others) for others in places[1:])
        for start, stop in places[0]
    )


def spelt(text: str) -> str:
    """Return the text in lower case, with spellings and names replaced by plain words."""
    text = _APOSTROPHE.sub(" not", without_names(text))
    for pattern, word in words().names:
        text = pattern.sub(word, text)
    text = text.lower()
    for pattern, word in words().spellings:
        text = pattern.sub(word, text)
    return text


def remedy(text: str) -> Optional[str]:
    """Return the fix that the error itself suggests."""
    found = _REMEDY.search(text)
    if found and not _ONLY_HELP.search(found[0]):
        return (
            f"export {found['set']}"
            if found["set"]
            else next(filter(None, found.group("how", "command", "bare", "option")))
        )
    variable = _SET.search(text)
    return f"export {variable['name']}={variable['value']}" if variable else None

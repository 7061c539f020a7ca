"""Text that was copied from a terminal: a long line comes as several, each as wide as the terminal was.

Only where the text itself shows it: many lines have the same, largest width, and what follows them goes on in the middle
of a word or sentence, and not as other lines begin.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import Callable, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.causes.events import LOST_PEER, TIMED_OUT
from drumbeat.causes.table import NOBODYS_FAULT, kind_of
from drumbeat.logs.meaning.grammar import is_quoted
from drumbeat.logs.meaning.likely import Reading, read_line
from drumbeat.logs.meaning.senses import STATUS, sense
from drumbeat.logs.read.prefixes import Line, clean, decode

MAX_LINES = 5_000  # a copy from a terminal is hardly longer
NARROWEST, WIDEST = 60, 300
MAX_JOINED = 40  # lines that one line may have become
_GOES_ON = re.compile(r"[a-z0-9_.,;:)\]}'\"/=-]| \S")
_BEGINNING = 6  # characters by which lines that begin alike are known
_DIGITS = str.maketrans("123456789", "000000000")


def unwrap(lines: Sequence[bytes]) -> List[bytes]:
    """The lines, with those that a terminal cut made whole again: each stands where it began, and the places of the others are
    empty, so that every line keeps its number."""
    whole = list(lines)
    if not 2 < len(whole) <= MAX_LINES:
        return whole
    texts = [line.rstrip(b"\r").decode("utf-8", "replace") for line in whole]
    width = max(map(len, texts))
    if not NARROWEST <= width <= WIDEST or any("\r" in text for text in texts):
        return whole
    full = [len(text) == width and not text.endswith("  ") for text in texts]
    begins = {_begin(text) for text, after in zip(texts[1:], full) if not after and text.strip()}
    if not _GOES_ON.match(texts[0]):  # else the copy may begin in the middle of a line
        begins.add(_begin(texts[0]))
    follows = [number for number in range(1, len(texts)) if full[number - 1] and texts[number].strip()]
    pieces = {n for n in follows if texts[n][:2] != "  " and _begin(texts[n]) not in begins | {_begin(texts[n - 1])}}
    cut = sum(bool(_GOES_ON.match(texts[n])) for n in pieces)  # surely in the middle of a word or sentence
    long = sum(width * 0.85 < len(text.rstrip()) for text in texts)
    if cut < 2 or len(pieces) < 0.7 * len(follows) or sum(full) < 0.6 * long:
        return whole
    number = 0
    while number < len(texts):
        start = number
        text = texts[start]
        while number + 1 < len(texts) and full[number] and texts[number + 1].strip() and number - start < MAX_JOINED:
            if number + 1 not in pieces:
                break
            number += 1
            text += texts[number]
            whole[number] = b""
        if number > start:
            whole[start] = text.rstrip().encode()
        number += 1
    return whole


def _begin(text: str) -> str:
    return text[:_BEGINNING].translate(_DIGITS)


# Words on lines that no rule knows and no logger marks: is this a log at all, did anything work, and do its last
# words speak of a failure? A log that ends with `worker 3 died` or `setup of the transport failed` is not healthy,
# whoever printed that. Only the last lines are asked: further up the program went on behind such words. A sentence
# about something that runs (a subject and a failing verb, or an exit status) is read by its grammar; other words of
# failure count only where nothing takes them back.


# What programs print on lines that no rule knows: words of runs, times, levels, measured values, rows of nccl-tests. A log
# without any error holds some of them, a shopping list none.
OF_A_RUN = re.compile(
    rb"(?i)(?<![a-z])(?:step|iter(?:ation)?s?|epoch|loss|lr|rank|nodes?|train\w*|python[\d.]*|s?batch|srun|slurm\w*|torch\w*|cuda|gpus?"
    rb"|nccl|rccl|gloo|mpi\w*|checkpoint\w*|tokens?|throughput|accuracy|job|tensorflow|jax|xla|ray|rollouts?|rewards?|workers?"
    rb"|lib(?:cu|nccl|rccl)\w*|models?|optimi[sz]ers?|datasets?|dataloaders?|tokeni[sz]er|nemo|megatron|deepspeed|lightning"
    rb"|transformers|vllm|\w+\.whl|conda|pip|pods?|kubectl|ray\w+|bandwidth|latency|benchmarks?|elapsed|duration"
    rb"|install(?:ed|ing|ation)?|download(?:ed|ing)?|setting up|running|copying|creating|created|loading|loaded|processing"
    rb"|finished|completed?|successful(?:ly)?|succeeded|passed|ran|tests?|servers?|docker|containers?|kernel|host(?:name)?s?"
    rb"|devices?|memory|process(?:es)?|threads?|configur\w+|build(?:ing)?|info|debug|warn(?:ing)?s?|float|half|bfloat\d+|drivers?|versions?)(?![a-z])"
    rb"|\d\d:\d\d:\d\d|\d ?(?:[mnu]?s|secs?|seconds?|[KMGT]i?B(?:/s)?|[KMGT]bps|it/s|%)(?![\w%])"
    rb"|[:=]\s{0,3}[-+]?\d+\.\d|[A-Za-z_]{3}\s{1,40}\d+\.\d|(?:\s{1,12}[-+]?\d{1,9}\.\d{1,12}){3}"
)
# Signs that something worked: counted steps, measured values, rows of numbers, words of things that were done.
WORK = regex(
    rb"(?i)(?<![a-z])(?:step|iter(?:ation)?|epoch|batch|loss|lr|reward|accuracy|busbw|algbw)s?\b['\"]?\W{0,4}\d"
    rb"|(?<![a-z])(?:finished|completed?|successful(?:ly)?|succeeded|passed|saved|done|ok|is up)(?![a-z])|\d%\||\d ?it/s|\ds/it"
    rb"|\d ?(?:[mnu]?s|secs?|seconds|[KMGT]i?B(?:/s)?|[KMGT]bps|nsec)(?![\w%])|[:=]\s{0,3}[-+]?\d+\.\d"
    rb"|(?:\s{1,40}[-+]?\d{1,15}(?:\.\d{1,12})?){3}|[a-z_]{3}[ \t]{1,4}[-+]?\d{1,9}\.\d{2}"
)
LAST_LINES = 2  # with words, in which any word of failure counts
KEPT = 64  # lines of each file, empty ones too
TOLD = 32  # of them in which words of failure are looked for
BEFORE = 12  # lines before the last work, in which a rank may have failed that does none afterwards
MAX_FILES = 1000
MAX_LENGTH = 400  # a longer line is data
_STEP = regex(r"(?i)(?<![a-z])(?:step|iter(?:ation)?|epoch)s?\b['\"]?\W{0,4}\d.{0,60}\d\.\d|%\|")
MAX_LOOKED = 1 << 27  # bytes in which signs of work are looked for

# What runs: `training`, `worker 3`, `rank 2 on n1`, `node n07`, `train.py`, `the process (pid 812)`.
_SUBJECT = (
    r"(?:\b(?:training|trainer|evaluation|benchmark|experiment|run|job|task|step|process|subprocess|program|script|command|workers?"
    r"|worker group|ranks?|nodes?|hosts?|peers?|pods?|containers?|child|children|actors?|replicas?|agents?|launcher|servers?"
    r"|engine|instance|session|connection|simulation|torchrun|srun|mpirun|python3?)\b|\b[\w./-]{1,60}\.(?:py|sh|pyz)\b)"
    r"(?:[\s#(:=]{1,2}(?:(?:pid|id|rank)[\s=]{1,2})?[A-Za-z_.-]{0,20}\d[\w./-]{0,20}\)?){0,2}"
    r"(?: (?:on|of|at|from|to) [\w.-]{1,40}){0,2}"
)
_FAILING = (
    r"(?:fail(?:ed|s)|crash(?:ed|es)|die[ds]|dead|killed|lost|gone|aborted|hung|stalled|stuck|disconnected|unreachable|unresponsive"
    r"|evicted|terminated|not respond(?:ing)?|stopped responding|disappeared|vanished|went down|went away|(?:is|are) down"
    r"|timed out|gave up|broken?(?: down)?|panick?ed|collapsed|perished|fell over|blew up|withdrew|quit"
    r"|(?:exited|ended|quit|stopped|terminated) (?:unexpectedly|abnormally|early|with (?:an )?errors?)"
    r"|(?:stopped|ended) (?:because of|due to|after|on) (?:an? )?(?:error|exception|failure|nan|signal)\w*)"
)
_CLAUSE = regex(
    rf"(?i){_SUBJECT}\s?[:,-]?\s?(?:\w+ )?"
    rf"(?:(?:has|have|had|is|are|was|were|been|being|just|itself|status|state)[\s:=-]+){{0,4}}{_FAILING}(?![\w-])"
    r"|\b(?:lost (?:contact|touch|connection|the connection)|no (?:heartbeat|response|answer|reply|sign of life))"
    rf" (?:with|to|from) (?:the )?{_SUBJECT}"
)
# What is only possible, or lived through; and what is denied, where a subject and a verb alone say that something failed.
_LIVED = (
    r"if|unless|when(?! \w+ing\b)|until|in case|successful\w*|ignor\w+|skip\w*|retry(?:ing)?(?! (?:\w+ )?(?:exceed|limit|count))"
    r"|re-?start\w*|re-?connect(?:ed|ing)"
    r"|re-?cover\w*|resum(?:ed|ing)|(?<!not )(?<!able to )continu\w+"
    r"|fall\w* ?back|may(?! not)|might|should|would|will(?! now| be (?:taken|stop|kill"
    r"|terminat|remov|reclaim|evict|end|shut|cancel))|deprecat\w*"
    r"|as expected|warn\w*"
    r"|tr(?:y|ying) again|trying (?!to)|instead|using|starting (?:from|anew|over|fresh)|set to|protection|enabled"
    r"|so far|is o(?:n|ff)"
)
_HEDGED = regex(rf"(?i)\b(?:{_LIVED})\b|^#\s|^\s*--?\w")
_REMARK = regex(r"(?<!\w)\"[^\"]{1,200}\"")  # what somebody else said, or a name
_DENIED = regex(
    rf"(?i)\b(?:no|not|never|none|0|zero|without|any|could|can|{_LIVED})\b"
    r"(?! (?:more|respond|heartbeat|response|answer|reply|sign|contact|be reached))|^#\s|^\s*--?\w|\?\s*$"
)
# A shell's trace (set -x) or prompt, a frame of a traceback and its source text: not what a program says.
COMMAND = regex(r"\++ \S|[\w.@~:/-]{0,60}[$#] \w")
_SOURCE = regex(r"\s{2,}(?:File \"|\S.*[)\]:,]\s*$)")
_FAILS = re.compile(
    r"(?i)\b(?:fail(?:ed|ure|s)?|errors?|fatal|(?:will|now|to) abort|abort(?:ed|ing)|cannot|can't|could ?n(?:o|')t|unable to"
    r"|timed out|terminated|crash(?:ed)?)\b"
)
# Measured errors, counts of them, what is only possible, and what the program goes on after.
_MEASURED = regex(
    r"[a-z_]{2}\s*[=:]\s*[-+]?\d+\.\d+(?![.:\d])|%\||\S {2,}\S+ {2,}\S"
    r"|(?<![\w.:] )(?<![\w.:])0 (?!and|bytes|gpus?\b|accel|devices?\b)[a-z]|[a-z]: (?:0|none)(?![\w.])"
    r"|\b(?:no|zero) (?:errors?|failures?|problems?|\w+ (?:\w+ )?(?:lost|failed|died|crashed|killed))\b"
)
_TAKEN_BACK = re.compile(
    r"(?i)\b(?:no|0|zero|without|if|any|successful\w*|ignor\w+|skip\w*|retry\w*|fall\w* ?back|may|might|should|would|warn\w*"
    r"|deprecat\w*|until|expected|tolerance|rate|mean|max|min|relative|absolute|squared|train\w*|test|val\w*|dev)\b"
    r"|^#\s|^\s*--?\w|\berrors? (?:handling|correction|log|file|count|rate|report|budget|feedback|bars?)\b"
    r"|could not collect|\S {2,}: "
    r"|errors?['\"]?\s*[=:|]\s*\S|[=:]\s*[-+]?\d+\.\d|\d\.\d+\D*$|%\||\S {2,}\S+ {2,}\S"
)


def speaks_of_failure(text: str) -> bool:
    line = clean(text)
    if len(line.text) > MAX_LENGTH or line.level in ("E", "F"):  # a logger's own errors are kept elsewhere
        return False
    if COMMAND.match(line.text) or _SOURCE.match(line.text):
        return False
    status, clause = STATUS.search(line.text), _CLAUSE.search(line.text)
    if any(found and is_quoted(line.text, found.start()) for found in (status, clause)):
        return False
    if status and not status["name"] and not _DENIED.search(line.text[: status.start()]):
        return int(status["signal"] or status["status"]) != 0
    if clause and not _DENIED.search(line.text):
        return True
    if line.level or is_quoted(line.text, len(line.text) - 1) or _HEDGED.search(line.text):
        return False
    if not _MEASURED.search(line.text) and sense(line.text):
        return True
    return bool(_FAILS.search(line.text)) and not _TAKEN_BACK.search(line.text)


class Work:
    """Signs of work. Looks at lines until one shows it."""

    def __init__(self) -> None:
        self.seen = False
        self._left = MAX_LOOKED

    def look(self, lines: Iterable[bytes]) -> None:
        for raw in lines if not self.seen and self._left > 0 else ():
            self._left -= len(raw)
            if WORK.search(raw, 0, MAX_LENGTH):
                self.seen = True
                return


Numbered = List[Tuple[int, bytes]]


class Tails:
    """The last lines of each file."""

    def __init__(self) -> None:
        self._lines: Dict[str, Deque[Tuple[int, bytes]]] = {}

    def add(self, file: str, first: int, lines: Sequence[bytes]) -> None:
        tail = self._lines.get(file)
        if tail is None:
            if len(self._lines) >= MAX_FILES:
                return
            tail = self._lines[file] = deque(maxlen=KEPT)
        start = max(len(lines) - KEPT, 0)
        tail.extend((first + start + place, raw[: MAX_LENGTH * 2]) for place, raw in enumerate(lines[start:]))

    def of(self, file: str) -> Numbered:
        return list(self._lines.get(file, ()))

    def files(self) -> List[str]:
        return list(self._lines)


# How a log ends. A number behind a word for an end is its status; else the model tells by the words.
GOOD, BAD = "good", "bad"
LAST_WORDS = 6  # lines
_STATUS_AT_END = regex(
    r"(?i)\b(?:(?:code|status|rc)\b(?:[^=:\n]{0,20}[=:])?\s?\(?|(?:exit(?:ed|s)?|ended|finished|returned|returns|quit(?:s|ting)?"
    r"|error stop)\b"
    r"(?: with)?[=:( ]{1,3})(?P<status>-?\d{1,3})(?!\w|[.:]\w|[%/]| ?[a-z])"
    r"|\b(?:finish|end|result|left|leav(?:es|ing)|departs?|stopped|closed|ended|gone|down|out)\b"
    r"(?:: | \(|, (?:code )?| )(?P<number>-?\d{1,3})\)?\W?$"
)
_WELL, _BETTER, _BEST = 0.5, 0.8, 0.95  # probabilities of a good end: alone, behind a bad line, behind a cause
_BAD, _WEAK = 0.85, 0.7  # probabilities of a line that is surely bad, and of one that may be where nothing went well
_OF_NCCL = regex(r" NCCL (?:INFO|TRACE) ")  # read by its own grammar
_ONLY_VALUE = regex(r"[A-Za-z]+:? [-+]?\d+\.\d")  # ERROR: 0.12
_COMMENT = regex(r"^#+ ")
_ASIDE = regex(r"(?i)\W{0,3}(?:hint|note|tip|see|nb|try|help|info)\b: ?")
_NUMBER = regex(r"\d+")
_VALUE = regex(r"(?<![\w.])\d+\.\d+(?:[eE][-+]?\d+)?(?![\w.]*\.\d)|\d ?%|\d/\d")


def _is_hedged(text: str) -> bool:
    """Return True where the line only tells of something possible, or lived through."""
    return bool(_HEDGED.search(_REMARK.sub("", _COMMENT.sub("", text))))


def _template(text: str) -> str:
    return _NUMBER.sub("0", text)


Who = Callable[[int], Optional[int]]
_A_VALUE = regex(r"[A-Za-z]\s?[:=]\s{0,3}[-+]?(?:\d[\d.,]*(?:e[-+]?\d+)?|nan)\s?\w{0,4}$")  # elapsed time: 153.2 sec
_COLUMNS = regex(
    r"\S(?: {3,}| ?\t)\S|\w\([^()]*[,=]|(?:\s{1,12}[-+]?\d[\d.]*){3}"
)  # and calls: Conv2d(32, 64, kernel_size=3)
_SENTENCE = regex(r"(?:[A-Za-z'-]{2,},? ){3,}[a-z]{2,}")
_TABLE = regex(r"^\W*\{|[\"']\w+[\"']: |\.{4}|^\s*[\w ]{1,40} +: ")  # columns, fields, settings: not a sentence
_LEAST, _ALONE = 0.6, 1.0  # points of a line that says why a run failed, whose ranks have labels or not
_OF_NOBODY = 1.8  # the same, where a rank says what is nobody's fault
_STRONG = 2.4  # points of a line that says so though nothing else does
_LOUD = regex(
    r"(?:^|[\s\[(<|:=])(?:ERR(?:OR)?|FATAL|CRIT(?:ICAL)?|SEVERE|PANIC|GRAVE|ALERT|EMERG)(?=[\s\])>:|])(?!\W{1,4}\d)|\bpanic(?:ked)?\b|\[(?:[Ee]rror|[Ff]atal)\]"
    r"|^[EF] +(?=[\[<(a-z]\S* +[a-z])|^!! "
)


def _works(lines: Sequence[Tuple[int, str]], speaker: Who) -> Set[int]:
    """The places of lines of work: a step, or a line with measured values whose like came before."""
    cleaned = [clean(text) for _, text in lines]
    kinds = [(speaker(number), _template(line.text)) for (number, _), line in zip(lines, cleaned)]
    seen = Counter(kinds)
    return {
        place
        for place, (line, (_, text)) in enumerate(zip(cleaned, lines))
        if _STEP.search(text)
        or seen[kinds[place]] > 1
        and _VALUE.search(f"{line.text} {line.fields}")
        and read_line(line.text).fine > 1 - _BAD
    }


def last_work(lines: Numbered, speaker: Who) -> str:
    """The line of work with which a file ends; empty where it ends with anything else."""
    texts = [(number, decode(raw)) for number, raw in lines if raw.strip()]
    return texts[-1][1] if texts and len(texts) - 1 in _works(texts, speaker) else ""


@dataclass(frozen=True)
class Words:
    """A line among the last ones of a file."""

    number: int
    line: Line
    who: Optional[int]
    reading: Reading
    status: Optional[int] = None  # of the end that it tells of
    known: bool = False  # it was read already
    data: bool = False  # a value, a row of a table, a setting
    doubtful: bool = False  # possible, lived through, or only a warning
    failing: bool = False  # a level, a status or a clause says that something failed
    alone: bool = False  # only one rank says it

    @property
    def bad(self) -> float:
        """Probability that something went wrong."""
        said = 0.0 if self.data else 1 - self.reading.fine
        return max(1.0 if self.status else 0.9 if self.failing else 0.0, said) / (2 if self.doubtful else 1)


def outcome(last: Sequence[Words]) -> Tuple[str, Optional[Words]]:
    """Return how a program ended (GOOD or BAD) and the line that says so; empty where none is sure. What was done in the end
    (`cleaned up, done`) does not make up for what went wrong right before; success does."""
    several = sum(each.bad >= _WEAK and not each.known for each in last) > 1 or any(
        each.who is not None for each in last
    )
    for behind, each in enumerate(reversed(last[-LAST_WORDS:])):
        before = [one for one in last if one.number < each.number]
        worst = max((one.bad for one in before), default=0.0)
        cause = max((one.reading.points for one in before if one.bad >= _BAD), default=0.0)
        needed = _WELL if worst < _BAD else _BETTER if cause < _STRONG else _BEST
        good = each.reading.finished >= needed and not each.status or each.status == 0 and cause < _STRONG
        if behind < LAST_LINES and good and not each.failing:
            return GOOD, each
        sure = each.failing or each.status or each.reading.points >= _ALONE or several
        if each.bad >= _BAD and each.status != 0 and sure:
            return BAD, each
    weak = max(last[-LAST_LINES:], key=lambda each: each.bad, default=None)
    return ("", weak) if weak is not None and weak.bad >= _WEAK and several else ("", None)


def telling(
    lines: Numbered,
    is_known: Callable[[str], bool],
    begin: int = 0,
    speaker: Who = lambda number: None,
    blame: Callable[[int], Optional[int]] = lambda begin: None,
    plain: Callable[[str], str] = lambda text: text,
) -> Tuple[bool, Optional[Tuple[int, Line, str]]]:
    """Return True if a file shows that anything went well; and the line among its last ones that says why it failed, or at
    least that it did, with the code of what it means.

    The line counts whose words mean most, if they mean enough for how the log ends; consequences, and what was said by those who
    worked on, count half. Else the first line of the rank that the others name (`blame`, from a line on), else the one with
    which the log ends badly. `is_known`: lines that were read already; `begin`: first line of the file's last run; `plain`: a
    text with plain words for its labels of ranks."""
    texts = [(number, decode(raw)) for number, raw in lines if raw.strip() and number >= begin]
    works = _works(texts, speaker)
    worked = max(works, default=-1) + 1
    late = {speaker(texts[place][0]) for place in works if place >= worked - BEFORE} | {None}
    first, end = texts[min(works)][0] if works else 0, texts[worked - 1][0] if works else 0
    found = list(_words([each for place, each in enumerate(texts) if place not in works], is_known, speaker, plain))
    last = [each for each in found if each.number > end][-TOLD:]
    ended, by = outcome(last)
    if ended == GOOD:
        return True, None
    blamed = blame(last[0].number) if last else None
    failed = ended == BAD or blamed is not None
    least = _LEAST if any(each.who is not None for each in found) else _ALONE
    scored = []
    first_bad = next((each for each in last if each.bad >= _BAD), None)
    for each in found:
        points = each.reading.points / (2 if kind_of(each.reading.code, "") in (LOST_PEER, TIMED_OUT) else 1)
        points += (each.who is not None and each.who == blamed) / 2 + (each is first_bad) / 2 - each.doubtful
        if each.number < end and (each.who in late or each.number < first):
            points /= 2  # it worked on
        needed = least if failed or each.failing and each.number > end else _STRONG
        needed = max(needed, _OF_NOBODY) if each.reading.code in NOBODYS_FAULT and each.who is not None else needed
        told = not _TABLE.search(each.line.text) if failed else not each.data and not each.doubtful
        told = told or each.failing
        if not each.known and told and (each.reading.points if failed else points) >= needed:
            scored.append((points, each))
    points, best = max(scored, key=lambda each: (each[0], -each[1].number), default=(0.0, None))
    if best is not None and points >= least:
        return bool(works), (best.number, best.line, best.reading.code)
    own = [each for each in found if each.alone and each.who == blamed and not each.known and not each.doubtful]
    chosen = next(iter(own), by) if failed else by
    if chosen is None or chosen.known:
        return bool(works), None
    return bool(works), (chosen.number, chosen.line, "")


def _words(
    texts: Sequence[Tuple[int, str]],
    is_known: Callable[[str], bool],
    speaker: Who,
    plain: Callable[[str], str],
) -> Iterator[Words]:
    """Yield the words of each line, without lines that were tried again, or are source text."""
    last = {(speaker(number), _template(text)): number for number, text in texts}
    speakers: Dict[str, Set[Optional[int]]] = {}
    for number, text in texts:
        speakers.setdefault(_template(text), set()).add(speaker(number))
    for place, (number, text) in enumerate(texts):
        line, who = clean(text), speaker(number)
        above, below = (texts[at][1] if 0 <= at < len(texts) else "" for at in (place - 1, place + 1))
        if clean(below).text.startswith("Arguments: ") and line.text.startswith("Message: "):
            continue  # what Python's logging could not write
        if line.text.startswith(
            ("Traceback (most recent", "frame #", "During handling of the above", "--- Logging error")
        ) or _OF_NCCL.search(text):
            continue
        if (
            last[(who, _template(text))] != number
            or len(line.text) > MAX_LENGTH
            or COMMAND.match(_COMMENT.sub("", line.text))
        ):
            continue
        if _SOURCE.match(line.text) and ('File "' in above or 'File "' in line.text):
            continue
        logged = line.level in ("E", "F") and not _ONLY_VALUE.match(line.text) or bool(_LOUD.search(line.text, 0, 60))
        failing = logged or speaks_of_failure(_COMMENT.sub("", text))
        status = _STATUS_AT_END.search(line.text)
        code = int(status["status"] or status["number"]) if status else None
        doubtful = not failing and (line.only_warns or _is_hedged(line.text) or bool(_ASIDE.match(line.text)))
        data = _TABLE.search(line.text) or _COLUMNS.search(line.text) and not _SENTENCE.search(line.text)
        data = not failing and bool(data or _A_VALUE.search(line.text) or _MEASURED.search(line.text))
        reading = read_line(plain(f"{line.text} {line.fields}".rstrip()), failing)
        alone = who is not None and speakers[_template(text)] == {who}
        yield Words(number, line, who, reading, code, is_known(line.text), data, doubtful, failing, alone)

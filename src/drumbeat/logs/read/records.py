"""Text copied from a terminal: a long line becomes several, each as wide as the terminal.

Lines are joined only if the text shows it: many lines share the largest width, and the next one continues in the middle of a
word or sentence, unlike other lines.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import Callable, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.causes.events import LOST_PEER, TIMED_OUT
from drumbeat.causes.table import NOBODYS_FAULT, kind_of
from drumbeat.logs.meaning.essence import essence
from drumbeat.logs.meaning.grammar import is_quoted
from drumbeat.logs.meaning.likely import likely_sense
from drumbeat.logs.meaning.model import guess, likely
from drumbeat.logs.meaning.senses import STATUS, is_about, sense
from drumbeat.logs.read.prefixes import Line, clean, decode

MAX_LINES = 5_000  # lines: a terminal copy is rarely longer
NARROWEST, WIDEST = 60, 300
FEWEST_QUOTED = 3  # lines of a mail
FEWEST_CUT = 2  # different lines that end at the width
MAX_JOINED = 40  # maximum pieces of one line
_GOES_ON = re.compile(r"[a-z0-9_.,;:)\]}'\"/=-]| \S")
_BEGINNING = 6  # characters that are compared at the start of lines
_DIGITS = str.maketrans("123456789", "000000000")


def unwrap(lines: Sequence[bytes]) -> List[bytes]:
    """Return the lines with terminal wrapping undone. A joined line is in its first line's place and the other places are
    empty, so that line numbers stay valid."""
    whole = list(lines)
    if not 2 < len(whole) <= MAX_LINES:
        return whole
    texts = [line.rstrip(b"\r").decode("utf-8", "replace") for line in whole]
    width = max(map(len, texts))
    if not NARROWEST <= width <= WIDEST or any("\r" in text for text in texts):
        return whole
    first = [len(text.partition(" ")[0]) for text in (*texts[1:], "")]  # words, before which a mail cuts a line
    full = [
        (len(text) == width or text.endswith(" ") and len(text) + word >= width) and not text.endswith("  ")
        for text, word in zip(texts, first)
    ]
    if len({_template(text) for text, whole_line in zip(texts, full) if whole_line}) < FEWEST_CUT:
        return whole  # one message of several ranks is no terminal's width
    begins = {_begin(text) for text, after in zip(texts[1:], full) if not after and text.strip()}
    if not _GOES_ON.match(texts[0]):  # otherwise the copy may begin in the middle of a line
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


def unquoted(lines: Sequence[bytes]) -> List[bytes]:
    """Return the lines without a mail's quotation marks, as often as most of them begin with one."""
    found = list(lines)
    while len(marked := [line for line in found if line[:1] == b">"]) > max(FEWEST_QUOTED, sum(map(bool, found)) / 2):
        size = 1 + all(line[1:2] in (b"", b" ") for line in marked)
        found = [line[size:] if line[:1] == b">" else line for line in found]
    return found


TWICE = re.compile(rb"EE+rrrr+oo+rr|(\w{2,60}(?:Error|Exception))\1")
MAX_TWICE = 400  # bytes


def once(line: bytes) -> bytes:
    """Return the line once if several ranks printed it at the same time, character by character or in pieces: `SSyynnttaaxx`."""
    size = len(line)
    pieces = [0] * size + [-1]  # at each place: length of the piece repeated there, if all after it repeats too
    for start in range(size - 2, -1, -1) if size <= MAX_TWICE else ():
        for half in range(1, (size - start) // 2 + 1):
            if pieces[start + 2 * half] and line.startswith(line[start : start + half], start + half):
                pieces[start] = half
                break
    start, found = 0, b""
    while start < size and pieces[start]:
        found += line[start : start + pieces[start]]
        start += 2 * pieces[start]
    return once(found) if start == size and TWICE.search(found) else found if start == size else line


def _begin(text: str) -> str:
    return text[:_BEGINNING].translate(_DIGITS)


# Judge lines that no rule knows and no logger marks: is this a log at all, did anything work, and do its last lines report a
# failure? A log that ends with `worker 3 died` or `setup of the transport failed` is not healthy, whoever printed that. Only
# the last lines count: after earlier ones the program went on. A sentence about something that runs (a subject and a failing
# verb, or an exit status) is parsed by its grammar; other failure words count only if nothing negates them.


# What programs print on lines that no rule knows: run-related words, times, levels, measured values, rows of nccl-tests. A
# log without any error has some of them, other text has none.
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
# Signs that something worked: counted steps, measured values, rows of numbers, words for finished work.
WORK = regex(
    rb"(?i)(?<![a-z])(?:step|iter(?:ation)?|epoch|batch|loss|lr|reward|accuracy|busbw|algbw)s?\b['\"]?\W{0,4}\d"
    rb"|(?<![a-z])(?:finished|completed?|successful(?:ly)?|succeeded|passed|saved|done|ok|is up)(?![a-z])|\d%\||\d ?it/s|\ds/it"
    rb"|\d ?(?:[mnu]?s|secs?|seconds|[KMGT]i?B(?:/s)?|[KMGT]bps|nsec)(?![\w%])|[:=]\s{0,3}[-+]?\d+\.\d"
    rb"|(?:\s{1,40}[-+]?\d{1,15}(?:\.\d{1,12})?){3}|[a-z_]{3}[ \t]{1,4}[-+]?\d{1,9}\.\d{2}"
)
LAST_LINES = 2  # with words; any failure word in them counts
KEPT = 64  # lines of each file, empty ones too
TOLD = 32  # of these, lines searched for failure words
BEFORE = 12  # lines before the last work: a rank that does no work afterwards may have failed here
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
# Phrases for what is only possible or was survived; and for what is denied, if only a subject and a verb report a failure.
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
_REMARK = regex(r"(?<!\w)\"[^\"]{1,200}\"")  # a quotation, or a name
_DENIED = regex(
    rf"(?i)\b(?:no|not|never|none|0|zero|without|any|could|can|normal(?:ly)?|of its own accord|{_LIVED})\b"
    r"(?! (?:more|respond|heartbeat|response|answer|reply|sign|contact|be reached))|^#\s|^\s*--?\w|\?\s*$"
)
# A shell's trace (set -x) or prompt, a frame of a traceback and its source text: not what a program says.
COMMAND = regex(r"\++ \S|[\w.@~:/-]{0,60}[$#] \w")
_SOURCE = regex(r"\s{2,}(?:File \"|\S.*[)\]:,]\s*$)")
_STACK = regex(r"\s*(?:frame #\d+: |#\d+ +0x|\[ ?\d+\] .*\(\+0x)")  # a frame of a C++ program
_FAILS = re.compile(
    r"(?i)(?<![\w/])(?:fail(?:ed|ure|s)?|errors?|fatal|(?:will|now|to) abort|abort(?:ed|ing)|cannot|can't"
    r"|could ?n(?:o|')t|unable to|timed out|terminated|crash(?:ed)?)\b(?![/-]\w|\.\w)"  # `error-classifier.pt` is a name
)
# Measured errors, error counts, possibilities, and errors that the program survives.
_MEASURED = regex(
    r"[a-z_]{2}\s*[=:]\s*[-+]?\d+\.\d+(?![.:\d])|%\||\S {2,}\S+ {2,}\S"
    r"|(?<![\w.:] )(?<![\w.:])0 (?!and|bytes|gpus?\b|accel|devices?\b)[a-z]|[a-z]: (?:0|none)(?![\w.])"
    r"|\b(?:no|zero) (?:errors?|failures?|problems?|\w+ (?:\w+ )?(?:lost|failed|died|crashed|killed))\b"
)
_TAKEN_BACK = re.compile(
    r"(?i)\b(?:no|0|zero|without|normal(?:ly)?|of its own accord|if|any|successful\w*"
    r"|ignor\w+|skip\w*|retry\w*|fall\w* ?back|may|might|should|would|warn\w*"
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
    """Detects signs of work; stops reading at the first one."""

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


# How a log ends: the last outcome word in its last lines. A number after such a word is an exit status.
GOOD, BAD, STOPPED = "good", "bad", "stopped"
BEGAN, DONE = "began", "done"  # progress of the work: something worked, or a record says that all was done
LAST_WORDS = 6  # lines
_STATUS_AT_END = regex(
    r"(?i)\b(?:(?:code|status|rc)\b(?:[^=:\n]{0,20}[=:])?\s?\(?|(?:exit(?:ed|s)?|ended|returned|returns|quit(?:s|ting)?"
    r"|error stop)\b"
    r"(?: with)?[=:( ]{1,3})(?P<status>-?\d{1,3})(?![\w.:%/]| ?[a-z]\w*(?![\w=]))"
    r"|\b(?:finish|end|result|left|leav(?:es|ing)|departs?|stopped|closed|ended|gone|down|out)\b"
    r"(?:: | \(|, (?:code )?| )(?P<number>-?\d{1,3})\)?\W?$"
)
_BAD_END = regex(
    r"(?i)\bnot ok\b|\b\w+['\"]?\s?[=:]\s?['\"]?(?:bad|failed|failure|expired|aborted|lost|dead|broken|false"
    r"|incomplete|(?:un|not )success\w*)\b\W{0,3}$"
    r"|\b(?:no result|without (?:a )?result|nothing (?:was )?(?:saved|written|produced)|(?:nothing|no work) was done|unfinished"
    r"|prematurely"
    r"|(?:did not|never|not) (?:finish(?:ed)?|complete(?:d)?)"
    r"|giv(?:ing|en) up|gave up|abnormal\w*|abort(?:ed|ing)|impossible|not able to (?:go on|continue)|nothing left to (?!do\b)"
    r"|(?:cannot|can not|could not) (?:go on|continue|proceed|be placed)"
    r"|(?:stop|end|kill|terminat)\w*ing (?:the )?(?:rest|others|remaining))\b"
)
_GOOD = r"(?:ok|success\w*|succeeded|passed|converged|all good|cleanly|ended well|done|completed?|finished)\b"
_WELL = regex(
    r"(?i)\b(?:ok|success\w*|succeeded|passed|converged|all good|cleanly|(?:ended|went) (?:well|fine|smoothly)|pass)\b"
    r"|\b(?:verdict|result|outcome|state|status|leaving)\W{1,3}(?:is )?(?:good|fine|green|normal)\w*"
)
_TIDIED = regex(r"(?i)\b(?:clean|tear|tore|shut|exit|stop|abort|half|clos|un)\w*|\b(?:could|can) ?not\b|\bnot\b")
_ALL_DONE = regex(
    r"(?i)\b(?:training|run|job|experiment|(?:all|last) (?:\w+ )?(?:steps?|epochs?|rounds?))\W{1,3}"
    r"(?:is |was |are |has )?(?:complete|finished|done|over)d?\W*$"
)
_WHOLE = regex(
    r"(?i)\b(?:all|both|every\w*|job|run|training|experiment|script|main|(?:worker|process|rank|task|member)(?:es|s))\b"
)
_DONE = regex(r"(?i)\b(?:done|completed?|finished)\b")
# A good word that is negated or counted as zero, and a bad one with a count above zero.
_NOT_WELL = regex(
    rf"(?i)(?:\b(?:not|never|hardly|0)|n't)(?: yet| been| be| have| \w+ly){{0,2}} {_GOOD}"
    rf"|(?<![\d.])0 ?(?:/|of|out of) ?[1-9]\d*(?: \w+){{0,2}} {_GOOD}"
    rf"|\b{_GOOD}['\"]?\s?[=:]\s?['\"]?(?:0|no(?:ne)?|false)\b"
    r"|\b(?:bad|failed|failures?|lost|dead|crashed|died|killed)['\"]?\s?[=:]\s?[1-9]"
    r"|(?<![\w.=:-])[1-9]\d*(?: of \d+)?(?: \w+)? (?:were |was |have |has )?(?:lost|failed|dead|crashed|died)\b"
)
_STOPS = regex(
    r"(?i)\b(?:stop|halt|quit|bail|exit|leav|terminat|cancel|tear|abandon|evict|withdr[ae]w|resign|remov|reclaim|kill"
    r"|end(?:ed|s|ing)\b|over\b|out\b|clos|(?:take|taken|taking|call|called|hand) (?:\w+ )?(?:back|off|away))\w*\b"
    r"|\b(?:shut|tak|br(?:ing|ought))\w* \w* ?down\b"
)
_WAITS = regex(r"(?i)\b(?:waiting|still trying|retrying|again in)\b")
_ONLY_VALUE = regex(r"[A-Za-z]+:? [-+]?\d+\.\d")  # ERROR: 0.12
_ASIDE = regex(r"(?i)\W{0,3}(?:hint|note|tip|see|nb|try|help|info)\b: ?")
_A_VALUE = regex(r"[A-Za-z]\s?[:=]\s{0,3}[-+]?\d[\d.,]*(?:e[-+]?\d+)?\s?\w{0,4}$")  # elapsed time: 153.2 sec
_CALL = regex(r"\w\([^()]*[,=]")  # Conv2d(32, 64, kernel_size=3)
_NAME_OF_PROGRAM = regex(r"[a-z][a-z_.-]{1,24}: (?=\S)")
_NUMBER = regex(r"\d+")
_VALUE = regex(r"(?<![\w.])\d+\.\d+(?:[eE][-+]?\d+)?(?![\w.]*\.\d)|\d ?%|\d/\d")


def outcome(texts: Sequence[str], of_member: Callable[[int], bool] = lambda place: False) -> Tuple[str, int]:
    """Return how the program ended (GOOD, BAD or STOPPED) and how many lines follow the one that says so; empty if none does.
    Cleanup at the end (`cleaned up, done`) does not make up for an error right before it. Success of the whole run does;
    success of one member or helper only if no other one left with an exit status. `of_member`: the line at this place is about
    one member."""
    ended, fine = ("", 0), -1
    for behind, text in enumerate(reversed(texts)):
        line, last = clean(text), behind < LAST_LINES
        if behind >= LAST_WORDS and fine < 0:
            break
        if (
            len(line.text) > MAX_LENGTH
            or line.only_warns
            or COMMAND.match(line.text)
            or _is_hedged(line.text)
            or _ASIDE.match(line.text)
        ):
            continue
        status = _STATUS_AT_END.search(line.text) or STATUS.search(line.text)
        number = int(next(filter(None, status.groups()), 0)) if status and status.lastgroup != "name" else 0
        whole = f"{line.text} {line.fields}".rstrip()
        if number or fine < 0 and (_BAD_END.search(whole) or (last and _NOT_WELL.search(whole))):
            return BAD, behind
        if fine >= 0:
            continue
        if last and ended[0] != GOOD and speaks_of_failure(_uncommented(text)):
            return BAD, behind
        all_done = _ALL_DONE.search(line.text)
        if last and (status or _WELL.search(line.text) or not behind and all_done):
            if all_done or _WHOLE.search(line.text) and not of_member(len(texts) - 1 - behind):
                return GOOD, behind
            fine = behind
        done = last and _DONE.search(line.text) and not _TIDIED.search(line.text)
        said = GOOD if done else STOPPED if _STOPS.search(line.text) else ""
        ended = ended if ended[0] else (said, behind)
    return (GOOD, fine) if fine >= 0 else ended


def _statements(texts: Iterable[Tuple[int, str]]) -> List[Tuple[int, str]]:
    """Return the lines that may say something: those with a word, without the rows of an account of what a job used."""
    return [(number, text) for number, text in texts if _SAID_WORD.search(text) and not _ROW.search(text)]


def ended_well(lines: Numbered) -> int:
    """Return the number of the line by which a file's last ones say that all went well; 0 if they do not."""
    texts = _statements((number, decode(raw)) for number, raw in lines)
    ended, behind = outcome([text for _, text in texts])
    return texts[-1 - behind][0] if ended == GOOD else 0


def _uncommented(text: str) -> str:
    head, _, rest = text.partition(" ")
    return rest if head and not head.strip("#") else text


def _is_hedged(text: str) -> bool:
    """Return True if the line only mentions something possible or survived."""
    return bool(_HEDGED.search(_REMARK.sub("", _uncommented(text))))


def _template(text: str) -> str:
    return _NUMBER.sub("0", text)


Who = Callable[[int], Optional[int]]
_NEGATIVE = regex(
    r"(?i)\b(?:disagree\w*|mis-?match\w*|panic\w*|crash\w*|abort\w*|damaged?|corrupt\w*|garbled|truncat\w*|forbid\w*|reject\w*|withdr\w*"
    r"|short|full|dry|used up|spent|diverg\w*|illegal\w*|differ\w*|conflict\w*|timed|stuck|hung|stalled|crammed|evict\w*|kill\w*"
    r"|nowhere|incompatib\w*|instead|off|dark|power\w*|halt\w*|fault\w*|violat\w*|barred|veto\w*|taken|occupied"
    r"|not?|none|nothing|nobody|never|cannot|without|lacks?|fail\w*|error|un(?:able|known|expected|reachable)\w*"
    r"|in(?:valid|complete|sufficient)\w*"
    r"|bad|wrong|lost|gone|dead|die[ds]|refus\w*|den(?:y|ied)|miss(?:ing|ed)|exhausted|exceed\w*|expired|stopped"
    r"|broken?|down|too|out of|over|only|but|while)\b|n't\b"
)
# A row of a scheduler's account: `27343512  -  ResidentSetSize of job (KB)`, `Cpus  :  13.33  36`.
_ROW = regex(
    r"(?i)^(?!.*\b(?:status|code|rc|signal|exit\w*|error\w*|fail\w*)\b)"
    r"(?:.*\d\s{2,}-\s{2,}\S|\s*[\w ()/.-]{1,40}(?:\s:\s{2,}|\s{2,}:\s)(?:[\d.]+(?:\s|$)|\S+\s{2,}\S))"
)
_COLUMNS = regex(r"\S(?: {3,}| ?\t)\S")
_SENTENCE = regex(r"(?:[A-Za-z'-]{2,},? ){3,}[a-z]{2,}")
_TABLE = regex(r"^\W*\{|[\"']\w+[\"']: |\.{4}|^\s*[\w ]{1,40} +: ")  # columns, fields, settings: not a sentence
# Tool output about a machine or a job says nothing about a run: rules, columns, `Key=Value`, `key : value`.
_DUMP = regex(
    r"[=_*+-]{8}|^\s*[A-Z][\w:/]*=|^\s*[\w ./()\[\]-]{1,40}(?:\s:\s|:\s{2}|:\t|:$)|\S(?: {3,}|\s?\t)\S"
    r"|^\s*(?:[{}\]],?$|\"\w+\": )"
)
_FEWEST_OF_DUMP = 5  # lines
_SAID_WORD = regex(r"[A-Za-z]{2,}")
_FEWEST_WORDS = 3
_MOSTLY, _MUCH = 0.6, 6.0  # share and evidence required for a statement's meaning
_LEAST = 1.0  # points of a line that gives a reason
_AFFIRMED = 1.5  # points of such a line without any negative word: `16 members are in`
_STRONG = 2.4  # points of a line that gives a reason though nothing else does
_LOUD = regex(
    r"(?:^|[\s\[(<|:=])(?:ERR(?:OR)?|FATAL|CRIT(?:ICAL)?|SEVERE|PANIC|GRAVE|ALERT|EMERG)(?=[\s\])>:|])(?!\W{1,4}\d)|\bpanic(?:ked)?\b"
    r"|^[EF] +(?=[\[<(a-z]\S* +[a-z])|^!! "
)


def _works(lines: Sequence[Tuple[int, str]], speaker: Who) -> Set[int]:
    """Return the places of lines of work: a step, or a line with measured values that resembles an earlier one."""
    cleaned = [clean(text) for _, text in lines]
    kinds = [(speaker(number), _template(line.text)) for (number, _), line in zip(lines, cleaned)]
    seen = Counter(kinds)
    return {
        place
        for place, (line, (_, text)) in enumerate(zip(cleaned, lines))
        if _STEP.search(text)
        or seen[kinds[place]] > 1
        and _VALUE.search(f"{line.text} {line.fields}")
        and not _BAD_END.search(text)
        and not _STOPS.search(text)
    }


def last_work(lines: Numbered, speaker: Who) -> str:
    """Return the line of work that ends a file; empty if it ends with anything else."""
    texts = [(number, decode(raw)) for number, raw in lines if raw.strip()]
    return texts[-1][1] if texts and len(texts) - 1 in _works(texts, speaker) else ""


@dataclass(frozen=True)
class Words:
    """A line that may say why a run failed."""

    number: int
    line: Line
    who: Optional[int]
    code: str = ""
    points: float = 0.0
    failing: bool = False  # a level, a status or a clause says that something failed
    negative: bool = False
    hedged: bool = False  # only possible, or survived
    alone: bool = False  # only one rank prints it


def telling(
    lines: Numbered,
    is_known: Callable[[str], bool],
    begin: int = 0,
    speaker: Who = lambda number: None,
    blame: Callable[[int], Optional[int]] = lambda begin: None,
    plain: Callable[[str], str] = lambda text: text,
    reached: str = BEGAN,
) -> Optional[Tuple[int, Line, str]]:
    """Return the line among a file's last ones that says why it failed, or at least that it did, and the code of its meaning.

    The line with the strongest meaning wins, if that is strong enough for how the log ends; consequences, and lines of ranks
    that worked on, count half. Otherwise it is the first line of the rank that the others name (`blame`, from a line on), or
    the last line that reports a failure. `is_known`: lines that were read already; `begin`: first line of the file's last run;
    `plain`: replaces rank labels in a text by plain words; `reached`: progress of the work before these lines.
    """
    texts = [(number, decode(raw)) for number, raw in lines if raw.strip() and number >= begin]
    if len(texts) >= _FEWEST_OF_DUMP and sum(not _DUMP.search(text) for _, text in texts) * 10 < len(texts):
        return None
    works = _works(texts, speaker)
    worked = max(works, default=-1) + 1
    workers = {speaker(texts[place][0]) for place in works}
    late = {speaker(texts[place][0]) for place in works if place >= worked - BEFORE} | {None}
    behind_work = texts[worked:] if worked else texts[-TOLD:]
    for items in (_of_items(texts), set()):  # failed items of a list count only where the rest ends badly
        last_words = _statements(each for each in behind_work if each[0] not in items)
        told_by = [speaker(number) is not None or clean(text).rank is not None for number, text in last_words]
        ended, behind = outcome([text for _, text in last_words], told_by.__getitem__)
        if ended in ("", GOOD):
            break
    texts = _statements(each for place, each in enumerate(texts) if place not in works and each[0] not in items)
    ended = "" if reached == DONE and ended == STOPPED else ended
    blamed = blame(last_words[0][0]) if last_words else None
    tag = _tag([text for _, text in texts])
    if ended == GOOD or not last_words:
        return None
    failed = ended == BAD or ended and (blamed is not None or ended == STOPPED and not worked)
    ended = ended or ("" if blamed is None and reached else STOPPED)
    least = _LEAST if failed or ended else _STRONG
    untagged = lambda text: plain(text[len(tag) :] if text.startswith(tag) else text)  # noqa: E731
    found = list(_words(texts, is_known, speaker, untagged, failed or bool(ended and blamed is not None)))
    warned = last_words[-1][0] if _warns(last_words[-LAST_LINES:]) and not failed else 0
    found = [each for each in found if each.number > warned or each.line.level or _is_told(each.line.text)]
    scored: List[Tuple[float, Words]] = []
    for each in found:
        needed = _LEAST if each.failing or failed else _STRONG if each.code in NOBODYS_FAULT else least
        if not each.code or each.points < needed:
            continue
        points = each.points / 2 if kind_of(each.code, "") in (LOST_PEER, TIMED_OUT) else each.points
        points += (each.who is not None and each.who == blamed) / 2 - each.hedged
        if each.number < last_words[0][0] and each.who in late:
            points /= 2  # it worked on
        scored.append((points, each))
    best = max(scored, key=lambda each: (each[0], -each[1].number), default=None)
    if best is not None and best[0] >= _LEAST:
        return best[1].number, best[1].line, best[1].code
    own = [each for each in found if each.alone and not each.hedged and blamed in (None, each.who)]
    own = [each for each in own if ended == BAD or each.who not in workers]
    if own and ended:
        chosen = next((each for each in own if each.negative), own[-1 if blamed is None else 0])
        return chosen.number, chosen.line, chosen.code or guess(plain(chosen.line.text))
    raised = any("Traceback (" in text for _, text in last_words)  # read by others
    end = texts[-LAST_LINES:][0][0]
    since = last_words[0][0] if worked and not raised else end
    spoken = [each for each in found if each.failing and each.number >= (end if each.line.only_warns else since)]
    if spoken:
        return spoken[-1].number, spoken[-1].line, spoken[-1].code
    if failed:
        number, line = last_words[-1 - behind][0], clean(last_words[-1 - behind][1])
        cut = ended != BAD and _TABLE.search(line.text)  # a row of a launcher's table
        return (number, line, "") if not cut and not is_known(line.text) else None
    number, line = last_words[-1][0], clean(last_words[-1][1])
    silent = worked and not ended and reached != DONE and not line.level
    return (number, line, "") if silent and _is_uneasy(line.text) and not is_known(line.text) else None


def last_statement(lines: Numbered) -> Optional[Tuple[int, Line]]:
    """Return the last line that says something, apart from the work that was going on."""
    texts = [(number, decode(raw)) for number, raw in lines if raw.strip()]
    works = _works(texts, lambda number: None)
    said = _statements(each for place, each in enumerate(texts) if place not in works)[-LAST_WORDS:]
    told = [(number, text) for number, text in said if len(_SAID_WORD.findall(text)) >= _FEWEST_WORDS]
    return (told[-1][0], clean(told[-1][1])) if told else None


def _warns(last: Sequence[Tuple[int, str]]) -> bool:
    """Return True for lines of a warning, but not one of the shutdown: the program has passed what stands above."""
    return any(clean(text).only_warns for _, text in last) and not any(_TIDIED.search(text) for _, text in last)


def _is_told(text: str) -> bool:
    """Return True for a sentence about something that runs."""
    return bool(STATUS.search(text) or _CLAUSE.search(text))


def _tag(texts: Sequence[str]) -> str:
    """Return the program's own name if most lines begin with it: `gather: ` is about no collective."""
    heads = Counter(found[0] for found in map(_NAME_OF_PROGRAM.match, texts) if found)
    name, count = max(heads.items(), key=lambda each: each[1], default=("", 0))
    return name if count > 2 and count * 2 > len(texts) else ""


# A line about one item of many, with the word before its number; words whose numbers count something else.
_ITEM = regex(
    r"(?P<head>\D{0,60}?\b(?P<word>[a-z][a-z_]+)(?: |[#=:]| #| no\.? )[\[(]?)(?P<number>\d{1,9})(?=[\s:;,.)\]-])"
)
_NO_ITEM = regex(
    r"(?:attempt|tr(?:y|ie)|retr(?:y|ie)|step|epoch|iter(?:ation)?|code|status|errno|signal|exit|port)s?|\w{1,4}"
)
_FEWEST_ITEMS = 3


def _is_uneasy(text: str) -> bool:
    """Return True for a statement that healthy runs do not end with: it shows trouble, but not the kind."""
    said = _SAID_WORD.findall(text)
    told = len(said) >= _FEWEST_WORDS and sum(map(str.islower, said)) > 1  # else a title
    told = told and not _is_hedged(text) and not _TABLE.search(text)
    if not told or WORK.search(text.encode()) or _A_VALUE.search(text) or _MEASURED.search(text) or COMMAND.match(text):
        return False
    found = likely(essence(text))
    told_of = next((code for code in found if code in ("vague", "aftermath")), "")
    share, evidence = found.get(told_of, (0.0, 0.0))
    return share >= _MOSTLY and evidence >= _MUCH


def _of_items(texts: Sequence[Tuple[int, str]]) -> Set[int]:
    """Return the lines that report a failed item of a list (`Error executing query 19: ...`): the same words stood before other
    numbers, so the program went on behind each, and something else ends the log. A number of a rank, a node or an attempt
    counts no items."""
    found: Dict[str, Dict[str, int]] = {}  # words before the number -> numbers and their last lines
    for number, text in texts:
        item = _ITEM.match(clean(text).text)
        counts = item and not _NO_ITEM.fullmatch(item["word"])
        if item and counts and not any(is_about(each, item["word"]) for each in ("member", "node", "gpu")):
            found.setdefault(item["head"], {})[item["number"]] = number
    end = texts[-LAST_LINES:][0][0] if texts else 0
    several = (places for places in found.values() if len(places) >= _FEWEST_ITEMS and max(places.values()) < end)
    return {number for places in several for number in places.values()}


def _words(
    texts: Sequence[Tuple[int, str]],
    is_known: Callable[[str], bool],
    speaker: Who,
    plain: Callable[[str], str],
    failed: bool,
) -> Iterator[Words]:
    """Yield the words of each line, without lines that were retried, read already, or are source text."""
    last = {(speaker(number), _template(text)): number for number, text in texts}
    speakers: Dict[str, Set[Optional[int]]] = {}
    for number, text in texts:
        speakers.setdefault(_template(text), set()).add(speaker(number))
    for place, (number, text) in enumerate(texts):
        line, who = clean(text), speaker(number)
        above, below = (texts[at][1] if 0 <= at < len(texts) else "" for at in (place - 1, place + 1))
        if clean(below).text.startswith("Arguments: ") and line.text.startswith("Message: "):
            continue  # a record that Python's logging failed to write
        if last[(who, _template(text))] != number or is_known(line.text):
            continue
        logged = line.level in ("E", "F") and not _ONLY_VALUE.match(line.text) or bool(_LOUD.search(line.text, 0, 60))
        failing = logged or speaks_of_failure(_uncommented(text))
        if _WAITS.search(line.text) and not failing and not _BAD_END.search(line.text):
            continue
        hedged = _is_hedged(line.text)
        indented = line.text[:2].isspace()
        source = (
            _STACK.match(line.text)
            or "Traceback (" in line.text
            or indented
            and ('File "' in above or 'File "' in line.text)
        )
        if source or hedged and not failed and not failing:
            continue
        if line.only_warns:
            if failing:
                yield Words(number, line, who, failing=True)
            continue
        words = plain(f"{line.text} {line.fields}".rstrip())
        sentence = logged or not _TABLE.search(line.text)
        sentence = sentence and (logged or bool(_SENTENCE.search(line.text)) or not _COLUMNS.search(line.text))
        code, points = likely_sense(words)
        negative = failing or bool(_NEGATIVE.search(words))
        alone = who is not None and speakers[_template(text)] == {who}
        told = failed or failing or negative or code in NOBODYS_FAULT and _STOPS.search(text)
        value = _A_VALUE.search(line.text) or _CALL.search(line.text) and not _SENTENCE.search(line.text)
        said = failing or not value and (failed or not _MEASURED.search(line.text))
        said = said or failed and negative and points >= _STRONG
        least = _LEAST if negative or code in NOBODYS_FAULT else _AFFIRMED
        if points < least or not (told and sentence and said):
            code = ""
        yield Words(number, line, who, code, points, failing, negative, hedged, alone)

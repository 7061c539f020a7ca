"""Text that was copied from a terminal: a long line comes as several, each as wide as the terminal was.

Only where the text itself shows it: many lines have the same, largest width, and what follows them goes on in the middle
of a word or sentence, and not as other lines begin.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import Callable, Deque, Dict, Iterable, List, Optional, Sequence, Set, Tuple

from drumbeat.base.regex import regex
from drumbeat.causes.table import CONSEQUENCES, NOBODYS_FAULT
from drumbeat.logs.meaning.grammar import is_quoted
from drumbeat.logs.meaning.senses import STATUS, likely_sense, sense
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
TOLD = 24  # of them in which words of failure are looked for
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
    r"|timed out|gave up|broken?(?: down)?"
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
    r"if|unless|when|until|in case|successful\w*|ignor\w+|skip\w*|retry(?:ing)?(?! (?:\w+ )?(?:exceed|limit|count))"
    r"|re-?start\w*|re-?connect(?:ed|ing)"
    r"|re-?cover\w*|resum(?:ed|ing)|continu\w+|fall\w* ?back|may(?! not)|might|should|would|will(?! now)|deprecat\w*"
    r"|as expected|warn\w*"
    r"|tr(?:y|ying) again|trying (?!to)|instead|using|starting (?:from|anew|over|fresh)|set to|protection|enabled"
    r"|so far|is o(?:n|ff)"
)
_HEDGED = regex(rf"(?i)\b(?:{_LIVED})\b|^#\s|^\s*--?\w")
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
    r"|^#\s|^\s*--?\w|\berror (?:handling|correction)|could not collect|\S {2,}: "
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
    """Has anything worked? Looks at lines until one shows it."""

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


# How a log ends: the last word of its outcome that its last lines say. A number behind a word for an end is its status.
GOOD, BAD, STOPPED = "good", "bad", "stopped"
LAST_WORDS = 6  # lines
_STATUS_AT_END = regex(
    r"(?i)\b(?:(?:code|status|rc)\b(?:[^=:\n]{0,20}[=:])?\s?\(?|(?:exit(?:ed|s)?|ended|returned|returns|quit(?:s|ting)?"
    r"|error stop)\b"
    r"(?: with)?[=:( ]{1,3})(?P<status>-?\d{1,3})(?![\w.:%/]| ?[a-z])"
    r"|\b(?:finish|end|result|left|leav(?:es|ing)|departs?|stopped|closed|ended|gone|down|out)\b"
    r"(?:: | \(|, (?:code )?| )(?P<number>-?\d{1,3})\)?\W?$"
)
_BAD_END = regex(
    r"(?i)\bnot ok\b|\b\w+['\"]?\s?[=:]\s?['\"]?(?:bad|failed|failure|expired|aborted|lost|dead|broken|false"
    r"|incomplete|(?:un|not )success\w*)\b\W{0,3}$"
    r"|\b(?:giv(?:ing|en) up|gave up|abnormal\w*|abort(?:ed|ing)|impossible|not able to (?:go on|continue)|nothing left to"
    r"|(?:cannot|can not|could not) (?:go on|continue|proceed|be placed)"
    r"|(?:stop|end|kill|terminat)\w*ing (?:the )?(?:rest|others|remaining))\b"
)
_GOOD = r"(?:ok|success\w*|succeeded|passed|converged|all good|cleanly|ended well|done|completed?|finished)\b"
_WELL = regex(r"(?i)\b(?:ok|success\w*|succeeded|passed|converged|all good|cleanly|ended well)\b")
_DONE = regex(r"(?i)\b(?:done|completed?|finished)\b")
# A good word that is denied or counted as zero, and a bad one that is counted as more.
_NOT_WELL = regex(
    rf"(?i)(?:\b(?:not|never|hardly|0)|n't)(?: yet| been| be| have| \w+ly){{0,2}} {_GOOD}"
    rf"|\b{_GOOD}['\"]?\s?[=:]\s?['\"]?(?:0|no(?:ne)?|false)\b"
    r"|\b(?:bad|failed|failures?|lost|dead|crashed|died|killed)['\"]?\s?[=:]\s?[1-9]"
    r"|(?<![\w.=:-])[1-9]\d*(?: of \d+)?(?: \w+)? (?:were |was |have |has )?(?:lost|failed|dead|crashed|died)\b"
)
_STOPS = regex(
    r"(?i)\b(?:stop|halt|quit|bail|exit|leav|terminat|cancel|tear|abandon|evict|withdr[ae]w|resign)\w*\b"
    r"|\b(?:shut|tak|br(?:ing|ought))\w* \w* ?down\b"
)
_WAITS = regex(r"(?i)\b(?:waiting|still trying|retrying|again in)\b")
_ONLY_VALUE = regex(r"[A-Za-z]+:? [-+]?\d+\.\d")  # ERROR: 0.12
_COMMENT = regex(r"^#+ ")
_NUMBER = regex(r"\d+")
_VALUE = regex(r"(?<![\w.])\d+\.\d+(?:[eE][-+]?\d+)?(?![\w.]*\.\d)|\d ?%|\d/\d")


def outcome(texts: Sequence[str]) -> Tuple[str, int]:
    """How the program ended, by its last lines: GOOD, BAD or STOPPED, and how many lines stand behind the one that says so;
    empty where none does. What was done in the end
    (`cleaned up, done`) does not make up for what went wrong right before; success does."""
    ended = "", 0
    for behind, text in enumerate(reversed(texts[-LAST_WORDS:])):
        line = clean(text)
        if (
            len(line.text) > MAX_LENGTH
            or line.only_warns
            or COMMAND.match(line.text)
            or _HEDGED.search(_COMMENT.sub("", line.text))
        ):
            continue
        last = behind < LAST_LINES
        status = _STATUS_AT_END.search(line.text)
        number = int(status["status"] or status["number"]) if status else 0
        if number or _BAD_END.search(line.text) or (last and _NOT_WELL.search(line.text)):
            return BAD, behind
        if last and speaks_of_failure(_COMMENT.sub("", text)):
            return BAD, behind
        if last and (status or _WELL.search(line.text)):
            return GOOD, behind
        said = GOOD if last and _DONE.search(line.text) else STOPPED if _STOPS.search(line.text) else ""
        ended = ended if ended[0] else (said, behind)
    return ended


def _template(text: str) -> str:
    return _NUMBER.sub("0", text)


Who = Callable[[int], Optional[int]]
_NEGATIVE = regex(
    r"(?i)\b(?:not?|none|nothing|nobody|never|cannot|without|lacks?|fail\w*|error|un(?:able|known|expected|reachable)\w*"
    r"|in(?:valid|complete|sufficient)\w*"
    r"|bad|wrong|lost|gone|dead|die[ds]|refus\w*|den(?:y|ied)|miss(?:ing|ed)|exhausted|exceed\w*|expired|stopped"
    r"|broken?|down|too|out of|over|only|but|while)\b|n't\b"
)
_TABLE = regex(
    r"\S(?: {3,}| ?\t)\S|^\W*\{|[\"']\w+[\"']: |\.{4}|^\s*[\w ]{1,40} +: "
)  # columns, fields, settings: not a sentence
_LEAST = 0.3  # points of a line that says why


def behind_work(lines: Sequence[Tuple[int, str]], speaker: Who) -> int:
    """The place behind the last line of work: a step, or a line with measured values whose like came before."""
    kinds = [(speaker(number), _template(clean(text).text)) for number, text in lines]
    seen = Counter(kinds)
    works = (
        place
        for place, (_, text) in enumerate(lines)
        if _STEP.search(text)
        or seen[kinds[place]] > 1
        and _VALUE.search(clean(text).text)
        and not _BAD_END.search(text)
    )
    return max(works, default=-1) + 1


def last_work(lines: Numbered, speaker: Who) -> str:
    """The line of work with which a file ends; empty where it ends with anything else."""
    texts = [(number, decode(raw)) for number, raw in lines if raw.strip()]
    return texts[-1][1] if texts and behind_work(texts, speaker) == len(texts) else ""


def telling(
    lines: Numbered,
    is_known: Callable[[str], bool],
    begin: int = 0,
    speaker: Who = lambda number: None,
    blame: Callable[[int], Optional[int]] = lambda begin: None,
    plain: Callable[[str], str] = lambda text: text,
    began: bool = True,
) -> Optional[Tuple[int, Line, str]]:
    """The line among the last ones of a file that says why it failed, or at least that it did: behind the last work that they
    show, the first that means something that is nobody's consequence; else the first of the rank that the others name
    (`blame`, from a line on); else the last that speaks of a failure. `is_known`: lines that were read already;
    `begin`: first line of the file's last run; `plain`: a text with plain words for its labels of ranks; `began`: something
    worked. Also gives the code of what the line means, if that is known."""
    texts = [(number, decode(raw)) for number, raw in lines if raw.strip() and number >= begin]
    worked = behind_work(texts, speaker)
    workers = {speaker(number) for number, _ in texts[:worked]}
    texts = texts[worked:] if worked else texts[-TOLD:]
    ended, behind = outcome([text for _, text in texts])
    if ended == GOOD or not texts:
        return None
    blamed = blame(texts[0][0])
    failed = ended == BAD or ended == STOPPED and (blamed is not None or not worked)
    ended = ended or ("" if blamed is None and began else STOPPED)
    last = {(speaker(number), _template(text)): number for number, text in texts}
    speakers: Dict[str, Set[Optional[int]]] = {}
    for number, text in texts:
        speakers.setdefault(_template(text), set()).add(speaker(number))
    scored: List[Tuple[float, int, Line, str]] = []
    own, spoken = [], []
    for place, (number, text) in enumerate(texts):
        line, who = clean(text), speaker(number)
        following = clean(texts[place + 1][1]).text if place + 1 < len(texts) else ""
        if line.text.startswith("Message: ") and following.startswith("Arguments: "):
            continue  # what Python's logging could not write
        if last[(who, _template(text))] != number or is_known(line.text):
            continue  # tried again
        logged = line.level in ("E", "F") and not _ONLY_VALUE.match(line.text)
        failing = logged or speaks_of_failure(_COMMENT.sub("", text))
        if _WAITS.search(line.text) and not _BAD_END.search(line.text):
            continue
        hedged = bool(_HEDGED.search(_COMMENT.sub("", line.text)))
        passed = line.only_warns or bool(_SOURCE.match(line.text)) or hedged and not failed
        asked = failing or ended and not passed
        words = plain(line.text)
        code, points = (sense(words), 1.0) if asked else ("", 0.0)
        negative = failing or bool(_NEGATIVE.search(words))
        if (failed or ended and blamed is not None or logged) and not passed and not _TABLE.search(line.text):
            code, points = likely_sense(words)
        blames = blamed is None or who in (None, blamed) or f"rank {blamed} " in words
        alone = who is not None and speakers[_template(text)] == {who}
        if failing and place >= len(texts) - LAST_LINES:
            spoken.append((number, line, code))
        if code:
            points += failing + (who is not None and who == blamed) - 0.1 * len(scored) - hedged - (not blames)
            points -= (code in CONSEQUENCES) + (not negative and code not in NOBODYS_FAULT) * (1 + (number == 1))
            scored.append((points, -number, line, code))
        if (
            asked
            and not passed
            and not hedged
            and alone
            and blamed in (None, who)
            and (ended == BAD or who not in workers)
        ):
            own.append((number, line, code))
    best = max(scored, key=lambda each: each[:2]) if scored else None
    if best is not None and best[0] >= _LEAST:
        return -best[1], best[2], best[3]
    if own and ended:
        return own[0]
    if spoken:
        return spoken[-1]
    if failed:
        number, line = texts[-1 - behind][0], clean(texts[-1 - behind][1])
        cut = ended != BAD and _TABLE.search(line.text)  # a row of a launcher's table
        return (number, line, "") if not cut and not is_known(line.text) else None
    return None

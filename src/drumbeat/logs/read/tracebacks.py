"""Python tracebacks: the exception at the end of each, and the user's own line that led to it.

Lines of several ranks may be interleaved, the header may be missing, the whole may be indented. Exceptions that Python reports
as ignored (at interpreter exit, in a destructor, in a logging call) did not end anything.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.logs.meaning.grammar import BARE
from drumbeat.logs.read.prefixes import Line

HEADER = "Traceback (most recent call last)"
EXCEPTION = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:\([A-Z]\w*\))?(?: \(see above for traceback\))?(?:: ?(?P<message>.*))?$"
)
# An exception's name ends with a capitalised word, or is one of the few lower-case ones; if other lines separate it from its
# traceback, it must end like an exception, because `Hostname: n7` could match too.
_NAME = re.compile(r"(?:^|\.)(?:_*[A-Z]\w*|\w*(?:error|exception|timeout|exit))$")
_NAMED = re.compile(
    r"(?i:(?:error|exception|exit|timeout|failure|interrupt|iteration|warning|failed|resources|pool)s?$)"
)
_WARNS = re.compile(r"/\S{1,300}:\d+: \w*Warning: ")  # a Python warning names its place
# A frame as Python prints it, or as rich does inside its box, or as IPython does; and what lines within a traceback begin with.
# (faulthandler writes `line 7 in f`, without a comma: where a thread stood, and no exception.)
_FRAME = re.compile(
    r'\s*File "([^"]{1,300})", line (\d+)(?!\d| in )|[\s\u2502]*(?:File )?(/[^\s:]{1,300}\.py):(\d+),? in '
)
_INSIDE = " \t|+^~/-\u2502\u256d\u2570\u2771"
BOX = "\u2502"  # its side
ARROW = "\u2771 "  # rich's mark before the line that a frame stands at
_ARROW = re.compile(r"[\s\u2502]*\u2771 +\d+ \u2502")
# IPython names the exception beside its header.
_NAMED_BEFORE = re.compile(r"\s*((?:[A-Za-z_]\w*\.)*[A-Z]\w*)\s{3,}$")
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<|/opt/conda/lib/|[/\\]Lib[/\\]|/bin/(?:torchrun|accelerate|deepspeed)$"
)
# Top-level frames of programs, processes and threads; a frame without a function is a syntax error's.
_TOP = re.compile(
    r"in <module>|in (?:_bootstrap|_bootstrap_inner|_wrap|_run_module_as_main|_main|spawn_main|_worker_loop|main|wrapper)\b"
    r"|multiprocessing|threading\.py|runpy|/launch|ray|line \d+$|\u2502"
)
# A launcher's own traceback says that a rank failed, not why.
_LAUNCHER = re.compile(
    r"/bin/(?:torchrun|accelerate|deepspeed)$|/torch/distributed/(?:run|launch|launcher/api)\.py$|/torchelastic/"
)
# Text before a traceback that did not end the process.
IGNORED = (
    "Exception ignored ",  # in, on, while calling
    "Error in atexit",
    "Error in sys.excepthook",
    "--- Logging error ---",
    "Original exception was",
)
# Text between two tracebacks of one failure.
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_MAIN = re.compile(r"in (?:<module>|_run_module_as_main\b)")
_HELPER = re.compile(
    r"in (?:_bootstrap|_bootstrap_inner|_wrap|spawn_main|_worker_loop)\b|multiprocessing|threading\.py"
)
_RAISES = re.compile(r"raise ((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:\(f?([\"'])((?:(?!\2).){1,200}))?")
_LABEL = re.compile(r" {0,5}(\d{1,6}):(?=\S)")
_GLUED_RANK = re.compile(r"\[rank(\d{1,6})\]: ?$")
_DIGITS = str.maketrans("123456789", "000000000")
CUT_OFF = "cut off before its"  # our own text about a traceback
MAX_PREFIX = 200
MAX_OPEN = 256
MAX_LENGTH = 400


@dataclass(frozen=True)
class Raised:
    """An exception that ended a traceback."""

    text: str
    frame: str  # file:line nearest to the raise
    own_frame: str  # nearest to it outside of installed packages; empty where there is none
    lines: int  # lines of the traceback, with its header
    ignored: bool = False
    caught: bool = False  # its outermost frame is not where a program begins: it was caught and printed
    chained: bool = False  # Python shows it as one failure with the traceback before it
    of_main: bool = False  # the user's program, from its first frame on
    of_helper: bool = False  # raised in a thread or a worker process
    of_launcher: bool = False
    asserted: str = ""  # the source text of an assertion without a message

    @property
    def where(self) -> str:
        """`raised at train.py:12`, followed by the library's line if that is another one."""
        if not self.own_frame or self.own_frame == self.frame:
            return f"raised at {self.frame}" if self.frame else ""
        return f"raised at {self.own_frame} (in {self.frame})"


@dataclass
class _Open:
    number: int  # number of the line with its header or last frame
    length: int = 0
    lines: int = 1
    indent: int = 0
    frame: str = ""
    own_frame: str = ""
    outermost: str = ""  # the first frame's function, with its file
    headed: bool = True
    source_next: bool = False  # the next line is the frame's source text
    source: str = ""  # of its last frame, where that raises
    torn: bool = False  # unrelated lines follow its last frame
    ignored: bool = False
    chained: bool = False
    of_launcher: bool = False
    prefix: str = ""  # prefix before each line, as before the header, with every digit replaced by 0
    name: str = ""  # name of the exception, if the header has it

    @property
    def caught(self) -> bool:
        """True if the outermost frame is not where a program begins."""
        return self.headed and not _TOP.search(self.outermost)

    @property
    def about_to_raise(self) -> str:
        """Return the exception that a cut-off traceback was about to raise, by the source text of its last frame."""
        match = _RAISES.match(self.source)
        if not match:
            return ""
        return f"{match[1]}: {match[3]}" if match[3] else match[1]

    def own(self, text: str) -> str:
        """Return the line without the prefix that it shares with the header."""
        length = len(self.prefix)
        return text[length:] if length and text[:length].translate(_DIGITS) == self.prefix else text


def is_library(path: str) -> bool:
    """Return True for a file of Python or an installed package."""
    return bool(_LIBRARY.search(path))


class Tracebacks:
    """The open tracebacks of one file, one for each rank that its prefixes name."""

    def __init__(self) -> None:
        self._open: Dict[Optional[int], _Open] = {}
        self._ignored: Dict[Optional[int], bool] = {}
        self._chained: Set[Optional[int]] = set()
        self._last: Dict[Optional[int], Tuple[int, Raised]] = {}  # line and exception of each rank's last traceback
        self._last_ignored: Set[Optional[int]] = set()  # ranks whose last traceback Python called ignored

    def __bool__(self) -> bool:
        return bool(self._open or self._ignored)

    def labelled(self, line: Line) -> Line:
        """Return the line without its label (`7:ValueError: x`) if that is a rank with an open traceback; it may be grep's
        otherwise. A logger's record has its rank on the first of its lines only."""
        only, state = next(iter(self._open.items())) if len(self._open) == 1 else (None, None)
        goes_on = line.rank is None and (line.text[:2] == "  " or BARE.match(line.text))
        if goes_on and state is not None and state.prefix:
            return replace(line, rank=only)
        label = _LABEL.match(line.text) if line.rank is None else None
        if label is None or int(label[1]) not in self._open:
            return line
        return replace(line, text=line.text[label.end() :], rank=int(label[1]))

    def inside(self, line: Line) -> bool:
        """Return True for the source text below a frame."""
        state = self._open.get(line.rank)
        return bool(state and state.source_next and state.own(line.text).startswith("    " + " " * state.indent))

    def unfinished(self) -> List[Tuple[Optional[int], int, Raised]]:
        """Return tracebacks without their final exception line: rank, number of the last line seen, and the rest. For a chain,
        return the last exception that was printed."""
        return [
            self._inner(rank)
            if state.chained and rank in self._last
            else (
                rank,
                state.number,
                Raised(
                    state.about_to_raise
                    or f"{state.name or 'a traceback that is'} {CUT_OFF} {'message' if state.name else 'exception'}",
                    state.frame,
                    state.own_frame,
                    state.lines,
                    caught=state.caught,
                    of_launcher=state.of_launcher and not state.own_frame,
                ),  # fmt: skip
            )
            for rank, state in self._open.items()
            if (state.frame or state.headed) and not state.ignored
        ]

    def _inner(self, rank: Optional[int]) -> Tuple[Optional[int], int, Raised]:
        number, raised = self._last[rank]
        return rank, number, replace(raised, caught=False)

    def feed(self, line: Line, number: int) -> Optional[Raised]:
        """Return the exception if this line ends a traceback."""
        raised = self._feed(line, number)
        if raised is not None and not raised.ignored and (line.rank in self._last or len(self._last) < MAX_OPEN):
            self._last[line.rank] = number, raised
        return raised

    def _feed(self, line: Line, number: int) -> Optional[Raised]:
        text = line.text
        if HEADER in text:
            prefix = text[: text.index(HEADER)]
            named = _NAMED_BEFORE.match(prefix)
            glued = _GLUED_RANK.search(prefix)  # an unfinished progress bar precedes the rank
            rank = int(glued[1]) if glued and line.rank is None else line.rank
            begun = self._begin(rank, number, len(text) - len(text.lstrip(" ")), self._ignored.pop(rank, False))
            prefix = "" if glued or named else prefix
            if begun is not None and "\u256d" in prefix:  # rich's box, whose first frame may be missing
                begun.outermost = BOX
            if begun is not None and named:
                begun.name, begun.outermost = named[1], "in <module>"
            if begun is not None and prefix.strip() and len(prefix) <= MAX_PREFIX:
                begun.prefix = prefix.translate(_DIGITS)
            return None
        if any(words in text for words in CHAINED):
            if len(self._chained) < MAX_OPEN:
                self._chained.add(line.rank)
            if line.rank in self._last_ignored and len(self._ignored) < MAX_OPEN:
                self._ignored[line.rank] = True  # exceptions raised while an ignored one is handled are ignored too
            return None
        if any(words in text for words in IGNORED):
            self._open.pop(line.rank, None)
            if len(self._ignored) < MAX_OPEN:
                self._ignored[line.rank] = True
            return None
        rank = line.rank
        if rank not in self._open and None in self._open and BARE.match(text):
            rank = None  # the rank stands in the message: `RuntimeError: [Rank 3] ...`
        state = self._open.get(rank)
        text = state.own(text) if state is not None else text
        frame = _FRAME.match(text)
        if state is None:
            if not text.strip():
                return None
            ignored = self._ignored.pop(line.rank, False)
            if _ARROW.match(text):  # the box of a rich traceback without its upper part
                boxed = self._begin(line.rank, number, 0, ignored)
                if boxed is not None:
                    boxed.outermost = BOX
                return None
            if not frame:
                bare = BARE.match(text.strip()) if ignored else None  # an ignored exception without a traceback
                return Raised(text.strip(), "", "", 1, True) if bare else None
            state = self._begin(line.rank, number, max(len(text) - len(text.lstrip(" ")) - 2, 0), ignored)
            if state is None:
                return None
            state.headed = False
        if frame or text.lstrip().startswith("raise "):
            state.number = number
        return self._go_on(rank, state, text, frame)

    def _begin(self, rank: Optional[int], number: int, indent: int, ignored: bool) -> Optional[_Open]:
        if len(self._open) >= MAX_OPEN:
            return None
        state = self._open[rank] = _Open(number, indent=indent, ignored=ignored, chained=rank in self._chained)
        self._chained.discard(rank)
        return state

    def _go_on(self, rank: Optional[int], state: _Open, text: str, frame: Optional[re.Match[str]]) -> Optional[Raised]:
        state.lines += 1
        if frame:
            state.frame = f"{frame[1] or frame[3]}:{frame[2] or frame[4]}"
            state.outermost = state.outermost or text
            if not is_library(frame[1] or frame[3]):
                state.own_frame = state.frame
            state.of_launcher = state.of_launcher or bool(_LAUNCHER.search(frame[1] or frame[3]))
            state.length, state.source_next, state.torn, state.source = state.length + 1, True, False, ""
            self._give_up(rank, state)
            return None
        state.source_next = False
        if text.lstrip().startswith(("raise ", "assert ")):
            state.source = text.strip()
        bare = text[state.indent :] if text[: state.indent].strip() == "" else text
        if not bare.strip() or bare[0] in _INSIDE:
            state.torn = state.torn or bool(_WARNS.match(bare))
            state.length += 1
            self._give_up(rank, state)
            return None
        match = EXCEPTION.match(bare)
        boxed = state.outermost == BOX  # rich's box, possibly without any frame
        if match and (state.frame or boxed) and (_NAMED if state.torn else _NAME).search(match["name"]):
            del self._open[rank]
            (self._last_ignored.add if state.ignored else self._last_ignored.discard)(rank)
            of_main = state.headed and bool(state.own_frame and _MAIN.search(state.outermost))
            return Raised(
                bare.strip(), state.frame, state.own_frame, state.lines, state.ignored, state.caught, state.chained, of_main,
                bool(_HELPER.search(state.outermost)), state.of_launcher and not state.own_frame,
                state.source if bare.strip() == "AssertionError" else "",
            )  # fmt: skip
        state.torn = True
        state.length += 8  # another writer's line in between; give up after about fifty
        self._give_up(rank, state)
        return None

    def _give_up(self, rank: Optional[int], state: _Open) -> None:
        if state.length > MAX_LENGTH:
            del self._open[rank]


# Tracebacks that a process printed and survived: it continued until a later exception ended it. Only for streams of one
# process: elsewhere a later traceback may be another rank's. Exceptions that Python shows as a chain belong together, and
# those of threads and worker processes may be the reason why the main one failed.


@dataclass(frozen=True)
class Span:
    """Place of a traceback: the lines of one rank from `first` to `last` in `file`."""

    file: str
    rank: Optional[int]
    first: int
    last: int
    raised: Raised


@dataclass(frozen=True)
class Survived:
    span: Span
    wrote_on: bool  # other lines separate it from the exception that ended the process


def survived(spans: Sequence[Span], ends: Mapping[str, int], at_the_end: int) -> Tuple[Survived, ...]:
    """Return the tracebacks before each stream's last one, if that one is at its end and does not chain to them."""
    streams: Dict[Tuple[str, Optional[int]], List[Span]] = {}
    for span in spans:
        streams.setdefault((span.file, span.rank), []).append(span)
    found = []
    for stream in streams.values():
        last = stream[-1]
        ended = last.raised.of_main and ends.get(last.file, 0) - last.last <= at_the_end
        start = len(stream) - 1
        while start and stream[start].raised.chained:
            start -= 1
        earlier = stream[:start]
        if ended and not any(span.raised.of_helper for span in stream):
            found += [Survived(span, stream[start].first > earlier[-1].last + 1) for span in earlier]
    return tuple(found)


# Where a process crashed: the stack that Python's faulthandler writes below `Fatal Python error`.


FATAL, STACK = "Fatal Python error: ", "(most recent call first):"  # text found in its lines
_CRASH_FRAME = re.compile(r'\s*File "([^"]{1,300})", line (\d+) in ')
_CURRENT = re.compile(r"\s*Current thread 0x")
MAX_OPEN_CRASHES = 256
MAX_LINES = 200


@dataclass
class _Stack:
    number: int  # of the line that names the error
    lines: int = 0
    current: bool = False  # inside the stack of the thread that crashed
    frame: str = ""  # innermost
    own_frame: str = ""  # innermost outside of installed packages

    @property
    def where(self) -> str:
        if not self.own_frame or self.own_frame == self.frame:
            return f"crashed at {self.frame}" if self.frame else ""
        return f"crashed at {self.own_frame} (in {self.frame})"


class Crashes:
    """The crashes of all files, one at a time for each rank of a file."""

    def __init__(self) -> None:
        self._open: Dict[Tuple[str, Optional[int]], _Stack] = {}

    def feed(self, text: str, rank: Optional[int], file: str, number: int) -> Tuple[int, str]:
        """Return the number of the line that names the error, and the crash location as far as known; or 0 and nothing."""
        if FATAL in text:
            if len(self._open) < MAX_OPEN_CRASHES or (file, rank) in self._open:
                self._open[(file, rank)] = _Stack(number)
            return 0, ""
        stack = self._open.get((file, rank)) if self._open else None
        if stack is None:
            return 0, ""
        stack.lines += 1
        if stack.lines > MAX_LINES:
            del self._open[(file, rank)]
            return 0, ""
        if STACK in text:
            stack.current = bool(_CURRENT.match(text))
        frame = _CRASH_FRAME.match(text) if stack.current else None
        if not frame:
            return 0, ""
        place = f"{frame[1]}:{frame[2]}"
        stack.frame = stack.frame or place
        if not stack.own_frame and not is_library(frame[1]):
            stack.own_frame = place
        return stack.number, stack.where

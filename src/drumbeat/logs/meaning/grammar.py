"""Tell errors from lines that only mention one. `so that CUDA out of memory is avoided` is not a failure, nor is a model's
answer about `CUDA out of memory`, a test's diff, or a field of a data set."""

from __future__ import annotations

import re

from drumbeat.causes.events import FAULTS, class_of, is_fault

_AFTER = 40  # characters after an error's words that may negate them
_TALK = re.compile(
    r"(?i)\b(?:avoid(?:s|ed|ing)?|prevent(?:s|ed|ing)?|so that|in case of|instead of|guards? against|protects? (?:from|against)"
    r"|(?:to|will|we|and) (?:handle|catch|detect|simulate|retry)|handles|handled|handling|recovers? from|would|might|may|could"
    r"|should|unlikely|not an error|(?:enabled|registered|installed) (?:for|on)|handlers? (?:for|on))\b"
)
# The line itself says that the error was wanted: a test of it, a drill.
_WANTED = re.compile(
    r"(?i)\b(?<!not )as (?:expected|planned|intended|wanted)\b|\b(?:on purpose|deliberate(?:ly)?|simulated|injected)\b"
    r"|(?:\.{3,}|[:,]) ?(?:ok|pass(?:ed)?)\W*$|^ok \d+\b"
)
# An exception's name, or what programs put before their errors.
_ERROR = re.compile(r"(?:^|[\s.])[A-Z]\w*(?:Error|Exception)\b|(?i:\b(?:error|fatal|failed|failure)\b)|NCCL WARN")
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception): ")

# After an error, in the same line: what the program does now.
_INSTEAD = re.compile(
    r"(?i)(?:[,;.)]|--?) {1,2}(?:so |now |we are )?"
    r"(?:using|trying (?!to\b)|falling back|retrying|continuing|skipping|switching|defaulting)"
)

# Who speaks in a conversation, what a model wrote, the lines of a diff, what grep found (-n, -H), source code, and the like.
_CHAT = re.compile(
    r"<\|?(?:im_start\|>)?(?:user|assistant|system|human|prompter)\|?>|\[INST\]"
    r"|### (?:Instruction|Response|Input|Human|Assistant)\b"
    r"|^\W{0,4}(?:Human|User|Assistant|Prompt|Question|Answer|[Gg]enerated|[Ss]ample|[Cc]ompletion)(?: \d+)?: "
)
_DIFF = re.compile(r"[-+](?: {2,}|\t|(?!(?:ba|z|k|da)?sh: )[A-Za-z_@\"'])")
_GREP = re.compile(r" {0,5}\d{1,7}:[^\s\d]|[\w./-]{1,200}\.(?:out|log|err|txt):(?:\d{1,7}:)?\S")
_SETTING = re.compile(
    r"(?:export )?[A-Z][A-Z0-9_]{2,60}=|\s{0,20}--?\w[\w-]{0,40}(?:[ =]\S{1,40})? {2,}"
)  # or an option and its help
_CODE = re.compile(
    r"\s*(?:raise [A-Z]\w*\(|except \(?[\w., ]+\)?(?: as \w+)?:|(?:el)?if .+:(?: |$)"
    r"|assert [\w\"'(]|print\(|echo |log\w*\.\w+\(|with \w+\.raises\()"
)
_STRINGS = re.compile(
    r"(?<![\w\\])(?:\"[^\"\\]*(?:\\.[^\"\\]*)*(?:\"|$)|'[^'\\]*(?:\\.[^'\\]*)*'|`[^`]*`|\u201c[^\u201d]*\u201d)"
)
# Fields in which loggers, containers and launchers keep what a program said.
_FIELD = re.compile(
    r"(?i)(?:log|line|msg|message|err|errors?|exc\w{0,20}|reason|details?|cause|what|why|event|std(?:out|err)|output|status"
    r"|stack\w{0,20}|traceback|description)[\"']?\s{0,3}[:=]\s{0,3}$"
)
# What a program writes before its error, whatever the words in between.
_FAILED = re.compile(
    r"(?i)\b(?:error|errno|fatal|fail\w*|exception|except|caught|catch\w*|rais\w+|threw|thrown?|crash\w*|abort\w*|died|kill\w*|exit\w*"
    r"|terminat\w+|panic\w*|cannot|can't|can not|could not"
    r"|couldn't|unable|not|lost|because|due|reason|warn\w*|invalid|refused|problem)\b"
    r"|[A-Za-z]Error\b|[A-Za-z]Exception\b|NCCL WARN"
)
_HEADER = re.compile(
    r"(?<![\w.])(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b|\b[\w./-]{1,60}: (?:error|fatal): |NCCL WARN "
)
_PLAIN = re.compile(r"(?:(?<![\w./'-])[A-Za-z]{1,20}[,;]? ){3}[\"'(]?$")
_TOLD = re.compile(
    r"\b(?:I|my|your|you|me|why|when|if|says?|said|tells?|prints?|printed|shows?|gets?|got|sees?|saw|about|called|named)\b"
    r"(?: [\w'-]{1,20}){0,4}[: ]{1,2}[\"'(]?$"
)


def is_exception(text: str) -> bool:
    """Return True if the line begins as an exception's own last line does."""
    return bool(_EXCEPTION.match(text))


def is_talk(text: str, start: int, end: int) -> bool:
    """Return True if the words around `text[start:end]` say that the error is avoided, expected, possible or replaced."""
    around = text[:start], text[end : end + _AFTER]
    if _WANTED.search(text) or _INSTEAD.search(text, start) and not is_exception(text):
        return True
    return any(map(_TALK.search, around)) and not _ERROR.search(text[:end])


def is_quoted(text: str, start: int) -> bool:
    """Return True if the error at `start` is part of a conversation, a diff, grep's output, code, or a string."""
    if any(form.match(text) for form in (_DIFF, _GREP, _CODE)):
        return True
    if _SETTING.match(text, 0, start) or _CHAT.search(text, 0, start):
        return True
    for string in _STRINGS.finditer(text):
        if string.start() > start:
            return False
        if start < string.end():
            before, rest = text[: string.start()], text[string.end() :].lstrip()
            own = not before.strip() and not rest.strip(" ,;.") or rest.startswith(":")  # all of the line, or a key
            return not own and not _FIELD.search(before) and not _FAILED.search(before)
    return False


def is_in_prose(text: str, start: int) -> bool:
    """Return True if plain words lead to the error at `start` and none of them says that something failed."""
    header = _HEADER.search(text)
    header = header if header and header.start() <= start else None
    before = text[: header.start() if header else start]
    told = _TOLD.search(before) or (header and _PLAIN.search(before))
    return bool(told) and not _FAILED.search(before)


# An exception's last line without its traceback: by names that only exceptions have, or by how such names end.


BARE = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Exit|Timeout|Failure|Iteration)|OutOfResources|BackendCompilerFailed|Exception)"
    r"|(?:[a-z_]\w*\.)+[a-z]*(?:error|exception|timeout)|(?:[A-Za-z_]\w*\.)*(?:errors|exceptions)\.[A-Z]\w*)"
    r"(?:\([A-Z]\w*\))?(?:: (?P<message>.+))?$"
)
# How other languages say that nobody caught an exception: Java, Rust, Go, Fortran, MPI, Julia, R.
FOREIGN_WORDS = (
    "Exception in thread", "panicked at", "panic:", "Fortran runtime error", "forrtl: ", "Fatal error in ", "*** MPI_ERR_",
    "LoadError", "Execution halted", "Uncaught exception", "Unhandled exception",
)  # fmt: skip
_FOREIGN = re.compile(
    r'Exception in thread "[^"]{1,100}" [\w.$]+|thread \'[^\']{0,100}\' (?:\(\d+\) )?panicked at |panic: |Fortran runtime error: '
    r"|forrtl: (?:severe|error) \(\d+\): |Fatal error in (?:P?MPI|internal)_\w+: |\*\*\* MPI_ERR_\w+: "
    r"|ERROR: LoadError: |Execution halted$|(?:Uncaught|Unhandled) exception\b"
)
# Names for which a line is checked even outside of a traceback.
NAMES = (
    *sorted(FAULTS), "RuntimeError", "ValueError", "OSError", "TimeoutError", "ConnectionError", "FloatingPointError", "EOFError",
    "UnpicklingError", "PicklingError", "HTTPError", "DistBackendError",
    "DistNetworkError", "DistStoreError", "AcceleratorError", "XlaRuntimeError", "JaxRuntimeError", "SafetensorError",
    "MisconfigurationException", "HfHubHTTPError", "RepositoryNotFoundError", "GatedRepoError", "LocalEntryNotFoundError",
    "ConfigAttributeError", "HorovodInternalError", "BrokenProcessPool", "CheckpointException", "ValidationError",
    "RemoteDisconnected", "InternalTorchDynamoError", "BackendCompilerFailed", "CompilationError", "OutOfResources",
)  # fmt: skip
_LISTED = frozenset(NAMES)
# An exception's last line, whatever the name, contains one of the first or ends with one of the others.
_BARE_INSIDE = (b"rror: ", b"xception: ", b"imeout: ", b"ailure: ", b"rrors.", b"xceptions.")
_BARE_ENDS = (b"Error", b"Exception")
BARE_SIGNS = (b"rror", b"xception", b"imeout: ", b"ailure: ")  # a line with none of these is not such a line
_WORD = re.compile(r"\b(?!(?i:nan|inf)\b)[A-Za-z]{3,}")
_MEASURED = re.compile(r"\W{0,3}(?:tensor\()?[-+]?\.?\d")  # what begins with a number is a value, not a message
_OF_ERRORS = re.compile(r"(?:^|\.)(?:errors|exceptions)\.")  # the module that many packages keep their exceptions in
_OF_ERRORS_AND_NAMED = re.compile(r"(?:^|\.)(?:errors|exceptions)\.\w*(?:Error|Exception)$")
_NO_LOGGER = re.compile(r"(?i:error|exception|exit|timeout|failure|iteration|resources|failed)$")
_MAX_MESSAGE = 400


def is_listed(text: str) -> bool:
    """Return True if the line begins with a name or words that only exceptions have."""
    return bool(_FOREIGN.match(text)) or class_of(text) in _LISTED


def names_itself(text: str) -> bool:
    """Return True if the exception's own name (for an assertion: without a message) says what went wrong."""
    name, said, _ = text.strip().partition(":")
    return is_fault(name) and not (said and class_of(name) == AssertionError.__name__)


def may_be_bare(raw: bytes) -> bool:
    """Return True if this line may be an exception's last one (a cheap test)."""
    if b"rror" not in raw and b"xception" not in raw and b"imeout: " not in raw and b"ailure: " not in raw:
        return False
    return any(sign in raw for sign in _BARE_INSIDE) or raw.rstrip().endswith(_BARE_ENDS)


def is_bare(text: str) -> bool:
    """Return True for an exception's last line outside of a traceback. If its name is unknown, it must also have a message
    (`MeanSquaredError: 0.05` is a measurement) or belong to a module, as exceptions do."""
    if _FOREIGN.match(text):
        return True
    match = BARE.match(text)
    if match is None:
        return False
    if (
        _MEASURED.match(match["message"] or "")
        and not is_listed(text)
        and not _OF_ERRORS_AND_NAMED.search(match["name"])
    ):
        return False
    words = len(_WORD.findall((match["message"] or "")[:_MAX_MESSAGE]))
    if match["message"] and not _NO_LOGGER.search(match["name"]):
        return words > 1  # `app.exceptions.Reporter: closed` is a logger and its message
    if "." in match["name"] and (words or not match["message"]):
        return True
    return words > 1 or is_listed(text) or bool(_OF_ERRORS.search(match["name"]))

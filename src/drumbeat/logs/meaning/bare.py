"""An exception's last line without its traceback: by names that only exceptions have, or by how such names end."""

from __future__ import annotations

import re

BARE = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Exit|Timeout|Failure)|OutOfResources|BackendCompilerFailed|Exception)"
    r"|(?:[a-z_]\w*\.)+[a-z]*(?:error|exception|timeout)|(?:[A-Za-z_]\w*\.)*(?:errors|exceptions)\.[A-Z]\w*)"
    r"(?:\([A-Z]\w*\))?(?:: (?P<message>.+))?$"
)
# How other languages say that nobody caught an exception: Java, Rust, Go, Fortran, Julia, R.
FOREIGN_WORDS = (
    "Exception in thread", "panicked at", "panic:", "Fortran runtime error", "LoadError", "Execution halted",
    "Uncaught exception", "Unhandled exception",
)  # fmt: skip
_FOREIGN = re.compile(
    r'Exception in thread "[^"]{1,100}" [\w.$]+|thread \'[^\']{0,100}\' (?:\(\d+\) )?panicked at |panic: |Fortran runtime error: '
    r"|ERROR: LoadError: |Execution halted$|(?:Uncaught|Unhandled) exception\b"
)
# Names by which a line is looked at though it stands outside of a traceback.
NAMES = (
    "RuntimeError", "ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "AssertionError", "OSError",
    "NotImplementedError", "ZeroDivisionError", "NameError", "UnboundLocalError", "SyntaxError", "IndentationError",
    "TimeoutError", "ConnectionError", "UnicodeDecodeError", "JSONDecodeError", "RecursionError", "OverflowError",
    "FloatingPointError", "EOFError", "StopIteration", "UnpicklingError", "PicklingError", "HTTPError", "DistBackendError",
    "DistNetworkError", "DistStoreError", "AcceleratorError", "XlaRuntimeError", "JaxRuntimeError", "SafetensorError",
    "MisconfigurationException", "HfHubHTTPError", "RepositoryNotFoundError", "GatedRepoError", "LocalEntryNotFoundError",
    "ConfigAttributeError", "HorovodInternalError", "BrokenProcessPool", "CheckpointException", "ValidationError",
    "RemoteDisconnected", "InternalTorchDynamoError", "BackendCompilerFailed", "CompilationError", "OutOfResources",
)  # fmt: skip
_LISTED = frozenset(NAMES)
# An exception's last line, whatever its name is, holds one of the first or ends with one of the others.
_BARE_INSIDE = (b"rror: ", b"xception: ", b"imeout: ", b"ailure: ", b"rrors.", b"xceptions.")
_BARE_ENDS = (b"Error", b"Exception")
BARE_SIGNS = (b"rror", b"xception", b"imeout: ", b"ailure: ")  # a line that holds none of these is no such line
_WORD = re.compile(r"\b(?!(?i:nan|inf)\b)[A-Za-z]{3,}")
_MEASURED = re.compile(r"\W{0,3}(?:tensor\()?[-+]?\.?\d")  # what begins with a number is a value, not a message
_OF_ERRORS = re.compile(r"(?:^|\.)(?:errors|exceptions)\.")  # the module that many packages keep their exceptions in
_OF_ERRORS_AND_NAMED = re.compile(r"(?:^|\.)(?:errors|exceptions)\.\w*(?:Error|Exception)$")
_NO_LOGGER = re.compile(r"(?i:error|exception|exit|timeout|failure|resources|failed)$")
_MAX_MESSAGE = 400
# Exceptions that often follow from another process's end, or from another failure that stands elsewhere.
_FOLLOWS = re.compile(
    r"(?:Connection|ConnectionReset|ConnectionAborted|ConnectionRefused|BrokenPipe|EOF|Timeout|Cancelled|Aborted|Unavailable|CommClosed"
    r"|DeadlineExceeded|StreamClosed|RemoteDisconnected|CalledProcess|Rpc)Error\b|timeout\b|KilledWorker\b|BrokenProcessPool\b|TimeoutExpired\b"
)

# Names that say themselves what went wrong: a fault of the program. RuntimeError, ValueError or a library's own name only say
# that something did; the message may well describe a cause that no rule knows in these words.
_FAULTS = re.compile(
    r"(?:Type|Key|Attribute|Name|Index|UnboundLocal|NotImplemented|ZeroDivision|Syntax|Indentation|Recursion|UnicodeDecode|JSONDecode)Error"
    r"|AssertionError$"
)


def is_listed(text: str) -> bool:
    """Does the line begin with a name or with words that only exceptions have?"""
    return bool(_FOREIGN.match(text)) or text.split(":", 1)[0].rsplit(".", 1)[-1] in _LISTED


def may_follow(text: str) -> bool:
    """Does its name say that it may well be the consequence of something else?"""
    return bool(_FOLLOWS.match(text.split(":", 1)[0].rsplit(".", 1)[-1]))


def names_itself(text: str) -> bool:
    """Does the exception's own name (for an assertion: a name without a message) say what went wrong?"""
    return bool(_FAULTS.match(text.strip()))


def may_be_bare(raw: bytes) -> bool:
    """Cheap: may this line be an exception's last one?"""
    if b"rror" not in raw and b"xception" not in raw and b"imeout: " not in raw and b"ailure: " not in raw:
        return False
    return any(sign in raw for sign in _BARE_INSIDE) or raw.rstrip().endswith(_BARE_ENDS)


def is_bare(text: str) -> bool:
    """Is this an exception's last line, outside of a traceback? Of a name that nobody knows it must also say something
    (`MeanSquaredError: 0.05` is a measurement), or stand in a module as exceptions do."""
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

"""Is a line an error, or does it only talk about one? `so that CUDA out of memory is avoided` failed at nothing, and neither did
a model that answers a question about `CUDA out of memory`, a diff of a test, or a field of a data set."""

from __future__ import annotations

import re

_AFTER = 40  # characters behind an error's words that may take them back
_TALK = re.compile(
    r"(?i)\b(?:avoid(?:s|ed|ing)?|prevent(?:s|ed|ing)?|so that|in case of|instead of|guards? against|protects? (?:from|against)"
    r"|(?:to|will|we|and) (?:handle|catch|detect|simulate|retry)|handles|handled|handling|recovers? from|would|might|may|could"
    r"|should|unlikely|not an error|(?:enabled|registered|installed) (?:for|on)|handlers? (?:for|on))\b"
)
# An exception's name, or what programs put before their errors.
_ERROR = re.compile(r"(?:^|[\s.])[A-Z]\w*(?:Error|Exception)\b|(?i:\b(?:error|fatal|failed|failure)\b)|NCCL WARN")
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception): ")

# Behind an error, in the same line: what the program does now.
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
    """Does the line begin as an exception's own last line does?"""
    return bool(_EXCEPTION.match(text))


def is_talk(text: str, start: int, end: int) -> bool:
    """Do the words around `text[start:end]` say that the error is guarded against, expected or possible, or replaced?"""
    around = text[:start], text[end : end + _AFTER]
    if _INSTEAD.search(text, start) and not is_exception(text):
        return True
    return any(map(_TALK.search, around)) and not _ERROR.search(text[:end])


def is_quoted(text: str, start: int) -> bool:
    """Does the error at `start` stand in a conversation, a diff, grep's output, code, or a longer line's string?"""
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
    """Do plain words lead to the error at `start`, without any that says that something failed?"""
    header = _HEADER.search(text)
    header = header if header and header.start() <= start else None
    before = text[: header.start() if header else start]
    told = _TOLD.search(before) or (header and _PLAIN.search(before))
    return bool(told) and not _FAILED.search(before)

"""Reduce a line to its message, without prefixes and without names.

The same words mean the same whatever logger, launcher or container put fields before them, and whatever the ranks of a job or
the functions of a program are called. The model of likely.py sees only this text, in training and in use.
"""

from __future__ import annotations

from drumbeat.base.regex import regex

MEMBER = " rank 1 "  # replaces every member of a job, whatever its name
_MOST = 8  # fields before a message
_SHORTEST = 8  # minimum length of a message
_DAY = (
    r"(?:\d{4}[-/]\d\d[-/]\d\d|\d\d[./-]\d\d[./-]\d{4}|\d\d/[A-Z][a-z]{2}/\d{4}:?"
    r"|(?:[A-Z][a-z]{2} )?[A-Z][a-z]{2} [ \d]\d(?= \d\d:)"
    r"|\d{4,6}(?= \d\d:\d\d:))"
)
TIME = rf"(?:{_DAY}[T_ ]?)?\d{{1,2}}:\d\d(?::\d\d)?(?:[.,]\d{{1,9}})?(?:Z| ?[+-]\d\d:?\d\d\b)?"
LEVEL = (
    r"(?i:debug|info|notice|warn(?:ing)?|err|crit(?:ical)?|fatal|severe|panic|alert|emerg|trace)\b"
    r"|(?:ERROR|error(?=[\]:|]))\b"
)
# What a member at the start of a line did or suffered: it is the line's subject then, not its writer.
_VERB = (
    r"(?:is|was|has|had|went|left|leaves|die[ds]|vanish\w*|disappear\w*|stopped|dropped|fell|gone|dead|silent|no longer"
    r"|never)\b"
)
_HEAD = regex(
    rf"\s*(?:[\[(<]?{TIME}[\])>]?|\d{{9,11}}\.\d+|[\[(<]?[tT]?\+?\d+\.\d+s?[\])>]?(?= )"
    rf"|[\[(<]?(?:{LEVEL})[\])>]?:?|[DIWEF]\d{{0,4}}(?= +\S*[\w.]*[\d\]:])"
    r"|[\w./-]+\.(?:cc|cpp|cu|c|h|hpp|py|rs|go|jl|f90|java):\d+\]?"
    r"|\[(?![^\]]*(?i:err))[^\]\s]{0,30}(?: {1,4}[^\]\s]{1,24}){0,3}\]|<[^>\s]{1,24}>"
    r"|\((?:[\w.-]+ )?[\w.-]*\d\)"
    r"|(?:ts|time|t|level|lvl|sev|who|rank|node|host|pid|src)="
    r"\"?[^\s\"]+\"?(?= \S)"
    r"|[A-Za-z][\w.@/-]*\[\d+\]:?|[A-Za-z][\w@/.-]*\d[\w@/.:-]*(?::|(?= *[|>])|(?<=-\d)(?= ))"
    rf"|(?i:rank|worker|task|peer|pe|mpi)(?:[/:=.#-]| {{1,4}})?\d+(?:/\d+)?(?::|(?!\d| {{1,2}}{_VERB}))"
    r"|\d{1,5}(?::|(?= *[|>]))"
    r"|[a-z][\w-]*\d[\w.-]*(?= [\w.-]+\[\d+\])|[|>:-]+(?= ))\s*"
)
_MEMBERS = regex(
    r"(?<![\w./])(?:(?i:rank|worker|trainer|member|replica|process|proc|peer|task|child|actor|participant|pe|learner|neighbou?r)s?"
    r"[\s#=:/\[._-]{0,2}\d{1,5}(?:/\d+)?\]?|[rwptRWPT]\d{1,4}\b|<\d{1,4}>)(?![\w.])"
)
# A name in quotes that is not a field's value: `while 'pullgrads' was pending`
_NAMES = regex(r"(?<![:=\w])(?<![:=] )([`'\"\u2018])\w[\w.:/-]*[`'\"\u2019](?!\s*[:=])")


def message(text: str) -> str:
    """Return the line without leading fields of a logger, a launcher or a scheduler."""
    start = 0
    for _ in range(_MOST):
        found = _HEAD.match(text, start)
        if found is None or found.end() == start or len(text) - found.end() < _SHORTEST:
            break
        start = found.end()
    return text[start:]


def essence(text: str) -> str:
    """Return the message with all member names replaced by one word."""
    return _MEMBERS.sub(MEMBER, message(text))


def without_names(text: str) -> str:
    return _NAMES.sub(" item ", text)

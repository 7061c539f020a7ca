"""Printing foreign text safely: file and run names, log lines, cluster output."""

from __future__ import annotations

import re
from typing import Iterator, Optional, Sequence, Tuple

from drumbeat.base.regex import regex

_ESCAPES = regex(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|[@-Z\\^_])?")
_MOVES = regex(r"\x1b\[\d{0,4}[A-GK]")  # of the cursor; the rest of a line is cleared
_COLOURS = regex(r"(\x1b\[[0-9;:]*m)")
_STEERS = regex(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # but tabs, line ends, returns
# Control characters but tabs and line ends, and marks that turn the direction of writing.
_CONTROLS = regex(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """Remove terminal control characters; line ends and tabs stay."""
    return text if text.isprintable() else _CONTROLS.sub("", _ESCAPES.sub("", text))


def visible(text: str) -> str:
    """Show terminal control characters in escaped form, as `\x1b`; colours, tabs and line ends stay."""
    if text.isprintable():
        return text
    parts = _COLOURS.split(text)
    parts[::2] = (_STEERS.sub(lambda found: f"\\x{ord(found[0]):02x}", part) for part in parts[::2])
    return "".join(parts)


def last_state(text: str) -> str:
    """Return what a terminal still shows of a line that was written over again and again, as progress bars do, without the
    cursor movements between several of them."""
    if text.isprintable():
        return text
    return _MOVES.sub("", text).rstrip("\r").rpartition("\r")[2]


def indented(text: str) -> str:
    """Remove control characters and indent all lines but the first, so that a line inside a name does not look like one of
    ours."""
    return re.sub(r"\n(?!  )", "\n  ", harmless(text))


def printable(text: str) -> str:
    """Return the text as one line, so that a name with a line end in it does not look like a line of ours."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " for letter in _ESCAPES.sub("", text))


# Detection of secrets, in one place for all that drumbeat prints or writes. A secret is recognised by the name
# it stands under (HF_TOKEN, PGPASSWORD, `--api-key`, `?token=` in a URL), by its own form (hf_…, a URL with
# user:password), or by the words before it (`Authorization: Bearer …`, `sshpass -p …`). `is_secret` judges one
# variable, `in_words` an argv, `in_text` shell text; `redact` gives a line with every secret in it replaced by `…`.


# Names are compared in whole words between underscores: HF_TOKEN is secret, TOKENIZERS_PARALLELISM is not.
_NAME = regex(
    r"(^|_)(TOKEN|SECRETS?|PASS|PASSWD|PWD|PASSPHRASE|CREDENTIALS?|APIKEY|PAT|JWT|COOKIE"
    r"|(API|ACCESS|ACCOUNT|PRIVATE|SECRET|AUTH|SSH)_?KEY)(_|$)|(PASSWORD|PASSWD|_PWD|TOKEN|SECRET)$"
)
# Names that are as often harmless (SORT_KEY, NUM_TOKENS): secret only with a value that could be one.
_DOUBTFUL_NAME = regex(r"(^|_)(TOKENS|KEYS?|AUTH|PRIVATE|SIGNATURE|SIG)(_|$)")
_HARMLESS_NAME = regex(r"_(FILE|PATH|DIR|SOCK|TYPE|NAME|ID)$|^(OLD)?PWD$")
# Numbers, short words, paths, and names in plain words, as of a column: a key has digits, capitals, or no end of letters.
_HARMLESS_VALUE = regex(r"[\d_.,:x+-]*|.{0,7}|[~./$].*|[a-z]{1,15}(?:[_.-][a-z]{1,15})*", re.DOTALL)

# Values that say themselves what they are.
_TOKENS = regex(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|A[KS]IA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|nvapi-[\w-]{20,}|eyJ[A-Za-z0-9_-]{10,}\.[\w.-]{2,}"
    r"|[rs]k_(?:live|test)_\w{10,}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,})"
)
# user:password@, where the password may hold a slash (a port before a path is none); or one long word before the @
_IN_URL = regex(
    r"://(?:[^/\s:@]{0,100}:(?!\$)([^/\s]{1,200}|(?!\d{1,5}/)[^\s\"',]{1,200}?)"
    r"|((?=[A-Za-z_-]{0,99}\d)(?=[\d_-]{0,99}[A-Za-z])[\w-]{20,200}))@"
)
_IN_QUERY = regex(r"(?<=[?&;])([A-Za-z][\w.-]{0,80})=([^\s&\"'$<>{}]+)")
_PRIVATE_KEY = regex(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(.+?)(?:-----END|\Z)", re.DOTALL)
_WHOLE_VALUE = regex(
    r"(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|eyJ[A-Za-z0-9_-]{10}|-----BEGIN )"
)

_OPTION = regex(r"--?([A-Za-z][\w.-]{0,80})")
# --eos-token names a token of a vocabulary; --token, --hf-token and --api-key an account's.
_VOCABULARY = regex(
    r"(^|_)(EOS|BOS|PAD|UNK|SEP|CLS|MASK|EOD|EOT|BOT|IMAGE|AUDIO|VIDEO|SPECIAL|STOP|START|END|FIM|NEW|TASK|PREFIX|PER|MAX"
    r"|MIN|NUM|USE|NO)(_|$)"
)

# Text between a name and its value: `=`, `: `, `': '`, `\\": \\"`. A value in quotes may hold blanks.
_ASSIGNED = regex(r"(?<![\w$])(?<!\$\{)([A-Za-z_]\w{0,80})([ \t]?[=:][ \t]?[bru]?(\\{0,2}[\"'])?)")
_JSON = regex(r"\\{0,2}[\"']([A-Za-z_][\w.-]{0,80})\\{0,2}[\"']\s{0,4}:\s{0,4}[bru]?(\\{0,2}[\"'])")
_GIVEN = regex(
    r"(?<![^\s\"'`(\[,])(--?[A-Za-z][\w.-]{0,80})([= \t]+|\\{0,2}[\"'],?[ \t]{1,4}(?=\\{0,2}[\"']))(\\{0,2}[\"'])?"
)
_CLOSING = {  # what stands in front of the quote that closes the one given; one after a backslash closes nothing
    quote: regex(
        rf"(?:(?!{re.escape(quote)})[^\n]){{0,4000}}(?={re.escape(quote)})"
        if quote.startswith("\\")
        else rf"(?:\\.|[^\n\\{quote}]){{0,4000}}(?={quote})"
    )
    for quote in ('"', "'", '\\"', "\\'", '\\\\"', "\\\\'")
}
_BARE_VALUE = regex(r"[^\s\"'$<>{}]+")
_HEADER = regex(
    r"(?i)\b((?:proxy-)?authorization\\{0,2}[\"']?\s*[:=]\s*\\{0,2}[\"']?(?:bearer|basic|token)\s+|\bbearer\s+)([\w.~+/=-]{8,})"
)
# password is hunter2; API key provided: 0123456789abcdef
_SPOKEN = regex(
    r"(?i)\b(?:(?:password|passwd|passphrase)[ \t]{1,4}(?:is|was)[ \t:]{1,4}[\"']?(?=\S{0,100}\d)([^\s\"'$<>{};,]+)"
    r"|(?:wandb|api|access|account|secret|private)[ _-]?key(?:[ \t]{1,4}(?:provided|is|was))?[ \t:=]{1,4}[\"']?([\w+/=-]{16,}))"
)
# X-Api-Key: x, Private-Token: x
_OTHER_HEADER = regex(r"(?<![\w-])([A-Za-z]{1,20}(?:-[A-Za-z]{1,20}){1,5})(:[ \t]?)([^\s\"'$<>{}]+)")
# Programs that take a secret without a name: curl -u me:x, wandb login x, mysql -px, sshpass -p x.
_BY_PROGRAM = (
    (regex(r"\bcurl\b[^\n|;&]{0,300}?\s(?:-u|--user)[= \t]?[\"']?[^\s:\"'$]{1,100}:([^\s\"'$]+)"), "curl -u"),
    (regex(r"\bwandb\s{1,4}login\s[^\n|;&]{0,100}?(?<![\w./:-])([A-Za-z0-9_-]{20,})"), "wandb login"),
    (regex(r"\b(?:mysql\w{0,10}|mariadb)\s[^\n|;&]{0,200}?(?<!\S)-p([^\s\"'$]+)"), "mysql -p"),
    (regex(r"\bsshpass\s[^\n|;&]{0,100}?(?<!\S)-p[ \t]{0,4}[\"']?([^\s\"'$]+)"), "sshpass -p"),
    (regex(r"\bredis-cli\s[^\n|;&]{0,200}?(?<!\S)-a[ \t]{1,4}[\"']?([^\s\"'$]+)"), "redis-cli -a"),
    (
        regex(
            r"\b(?:docker|podman|az)\s[^\n|;&]{0,100}?login\s[^\n|;&]{0,200}?(?<!\S)-p[ \t]{1,4}[\"']?([^\s\"'$-][^\s\"']*)"
        ),
        "login -p",
    ),
)
_KEY_OF_CONFIG = regex(r"[+~]{0,2}([A-Za-z_][\w.@/-]{0,120})")  # hf.token=x, +trainer.api_key=x
_LIKE_A_PASSWORD = regex(r"(?=\S*\d)(?=\S*[A-Za-z])\S{8,}")
_NOT_ONE = regex(r"(?i)true|false|yes|no|none|null|auto|\d{1,6}")
_JUDGED = 300  # characters of a value that are looked at; all of it is hidden
HIDDEN = "…"
# Nothing above matches a text without one of these, in lower case. Looked for one by one: a pattern of them all is slower.
_SIGNS = (
    "token", "secret", "pass", "pwd", "credential", "key", "jwt", "cookie", "auth", "private", "sig", "bearer", "@",
    "hf_", "gho_", "ghp_", "ghu_", "ghs_", "ghr_", "glpat", "sk-", "akia", "asia", "xox", "nvapi", "eyj", "curl", "wandb",
    "mysql", "mariadb", "redis-cli", "docker", "podman", "login", "sk_", "rk_", "aiza", "npm_", "pypi-",
)  # fmt: skip
_PAT = regex(r"(?:\b|_)pat\b")  # a path is none


def looks_secret(name: str) -> bool:
    """Return true if the name alone looks secret; used where no value is known."""
    name = _upper(name)
    return bool(_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def is_secret(name: str, value: str) -> bool:
    """Return true if the name or the value looks like something that must not be written."""
    if looks_secret(name) or _WHOLE_VALUE.match(value) or _form(value):
        return bool(value)
    name = _upper(name)
    return bool(
        _DOUBTFUL_NAME.search(name) and not _HARMLESS_NAME.search(name) and not _HARMLESS_VALUE.fullmatch(value)
    )


def _upper(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()  # AccountKey is ACCOUNT_KEY


def in_words(words: Sequence[str]) -> Optional[str]:
    """Name the part of a command that holds a secret: an option (`--token`), a variable (`HF_TOKEN`), a kind of value; None if
    there is none."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        option = _OPTION.fullmatch(name)
        if option:
            following = words[place + 1] if place + 1 < len(words) else ""
            if _secret_option(option.group(1), value if equals else following):
                return name
        elif (
            equals
            and _literal(value)
            and ((name.isidentifier() and is_secret(name, value)) or _secret_key(name, value))
        ):
            return name
        found = in_text(word) if any(char in word for char in " \n\"':") else _form(word)
        if found:
            return found
    return next((what for _, _, what in _given_to_programs(" ".join(words))), None)


def in_text(text: str) -> Optional[str]:
    """Name the part of a shell text that holds a secret; None if there is none."""
    return next((name for _, _, name in _found(text)), None)


def redact(text: str) -> str:
    """Return the text with every secret in it replaced by `…`; everything else stays as it is."""
    folded = text.casefold()
    if not (any(sign in folded for sign in _SIGNS) or ("pat" in folded and _PAT.search(folded))):
        return text
    parts, end = [], 0
    for start, stop, _ in sorted(_found(text)):
        if start >= end:
            parts += [text[end:start], HIDDEN]
        end = max(end, stop)
    return "".join(parts) + text[end:]


def _found(text: str) -> Iterator[Tuple[int, int, str]]:
    """Yield start and end of each secret, and the name or form it was recognised by."""
    for match in _HEADER.finditer(text):
        yield match.start(2), match.end(2), "an Authorization header"
    for match, start, judged, end in _with_values(_GIVEN, text):
        if not judged.startswith("-") and _secret_option(match.group(1).lstrip("-"), judged):
            yield start, end, match.group(1)
    for match, start, judged, end in _with_values(_ASSIGNED, text):
        if _literal(judged) and is_secret(match.group(1), judged) and _assigns(match, judged):
            yield start, end, match.group(1)
    for match, start, judged, end in _with_values(_JSON, text):
        if _secret_key(match.group(1), judged):
            yield start, end, match.group(1)
    for match in _IN_QUERY.finditer(text):
        if _secret_in_query(match.group(1), match.group(2)):
            yield match.start(2), match.start(2) + len(match.group(2).rstrip(").,;]")), match.group(1)
    for match in _SPOKEN.finditer(text):
        yield match.start(match.lastindex or 0), match.end(match.lastindex or 0), "the words before it"
    for match in _PRIVATE_KEY.finditer(text):
        yield match.start(1), match.end(1), "a private key"
    for match in _OTHER_HEADER.finditer(text):
        name, value = match.group(1), match.group(3)
        sure = name.lower().startswith("x-") or _LIKE_A_PASSWORD.fullmatch(value)
        if sure and _literal(value) and looks_secret(name.replace("-", "_")):
            yield match.start(3), match.end(3), name
    yield from _given_to_programs(text)
    for match in _IN_URL.finditer(text):
        yield match.start(match.lastindex or 0), match.end() - 1, "a URL with a password"
    for match in _TOKENS.finditer(text):
        yield match.start() + 3, match.end(), "an access token"


def _with_values(pattern: re.Pattern[str], text: str) -> Iterator[Tuple[re.Match[str], int, str, int]]:
    """Yield each name that the pattern finds, and of the value after it the start, the part to judge, and the end. Names
    inside a value are found too: the value of `https:` is a URL."""
    bare_end = -1
    for match in pattern.finditer(text):
        start, quote = match.end(), match.group(match.re.groups)
        closed = _CLOSING[quote].match(text, start) if quote else None
        end = closed.end() if closed else -1
        if end < 0:
            if bare_end < start:  # a value that began earlier and holds this name ends where this one does
                bare = _BARE_VALUE.match(text, start)
                bare_end = bare.end() if bare else start
            end = bare_end
        if start < end:
            yield match, start, text[start : min(end, start + _JUDGED)], end


def _assigns(match: re.Match[str], value: str) -> bool:
    """Return true if this assigns a value. Prose has colons too (`unexpected token: 12`), so in lower case only a value that
    looks like a password counts."""
    name, between = match.group(1), match.group(2)
    if _VOCABULARY.search(_upper(name)) and not _WHOLE_VALUE.match(value):
        return False
    if name.isupper():
        return True
    if not looks_secret(name):
        return "=" in between and name.lower() in ("sig", "signature") and bool(_LIKE_A_PASSWORD.fullmatch(value))
    if "pass" in name.lower():  # no count, and hardly ever prose
        return "=" in between or bool(match.group(3)) or not value.isalpha()
    if _NOT_ONE.fullmatch(value):
        return False
    return "=" in between or bool(_LIKE_A_PASSWORD.fullmatch(value))


def _secret_in_query(name: str, value: str) -> bool:
    name = re.sub(r"[.-]", "_", _upper(name))
    return _literal(value) and is_secret(name, value) and not _NOT_ONE.fullmatch(value) and not _VOCABULARY.search(name)


def _given_to_programs(text: str) -> Iterator[Tuple[int, int, str]]:
    for pattern, what in _BY_PROGRAM:
        for match in pattern.finditer(text):
            yield match.start(1), match.end(1), what


def _secret_key(key: str, value: str) -> bool:
    """Return true for a configuration key whose last part is secret (`hf.token`), unless the whole key names a vocabulary."""
    match = _KEY_OF_CONFIG.fullmatch(key)
    if not match or not _literal(value) or _NOT_ONE.fullmatch(value):
        return False
    parts = re.split(r"[./@-]", match.group(1).upper())
    return not _VOCABULARY.search("_".join(parts)) and any(
        looks_secret("_".join(parts[-words:])) for words in ((1, 2) if "-" in key else (1,))
    )


def _form(word: str) -> Optional[str]:
    if _IN_URL.search(word):
        return "a URL with a password"
    return "an access token" if _TOKENS.search(word) else None


def _secret_option(option: str, value: str) -> bool:
    name = re.sub(r"[.-]", "_", option).upper()
    if not _literal(value) or value.startswith("-") or _VOCABULARY.search(name):
        return bool(_WHOLE_VALUE.match(value)) and looks_secret(name)
    return is_secret(name, value) and not _NOT_ONE.fullmatch(value)


def _literal(value: str) -> bool:
    """Return false for a value that is filled in later, a file name or a placeholder."""
    return bool(value) and not re.match(r"[$/~<{\[]|pass$|your|xxx", value)

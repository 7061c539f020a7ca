"""`$NAME` and `${NAME}` in a job's text, filled in once, where the order is made. `$$` is a plain `$`."""

from __future__ import annotations

import re
from typing import Mapping

from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.base.secret import is_secret

_DOLLAR = regex(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})?")


def expand(text: str, environ: Mapping[str, str], place: str) -> str:
    """What comes out is not expanded again. `place` begins a message: `job.yaml:3: command`."""

    def fill(match: re.Match[str]) -> str:
        if match.group(1):
            return "$"
        name = match.group(2) or match.group(3)
        if not name:
            raise Problem(
                f"{place}: a '$' without a name after it",
                "write $$ for a plain '$'; no shell reads this text, so $(...) and $1 mean nothing here",
            )
        if name not in environ:
            raise Problem(
                f"{place}: ${name} is not defined", f"export {name}, or write $${name} for the text '${name}'"
            )
        if is_secret(name, environ[name]):
            raise Problem(
                f"{place}: the value of ${name} looks secret and would be written into the run folder",
                f"hand it on by name (env: {{{name}: pass}}) and read it in the command",
            )
        return environ[name]

    return _DOLLAR.sub(fill, text)


def literal(text: str) -> str:
    """Text that has been through the user's shell already, so that `expand` gives it back unchanged."""
    return text.replace("$", "$$")

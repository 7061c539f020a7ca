"""A job file, or another YAML file, under `drumbeat lint`: read by the reader that plan, run and submit use."""

from __future__ import annotations

import difflib
import re
from typing import Any, List, Optional, Sequence, Tuple

from drumbeat.base.regex import regex

LOOKED_AT = "the keys and values of a job file; drumbeat plan shows what becomes of them"
_KEY = regex(r"^([A-Za-z][\w-]*)[ \t]*:(?=\s|$)", re.MULTILINE)


def review_job_file(text: str, name: str) -> Any:
    """A Review as of a script; None where the text is no job file."""
    from drumbeat.base.problem import Problem
    from drumbeat.jobfile.check import mistakes
    from drumbeat.jobfile.job import Job
    from drumbeat.jobfile.yamlfile import load_text, shown_path
    from drumbeat.lint.engine import Review

    file = shown_path(name)
    try:
        table = load_text(text, file, "a job file")
    except Problem as problem:
        if not is_job_file(top_keys(text)):
            return None
        problems: Sequence[Problem] = [problem]
    else:
        if not is_job_file(list(table.entries)):
            return None
        problems = mistakes(Job, table, file, "the job")
    lines = text.splitlines()
    found = [_finding(problem, file, name, lines) for problem in problems]
    return Review(text, False, tuple(found), (), LOOKED_AT)


def top_keys(text: str) -> List[str]:
    """The keys at the left edge, also of YAML that does not parse."""
    return _KEY.findall(text)


def is_job_file(keys: List[str]) -> bool:
    """At least half of the keys are a job's, or nearly; `name` alone says nothing."""
    from drumbeat.jobfile.fields import keys_of
    from drumbeat.jobfile.job import Job

    return _share(keys, list(keys_of(Job))) >= 0.5 and not is_site_profile(keys)


def is_site_profile(keys: List[str]) -> bool:
    from drumbeat.jobfile.fields import keys_of, required_keys
    from drumbeat.jobfile.site import Site

    return set(required_keys(Site)) <= set(keys) and _share(keys, list(keys_of(Site))) >= 0.5


def _share(keys: List[str], known: List[str]) -> float:
    asked = [key for key in keys if key != "name"][:200]
    return sum(bool(difflib.get_close_matches(key[:60], known, 1, 0.8)) for key in asked) / len(asked) if asked else 0


def _finding(problem: Any, file: str, name: str, lines: Sequence[str]) -> Any:
    from drumbeat.findings.model import ERROR, Evidence, Finding
    from drumbeat.lint.engine import MAX_SHOWN

    line, words = _place(problem.what, file)
    shown = lines[line - 1].strip()[:MAX_SHOWN] if line and line <= len(lines) else ""
    return Finding("job-file", ERROR, words, "", problem.fix, (Evidence(shown, name, line),))


def _place(what: str, file: str) -> Tuple[Optional[int], str]:
    """Messages of the reader begin with `job.yaml:3: `."""
    found = re.match(re.escape(file) + r"(?::(\d+))?: ", what)
    return (int(found[1]) if found[1] else None, what[found.end() :]) if found else (None, what)

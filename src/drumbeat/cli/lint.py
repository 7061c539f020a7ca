"""drumbeat lint: check a batch script, a launch command, a page with either in it, or a job file."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from drumbeat.base.problem import Problem
from drumbeat.base.record import to_plain
from drumbeat.base.redact import printable, redact
from drumbeat.base.regex import regex
from drumbeat.cli import add_json
from drumbeat.cli.output import print_json, read_script
from drumbeat.commands.launch import find_launcher
from drumbeat.commands.program import reader
from drumbeat.commands.script import foreign_directives
from drumbeat.findings.model import ERROR, WARNING, Evidence, Finding, worst
from drumbeat.jobfile.check import check, keys_of, mistakes, required_keys
from drumbeat.jobfile.job import Job, job_from_text
from drumbeat.jobfile.site import Site
from drumbeat.jobfile.yamlfile import Items, Text, load_text, shown_path
from drumbeat.lint.context import in_batch, rules
from drumbeat.lint.engine import MAX_SHOWN, Review, apply_edits, difference, lint
from drumbeat.lint.pages import SCRIPTS
from drumbeat.plan.binding import ranks_without_gpu
from drumbeat.plan.exported import against_expected


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a script, a job file, or a Markdown or reStructuredText page; - is standard input",
    )
    add_json(parser)
    parser.add_argument("--fix", action="store_true", help="fix what is safe to fix; the old file stays as FILE.orig")
    parser.epilog = (
        "Exit code: 0: notes at most; 1: a warning or an error; 2: a file that cannot be read, or that "
        "holds nothing that lint can check. With --fix it counts what is left."
    )


_READS = "a batch script, a Python program, a job file or a page"


def run(args: Any) -> int:
    if args.fix and "-" in args.files:
        raise Problem("--fix needs a file to write to; '-' has none", "save what you pasted and lint that")
    reviews = {name: _review(text, name) for name, text in [(name, read_script(name, _READS)) for name in args.files]}
    unread = [name for name, review in reviews.items() if not review.looked_at]
    fixed = {name: _fix(name, review) for name, review in reviews.items() if name not in unread} if args.fix else {}
    if args.json:
        _print_json(reviews, fixed)
    else:
        for name, review in reviews.items():
            if name not in unread:
                _print(name, review)
            foreign = foreign_directives(review.text)
            if foreign:
                print(
                    f"{printable(name)}:{foreign[0][0]}: not read: {len(foreign)} lines with options of another scheduler"
                )
            for line in fixed.get(name, ()):
                print(line)
    if unread:
        raise Problem("\n  ".join(_unread(name, reviews[name].text) for name in unread))
    left = {name: _review(read_script(name), name) if fixed.get(name) else review for name, review in reviews.items()}
    findings = [finding for review in left.values() for finding in review.findings]
    return 1 if worst(findings) in (WARNING, ERROR) else 0


def _review(text: str, name: str) -> Any:
    data = name.endswith((".yaml", ".yml", ".json"))
    beside = reader(os.path.dirname(name) if name != "-" else "", "")
    review = Review(text, False, (), (), "") if data else lint(text, name, beside)
    return review if review.looked_at else review_job_file(text, name) or review


def _unread(name: str, text: str) -> str:
    shown = _shown(name)
    if not text.strip():
        return f"{shown}: is empty"
    if name.endswith(SCRIPTS) and all(line.startswith("#") for line in text.splitlines() if line.strip()):
        return f"{shown}: nothing to check: only comments"
    if is_site_profile(top_keys(text)):
        return f"{shown}: this is a site profile; use drumbeat site check {'FILE' if name == '-' else name}"
    return (
        f"{shown}: nothing to check: lint reads shell or Python (name it .sh or .py if it is one), "
        "a .md or .rst page with either in it, or a job file; for a log: drumbeat diagnose"
    )


def _shown(name: str) -> str:
    return "standard input" if name == "-" else printable(name)


def _fix(name: str, review: Any) -> Sequence[str]:
    """Write the fixes and return the diff; empty when there was nothing to fix."""
    with open(name, "rb") as file:
        original = file.read()
    text = apply_edits(review)
    if review.document and b"\r\n" in original:
        text = text.replace("\n", "\r\n")  # a page's own line ends are its own matter
    new = text.encode("utf-8")
    if new == original:
        return ()
    backup = name + ".orig"
    try:
        # Never over an older backup: that one may be the only good copy.
        with open(backup, "xb") as file:
            file.write(original)
        mode = os.stat(name).st_mode & 0o7777
        os.chmod(backup, mode)
        temporary = name + ".fixing"
        with open(temporary, "xb") as file:
            file.write(new)
        os.chmod(temporary, mode)
        os.replace(temporary, name)
    except FileExistsError as error:
        raise Problem(
            f"{printable(error.filename)} is already there", "move it away first; nothing was changed"
        ) from None
    except OSError as error:
        raise Problem(f"cannot write {printable(name)}: {error.strerror}", "lint without --fix only reads") from None
    before = original.decode("utf-8").replace("\r\n", "\n")
    lines = [redact(line) for line in difference(before, text.replace("\r\n", "\n"), printable(name))]
    return (*(lines or ["only line ends changed"]), f"fixed {printable(name)}; the old text is {printable(backup)}")


def _print(name: str, review: Any) -> None:
    findings, source = review.findings, _sources()
    shown = _shown(name)
    for finding in findings:
        place = finding.evidence[0]
        documented = source.get(finding.code)
        print(f"{shown}:{f'{place.line}:' if place.line else ''} {finding.severity}: {finding.title}  [{finding.code}]")
        if place.text:
            print(f"    {place.text}{'...' * (len(place.text) == MAX_SHOWN)}")
        if finding.cause:
            print(f"    why  {finding.cause}{f' ({documented})' if documented else ''}")
        if finding.fix:
            print(f"    fix  {finding.fix}")
    if not findings:
        print(f"{shown}: nothing found (looked at: {review.looked_at})")
        return
    counted = []
    for severity, word in (("error", "error"), ("warning", "warning"), ("info", "note")):
        count = sum(finding.severity == severity for finding in findings)
        if count:
            counted.append(f"{count} {word}{'' if count == 1 else 's'}")
    print(f"{shown}: {', '.join(counted)}")


def _sources() -> Dict[str, str]:
    return {rule.id: rule.source for rule in rules()}


def _print_json(reviews: Dict[str, Any], fixed: Dict[str, Sequence[str]]) -> None:
    source = _sources()
    files: List[Dict[str, Any]] = []
    for name, review in reviews.items():
        findings = [{**to_plain(finding), "source": source.get(finding.code, "")} for finding in review.findings]
        looked_at = review.looked_at or None
        files.append({"file": name, "looked_at": looked_at, "findings": findings, "fixed": list(fixed.get(name, ()))})
    print_json({"files": files})


# A job file, or another YAML file, under `drumbeat lint`: read by the reader that plan, run and submit use.


LOOKED_AT = "the keys and values of a job file; drumbeat plan shows what becomes of them"
_KEY = regex(r"^([A-Za-z][\w-]*)[ \t]*:(?=\s|$)", re.MULTILINE)


def review_job_file(text: str, name: str) -> Any:
    """Check a job file and return a Review like that of a script; None if the text is not a job file."""
    shell: List[Any] = []
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
        size = {
            key: entry.value
            for key, entry in table.entries.items()
            if isinstance(entry, Text) and entry.value.isdigit()
        }
        for key in ("command", "on-start", "setup"):
            if key in table.entries:
                shell += _in_shell(table.entries[key], table.lines[key], text.splitlines(), name, size)
    found = [*(_finding(problem, file, name, text.splitlines()) for problem in problems), *shell]
    if not problems:
        found += [replace(each, evidence=(_gpus_line(text, name),)) for each in _without_gpu(text, file)]
        found += _of_variables(check(Job, table, file, "the job"), table, text.splitlines(), name)
    return Review(text, False, tuple(found), (), LOOKED_AT)


def _of_variables(job: Any, table: Any, lines: Sequence[str], name: str) -> List[Any]:
    """Lint the job's variables as a script that exports them, and compare them with the network that the job expects."""
    own = {each: value for each, value in job.env.items() if value is not None and value.isprintable()}
    at = [table.entries["env"].lines[each] for each in own]
    script = [f"export NNODES={int(job.nodes or 1)}", *(f"export {each}={shlex.quote(own[each])}" for each in own)]
    found, settled = [], {rule.id for rule in rules() if rule.converted}
    for finding in lint("\n".join(script), "job.sh").findings if own else ():
        line = at[(finding.evidence[0].line or 2) - 2]
        if finding.code not in settled:
            found.append(replace(finding, evidence=(Evidence(lines[line - 1].strip(), name, line),)))
    if job.expect:
        for finding in against_expected(own, job.expect.transport, job.expect.gdr, int(job.nodes or 1)):
            line = at[list(own).index(finding.evidence[0].text)]
            found.append(replace(finding, evidence=(Evidence(lines[line - 1].strip(), name, line),)))
    return found


def _without_gpu(text: str, file: str) -> List[Any]:
    """Judge whether each rank has a GPU, where the job file says how many there are of both."""
    try:
        job = job_from_text(text, file)
        launch = find_launcher(job.command)
    except Problem:
        return []
    ranks = job.ranks_per_node or (launch and launch.ranks_per_node) or 0
    return ranks_without_gpu(ranks, job.gpus or 0, job.ranks_per_gpu, job.gpus_per_rank)


def _gpus_line(text: str, name: str) -> Any:
    numbered = enumerate(text.splitlines(), 1)
    return next((Evidence(line, name, at) for at, line in numbered if re.match(r"gpus\s*:", line)), Evidence("", name))


def _in_shell(entry: Any, first: int, lines: Sequence[str], name: str, size: Dict[str, str]) -> Iterator[Any]:
    """Yield findings on the shell text of a key in a job of that size, each with its line of the job file."""
    items = [each.value for each in entry.values if isinstance(each, Text)] if isinstance(entry, Items) else []
    words = items[2] if items[:2] == ["bash", "-c"] and items[2:] else shlex.join(items)
    words = entry.value if isinstance(entry, Text) else words
    settled = {rule.id for rule in rules() if rule.converted}
    for finding in lint(in_batch(words.replace("$$", "$"), size), "job.sh").findings:
        shown = finding.evidence[0].text
        line = next((n for n, text in enumerate(lines, 1) if n >= first and shown in text.replace("$$", "$")), first)
        if finding.code not in settled:
            yield replace(finding, evidence=(Evidence(shown, name, line),))


def top_keys(text: str) -> List[str]:
    """Return the keys at the left edge, also of YAML that does not parse."""
    return _KEY.findall(text)


def is_job_file(keys: List[str]) -> bool:
    """Return true if at least half of the keys are a job's, or nearly so; `name` alone proves nothing."""
    return _share(keys, list(keys_of(Job))) >= 0.5 and not is_site_profile(keys)


def is_site_profile(keys: List[str]) -> bool:
    return set(required_keys(Site)) <= set(keys) and _share(keys, list(keys_of(Site))) >= 0.5


def _share(keys: List[str], known: List[str]) -> float:
    asked = [key for key in keys if key != "name"][:200]
    return sum(bool(difflib.get_close_matches(key[:60], known, 1, 0.8)) for key in asked) / len(asked) if asked else 0


def _finding(problem: Any, file: str, name: str, lines: Sequence[str]) -> Any:
    line, words = _place(problem.what, file)
    shown = lines[line - 1].strip()[:MAX_SHOWN] if line and line <= len(lines) else ""
    return Finding("job-file", ERROR, words, "", problem.fix, (Evidence(shown, name, line),))


def _place(what: str, file: str) -> Tuple[Optional[int], str]:
    """Split the place (`job.yaml:3: `) off a message of the reader."""
    found = re.match(re.escape(file) + r"(?::(\d+))?: ", what)
    return (int(found[1]) if found[1] else None, what[found.end() :]) if found else (None, what)

"""`drumbeat site check`: everything in a profile that lint, plan and render would refuse, all at once, with the profile's own
values.

An entry with a mistake is left out, and the rest is checked again: no mistake hides the next.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from drumbeat import backends
from drumbeat.backends.contract import Unreachable
from drumbeat.base.problem import Problem
from drumbeat.bundle.build import cached_bundle
from drumbeat.bundle.pinned import pinned
from drumbeat.desk.start.place import look_around
from drumbeat.findings.model import ERROR, WARNING, Finding
from drumbeat.jobfile.check import mistakes, raise_all
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.site import BUILT_IN, Site, checked_site
from drumbeat.jobfile.yamlfile import Table, Text, load_file, shown_path

_VARIABLE = re.compile(r"(?<!\$)\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
_MOST = 100  # rounds
_EVERYWHERE = ("account", "partition", "time")
_ANY: Dict[str, Any] = {
    "account": "any",
    "partition": "any",
    "qos": "any",
    "time": 3600,
    "constraint": "any",
    "reservation": "any",
}


class Checked(NamedTuple):
    site: Optional[Site]  # the profile without its mistakes
    mistakes: Tuple[Problem, ...]
    assumed: Tuple[str, ...]  # variables that are not set here


def check_site(path: str, environ: Mapping[str, str]) -> Checked:
    environ, table = look_around(environ, gpus=None).environ, load_file(path, "a site profile")
    file, name = shown_path(path), re.sub(r"\.ya?ml$", "", path.rpartition("/")[2])
    assumed = sorted(name for name in _variables(table) if name not in environ)
    full = {**{variable: f"/{variable}" for variable in assumed}, **environ}
    found: Dict[str, Problem] = {}
    site = None
    for _ in range(_MOST):
        problems = mistakes(Site, table, file, "the site", name=name)
        if not problems:
            try:
                site = checked_site(table, name, file)
                problems = _of_values(site, full, True)
            except Problem as refused:
                problems = [refused]
        fresh = [problem for problem in problems if str(problem) not in found and file in str(problem)]
        found.update((str(problem), problem) for problem in fresh)
        smaller = table
        for problem in fresh:
            smaller = _without(smaller, file, problem.what)
        if smaller is table:
            break
        table, site = smaller, None
    return Checked(site, tuple(found.values()), tuple(assumed))


def refuse_mistakes(site: Site, environ: Mapping[str, str]) -> None:
    """Refuse a user's own profile if `check_site` finds mistakes in its values, before a job is planned or submitted. No
    scheduler is asked."""
    file = _file(site)
    if site.origins and not file.startswith(BUILT_IN):
        raise_all(file, [problem for problem in _of_values(site, environ, False) if file in str(problem)])


def _variables(node: Any) -> List[str]:
    """Return the names of all `$NAME` in a profile."""
    if isinstance(node, Text):
        return [match[1] or match[2] for match in _VARIABLE.finditer(node.value)]
    parts = node.entries.values() if isinstance(node, Table) else node.values
    return list(dict.fromkeys(name for part in parts for name in _variables(part)))


def _without(table: Table, file: str, words: str) -> Table:
    """Return the table without the entry that a message is about; add what the profile lacks."""
    found = re.match(rf"{re.escape(file)}:(\d+): (?:unknown key '[^']*' in )?([\w.-]*)", words)
    lacks = re.match(rf"{re.escape(file)}:\d+: the site has no '([\w-]+)'", words)
    if lacks:
        name = lacks[1]
        return Table({**table.entries, name: Text("any")}, {**table.lines, name: table.line}, table.line)
    if not found:
        return table
    top, _, rest = found[2].partition(".")
    if top not in table.entries:  # the message names only its line
        lines = [(line, name) for name, line in table.lines.items() if line <= int(found[1])]
        top, rest = (max(lines)[1], "") if lines else ("", "")
    inner, second = table.entries.get(top), rest.partition(".")[0]
    entries = {name: node for name, node in table.entries.items() if name != top}
    if (
        isinstance(inner, Table)
        and second in inner.entries
        and len(inner.entries) > 1
        and top in ("env", "submit", "paths", "floors")
    ):
        rest_of_it = {name: node for name, node in inner.entries.items() if name != second}
        entries[top] = Table(rest_of_it, inner.lines, inner.line)
    return Table(entries, table.lines, table.line)


def _of_values(site: Site, environ: Mapping[str, str], render: bool) -> List[Problem]:
    """Check the values as a job would use them: its order, the backend's request, and the rules for its variables."""
    backend = backends.get(site.backend, site.where("backend"))
    found: List[Problem] = []
    for finding in _of_variables(site):
        line = next((each.line for each in finding.evidence if each.line), 1)
        found.append(Problem(f"{site.where(f'env.{list(site.env)[line - 1]}')}: {finding.title}", finding.fix))
    for image in (None, "registry.example.org/any:1"):  # a pod needs one, of the job or the site
        try:
            about = {key: value for key, value in _ANY.items() if key in (*_EVERYWHERE, *backend.specific)}
            about.update({"container": image, "container_runtime": "pod"} if image else {})
            job = Job(command=("true",), nodes=1, origins=dict(site.origins), **about)
            order = resolve(job, site, look_around(environ, gpus=None))
            backend.check(order, site.where)
            if render:
                backend.render(pinned(order, cached_bundle(environ)))
            break
        except Unreachable:
            break  # the rest needs the scheduler's own answer: left to submit
        except Problem as problem:
            found.append(problem)
            if _file(site) in str(problem):
                break
    return found


def _file(site: Site) -> str:
    return site.where("summary").partition(":")[0]


def _of_variables(site: Site) -> List[Finding]:
    if not site.env:
        return []
    from drumbeat.lint.engine import lint  # imported here: few profiles need it, and every plan calls this

    names = list(site.env)
    script = "".join(f"export {name}={shlex.quote(site.env[name].value)}\n" for name in names)
    return [each for each in lint(script, "site.sh").findings if each.severity in (ERROR, WARNING)]

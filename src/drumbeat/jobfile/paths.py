"""A site's paths, looked up on a machine. Versions age: a profile holds patterns, and the newest match is taken."""

from __future__ import annotations

import fnmatch
import re
from typing import Callable, Dict, List, Sequence, Tuple

from drumbeat.base.order import HostPath
from drumbeat.findings.model import ERROR, Evidence, Finding

Lister = Callable[[str], List[str]]  # Host.list: the names in a folder


def find_paths(paths: Sequence[HostPath], names_in: Lister, host: str) -> Tuple[Dict[str, str], List[Finding]]:
    """Where each of them is here; one that is not there is an error that says what was looked for and why."""
    found: Dict[str, str] = {}
    missing: List[Finding] = []
    for path in paths:
        matching = expand_pattern(names_in, path.pattern)
        if matching:
            found[path.name] = matching[0]
            continue
        missing.append(
            Finding(
                "site-path-missing",
                ERROR,
                f"{path.name} is not where the site's profile says",
                path.why,
                "look where it is now and correct the profile: drumbeat site show NAME --source > my.yaml",
                (Evidence(f"looked for {path.pattern}"),),
                host=host,
            )
        )
    return found, missing


def expand_pattern(names_in: Lister, pattern: str) -> List[str]:
    """What matches, the newest version first."""
    places = ["/"]
    for part in pattern.strip("/").split("/"):
        places = [
            place.rstrip("/") + "/" + name
            for place in places
            for name in names_in(place)
            if fnmatch.fnmatchcase(name, part)
        ]
    return sorted(places, key=_by_version, reverse=True)


def _by_version(path: str) -> List[Tuple[int, int, str]]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d{1,9})", path)]

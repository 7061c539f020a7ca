"""A site's paths, looked up on a machine. Versions age: a profile holds patterns, and the newest match is taken."""

from __future__ import annotations

import fnmatch
import re
from typing import Dict, List, Tuple

from drumbeat.facts.host import Host
from drumbeat.problem import Problem
from drumbeat.spec.site import Site


def find_paths(site: Site, host: Host) -> Dict[str, str]:
    """Every path of the site; one that is not there is a Problem that says what was looked for and why."""
    found, missing = {}, []
    for name, path in site.paths.items():
        matching = expand_pattern(host, path.pattern)
        if matching:
            found[name] = matching[0]
        else:
            missing.append(f"{name}: nothing matches {path.pattern} ({path.why})")
    if missing:
        raise Problem(
            f"site {site.name} on {host.hostname()}: " + "; ".join(missing),
            "look where it is now, then mend the site's profile, or take your own: drumbeat site show "
            f"{site.name} --source > my.yaml; drumbeat site check my.yaml",
        )
    return found


def expand_pattern(host: Host, pattern: str) -> List[str]:
    """What matches, the newest version first."""
    places = ["/"]
    for part in pattern.strip("/").split("/"):
        names = [
            (place.rstrip("/") + "/" + name)
            for place in places
            for name in host.list(place)
            if fnmatch.fnmatchcase(name, part)
        ]
        places = names
    return sorted(places, key=_by_version, reverse=True)


def _by_version(path: str) -> List[Tuple[int, int, str]]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d{1,9})", path)]

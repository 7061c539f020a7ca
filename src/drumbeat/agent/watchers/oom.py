"""How often the kernel has killed for lack of memory: told from before and after, a SIGKILL has a cause."""

from __future__ import annotations

import os.path
import re
from typing import Iterator, Optional

from drumbeat.base.regex import regex
from drumbeat.machine.host import Host

_COUNT = regex(r"^oom_kill (\d{1,18})$", re.MULTILINE)


def oom_kills(host: Host) -> Optional[int]:
    """Of our own memory cgroup and those below it; where that is not told, of the whole node; None where nobody counts."""
    for path in (*_own(host.read("/proc/self/cgroup") or ""), "/proc/vmstat"):
        found = _COUNT.search(host.read(path) or "")
        if found:
            return int(found.group(1))
    return None


def _own(cgroups: str) -> Iterator[str]:
    """Version 1 has a hierarchy for memory; version 2 counts in every folder for all below it, a container's root too."""
    for line in cgroups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if ".." in place:
            continue
        if "memory" in controllers.split(","):
            yield f"/sys/fs/cgroup/memory{place.rstrip('/')}/memory.oom_control"
        elif number == "0" and not controllers:
            while True:
                yield f"/sys/fs/cgroup{place.rstrip('/')}/memory.events"
                if place in ("", "/"):
                    break
                place = os.path.dirname(place)

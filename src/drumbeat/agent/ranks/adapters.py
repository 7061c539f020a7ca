"""Adapters tell frameworks that do not read RANK and its kin who a rank is, and tell us what a rank does (`inrank/stacks.py`).

Their folder stands first on the ranks' PYTHONPATH. Python loads its `sitecustomize` at every start; that one waits until a
framework is imported, and only then runs the framework's adapter. `DRUMBEAT_ADAPTERS=off` leaves the ranks' Python alone.
"""

from __future__ import annotations

import os
import pkgutil
from typing import List, Mapping

from drumbeat.base.order import EnvVar
from drumbeat.plan.argv import ADAPTERS, TRACKERS, WHO

OFF = "off"
_FILES = {
    "sitecustomize.py": "drumbeat.inrank.adapters",
    "jax_cluster.py": "drumbeat.inrank.adapters",
    "worker_list.py": "drumbeat.inrank.adapters",
    "trackers.py": "drumbeat.inrank.adapters",
    "stacks.py": "drumbeat.inrank",
}


def install(local: str, environ: Mapping[str, str], trackers: str) -> List[EnvVar]:
    """Write the adapters below `local`, a private folder on the node's own disk; return the variables that lead to them.

    `environ` is what the ranks would get without them; `trackers`: where names of trackers' runs are kept, if the run may be
    started again.
    """
    if environ.get(ADAPTERS) == OFF:
        return []
    folder = os.path.join(local, "adapters")
    os.makedirs(folder, exist_ok=True)
    for name, package in _FILES.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(pkgutil.get_data(package, name) or b"")
    path = os.pathsep.join(filter(None, (folder, environ.get("PYTHONPATH"))))
    values = {ADAPTERS: folder, "PYTHONPATH": path, **({TRACKERS: trackers} if trackers else {})}
    return [EnvVar(name, value, WHO[name], "default") for name, value in values.items()]

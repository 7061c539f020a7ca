"""Caches of compiled kernels on a node's own disk. What lies in them is loaded and run, so nobody else may write there.

Their paths are the same for every run, so that a cache is found again, and so others know them: each folder is made with
mode 0700, and one that somebody else made or can write to is not used.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Dict, List, Sequence, Tuple

from drumbeat.base.order import EnvVar
from drumbeat.base.private_folder import make_private
from drumbeat.findings.model import WARNING, Evidence, Finding

_CACHES = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def private_caches(variables: Sequence[EnvVar], own: str) -> Tuple[List[EnvVar], List[Finding]]:
    """The variables, each planned cache now a private folder: the planned one, or a new one below `own` where that is
    not safe. What the user or the site names stays as it is."""
    chosen: List[EnvVar] = []
    problems: Dict[str, str] = {}  # planned path -> why it is not used
    for variable in variables:
        if variable.name in _CACHES and variable.source == "default":
            path = variable.value
            if path not in problems:
                problems[path] = make_private(path)
            if problems[path]:
                path = os.path.join(own, os.path.basename(path))
                os.makedirs(path, mode=0o700, exist_ok=True)
                why = f"empty and for this run only: {problems[variable.value]}"
                variable = replace(variable, value=path, why=why, source="detected")
        chosen.append(variable)
    findings = [
        Finding(
            "cache-not-private",
            WARNING,
            "a kernel cache is not used: others could put code into it",
            why,
            f"remove {path} if it is yours, or name another folder in the job's env; kernels are compiled anew until then",
            (Evidence(why),),
        )
        for path, why in problems.items()
        if why
    ]
    return chosen, findings

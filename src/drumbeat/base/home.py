"""Where a user's own files are: $HOME, else what the user database says."""

from __future__ import annotations

import os
from typing import Mapping


def home_folder(environ: Mapping[str, str]) -> str:
    """Empty where nobody knows."""
    import pwd

    if environ.get("HOME"):
        return environ["HOME"]
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


def users_folder(environ: Mapping[str, str], variable: str, *usual: str) -> str:
    """The folder that `variable` (XDG_STATE_HOME, say) names, else the usual one in the home folder."""
    return environ.get(variable) or os.path.join(home_folder(environ), *usual)

"""The token by which agents of one run know each other."""

from __future__ import annotations

import os
import secrets
import stat
from typing import Mapping

from drumbeat.base.home import users_folder
from drumbeat.base.problem import Problem

_SHORTEST = 16  # characters


def fresh_token() -> str:
    """For agents that this desk starts itself: it reaches them in their environment and is never written."""
    return secrets.token_hex(32)


def users_token(environ: Mapping[str, str]) -> str:
    """For nodes that are started by hand or by a scheduler: $DRUMBEAT_TOKEN, or the user's own 0600 file."""
    given = environ.get("DRUMBEAT_TOKEN", "")
    if given:
        if len(given) < _SHORTEST:
            raise Problem(
                f"DRUMBEAT_TOKEN has {len(given)} characters: who sees two agents meet could find it by trying",
                f"use at least {_SHORTEST} random ones, the same on all nodes: openssl rand -hex 32",
            )
        return given
    config = users_folder(environ, "XDG_CONFIG_HOME", ".config")
    path = os.path.join(config, "drumbeat", "token")
    try:
        if not os.path.exists(path):
            _make(path)
    except OSError as error:
        raise Problem(
            f"cannot keep a token in {path}: {error.strerror}", "export DRUMBEAT_TOKEN, the same on all nodes"
        ) from None
    with open(path, encoding="ascii", errors="replace") as file:
        found = os.fstat(file.fileno())
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise Problem(f"{path} can be read by others", f"chmod 600 {path}")
        if found.st_uid not in (os.geteuid(), 0):
            raise Problem(f"{path} belongs to another user (uid {found.st_uid})", "delete it; a new one is made")
        token = file.read().strip()
    if len(token) < _SHORTEST:
        raise Problem(
            f"{path} holds no token", f"delete it; a new one is made, and must be the same on all nodes: {path}"
        )
    return token


def _make(path: str) -> None:
    """Two nodes with one home may do this at the same time: the first link wins, and nobody sees half a file."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    own = f"{path}.{secrets.token_hex(4)}"
    with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(fresh_token() + "\n")
    try:
        os.link(own, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(own)

"""Creates a run folder, completely or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import os
import secrets
import shutil
import socket
import stat
import subprocess
from contextlib import suppress
from itertools import zip_longest
from typing import Any, Dict, List, Mapping, Optional, Tuple

from drumbeat import __version__
from drumbeat.backends.local import own_handle
from drumbeat.base.folders import config_folder, index_folder, unsafe
from drumbeat.base.order import Order, dump_order
from drumbeat.base.problem import Problem
from drumbeat.base.proc import start_time
from drumbeat.base.redact import redact
from drumbeat.bundle.build import pieces
from drumbeat.containers.image import image_identity
from drumbeat.desk.start.code_sync import git, put_into
from drumbeat.runfolder.files import replace, replace_json
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.summary import Desk, RunRecord, write_run_record

# Code and image of a run: the commit, uncommitted changes, and the image's own identity.


_LONGEST_DIFF = 256 << 10  # bytes that are kept
_MOST_CHANGED = 200  # names
_DEADLINE = 5.0  # seconds per question to git


def code_state(order: Order) -> Tuple[Dict[str, Any], str]:
    """Return code.json and the text of code.diff. `commit` is 'unknown' outside a git checkout; the digest is that of the
    whole diff, the text may be cut and has no secrets in it."""
    workdir = order.source_workdir
    found: Dict[str, Any] = {"commit": "unknown", "dirty": None, "branch": None, "changed": []}
    if order.code == "sync":
        found["sent"] = {"archive": "code.tar.gz", "sha256": order.code_digest, "from": order.code_root}
    if order.container is not None:
        found["image"] = order.container.image
        found["image_digest"] = image_identity(os.path.join(workdir, order.container.image)) or None
    commit = _git(workdir, "rev-parse", "HEAD")
    if commit is None:
        return found, ""
    status = _git(workdir, "status", "--porcelain", "--untracked-files=no") or b""
    changed = status.decode("utf-8", "replace").splitlines()
    branch = _git(workdir, "rev-parse", "--abbrev-ref", "HEAD") or b""
    found.update(commit=commit.decode().strip(), dirty=bool(changed), branch=branch.decode("utf-8", "replace").strip())
    found["changed"] = changed[:_MOST_CHANGED]
    diff = _git(workdir, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color") if changed else b""
    if not diff:
        return found, ""
    found["diff_digest"] = hashlib.sha256(diff).hexdigest()
    text = redact(diff[:_LONGEST_DIFF].decode("utf-8", "replace"))
    return found, text + (f"\n(cut: {len(diff):,} bytes in all)\n" if len(diff) > _LONGEST_DIFF else "")


def _git(workdir: str, *words: str) -> Optional[bytes]:
    try:
        done = git(workdir, _DEADLINE, *words)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


_JOB_LIMIT = 256 << 10


def create_run(
    order: Order, job_file: Optional[str], bundle: str, environ: Mapping[str, str], handle: str = ""
) -> RunFolder:
    folder = RunFolder(order.folder)
    try:
        os.makedirs(os.path.dirname(folder.path), exist_ok=True)
        os.mkdir(folder.path, 0o775)  # a group may share runs if the umask allows it, but never everybody
    except OSError as error:
        raise no_place(folder.path, error) from None
    try:
        replace(folder.order, dump_order(order))
        if job_file:
            with open(job_file, encoding="utf-8", errors="replace") as file:
                replace(folder.job, redact(file.read(_JOB_LIMIT)))  # comments may hold what the job may not
        code, diff = code_state(order)
        replace_json(folder.code, code)
        if diff:
            replace(folder.diff, diff, 0o600)
        put_into(order)
        _put_bundle(bundle, folder, environ)
        os.mkdir(folder.at("nodes"))
        replace(folder.stop, "")  # there from the start: opening a file that exists sees others' writes at once on NFS
        desk = Desk(socket.gethostname(), os.getpid(), start_time(os.getpid()))
        record = RunRecord(order.run_id, name=order.name, created=order.created, version=__version__, desk=desk)
        write_run_record(folder, dataclasses.replace(record, handle=handle or own_handle()))  # last: then it is whole
    except (Problem, OSError) as error:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise no_place(folder.path, error) if isinstance(error, OSError) else error from None
    enlist(order.folder, order.run_id, environ)
    return folder


_RECENT = 8  # runs whose bundle may be the same


def _put_bundle(bundle: str, folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Put the bundle into the run folder. If a recent run beside this one has the same, the two share one file (a hard link), so
    that many small runs cost little quota. Whatever starts a node checks the content in any case (bundle/pinned.py)."""
    if any(_linked(other, bundle, folder.bundle) for other in _recent_bundles(os.path.dirname(folder.path), environ)):
        return
    made = os.open(folder.bundle, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)  # read by several runs
    with open(bundle, "rb") as file, open(made, "wb") as target:
        shutil.copyfileobj(file, target)


def _recent_bundles(runs: str, environ: Mapping[str, str]) -> List[str]:
    """Return the bundles of this user's newest runs, as far as those are in the folder `runs`."""
    index = index_folder(environ)
    try:
        newest = heapq.nlargest(_RECENT, os.listdir(index), key=lambda name: name.split("-")[-3:])
        folders = [os.readlink(os.path.join(index, name)) for name in newest]
    except OSError:
        return []
    return [RunFolder(path).bundle for path in folders if os.path.dirname(path) == runs]


def _linked(other: str, bundle: str, path: str) -> bool:
    """Link `path` to another run's bundle if that has the same content and only this user can have written it."""
    try:
        with open(os.open(other, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file, open(bundle, "rb") as own:
            found = os.fstat(file.fileno())
            if unsafe(found) or any(one != two for one, two in zip_longest(pieces(file), pieces(own))):
                return False
        os.link(other, path, follow_symlinks=False)
    except OSError:  # gone, or storage without hard links
        return False
    if os.path.samestat(os.lstat(path), found):
        return True
    os.unlink(path)  # it was replaced while we looked
    return False


def no_place(path: str, error: OSError) -> Problem:
    return Problem(f"cannot write {path}: {error.strerror}", "choose another place with --runs")


def forget_run(order: Order, environ: Mapping[str, str]) -> None:
    """Remove all traces of a run that was never started."""
    shutil.rmtree(order.folder, ignore_errors=True)
    link = os.path.join(index_folder(environ), order.run_id)
    if os.path.islink(link):
        os.unlink(link)


def enlist(folder: str, run_id: str, environ: Mapping[str, str]) -> None:
    index = index_folder(environ)
    with suppress(OSError):  # a home directory that is read-only or full costs the listing, not the run
        os.makedirs(index, exist_ok=True)
        os.symlink(folder, os.path.join(index, run_id))


# The token with which agents of one run recognise each other.


_SHORTEST = 16  # characters


def fresh_token() -> str:
    """Make a token for agents that this desk starts itself: it reaches them in their environment and is never written."""
    return secrets.token_hex(32)


def users_token(environ: Mapping[str, str]) -> str:
    """Return the token for nodes that are started by hand or by a scheduler: $DRUMBEAT_TOKEN, or the user's 0600 file."""
    given = environ.get("DRUMBEAT_TOKEN", "")
    if given:
        if len(given) < _SHORTEST:
            raise Problem(
                f"DRUMBEAT_TOKEN has {len(given)} characters: somebody who records two agents connecting could guess it",
                f"use at least {_SHORTEST} random ones, the same on all nodes: openssl rand -hex 32",
            )
        return given
    path = config_folder(environ, "token")
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
    """Write the token file. Two nodes that share a home may do this at once: the first link wins, and nobody reads
    half a file."""
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

"""`code: sync`: the working tree travels with the run, and the job runs in that copy.

The files that git lists are sent as they are in the working tree: committed files with their uncommitted changes, and new files
that are not ignored. The same tree always makes the same archive, so its SHA-256 identifies the code that ran.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from typing import List, Sequence

from drumbeat.base.order import Order, read_order
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.base.signals import EXIT_PREFLIGHT
from drumbeat.runfolder.files import create_private
from drumbeat.runfolder.layout import RunFolder

MOST_BYTES = 200 << 20  # of all files together
_MOST_FILES = 50_000
_SHOWN = 3


def with_code(order: Order, kind: str) -> Order:
    """Return the order whose command runs in the run's own copy of the code."""
    if kind == "image" and order.container is None:
        raise Problem("code: image, but the job has no container", "name the image: container: IMAGE")
    if kind != "sync":
        return dataclasses.replace(order, code=kind)
    root = os.path.realpath(_git(order.workdir, "rev-parse", "--show-toplevel").strip())
    inside = os.path.relpath(os.path.realpath(order.workdir), root)
    copy = os.path.normpath(os.path.join(RunFolder(order.folder).code_copy, inside))
    data = pack(root, order.folder)
    digest = hashlib.sha256(data).hexdigest()
    return dataclasses.replace(
        order, code="sync", code_root=root, code_digest=digest, code_bytes=len(data), workdir=copy
    )


def pack(root: str, folder: str) -> bytes:
    """Pack the working tree, without the run's own `folder`."""
    names = [name for name in _listed(root) if not _of_a_run(root, name, folder)]
    if not names:
        raise Problem(f"{root}: git lists no file that could be sent", "commit or add the code, or use code: shared")
    if len(names) > _MOST_FILES:
        raise Problem(f"{root}: git lists {len(names):,} files; code: sync sends at most {_MOST_FILES:,}", _LESS)
    sizes = {name: os.lstat(os.path.join(root, name)).st_size for name in names}
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:_SHOWN]
        shown = ", ".join(f"{name} ({sizes[name] >> 20} MiB)" for name in largest)
        raise Problem(
            f"{root}: {total >> 20} MiB of code; code: sync sends at most {MOST_BYTES >> 20} MiB. Largest: {shown}",
            _LESS,
        )
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in names:
            _add(archive, os.path.join(root, name), name)
    return buffer.getvalue()


_LESS = "name what is not code in .gitignore, or use storage that the nodes share: code: shared"


def unpack(data: bytes, target: str) -> None:
    """Unpack regular files and links that stay inside; anything else in the archive is refused."""
    os.makedirs(target, mode=0o700, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for entry in archive:
            path = os.path.normpath(os.path.join(target, entry.name))
            if not _within(path, target) or not (entry.isreg() or entry.issym()):
                raise Problem(f"{entry.name!r} in the code's archive does not belong there")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if entry.issym():
                if not _within(os.path.normpath(os.path.join(os.path.dirname(path), entry.linkname)), target):
                    raise Problem(f"{entry.name}: the link to {entry.linkname} leads out of the code")
                os.symlink(entry.linkname, path)
                continue
            source = archive.extractfile(entry)
            assert source
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, entry.mode & 0o755), "wb") as file:
                file.write(source.read())


def receive(order_file: str, target: str, pieces: Sequence[str]) -> int:
    """Receive the archive on a node to which it came in pieces: `_code ORDER TARGET PIECE ...`."""
    try:
        order = read_order(order_file)
        data = b""
        for path in pieces:
            with open(path, "rb") as piece:
                data += piece.read()
        unpack_checked(data, order, target)
    except (OSError, RecordError, Problem) as error:
        print(f"drumbeat: the code that was sent with this run cannot be used: {error}", file=sys.stderr)
        return EXIT_PREFLIGHT
    return 0


def unpack_checked(data: bytes, order: Order, target: str) -> None:
    if hashlib.sha256(data).hexdigest() != order.code_digest:
        raise Problem("the code was changed on its way")
    unpack(data, target)


def put_into(order: Order) -> None:
    """Write the archive, and the unpacked copy in which the job runs, into the new run folder."""
    if order.code != "sync":
        return
    data = pack(order.code_root, order.folder)
    if hashlib.sha256(data).hexdigest() != order.code_digest:
        raise Problem(
            f"the code in {order.code_root} is not the one that this order was made for (sha256 {order.code_digest[:12]}…)",
            "make the order again",
        )
    folder = RunFolder(order.folder)
    create_private(folder.code_archive, data)
    unpack(data, folder.code_copy)


def _add(archive: tarfile.TarFile, path: str, name: str) -> None:
    """Add a file without owner and times: only its content, and whether it is executable."""
    found = os.lstat(path)
    entry = tarfile.TarInfo(name)
    if os.path.islink(path):
        link = os.readlink(path)
        if os.path.isabs(link):
            raise Problem(
                f"{path} is a link to {link}, which the nodes may not have",
                "make it relative, or ignore it in .gitignore",
            )
        entry.type, entry.linkname = tarfile.SYMTYPE, link
        archive.addfile(entry)
        return
    with open(path, "rb") as file:
        data = file.read()
    mode = 0o755 if found.st_mode & 0o100 else 0o644
    entry.size, entry.mode = len(data), mode if found.st_mode & 0o044 else mode & 0o700  # private files stay private
    archive.addfile(entry, io.BytesIO(data))


def _of_a_run(root: str, name: str, folder: str) -> bool:
    """Return true if a file belongs to a run folder: this run's own, or one beside it."""
    path, runs = os.path.join(root, name), os.path.dirname(folder)
    if _within(path, folder) or (not _within(root, runs) and _within(path, runs)):
        return True
    beside = os.path.relpath(path, runs).split(os.sep)[0] if _within(path, runs) else ""
    return bool(beside) and os.path.isfile(os.path.join(runs, beside, "order.json"))


def _listed(root: str) -> List[str]:
    names = set(_git(root, "ls-files", "-z", "--cached", "--recurse-submodules").split("\0"))
    names |= set(_git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0"))
    paths = {name: os.path.join(root, name) for name in names if name}
    return sorted(name for name, path in paths.items() if os.path.islink(path) or os.path.isfile(path))


def git(where: str, seconds: float, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Run a git command on a checkout without running the checkout's hooks."""
    argv = ["git", "-C", where, "-c", "core.fsmonitor=false", *words]
    return subprocess.run(argv, capture_output=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL)


def _git(where: str, *words: str) -> str:
    try:
        done = git(where, 60.0, *words)
    except FileNotFoundError:
        raise Problem(
            "code: sync sends what git lists, and there is no git here", "install git, or use code: shared"
        ) from None
    except subprocess.TimeoutExpired:
        raise Problem(f"git has not answered for 60 s in {where}", "use code: shared") from None
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Problem(
            f"code: sync sends what git lists, and {where} is not a git checkout: {said[-1] if said else 'git does not say why'}",
            "git init && git add -A there, or use code: shared",
        )
    return os.fsdecode(done.stdout)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")

"""Sent as text to a host's Python over ssh: makes sure that drumbeat.pyz is there, then becomes `drumbeat.pyz _host`.

Standard input holds, after this text and a NUL: the SHA-256 of drumbeat.pyz and a newline; where the reply says that the
host has no such file, its size, a newline and its bytes; then what `_host` reads. Only single bytes are read around these
parts, because whatever this process buffered would be lost at the exec. Nothing of drumbeat can be imported here.
"""

import hashlib
import json
import os
import stat
import sys
import tempfile

MARK = "drumbeat-host "


def reply(**words: object) -> None:
    """Write a reply on a line of its own: a login script may have printed something without an end of line."""
    os.write(1, ("\n" + MARK + json.dumps(words) + "\n").encode())


def read_line() -> str:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(1)
        line += byte
    return line.decode().strip()


def read_bytes(size: int) -> bytes:
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 16))
        if not part:
            sys.exit(1)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def refuse(why: str) -> None:
    reply(error=why)
    sys.exit(1)


def private_folder() -> str:
    """Return the user's cache folder, with mode 0700. Its files are executed, so a folder that others can write to is
    refused."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(os.path.abspath(cache), "drumbeat")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.stat(folder)
    except OSError as error:
        refuse(f"cannot make {folder}: {error.strerror}")
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        refuse(f"{folder} belongs to another user, or others can write to it")
    return folder


def intact(path: str, digest: str) -> bool:
    """Return true if the file has this digest and only this user can write to it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022 or not stat.S_ISREG(found.st_mode):
            return False
        return hashlib.sha256(file.read()).hexdigest() == digest


def keep(path: str, data: bytes) -> None:
    partial = ""
    try:
        descriptor, partial = tempfile.mkstemp(dir=os.path.dirname(path), prefix="partial-")
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError as error:
        if partial:
            os.unlink(partial)
        refuse(f"cannot keep {path}: {error.strerror}")


def main() -> None:
    digest = read_line()
    path = os.path.join(private_folder(), f"host-{digest[:16]}.pyz")
    have = intact(path, digest)
    reply(
        have=have,
        python=".".join(map(str, sys.version_info[:3])),
        host=os.uname().nodename,
        connection=os.environ.get("SSH_CONNECTION", ""),
    )
    if not have:
        data = read_bytes(int(read_line()))
        if hashlib.sha256(data).hexdigest() != digest:
            refuse("drumbeat.pyz was changed on its way")
        keep(path, data)
        reply(kept=path)
    os.execv(sys.executable, [sys.executable, "-I", "-S", path, "_host"])


if __name__ == "__main__":
    main()

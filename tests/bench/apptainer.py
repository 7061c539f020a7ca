"""A real apptainer: the machine's own, or Debian's newest package unpacked beside the system and made to run on it.

What it and its images need of Debian (busybox-static, patchelf ...) comes with tests/system-packages.sh.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List, Optional, Tuple


def get(folder: Path) -> Tuple[Optional[str], str]:
    """The folder of an `apptainer` program that works, or None and the reason. `folder` is kept between runs."""
    found = shutil.which("apptainer")
    if found:
        return os.path.dirname(found), ""
    program = folder / "root" / "usr" / "bin" / "apptainer"
    if not program.exists():
        try:
            _unpack(folder)
        except (OSError, subprocess.SubprocessError, LookupError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            return None, f"no apptainer here, and Debian's could not be had: {error}"
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return (
        (str(program.parent), "")
        if done.returncode == 0
        else (None, f"apptainer does not run here: {done.stderr[:200]}")
    )


def _unpack(folder: Path) -> None:
    for place in ("lists/partial", "cache/archives/partial", "packages", "root"):
        (folder / place).mkdir(parents=True, exist_ok=True)
    quiet = {"check": True, "capture_output": True, "timeout": 120}
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (folder / "sources.list").write_text(f"deb [signed-by={keyring}] {_archive()} sid main\n")
    options: List[str] = []
    for name, value in (
        ("Dir::Etc::sourcelist", "sources.list"),
        ("Dir::State::Lists", "lists"),
        ("Dir::Cache", "cache"),
    ):
        options += ["-o", f"{name}={folder / value}"]
    options += ["-o", "Dir::Etc::sourceparts=/dev/null"]
    subprocess.run(["apt-get", *options, "update", "-qq"], **quiet)
    wanted = ["apptainer", "libc6/sid", "libseccomp2/sid", "libsqlite3-0/sid"]
    subprocess.run(["apt-get", *options, "-qq", "download", *wanted], cwd=folder / "packages", **quiet)
    root = folder / "root"
    for package in glob.glob(str(folder / "packages" / "*.deb")):
        subprocess.run(["dpkg", "-x", package, str(root)], **quiet)
    # Its own C library is newer than this system's: both programs are told to use the one that came along.
    (loader,) = glob.glob(str(root / "usr/lib/*/ld-linux*.so.*"))[:1] or [""]
    libraries = os.path.dirname(loader)
    for program in (root / "usr/bin/apptainer", Path(libraries) / "apptainer/bin/starter"):
        change = ["--force-rpath", "--set-interpreter", loader, "--set-rpath", libraries]
        subprocess.run(["patchelf", *change, str(program)], **quiet)
    # Where it looks for its settings and mounts once its prefix has moved.
    for link, target in (("usr/etc", "../etc"), ("usr/lib/etc", "../../etc"), ("usr/lib/var", "../var")):
        (root / link).unlink(missing_ok=True)
        (root / link).symlink_to(target)
    (root / "usr/var/lib/apptainer/mnt/session").mkdir(parents=True, exist_ok=True)
    settings = root / "etc/apptainer/apptainer.conf"
    plain = re.sub(
        r"^root default capabilities = .*$", "root default capabilities = no", settings.read_text(), flags=re.M
    )
    settings.write_text(plain)  # a machine without CAP_SYS_RESOURCE cannot keep all of root's


def _archive() -> str:
    """The machine's own Debian archive."""
    for path in ["/etc/apt/sources.list", *glob.glob("/etc/apt/sources.list.d/*")]:
        try:
            text = Path(path).read_text()
        except OSError:
            continue
        found = re.search(r"^(?:URIs:|deb(?: \[[^\]]*\])?)\s+(\S*debian\S*)", text, re.MULTILINE)
        if found:
            return found.group(1)
    raise LookupError("no Debian archive in /etc/apt")


def tree(folder: Path) -> Path:
    """An image as a folder tree: a busybox, and empty places where a test binds the machine's own Python."""
    places = (
        "bin",
        "dev",
        "etc",
        "home",
        "lib",
        "lib64",
        "opt",
        "proc",
        "root",
        "sys",
        "tmp",
        "usr",
        "var/tmp",
        "work",
    )
    for place in places:
        (folder / place).mkdir(parents=True, exist_ok=True)
    for name in ("hosts", "resolv.conf", "passwd", "group", "localtime"):
        (folder / "etc" / name).touch()
    shutil.copy("/bin/busybox", folder / "bin" / "busybox")
    for name in ("sh", "cat", "env", "ls", "hostname", "uname"):
        (folder / "bin" / name).unlink(missing_ok=True)
        (folder / "bin" / name).symlink_to("busybox")
    python = folder / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder


def binds() -> List[str]:
    """What makes this machine's Python run in that image; the system's libraries are not in the image."""
    found = ["/usr", "/usr/lib:/lib"] + (["/usr/lib64:/lib64"] if os.path.isdir("/usr/lib64") else [])
    return [*found, *dict.fromkeys((sys.prefix, sys.base_prefix))]


def build(program: str, source: Path, image: Path) -> None:
    subprocess.run([f"{program}/apptainer", "build", "-F", str(image), str(source)], check=True, capture_output=True)

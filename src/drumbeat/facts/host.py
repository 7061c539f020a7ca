"""Host: the only door through which readers touch a machine. This one is live; others replay the same questions."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from typing import Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

_READ_LIMIT = 1 << 20  # no sysfs or proc file we read is near this


class Host(Protocol):
    """Answers never raise: what cannot be read is None or empty, and a reader turns that into unknown."""

    def read(self, path: str) -> Optional[str]: ...

    def list(self, path: str) -> List[str]: ...

    def resolve(self, path: str) -> Optional[str]:
        """Where a symbolic link ends, or None."""

    def command(self, argv: Sequence[str], timeout: float = 5.0) -> Optional[str]:
        """Standard output of a command that ended with 0, or None."""

    @property
    def environ(self) -> Mapping[str, str]: ...

    def affinity(self) -> Tuple[int, ...]: ...

    def limit(self, name: str) -> Optional[int]:
        """A resource limit by its lower-case name (memlock, nofile); -1 is unlimited."""

    def disk_bytes(self, path: str) -> Optional[int]: ...

    def hostname(self) -> str: ...


class LiveHost:
    """This machine."""

    def read(self, path: str) -> Optional[str]:
        try:
            with open(path, "rb") as file:
                return file.read(_READ_LIMIT).decode("utf-8", "replace")
        except OSError:
            return None

    def list(self, path: str) -> List[str]:
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def resolve(self, path: str) -> Optional[str]:
        try:
            return os.path.realpath(path) if os.path.lexists(path) else None
        except OSError:
            return None

    def command(self, argv: Sequence[str], timeout: float = 5.0) -> Optional[str]:
        try:
            done = subprocess.run(
                list(argv), capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None

    @property
    def environ(self) -> Dict[str, str]:
        return dict(os.environ)

    def affinity(self) -> Tuple[int, ...]:
        return tuple(sorted(os.sched_getaffinity(0)))

    def limit(self, name: str) -> Optional[int]:
        number = getattr(resource, "RLIMIT_" + name.upper(), None)
        if number is None:
            return None
        soft = resource.getrlimit(number)[0]
        return -1 if soft == resource.RLIM_INFINITY else soft

    def disk_bytes(self, path: str) -> Optional[int]:
        try:
            stat = os.statvfs(path)
        except OSError:
            return None
        return stat.f_frsize * stat.f_blocks

    def hostname(self) -> str:
        return socket.gethostname()

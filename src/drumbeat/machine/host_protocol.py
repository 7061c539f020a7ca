"""Host: the only interface through which readers access a machine. One is live (host.py), others replay recorded answers."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple


class Host(Protocol):
    """Interface to a machine. Methods never raise: unreadable data is None or empty, and a reader turns that into unknown."""

    def read(self, path: str) -> Optional[str]: ...

    def data(self, path: str, start: int, size: int) -> Optional[bytes]:
        """Return a piece of a binary file; shorter if the file ends earlier."""

    def version_in(self, path: str, text: str, start: int, size: int) -> Optional[str]:
        """Return the version number (1.2 or 1.2.3) that follows `text` in a piece of a (large) binary file."""

    def digest(self, path: str) -> Optional[str]:
        """Return the sha256 of a file; only for small files."""

    def list(self, path: str) -> List[str]: ...

    def resolve(self, path: str) -> Optional[str]:
        """Return the target of a symbolic link, or None if it does not exist."""

    def command(self, argv: Sequence[str], timeout: float = 5.0) -> Optional[str]:
        """Return the standard output of a command that exited with 0, or None."""

    def library(self, name: str) -> Any:
        """Open a shared library of this machine; None if there is none, or if the machine is only replayed."""

    @property
    def environ(self) -> Mapping[str, str]: ...

    def addresses(self) -> Optional[Dict[str, Tuple[str, ...]]]:
        """Return interface -> addresses with prefix length, from the kernel; None if it cannot be asked."""

    def affinity(self) -> Tuple[int, ...]: ...

    def limit(self, name: str) -> Optional[int]:
        """Return a resource limit by its lower-case name (memlock, nofile); -1 is unlimited."""

    def disk_bytes(self, path: str) -> Optional[int]: ...

    def hostname(self) -> str: ...

    def python(self) -> str:
        """Return the version of the Python that runs the readers."""

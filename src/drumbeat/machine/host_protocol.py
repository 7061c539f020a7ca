"""Host: the only door through which readers touch a machine. One is live (host.py), others replay the same questions."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple


class Host(Protocol):
    """Answers never raise: what cannot be read is None or empty, and a reader turns that into unknown."""

    def read(self, path: str) -> Optional[str]: ...

    def data(self, path: str, start: int, size: int) -> Optional[bytes]:
        """A piece of a binary file; shorter where the file ends."""

    def version_in(self, path: str, text: str, start: int, size: int) -> Optional[str]:
        """The version number (1.2 or 1.2.3) that follows `text` in a piece of a (large) binary file."""

    def digest(self, path: str) -> Optional[str]:
        """sha256 of a file that is not large."""

    def list(self, path: str) -> List[str]: ...

    def resolve(self, path: str) -> Optional[str]:
        """Return where a symbolic link ends, or None if there is nothing."""

    def command(self, argv: Sequence[str], timeout: float = 5.0) -> Optional[str]:
        """Standard output of a command that ended with 0, or None."""

    def library(self, name: str) -> Any:
        """A shared library of this machine, opened; None where there is none, and on a machine that is only replayed."""

    @property
    def environ(self) -> Mapping[str, str]: ...

    def addresses(self) -> Optional[Dict[str, Tuple[str, ...]]]:
        """Interface -> addresses with prefix length, as the kernel says; None: it cannot be asked."""

    def affinity(self) -> Tuple[int, ...]: ...

    def limit(self, name: str) -> Optional[int]:
        """A resource limit by its lower-case name (memlock, nofile); -1 is unlimited."""

    def disk_bytes(self, path: str) -> Optional[int]: ...

    def hostname(self) -> str: ...

    def python(self) -> str:
        """The version of the Python that asks."""

"""The contract of a backend: where a job runs. What `render` shows is exactly what `submit` sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Optional, Protocol, Tuple

from drumbeat.order import Order


@dataclass(frozen=True)
class Request:
    """A complete, printable request. `text` is the script or manifest, byte for byte as it is sent."""

    backend: str
    order: Order
    text: str
    argv: Tuple[str, ...] = ()  # the command that sends it


@dataclass(frozen=True)
class Status:
    handle: str  # local://host/run-id, slurm://cluster/1234
    state: str  # queued, running, finished, failed, cancelled, unknown
    detail: str = ""
    exit_code: Optional[int] = None


class Backend(Protocol):
    def render(self, order: Order) -> Request: ...

    def submit(self, request: Request) -> str:
        """Send it; the handle of what now runs."""

    def status(self, handle: str) -> Status: ...

    def logs(self, handle: str, rank: Optional[int], follow: bool) -> Iterator[str]: ...

    def cancel(self, handle: str) -> None: ...

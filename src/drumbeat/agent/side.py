"""What the agent asks of its side of the run: the lead's (`lead_side`) or a member's (`member_side`)."""

from __future__ import annotations

from typing import Protocol

from drumbeat.agent.wire.messages import Message
from drumbeat.findings.model import Finding


class Side(Protocol):
    @property
    def busy(self) -> bool:
        """Whether there is more to send than one turn has sent."""

    @property
    def patient(self) -> bool:
        """Whether messages may wait for a moment, so that several are read in one turn."""

    def skip_old_stops(self) -> None:
        """First of all: what the `stop` file asks of an earlier start of this run is not for us."""

    def begin(self) -> None:
        """Open the run folder, where this side knows which it is; from now on a stop is obeyed."""

    def open(self) -> None:
        """Meet the others."""

    def tell(self, message: Message) -> None:
        """A message of this node to the lead."""

    def beat(self) -> None:
        """Tell the lead that this node is alive, and how far it is."""

    def tick(self, now: float) -> None: ...

    def send_some(self) -> None: ...

    def look_for_stop(self, now: float) -> None:
        """Obey the `stop` file of the run folder."""

    def give_up(self) -> None:
        """This agent has lost its guard."""

    def storage_lost(self, finding: Finding) -> None: ...

    def leave(self) -> None: ...

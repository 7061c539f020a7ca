"""Feeds this node's watchers and carries out what they ask for. Sensors read the machine; watchers only think."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Protocol, Sequence

from drumbeat.agent.watchers.contract import Emit, Saw, Stop, Warn, Watcher
from drumbeat.agent.wire.messages import Counted, Found, Judged, Message
from drumbeat.base import clock

Record = Callable[[str, Dict[str, Any]], Any]  # writes an event of this node
Tell = Callable[[Message], None]  # sends a message to the lead


class Sensor(Protocol):
    def poll(self, now: float, final: bool = False) -> List[Saw]:
        """What can be seen now that could not be seen before; `final` when the ranks are gone."""


class Watching:
    """`record` writes an event of this node; `tell` sends a message to the lead, which alone warns and stops."""

    def __init__(
        self,
        watchers: Sequence[Watcher],
        sensors: Sequence[Sensor],
        record: Record,
        tell: Tell,
        attempt: int = 0,
    ) -> None:
        self.watchers, self.sensors, self.record, self.tell = watchers, sensors, record, tell
        self.attempt = attempt

    def feed(self, kind: str, data: Dict[str, Any], now: float) -> None:
        self._feed(Saw(kind, data), now)

    def tick(self, now: float) -> None:
        self._sense(now, False)
        self._feed(Saw("tick"), now)

    def end(self, now: float) -> None:
        """The ranks are gone; whoever still waits for something says what it knows."""
        self._sense(now, True)
        self._feed(Saw("ended"), now)

    def _sense(self, now: float, final: bool) -> None:
        for sensor in self.sensors:
            for saw in sensor.poll(now, final):
                self._feed(saw, now)

    def _feed(self, saw: Saw, now: float) -> None:
        for watcher in self.watchers:
            for action in watcher.on(saw, now):
                if isinstance(action, Emit) and action.kind == "census":
                    self.tell(Counted(self.attempt, action.data["rows"], clock.now()))
                elif isinstance(action, Emit):
                    self.record(action.kind, action.data)
                    if action.kind == "verdict":
                        self.tell(Judged(action.data["verdict"]))
                elif isinstance(action, (Warn, Stop)):  # the lead writes it down, for all nodes in one file
                    self.tell(Found(action.finding, isinstance(action, Stop)))

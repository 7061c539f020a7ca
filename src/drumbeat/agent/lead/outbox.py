"""What the lead has to tell its members: sent in order, but in a large job not all in one turn, so that beats keep flowing."""

from __future__ import annotations

import time
from collections import deque
from typing import Callable, Deque, Tuple

from drumbeat.agent.wire.messages import Message, encode

_SLICE = 0.1  # seconds of sending in one turn of the loop


class Outbox:
    """`deliver(member, message, data)` sends a message to one member; `data` is the message, encoded once for all."""

    def __init__(self, deliver: Callable[[int, Message, bytes], None]) -> None:
        self._deliver = deliver
        self._waiting: Deque[Tuple[Message, Deque[int]]] = deque()

    def put(self, message: Message, members: Tuple[int, ...]) -> None:
        self._waiting.append((message, deque(members)))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def send_some(self) -> None:
        """For one turn. Telling the lead's own node may put more messages into the box."""
        until = time.monotonic() + _SLICE
        while self._waiting and time.monotonic() < until:
            message, members = self._waiting[0]
            data = encode(message)
            while members and time.monotonic() < until:
                self._deliver(members.popleft(), message, data)
            if not members:
                self._waiting.popleft()

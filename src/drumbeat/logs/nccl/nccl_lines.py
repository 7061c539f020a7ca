"""NCCL's own lines, read one by one into communicators: which of them are worth parsing, which were said before, and a
warning that somebody wrapped."""

from __future__ import annotations

from typing import Optional, Set, Tuple

from drumbeat.findings.model import Evidence
from drumbeat.logs.nccl import nccl
from drumbeat.logs.nccl.communicators import Communicators
from drumbeat.logs.nccl.records import Init
from drumbeat.logs.read.prefixes import MAX_LINE, clean, decode, without_colour

SIGNS = (b"CCL", b"] INFO ", *nccl.HEADLESS_SIGNS)  # a line without any of them is none of NCCL's
MAX_TEXT = 1000  # of an evidence line
MAX_CHANNELS = 100_000
MAX_COLLECTIVES = 2_000  # lines of collective calls that are looked at
_INFO = b" NCCL INFO "


class NcclLines:
    def __init__(self) -> None:
        self.communicators = Communicators()
        self._collectives = 0
        self._channels: Set[bytes] = set()
        self._again: Set[bytes] = set()  # whole lines of connections that were read before
        self.warned: Optional[Tuple[str, int, bytes]] = None  # the last WARN, if the next line may go on with it

    def feed(self, file: str, number: int, raw: bytes) -> bool:
        """Was there something to learn from this line?"""
        if self.warned is not None:
            self._continue(self.warned, file, number, raw)
        worth = b"CCL" in raw or b"] INFO " in raw
        if not worth and nccl.may_be_headless(raw):  # quoted without NCCL's own head, perhaps behind somebody's prefix
            text = clean(decode(raw)).text.encode()
            worth = nccl.looks_headless(text)
            raw = text if worth else raw
        if not worth:
            return False
        start = raw.find(_INFO)
        message = raw[start + len(_INFO) :]
        # INFO lines are judged by their first word, before they are decoded: most are not about networks.
        worth = start < 0 or nccl.worth(message) or _INFO in message
        if worth and start >= 0 and _INFO not in message and self._said_before(raw, start, message):
            self._connects(file, number)
        elif worth:
            self._read(file, number, raw)
        return worth

    def _connects(self, file: str, number: int) -> None:
        self.communicators.connections.add(file, number)
        self.communicators.connects(file, number)

    def is_known(self, file: str, number: int, raw: bytes) -> bool:
        """Is this, letter by letter, a connection that was read before? Then only its place is new."""
        if raw not in self._again:
            return False
        self._connects(file, number)
        return True

    def remember(self, raw: bytes) -> None:
        """Nobody else has anything to learn from a line like this one."""
        start = raw.find(_INFO)
        message = raw[start + len(_INFO) :]
        if (
            start >= 0
            and message.startswith(b"Channel ")
            and raw[:start] + message[message.find(b" : ") :] in self._channels
        ):
            if len(self._again) >= MAX_CHANNELS:
                self._again.clear()
            self._again.add(raw)

    def _continue(self, warned: Tuple[str, int, bytes], file: str, number: int, raw: bytes) -> None:
        """A WARN that somebody wrapped: read the two lines together once more."""
        warned_in, at, text = warned
        self.warned = None
        if warned_in == file and at + 1 == number and raw.strip() and b"NCCL" not in raw:
            joined = text.rstrip() + b" " + raw.strip()
            self._read(file, at, joined[:MAX_LINE])
            self.warned = None

    def _read(self, file: str, number: int, raw: bytes) -> None:
        text = without_colour(decode(raw))
        evidence: Optional[Evidence] = None
        found = False
        for record in nccl.records(text):
            found = self.communicators.spoke = True
            if record.level == "WARN":
                self.warned = (file, number, raw)
                if "/rccl/" in text or "/hipify/" in text:  # its WARN lines carry the path of its build
                    self.communicators.libraries.add("rccl")
            seen = nccl.observe(record)
            if seen is not None:
                if isinstance(seen, Init):
                    self._channels.clear()  # the same words may now be about another communicator
                    self._again.clear()
                evidence = evidence or Evidence(text[:MAX_TEXT], file, number)
                self.communicators.add(record, seen, evidence)
        if not found and b"CCL version" in raw:
            for version in nccl.find_version(text):
                self.communicators.version(version, Evidence(text[:MAX_TEXT], file, number))

    def _said_before(self, raw: bytes, start: int, message: bytes) -> bool:
        """A connection's many channels differ only in their number; of collective calls some are enough."""
        if b"[nranks=" in message:
            self._collectives += 1
            return self._collectives > MAX_COLLECTIVES
        if not message.startswith(b"Channel "):
            return False
        key = raw[:start] + message[message.find(b" : ") :]
        if key in self._channels:
            return True
        if len(self._channels) >= MAX_CHANNELS:
            self._channels.clear()
            self._again.clear()
        self._channels.add(key)
        return False

"""Hostile bytes on the wire: whatever comes, before or after the proof, is a WireError and nothing else."""

import dataclasses
import json
import math
import random
import socket

import pytest

from drumbeat.agent.lead_side import LeadWatching
from drumbeat.agent.watchers.hang import Hang
from drumbeat.agent.watchers.straggler import Straggler
from drumbeat.agent.wire import messages
from drumbeat.agent.wire.channel import Channel, Seal
from drumbeat.agent.wire.messages import Beat, Counted, Done, Looked, RankEnded, StopAsked, WireError, decode, encode
from tests.agent.test_lead import mustered

TOKEN = "f" * 32
TYPES = sorted(messages._TYPES)
ODD = [
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**63), 10**40, 0.5, -1e308, 1e308, math.inf, -math.inf, math.nan, "", "x",
    "\0", "\ud800", "a" * 5000, "../../etc", "error", [], [[]], {}, {"code": "x", "severity": "no", "title": 3},
    {"rank": "x"}, [1, 2, 3], [{}], [None], {"is": "Hello"},
]  # fmt: skip


def values(chance):
    value = chance.choice(ODD)
    if chance.random() < 0.2:
        value = {
            chance.choice(["code", "severity", "title", "rank", "t", "step"]): chance.choice(ODD) for _ in range(4)
        }
    return [value] * chance.randrange(4) if chance.random() < 0.2 else value


def test_any_fields_make_a_message_or_a_wire_error():
    chance, made = random.Random(5), 0
    for number in range(6000):
        name = TYPES[number % len(TYPES)]
        plain = {"is": name}
        for field in dataclasses.fields(messages._TYPES[name]):
            if chance.random() < 0.8:
                plain[field.name] = values(chance)
        try:
            made += decode(plain) is not None
        except WireError as error:
            assert len(str(error)) < 2000
    assert made, "some of them fit"


def pair(lead=True):
    ours, theirs = socket.socketpair()
    return Channel(ours, TOKEN, lead=lead), theirs


def test_any_bytes_before_the_proof_are_refused_or_waited_for():
    chance = random.Random(6)
    kinds = (
        b"{",
        b'"',
        b"[",
        b"\n",
        b"\0",
        b"\xff",
        b'{"proof":',
        b'{"challenge":',
        b'{"greeting":',
        b"1e999",
        b"}",
        b":",
        b"null",
    )
    for number in range(600):
        channel, other = pair(lead=number % 2 == 0)
        with other:
            data = b"".join(chance.choice(kinds) for _ in range(chance.randrange(1, 40)))
            other.sendall(data + (b"\n" if chance.random() < 0.7 else b""))
            try:
                assert channel.receive() == []
            except WireError:
                pass
            assert not channel.opened
            channel.close()


def opened():
    """Two ends of one connection that have proved themselves."""
    left, right = socket.socketpair()
    lead, member = Channel(left, TOKEN, lead=True), Channel(right, TOKEN, lead=False)
    for _ in range(4):
        member.receive()
        lead.receive()
    assert lead.opened and member.opened
    return lead, member


def test_changed_and_repeated_messages_end_the_connection_wherever_they_are_hit():
    chance = random.Random(7)
    line = Seal(b"k").close(encode(StopAsked(15)))
    for number in range(400):
        lead, member = opened()
        sealed = member._outgoing.close(encode(Beat(step=number)))
        at = chance.randrange(len(sealed) - 1)
        hostile = [
            sealed[:at] + bytes([sealed[at] ^ (1 << chance.randrange(8))]) + sealed[at + 1 :],  # a flipped bit
            sealed + sealed,  # once too often
            line,  # sealed with another key
            sealed[:at] + b"\n",  # cut short
        ][number % 4]
        member.sock.sendall(hostile if hostile.endswith(b"\n") else hostile + b"\n")
        with pytest.raises(WireError):
            lead.receive()
            lead.receive()
        lead.close()
        member.close()


def test_the_same_count_is_never_used_twice():
    lead, member = opened()
    member.send(Beat(step=1))
    assert lead.receive() == [Beat(step=1)]
    member._outgoing._count = 0  # a message sealed as the first one once more
    member.send(Beat(step=2))
    with pytest.raises(WireError):
        lead.receive()
    lead.close()
    member.close()


def test_a_message_without_end_is_cut_off_at_its_longest(monkeypatch):
    monkeypatch.setattr("drumbeat.agent.wire.channel._LONGEST", 1 << 16)
    lead, member = opened()
    member.sock.setblocking(False)
    with pytest.raises(WireError, match="too long"):
        for _ in range(100):
            try:
                member.sock.send(b"x" * (1 << 14))
            except BlockingIOError:
                pass
            lead.receive()
    assert len(lead._in) < 4 << 20
    lead.close()
    member.close()


def test_a_member_that_says_anything_does_not_break_the_lead():
    """Every message that decodes is carried out by the lead and its watchers, whatever stands in it."""
    chance, now = random.Random(8), 1.0
    for _ in range(40):
        lead, _ = mustered()
        watching = LeadWatching(lead, [Hang("warn"), Straggler()])
        watching.recorded("attempt-started", now)
        for _ in range(60):
            kind = chance.choice((Beat, RankEnded, Done, Looked, Counted))
            plain = {"is": kind.__name__, "attempt": 0}
            for field in dataclasses.fields(kind):
                if field.name != "attempt" and chance.random() < 0.7:
                    plain[field.name] = values(chance)
            try:
                message = decode(json.loads(json.dumps(plain)))
            except WireError:
                continue
            now += chance.random() * 10
            if isinstance(message, Beat):
                lead.beat(1, message)
                watching.beat(1, message, now)
            elif isinstance(message, RankEnded):
                watching.rank_ended(1, message.end, now)
                lead.rank_ended(1, message, now)
            elif isinstance(message, Done):
                lead.member_done(1, message, now)
            elif isinstance(message, Looked):
                watching.looked(1, message, now)
            else:
                lead.counted(1, message)
            watching.tick(now)
            lead.tick(now)
        lead.member_done(0, Done(0), now)
        lead.member_lost(1, "gone", now)

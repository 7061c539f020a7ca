"""The wire: only those who know the token get in, and a stranger's bytes end in a WireError, nothing else."""

import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.agent.wire.channel import Channel
from drumbeat.agent.wire.meet import free_port, listen
from drumbeat.agent.wire.messages import FilePart, Refuse, StopAsked, WireError, decode


def pair(token_lead="a" * 32, token_node="a" * 32):
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return Channel(right, token_lead, lead=True), Channel(left, token_node, lead=False)


def settle(*channels):
    messages = {id(channel): [] for channel in channels}
    for _ in range(20):
        for channel in channels:
            if not channel.closed:
                messages[id(channel)] += channel.receive()
    return [messages[id(channel)] for channel in channels]


def test_both_sides_prove_themselves_then_talk():
    lead, node = pair()
    settle(lead, node)
    assert lead.opened and node.opened
    node.send(StopAsked(15))
    lead.send(Refuse("ä\n"))
    assert settle(lead, node) == [[StopAsked(15)], [Refuse("ä\n")]]


def test_another_token_is_refused_by_both():
    lead, node = pair(token_node="b" * 32)
    node.receive()
    with pytest.raises(WireError, match="token"):
        settle(lead)
    with pytest.raises(WireError, match="another token"):
        settle(node)
    assert not lead.opened and not node.opened


def test_a_message_before_the_proof_is_not_one():
    lead, node = pair()
    node._put({"is": "StopAsked", "signal": 15})
    with pytest.raises(WireError):
        settle(lead)


def test_a_large_message_comes_whole():
    lead, node = pair()
    settle(lead, node)
    node.send(Refuse("x" * 3_000_000))
    assert take(node, lead, 1) == [Refuse("x" * 3_000_000)]


def take(sender, receiver, count):
    messages = []
    for _ in range(100_000):
        sender.flush()
        messages += receiver.receive()
        if len(messages) >= count:
            break
    return messages


def test_the_limit_is_for_a_message_not_for_what_waits():
    """Twelve messages of 1.4 MB lie in the socket and the buffers before the other side reads the first."""
    lead, node = pair()
    settle(lead, node)
    parts = [FilePart(f"rank-{number}.out", "x" * 1_400_000, True) for number in range(12)]
    for part in parts:
        node.send(part)
    assert take(node, lead, 12) == parts


def test_one_message_that_is_too_long():
    lead, node = pair()
    settle(lead, node)
    node.send(Refuse("x" * 9_000_000))
    with pytest.raises(WireError, match="too long"):
        take(node, lead, 1)


@pytest.mark.parametrize(
    "plain", [{}, {"is": "Nothing"}, {"is": "StopAsked"}, {"is": "StopAsked", "signal": "x"}, {"is": ["Ping"]}]
)
def test_a_message_that_is_none_of_ours(plain):
    with pytest.raises(WireError):
        decode(plain)


@pytest.mark.parametrize(
    "line",
    [
        b'{"proof":"\\u00e9"}', b'{"proof":"\\ud800"}', b'{"challenge":"\\ud800"}', b'{"proof":1e999}', b"[" * 2000,
        b'{"proof":' + b"9" * 4000 + b"}", b"\xff\xfe{}", b'{"refuse":"\\ud800"}', b"{}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("lead", [True, False])
def test_whatever_comes_before_the_proof_is_refused(line, lead):
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    channel = Channel(right, "token", lead=lead)
    left.sendall(line + b"\n")
    with pytest.raises(WireError):
        for _ in range(20):
            channel.receive()
    left.close()
    channel.close()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=6000))
def test_a_strangers_bytes(data):
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    channel = Channel(right, "token", lead=True)
    left.sendall(data)
    left.close()
    try:
        assert channel.receive() == [] and not channel.opened
    except WireError:
        pass
    channel.close()


def test_a_connection_that_breaks_while_sending_keeps_its_number_until_it_is_dropped():
    """Else the next connection would get the number that the selector still knows, and could not be registered."""
    lead, node = pair()
    settle(lead, node)
    node.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    node.close()  # with a reset
    for _ in range(100):
        lead.send(StopAsked(15))
    assert lead.closed and lead.sock.fileno() >= 0 and lead.receive() == []
    lead.close()
    assert lead.sock.fileno() < 0


def test_listen_takes_the_first_free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = free_port("127.0.0.1", ())
        with listen("127.0.0.1", (port, other)) as sock:
            assert sock.getsockname()[1] == other
        with pytest.raises(WireError, match="none of the ports"):
            listen("127.0.0.1", (port,))

"""The lead's door: strangers are few and short of time, and members come in all the same."""

import selectors
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from drumbeat.agent.lead.connections import Connection, Connections
from drumbeat.agent.wire.channel import Channel
from drumbeat.agent.wire.meet import Door, _origin, dial, free_port, listen, most_strangers
from drumbeat.agent.wire.messages import Refuse, StopAsked, WireError
from tests.agent.test_lead import order

TOKEN = "a" * 32


class Lead:
    def __init__(self, most):
        self.selector = selectors.DefaultSelector()
        self.admitted, self.refused = [], []
        self.port = free_port("127.0.0.1", ())
        self.door = Door(
            listen("127.0.0.1", (self.port,)), TOKEN, most, self.selector, self._admit,
            lambda address, why: self.refused.append((address, why)),
        )  # fmt: skip

    def _admit(self, channel, messages):
        self.admitted.append((channel, messages))

    def turn(self):
        for key, _ in self.selector.select(0.01):
            key.data()

    def close(self):
        self.door.close()
        for channel, _ in self.admitted:
            channel.close()
        self.selector.close()


@pytest.fixture
def lead():
    lead = Lead(most=40)
    yield lead
    lead.close()


def knock(port):
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def member(lead, token=TOKEN):
    """Let one member try once; whether it got in."""
    channel = Channel(knock(lead.port), token, lead=False)
    try:
        for _ in range(200):
            lead.turn()
            channel.receive()
            if channel.opened:
                lead.turn()
                channel.send(StopAsked(15))
            if channel.opened or channel.closed:
                break
    except WireError:
        pass
    return channel.opened


def test_members_come_in_while_2000_strangers_knock(lead):
    strangers, got_in = [], 0
    for number in range(2000):
        strangers.append(knock(lead.port))
        if len(strangers) > 200:  # few open files are enough for this
            strangers.pop(0).close()
        if number % 20 == 0:
            lead.turn()
        if number % 200 == 100:
            got_in += member(lead)
        assert lead.door.strangers <= 40
    assert got_in == 10 and len(lead.admitted) == 10
    for sock in strangers:
        sock.close()


def test_who_proves_nothing_in_time_is_sent_away(lead):
    lead.door.tick(100.0)
    silent = [knock(lead.port) for _ in range(5)]
    while lead.door.strangers < 5:
        lead.turn()
    lead.door.tick(114.9)
    assert lead.door.strangers == 5
    lead.door.tick(115.1)
    assert lead.door.strangers == 0
    silent += [knock(lead.port) for _ in range(30)]  # of 40 places
    while lead.door.strangers < 30:
        lead.turn()
    lead.door.tick(118.0)
    assert lead.door.strangers == 30
    lead.door.tick(118.2)
    assert lead.door.strangers == 0
    for sock in silent:
        while sock.recv(4096):
            pass
        sock.close()


def test_a_flood_from_one_address_costs_the_others_nothing():
    lead = Lead(most=10)
    try:
        with socket.socket() as early:
            early.bind(("127.0.0.9", 0))
            early.connect(("127.0.0.1", lead.port))
            flood = [knock(lead.port) for _ in range(60)]
            for _ in range(100):
                lead.turn()
            assert lead.door.strangers == 10
            early.setblocking(False)
            assert early.recv(4096).startswith(b'{"greeting"')
            with pytest.raises(BlockingIOError):  # it came first, and is still there
                early.recv(4096)
            for sock in flood:
                sock.close()
    finally:
        lead.close()


def test_another_token_is_named_once(lead):
    assert not member(lead, "b" * 32) and not member(lead, "c" * 32)
    ((address, why),) = lead.refused
    assert address == "127.0.0.1" and "token" in why


def test_after_the_muster_nobody_listens(lead):
    stranger = knock(lead.port)
    lead.turn()
    assert member(lead)
    lead.door.close()
    assert lead.door.strangers == 0
    with pytest.raises(ConnectionRefusedError):
        knock(lead.port)
    stranger.close()


def test_the_lead_closes_its_door_when_no_stranger_is_there():
    port = free_port("127.0.0.1", ())
    with selectors.DefaultSelector() as selector:
        asked = order(master="127.0.0.1", emulated=True, muster_ports=(port,))
        connections = Connections(asked, selector, TOKEN, None)
        connections.open()
        knock(port).close()
        connections.close_door()
        with pytest.raises(ConnectionRefusedError):
            knock(port)


def test_a_message_that_was_changed_on_its_way_is_named_on_both_sides():
    """The node knows the token; what it says first does not arrive as it was said."""
    port, said, heard = free_port("127.0.0.1", ()), [], []

    def node():
        channel = dial("127.0.0.1", (port,), TOKEN, 60.0, lambda: None, lambda text: None)
        channel.sock.sendall(b"0" * 32 + b' {"type":"pong","t":1}\n')
        while not channel.closed and not heard:
            heard.extend(channel.receive())
            time.sleep(0.01)

    with selectors.DefaultSelector() as selector:
        asked = order(master="127.0.0.1", emulated=True, muster_ports=(port,))
        connections = Connections(asked, selector, TOKEN, SimpleNamespace(broken=said.append))
        connections.open()
        thread = threading.Thread(target=node, daemon=True)
        thread.start()
        deadline = time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            for key, _ in selector.select(0.1):
                key.data()
        thread.join(60)
        connections.close_door()
    (why,) = said
    assert why.startswith("a node at 127.0.0.1 was sent away: a message was changed")
    assert isinstance(heard[0], Refuse) and "a message was changed" in heard[0].why


def test_open_files_must_suffice():
    assert most_strangers(2, 1 << 20) == 1026
    assert most_strangers(4096, 1 << 20) == 4096 + 1024
    assert most_strangers(800, 1024) == 96
    with pytest.raises(WireError, match="1250 nodes need 1386 open files.*allows 1024.*ulimit -Hn"):
        most_strangers(1250, 1024)


def test_a_stalled_lead_lets_no_stranger_stay(lead):
    """Its clock is given to it: however late it looks, each stranger's time counts from when it was accepted."""
    lead.door.tick(time.monotonic())
    with knock(lead.port):
        while not lead.door.strangers:
            lead.turn()
        lead.door.tick(time.monotonic() + 3600)
        assert lead.door.strangers == 0


def test_all_addresses_of_one_ipv6_network_are_one_source():
    assert _origin("2001:db8:1:2::5") == _origin("2001:db8:1:2:ffff::9") != _origin("2001:db8:1:3::5")
    assert _origin("::ffff:10.0.0.7") == _origin("10.0.0.7") == "10.0.0.7"


def test_a_member_is_not_silent_while_its_words_wait_for_us():
    """A lead without a core reads late; that is nobody's silence."""
    told, (ours, theirs) = [], socket.socketpair()
    listener = SimpleNamespace(patience=60.0, silent=lambda member, seconds, again=False: told.append(member))
    with selectors.DefaultSelector() as selector, ours, theirs:
        connections = Connections(order(emulated=True), selector, TOKEN, listener)
        connections.by_socket[ours] = Connection(None, member=7, heard=0.0)
        theirs.sendall(b"not read yet")
        connections._check_silence(1000.0, 0.0)
        assert not told and ours in connections.by_socket
        ours.recv(100)
        connections.by_socket[ours].heard = 970.0
        connections._check_silence(1000.0, 0.0)
        assert told == [7]

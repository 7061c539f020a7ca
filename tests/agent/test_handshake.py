"""A proof holds for one connection, one role and one port; a sealed message holds once, in its place and direction."""

import contextlib
import json
import os
import selectors
import socket
import threading
import time

import pytest

from drumbeat.agent.wire.channel import (
    LEAD,
    NODE,
    Channel,
    Seal,
    check_same_user,
    is_relayed,
    plain_address,
    proof,
    session_key,
)
from drumbeat.agent.wire.meet import dial, free_port, listen, listening_address
from drumbeat.agent.wire.messages import StopAsked, Welcome, WireError
from tests.conftest import wait_for

TOKEN = "a" * 32
PLACE = ("127.0.0.1", 4000)


class Relay:
    """Another user's process on a candidate port: it passes every byte on to the real lead, and changes what it likes."""

    def __init__(self, lead_port, change=lambda line: line):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.lead_port, self.change = lead_port, change
        self.seen = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        self.listener.settimeout(0.1)
        while not self.stop.is_set():
            try:
                member, _ = self.listener.accept()
            except TimeoutError:
                continue
            lead = socket.create_connection(("127.0.0.1", self.lead_port))
            self._pass(member, lead)

    def _pass(self, member, lead):
        with selectors.DefaultSelector() as selector, member, lead:
            selector.register(member, selectors.EVENT_READ, lead)
            selector.register(lead, selectors.EVENT_READ, member)
            while not self.stop.is_set():
                for key, _ in selector.select(0.1):
                    data = key.fileobj.recv(1 << 16)
                    if not data:
                        return
                    self.seen.append(data)
                    key.data.sendall(b"".join(self.change(line) for line in data.splitlines(keepends=True)))

    def close(self):
        self.stop.set()
        self.thread.join(10)
        self.listener.close()


class LeadThread:
    """A lead that lets in whoever proves itself, and welcomes it to a folder."""

    def __init__(self):
        self.listener = listen("127.0.0.1", (free_port("127.0.0.1", ()),))
        self.port = self.listener.getsockname()[1]
        self.admitted, self.refused, self.stop = [], [], threading.Event()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        channels = []
        while not self.stop.wait(0.005):
            try:
                channels.append(Channel(self.listener.accept()[0], TOKEN, lead=True))
            except BlockingIOError:
                pass
            for channel in [each for each in channels if not each.closed and each not in self.admitted]:
                try:
                    channel.receive()
                except WireError as error:
                    self.refused.append(str(error))
                    channel.close()
                if channel.opened:
                    channel.send(Welcome("run", "/folder", "host"))
                    self.admitted.append(channel)

    def close(self):
        self.stop.set()
        self.thread.join(10)
        self.listener.close()


@pytest.fixture
def lead():
    lead = LeadThread()
    yield lead
    lead.close()


def test_a_relay_on_another_candidate_port_gets_nothing(lead):
    """The member dials the squatted port first. The lead refuses the relayed proof, and the member finds it by itself."""
    relay, told = Relay(lead.port), []
    try:
        channel = dial("127.0.0.1", (relay.port, lead.port), TOKEN, 30.0, lambda: None, told.append)
        assert channel.sock.getpeername()[1] == lead.port
        assert any(f"port {relay.port} answers, but" in text and "relays" in text for text in told), told
        assert any("relays" in text for text in lead.refused)
        wait_for(lambda: len(lead.admitted) == 1, what="the lead's side of the same handshake")
        assert not any(b"/folder" in data for data in relay.seen)  # nothing but the handshake went through it
        channel.close()
    finally:
        relay.close()


def test_a_relay_that_claims_the_right_port_has_no_proof_for_it(lead):
    def change(line):
        plain = json.loads(line)
        if "dialled" in plain:
            plain["dialled"][1] = lead.port
        return json.dumps(plain).encode() + b"\n"

    relay = Relay(lead.port, change)
    try:
        with pytest.raises(WireError, match="no lead"):
            dial("127.0.0.1", (relay.port,), TOKEN, 2.0, lambda: None, lambda text: None)
        assert not lead.admitted and any("token" in text for text in lead.refused)
    finally:
        relay.close()


def test_a_relay_that_is_let_through_cannot_change_a_message(lead, monkeypatch):
    """As behind a spoofed name, where the relay has the same port on another machine: it can cut the line, no more."""
    monkeypatch.setattr("drumbeat.agent.wire.channel.is_relayed", lambda claimed, here: "")
    relay = Relay(lead.port, lambda line: line.replace(b"/folder", b"/victim"))
    try:
        with pytest.raises(WireError, match="changed"):  # while dialling, if the lead is quick, or later
            channel = dial("127.0.0.1", (relay.port,), TOKEN, 10.0, lambda: None, lambda text: None)
            end = time.monotonic() + 30
            while time.monotonic() < end:
                assert channel.receive() == []
    finally:
        relay.close()


def pair():
    keys = [session_key(b"token", role, "lead's", "node's", PLACE) for role in (LEAD, NODE)]
    return [[Seal(key) for key in keys] for _ in range(2)]


def test_messages_come_in_order_and_once():
    (lead_out, _), (lead_in, node_in) = pair()
    lines = [lead_out.close(f"{number}\n".encode())[:-1] for number in range(3)]
    assert lead_in.open(lines[0]) == b"0"
    for wrong in (lines[0], lines[2], lines[1][:-1] + b"7", lines[1][33:], b"", b"x" * 32):
        probe = Seal(session_key(b"token", LEAD, "lead's", "node's", PLACE))
        probe.open(lines[0])
        with pytest.raises(WireError):
            probe.open(wrong)
    with pytest.raises(WireError):  # sent back to who sent it
        node_in.open(lines[0])


def test_a_proof_holds_for_its_role_challenges_and_place():
    given = proof(b"token", NODE, "c1", "c2", PLACE)
    others = [
        proof(b"token", LEAD, "c1", "c2", PLACE), proof(b"token", NODE, "c2", "c1", PLACE),
        proof(b"other", NODE, "c1", "c2", PLACE),
        proof(b"token", NODE, "c1", "c2", ("127.0.0.1", 4001)), proof(b"token", NODE, "c1", "c2", ("10.0.0.1", 4000)),
    ]  # fmt: skip
    assert given not in others and len(set(others)) == len(others)


def test_what_counts_as_relayed():
    assert is_relayed(PLACE, PLACE) == ""
    assert "relays" in is_relayed(PLACE, ("127.0.0.1", 4001))
    assert is_relayed(("192.0.2.7", 4000), PLACE) == ""  # no address of this machine: NAT, or a service's address
    assert "relays" in is_relayed(("192.0.2.7", 4001), PLACE)
    assert "relays" in is_relayed(("127.0.0.2", 4000), PLACE)  # ours, but it should have arrived there
    assert "relays" in is_relayed(("\ud800", 4001), PLACE)


def test_a_session_recorded_before_opens_nothing_again(lead):
    channel = dial("127.0.0.1", (lead.port,), TOKEN, 30.0, lambda: None, lambda text: None)
    sent = []
    channel.sock, real = Recording(channel.sock, sent), channel.sock
    channel.send(StopAsked(15))
    real.close()
    with socket.create_connection(("127.0.0.1", lead.port), timeout=60) as again:
        again.recv(4096)
        again.sendall(b"".join(sent))
        assert b"refuse" in again.recv(4096) or again.recv(4096) == b""
    assert len(lead.admitted) == 1


class Recording:
    def __init__(self, sock, sent):
        self._sock, self._sent = sock, sent

    def send(self, data):
        self._sent.append(bytes(data))
        return self._sock.send(data)


def test_a_refusal_is_printed_as_plain_text():
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = Channel(socket.create_connection(server.getsockname()), TOKEN, lead=False)
        stranger, _ = server.accept()
    with stranger:
        stranger.sendall(json.dumps({"refuse": "\x1b[2J" + "x" * 3000}).encode() + b"\n")
        with pytest.raises(WireError) as caught:
            for _ in range(100):
                node.receive()
                time.sleep(0.01)
    assert str(caught.value).startswith("?[2Jxxx") and len(str(caught.value)) <= 200
    node.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the other side belongs to another user")
def test_the_other_end_of_a_unix_socket_must_be_this_user():
    name = f"\0drumbeat-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(name)
                    sock.recv(1)
            finally:
                os._exit(0)
        with socket.socket(socket.AF_UNIX) as own:
            accepted = listener.accept()[0]
            with accepted, pytest.raises(WireError, match="another user"):
                check_same_user(accepted)
            os.waitpid(child, 0)
            own.connect(name)
            with listener.accept()[0] as accepted:
                check_same_user(accepted)


def test_the_listener_is_as_narrow_as_is_safe():
    assert listening_address("127.0.0.1", emulated=True) == "127.0.0.1"
    for name in ("127.0.0.1", "192.0.2.7", "nid0001"):  # others cannot have dialled that; not ours: NAT; a name
        assert listening_address(name, emulated=False) in ("::", "0.0.0.0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(
            OSError
        ):  # a machine without any network has only 0.0.0.0, where one must hear everybody
            probe.connect(("192.0.2.1", 9))
        own = probe.getsockname()[0]
    assert listening_address(own, emulated=False) == own


def test_a_name_that_does_not_resolve_ends_soon():
    begin = time.monotonic()
    with pytest.raises(WireError, match="does not resolve"):
        dial("no-such-host.invalid", (1,), TOKEN, 300.0, lambda: None, lambda text: None, unresolved=0.5)
    assert time.monotonic() - begin < 60


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="the kernel has no IPv6")
@pytest.mark.parametrize("address", ["::1", "127.0.0.1"])
def test_a_lead_known_by_name_is_reached_by_both_protocols(address):
    """A cluster may have IPv6 alone; over IPv4 the same listener must not take the member for relayed."""
    port = free_port("127.0.0.1", ())
    with listen(listening_address("node0", emulated=False), (port,)) as listener:
        listener.setblocking(True)
        channels = []

        def serve():
            channel = Channel(listener.accept()[0], TOKEN, lead=True)
            channels.append(channel)
            while not channel.opened and not channel.closed:
                channel.receive()
                time.sleep(0.01)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        member = dial(address, (port,), TOKEN, 30.0, lambda: None, lambda text: None)
        thread.join(30)
        assert member.opened and channels[0].opened
        member.close()
        channels[0].close()


def test_addresses_are_compared_as_the_other_side_writes_them():
    assert plain_address("::ffff:10.0.0.7") == "10.0.0.7" and plain_address("fe80::1%eth0") == "fe80::1"
    assert plain_address("fd00::ffff:1") == "fd00::ffff:1" and plain_address("10.0.0.7") == "10.0.0.7"


def test_a_link_local_address_without_its_interface_is_said_at_once():
    with pytest.raises(WireError, match="needs its interface"):
        dial("fe80::1", (1,), TOKEN, 60.0, lambda: None, lambda text: None)

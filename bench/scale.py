"""A large job's lead, for real: one guard with its agent as the lead, and thousands of members that speak the real protocol.

PYTHONPATH=src:. python bench/scale.py [MEMBERS ...]      default: 1250 4096

Members are connections of one process: each proves that it knows the token, says hello with the network of a full-size DGX
or LUMI node, answers pings, receives the world and its start, beats, and ends with its ranks when the lead says so. Then the
last member falls silent on an open connection, and the lead must name it and lose nobody. One rank of another fails, and all
others are ended by the lead. The lead's own node starts eight real processes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import resource
import secrets
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

from drumbeat.agent.agent import Agent
from drumbeat.agent.guard import guard
from drumbeat.agent.member_side import beat_interval
from drumbeat.agent.wire import channel as channel_module
from drumbeat.agent.wire.channel import Channel
from drumbeat.agent.wire.meet import raise_open_files
from drumbeat.agent.wire.messages import (
    Beat,
    Done,
    End,
    Hello,
    Ping,
    Pong,
    Prepare,
    RankEnded,
    Refuse,
    Start,
    Stop,
    Welcome,
    encode,
    network_of,
)
from drumbeat.base.order import Order, dump_order, load_order
from drumbeat.base.processes import children
from drumbeat.base.record import to_json
from drumbeat.bundle.build import cached_bundle
from drumbeat.findings.model import ERROR, Finding
from drumbeat.machine.gather import gather
from drumbeat.machine.model import Facts
from drumbeat.machine.replay import FolderHost

RANKS = 8
SETTLE = 3.0  # seconds after the last start that do not count as its steady state
WORK = 15.0  # seconds of beats between that and the failure
DIALLERS = 16  # at a time
SILENCE = 60.0  # seconds in which a silent member must be named
DEADLINE = 15.0  # the guard's


def order_for(members: int, folder: str) -> Order:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return Order(
        run_id="scale", name="scale", created=time.time(), command=("sleep", "600"), nodes=members, ranks_per_node=RANKS,
        launcher="ranks", launcher_why="a measurement", workdir="/", folder=folder, site="localhost", backend="local",
        hosts=tuple(f"nid{100000 + number}" for number in range(members)), master="127.0.0.1", muster_ports=(port,),
        checks={"preflight": "off", "affinity": "off", "transport": "off", "hang": "warn"},
    )  # fmt: skip


def clocks(schedstat: int) -> Tuple[float, float, float]:
    """Seconds by the clock, of CPU time, and by the clock without those in which this process was ready and waited for a core.
    `schedstat`: this process's /proc/self/schedstat. To open it each time would cost more than a turn of the loop does."""
    now = time.monotonic()
    waited = int(os.pread(schedstat, 100, 0).split()[1]) / 1e9
    return now, time.process_time(), now - waited


# -- the lead's process ------------------------------------------------------------------------------------------------


def lead(order_file: str, results: str) -> int:
    """Runs the real guard and agent; on the side it notes how long each turn of the agent's loop was busy."""
    with open(order_file, encoding="utf-8") as file:
        order = load_order(file.read())
    bundle = str(cached_bundle(os.environ))

    def agent(beat_fd: int) -> int:
        from drumbeat.agent.loop import Loop

        bytes_of = {"sent": 0, "received": 0}
        close = channel_module.Channel.close

        def closing(self: Channel) -> None:
            if not self.closed:
                bytes_of["sent"] += self.sent
                bytes_of["received"] += self.received
            close(self)

        channel_module.Channel.close = closing  # type: ignore[method-assign]
        token = os.environ["DRUMBEAT_TOKEN"]
        made = Loop(Agent(order, 0, token, bundle, beat_fd, lambda message: None, lambda *_: None))
        turns: List[Tuple[float, ...]] = []  # how long each turn was busy: see `clocks`
        schedstat = os.open("/proc/self/schedstat", os.O_RDONLY)
        select, woken, muster = made.selector.select, list(clocks(schedstat)), [0.0]

        def timed(timeout: float) -> Any:
            turns.append(tuple(now - before for now, before in zip(clocks(schedstat), woken)))
            if made.side.lead.phase == "muster":  # type: ignore[union-attr]
                muster[0] = time.process_time()
            found = select(timeout)
            woken[:] = clocks(schedstat)
            return found

        made.selector.select = timed  # type: ignore[assignment,method-assign]
        code = made.run()
        used = resource.getrusage(resource.RUSAGE_SELF)
        for connection in made.side.connections.by_socket.values():  # type: ignore[union-attr]
            bytes_of["sent"] += connection.channel.sent
            bytes_of["received"] += connection.channel.received
        measured = {
            "cpu": used.ru_utime + used.ru_stime, "rss": used.ru_maxrss / 1024, "turns": len(turns), "muster cpu": muster[0],
            **dict(zip(("stall", "busy", "alone"), map(max, zip(*turns[1:])))), **bytes_of,
        }  # fmt: skip
        Path(results).write_text(json.dumps(measured))
        return code

    return guard(agent, DEADLINE, lambda: None)


# -- the members' process ----------------------------------------------------------------------------------------------


class Members:
    def __init__(self, order: Order, token: str, facts: List[Facts]) -> None:
        self.order, self.token = order, token
        self.networks = [network_of(each) for each in facts]
        self.hosts = [each.host for each in facts]
        self.selector = selectors.DefaultSelector()
        self.channels: Dict[int, Channel] = {}
        self.greeted: set[int] = set()
        self.started: Dict[int, float] = {}
        self.ended: set[int] = set()
        self.every = beat_interval(order)
        self.beats: Dict[int, float] = {}  # member -> when its next beat is due
        self.next_beats = 0.0
        self.world_bytes = 0
        self.hello_bytes = 0
        self.redialled = 0
        self.silent: set[int] = set()
        self.to_dial: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.dialled: queue.SimpleQueue[Tuple[int, socket.socket]] = queue.SimpleQueue()

    def connect(self) -> None:
        for number in range(1, self.order.nodes):
            self.to_dial.put(number)
        for _ in range(DIALLERS):
            threading.Thread(target=self._dial, daemon=True).start()
        while len(self.channels) < self.order.nodes - 1:
            self.serve(0.02)

    def _dial(self) -> None:
        """In threads of their own: a connection that waits for the lead must not hold the others up."""
        address = ("127.0.0.1", self.order.muster_ports[0])
        while True:
            number = self.to_dial.get()
            try:
                self.dialled.put((number, socket.create_connection(address, timeout=30)))
            except OSError:  # the lead is not up yet, or busy
                time.sleep(0.05)
                self.to_dial.put(number)

    def serve(self, timeout: float) -> None:
        while not self.dialled.empty():
            number, sock = self.dialled.get()
            self.channels[number] = Channel(sock, self.token, lead=False)
            self.selector.register(sock, selectors.EVENT_READ, number)
        for count, (key, _) in enumerate(self.selector.select(timeout)):
            self._receive(key.data)
            if count % 64 == 63:
                self._beat()
        self._beat()

    def _beat(self) -> None:
        """Beats of the members whose time has come; also what a full connection did not take before."""
        now = time.monotonic()
        if now < self.next_beats:
            return
        self.next_beats = now + 0.25
        for number in [number for number, due in self.beats.items() if due <= now]:
            self.beats[number] = now + self.every
            if not self.channels[number].closed and number not in self.silent:
                self.channels[number].send(Beat(7, time.time()))
        for channel in self.channels.values():
            if channel.wants_write:
                channel.flush()

    def _receive(self, number: int) -> None:
        channel = self.channels[number]
        sock = channel.sock
        messages = channel.receive()
        if channel.opened and not channel.closed and number not in self.greeted:
            self.greeted.add(number)
            kind = number % len(self.networks)
            hello = Hello(number, self.order.hosts[number], "127.0.0.1", self.order.identity, self.order.terms(), RANKS,
                          network=self.networks[kind])  # fmt: skip
            self.hello_bytes = max(self.hello_bytes, len(encode(hello)))
            channel.send(hello)
        for message in messages:
            self._obey(number, channel, message)
        if channel.closed:
            self.selector.unregister(sock)
            if number not in self.greeted:  # too late with its proof: as a real member would, it tries again
                self.redialled += 1
                self.to_dial.put(number)
            elif number not in self.started:
                raise SystemExit(f"member {number} lost its connection before its start")
            else:
                self.ended.add(number)

    def _obey(self, number: int, channel: Channel, message: Any) -> None:
        if number in self.silent and not isinstance(message, (Stop, End)):
            return
        if isinstance(message, Ping):
            channel.send(Pong(time.time()))
        elif isinstance(message, Welcome):
            self.beats[number] = time.monotonic() + self.every
        elif isinstance(message, Refuse):
            raise SystemExit(f"member {number} was refused: {message.why}")
        elif isinstance(message, Prepare):
            self.world_bytes = len(encode(message))
        elif isinstance(message, Start):
            self.started[number] = time.monotonic()
        elif isinstance(message, Stop):
            for rank in range(number * RANKS, (number + 1) * RANKS):
                channel.send(RankEnded(0, rank, None, 15, time.time(), True, Finding("stopped", "info", "ended")))
            channel.send(Done(0))
        elif isinstance(message, End):
            channel.close()
            self.ended.add(number)

    def fail(self, number: int) -> None:
        """The first failure, and one that follows from it on every other member."""
        channel = self.channels[number]
        cause = Finding("exception", ERROR, "RuntimeError: boom", rank=number * RANKS, node=number)
        channel.send(RankEnded(0, number * RANKS, 1, None, time.time(), False, cause))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(members: int, facts: List[Facts]) -> Dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="drumbeat-scale-") as base:
        folder = os.path.join(base, "run")
        os.makedirs(os.path.join(folder, "nodes"))
        order = order_for(members, folder)
        Path(folder, "order.json").write_text(dump_order(order))
        Path(folder, "run.json").write_text(json.dumps({"schema": "1.0", "run_id": order.run_id}))
        Path(folder, "stop").write_text("")
        token = secrets.token_hex(16)
        argv = [sys.executable, __file__, "--lead", os.path.join(folder, "order.json"), os.path.join(base, "results")]
        begin = time.monotonic()
        process = subprocess.Popen(argv, env={**os.environ, "DRUMBEAT_TOKEN": token})
        them = Members(order, token, facts)
        them.connect()
        connected = time.monotonic()
        while len(them.started) < members - 1:
            them.serve(0.2)
            assert process.poll() is None, "the lead is gone"
        last_start = time.monotonic()
        settled = last_start + SETTLE
        while time.monotonic() < settled:
            them.serve(0.1)
        agent = children(process.pid)[0]
        used, settled = cpu_seconds(agent), time.monotonic()
        while time.monotonic() < settled + WORK:
            them.serve(0.1)
        quiet, wall = time.monotonic(), time.time()
        steady = (cpu_seconds(agent) - used) / (quiet - settled)
        them.silent.add(members - 1)
        named: Dict[str, Any] = {}
        while not named and time.monotonic() < quiet + SILENCE:
            them.serve(0.1)
            lines = Path(folder, "events.jsonl").read_text().splitlines()[-20:]
            named = next((each for each in map(json.loads, lines) if each["kind"] == "node-silent"), {})
        failed = time.monotonic()
        them.fail(1)
        while len(them.ended) < members - 1 and process.poll() is None:
            them.serve(0.2)
        code = process.wait(60)
        events = [json.loads(line) for line in Path(folder, "events.jsonl").read_text().splitlines()]
        gone = [(event["kind"], event["peer"]) for event in events if event["kind"] in ("node-silent", "node-lost")]
        mustered = next(event["seconds"] for event in events if event["kind"] == "mustered")
        return {
            **json.loads(Path(base, "results").read_text()), "code": code, "muster": mustered,
            "connect": connected - begin, "last start": last_start - begin, "end": time.monotonic() - failed,
            "steady": steady, "redialled": them.redialled, "hello": them.hello_bytes, "world": them.world_bytes,
            "silent": named and named["t"] - wall, "gone": gone,
            "summary": os.path.getsize(os.path.join(folder, "summary.json")),
            "peers": os.path.getsize(os.path.join(folder, "peers.json")),
        }  # fmt: skip


def full_size_facts() -> List[Facts]:
    """A DGX with InfiniBand and a LUMI node with Slingshot."""
    from tests.trees.archetypes import build

    made = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as base:
        for name in ("dgx-h100", "lumi-g"):
            build(name, Path(base, name), 0)
            made.append(gather(FolderHost(os.path.join(base, name))))
    return [_at_least(facts, 20_000) for facts in made]


def _at_least(facts: Facts, size: int) -> Facts:
    """The test trees leave out what no reader needs; a real node's facts are larger."""
    missing = size - len(to_json(facts, indent=None))
    return dataclasses.replace(facts, unknown=(*facts.unknown, "x" * max(0, missing)))


def main(counts: List[int]) -> None:
    raise_open_files()
    facts = full_size_facts()
    print("facts", [len(to_json(each, indent=None)) for each in facts], "bytes; cores", os.cpu_count())
    for members in counts:
        found = measure(members, facts)
        per_node = {name: found[name] / members / 1024 for name in ("sent", "received")}
        print(
            f"{members} members, {members * RANKS} ranks: exit code {found['code']}; muster {found['muster']:.1f} s, last start "
            f"{found['last start']:.1f} s after the command, all ended {found['end']:.1f} s after the failure\n"
            f"  lead: {found['cpu']:.1f} s CPU ({found['muster cpu']:.1f} s until all were there), {found['rss']:.0f} MiB\n"
            f"  longest turn of its loop: {found['busy']:.2f} s CPU; by the clock {found['stall']:.2f} s, without waiting for a "
            f"core {found['alone']:.2f} s\n"
            f"  per node: {per_node['sent']:.1f} KiB sent to it, {per_node['received']:.1f} KiB received; hello "
            f"{found['hello']} B, world {found['world']} B\n"
            f"  after the start: {100 * found['steady']:.1f} % of one core; members that dialled again: {found['redialled']}\n"
            f"  a silent member was named after {found['silent'] or 0:.1f} s; silent or lost at any time: {found['gone']}\n"
            f"  summary.json {found['summary']} B, peers.json {found['peers']} B",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--lead"]:
        sys.exit(lead(sys.argv[2], sys.argv[3]))
    main([int(word) for word in sys.argv[1:]] or [1250, 4096])

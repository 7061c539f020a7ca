"""The contracts other rooms build on, each with a golden JSON: a change of a field shows up here first."""

import json
import os
from pathlib import Path

import pytest

from drumbeat.agent.watchers.contract import Emit, Saw, Stop, Warn
from drumbeat.backends.contract import Request, Status
from drumbeat.base.order import EnvVar, Order, Wrap, dump_order, load_order
from drumbeat.base.record import RecordError, from_plain, to_plain
from drumbeat.findings.model import Evidence, Finding, Verdict
from drumbeat.machine.model import (
    Container,
    Cpus,
    CxiDevice,
    Facts,
    Gid,
    Gpu,
    Identity,
    Interface,
    Kernel,
    Library,
    Limits,
    Peer,
    Peers,
    RdmaDevice,
    RdmaPort,
)
from drumbeat.runfolder.events import COMMON, KINDS
from drumbeat.runfolder.layout import RunFolder

GOLDEN = Path(__file__).parent.parent / "golden"

ORDER = Order(
    run_id="demo-20260101-000000-ab12",
    name="demo",
    created=1767225600.0,
    command=("python3", "train.py", "--steps", "3"),
    nodes=2,
    ranks_per_node=2,
    launcher="ranks",
    launcher_why="the default: the agent starts the ranks itself",
    workdir="/home/u/code",
    folder="/home/u/runs/demo",
    site="localhost",
    backend="local",
    emulated=True,
    hosts=("127.0.0.1", "127.0.0.2"),
    master="127.0.0.1",
    muster_ports=(61000, 61001),
    env=(EnvVar("OMP_NUM_THREADS", "1", "as the job asks", "user"),),
    passed=("HF_TOKEN",),
    wrap=Wrap((2,), ("nsys", "profile", "-o", "prof-{rank}")),
    restarts=1,
)
FACTS = Facts(
    host="n1",
    arch="x86_64",
    os="Debian GNU/Linux 12",
    python="3.11.2",
    memory_bytes=1 << 39,
    cpus=Cpus("EPYC", (0, 1), (0, 1), {"0": (0, 1)}, ((0, 1),), ((0,), (1,)), ()),
    gpus=(Gpu(0, "amd", "MI250X", "0000:c1:00.0", None, 3, 64 << 30, "gfx90a", 0),),
    rdma=(
        RdmaDevice(
            "mlx5_0",
            "mlx5_core",
            "0000:1a:00.0",
            0,
            ("eth2",),
            (RdmaPort(1, "ACTIVE", "LinkUp", "Ethernet", 400.0, (Gid(3, "::ffff:10.0.0.1", "RoCE v2", "eth2"),)),),
        ),
    ),
    cxi=(CxiDevice("cxi0", "hsn0", "0000:d5:00.0", 0, 200.0),),
    interfaces=(Interface("eth0", True, ("10.0.0.1/24",), 100000, 9000, "physical"),),
    libraries=(Library("librccl-net.so", "/opt/lib/librccl-net.so", "1.4.0", True),),
    versions={"rocm": "6.2.4"},
    limits=Limits(-1, 1048576, 64 << 30, None, ()),
    kernel=Kernel("6.4.0", False, "pt", None, (32768, 60999)),
    container=Container(False),
    identity=Identity("slurm", "812", "0", 0, 2, ("n1", "n2"), 0, 1, "n1"),
    environment={"NCCL_DEBUG": "INFO"},
)
PEERS = Peers((Peer(0, "n1", "10.0.0.1", FACTS, 0.0, 2),), "10.0.0.1", 61010)
FINDING = Finding(
    "port-in-use",
    "error",
    "the rendezvous port was taken",
    "another process listens on it",
    "nothing: the next port is tried",
    (Evidence("RuntimeError: EADDRINUSE", "rank-0.err", 12),),
    node=0,
    host="n1",
    rank=0,
)


def contracts():
    yield "order", ORDER
    yield "facts", FACTS
    yield "peers", PEERS
    yield "finding", FINDING
    yield "verdict", Verdict("transport", "rdma", "certain", "4 NICs, GPU-direct", (FINDING,))
    yield "request", Request("slurm", ORDER, "#!/bin/sh\n")
    yield "status", Status("slurm://lumi/1234", "running", "on n[1-2]")


@pytest.mark.parametrize("name,value", list(contracts()))
def test_record_is_as_recorded_and_comes_back(name, value):
    compare(name, to_plain(value))
    assert from_plain(type(value), json.loads((GOLDEN / f"{name}.json").read_text())) == value


def test_event_kinds():
    compare("events", {"common": list(COMMON), "kinds": {kind: list(fields) for kind, fields in KINDS.items()}})


def test_run_folder_layout():
    run = RunFolder("RUN")
    node = run.node(1)
    compare(
        "runfolder",
        {
            "run": [run.run_json, run.order, run.job, run.code, run.bundle, run.events, run.peers, run.summary],
            "node": [
                node.facts,
                node.environment,
                node.events,
                node.metrics,
                node.agent_log,
                node.log(0, 3, "out"),
                node.log(0, 3, "err"),
            ],
        },
    )


def test_watcher_actions():
    compare(
        "watcher",
        {
            "saw": to_plain(Saw("line", {"rank": 0, "stream": "err", "text": "x"})),
            "emit": to_plain(Emit("verdict", {"verdict": {}})),
            "warn": to_plain(Warn(FINDING)),
            "stop": to_plain(Stop(FINDING)),
        },
    )


def test_order_round_trip_and_digest():
    again = load_order(dump_order(ORDER))
    assert again == ORDER and again.digest() == ORDER.digest()
    other = from_plain(Order, {**to_plain(ORDER), "run_id": "x", "folder": "/elsewhere", "created": 1.0})
    assert other.digest() == ORDER.digest(), "each node may have made its own order"
    assert from_plain(Order, {**to_plain(ORDER), "nodes": 3}).digest() != ORDER.digest()


def test_newer_major_is_refused_and_newer_minor_is_read():
    plain = to_plain(ORDER)
    assert load_order(json.dumps({**plain, "schema": "2.9", "new_key": 1})) == from_plain(
        Order, {**plain, "schema": "2.9"}
    )
    with pytest.raises(RecordError, match="newer drumbeat"):
        load_order(json.dumps({**plain, "schema": "3.0"}))


@pytest.mark.parametrize(
    "key,value,words",
    [
        ("nodes", "2", "Order.nodes: expected int, got str"),
        ("nodes", True, "expected int, got bool"),
        ("command", "python", "expected a list"),
        ("env", [{"name": "A"}], r"Order.env\[0\]: 'value' is missing"),
    ],
)
def test_wrong_type_names_the_place(key, value, words):
    with pytest.raises(RecordError, match=words):
        from_plain(Order, {**to_plain(ORDER), key: value})


def compare(name, plain):
    path = GOLDEN / f"{name}.json"
    text = json.dumps(plain, indent=2) + "\n"
    if os.environ.get("DRUMBEAT_WRITE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text, f"{name} changed: look at it, then DRUMBEAT_WRITE_GOLDEN=1 to record it"

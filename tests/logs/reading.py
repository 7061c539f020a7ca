"""Small logs, written here, and how to read them."""

import textwrap
from pathlib import Path
from types import SimpleNamespace

import yaml

from drumbeat.logs.reader import Reader


def rule_examples():
    """Id of a rule -> `examples`, on which it speaks, and `near` misses, on which it must not."""
    files = sorted((Path(__file__).parent / "data" / "rules").glob("*.yaml"))
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = {key: each for file in files for key, each in yaml.load(file.read_text("utf-8"), loader).items()}
    return {
        key: SimpleNamespace(examples=listed(each, "examples"), near=listed(each, "near"))
        for key, each in entries.items()
    }


def listed(entry, key):
    texts = entry.get(key, [])
    return [texts] if isinstance(texts, str) else texts


def read(text, file="log"):
    return read_files({file: text})


def read_files(files):
    reader = Reader()
    for name, text in files.items():
        for number, line in enumerate(textwrap.dedent(text).strip("\n").split("\n"), 1):
            reader.feed(name, number, line.encode())
    return reader.report()


def start_up(rank, nranks=2, nodes=2, network="IB", more=(), host=None, complete=True, comm_id="0x77"):
    """What one rank of NCCL 2.21 prints until its communicator is complete."""
    host = host or f"n{rank}"
    at = f"{host}:{100 + rank}:{200 + rank} [0] NCCL INFO"
    comm = (
        f"ncclCommInitRank comm 0x5{rank}0 rank {rank} nranks {nranks} cudaDev 0 nvmlDev 0 busId 1a000 commId {comm_id}"
    )
    lines = [
        f"{at} NCCL version 2.21.5+cuda12.4",
        f"{at} Bootstrap : Using eth0:10.0.0.{rank}<0>",
        *(f"{at} {line}" for line in more),
        f"{at} Using network {network}",
        f"{at} {comm} - Init START",
    ]
    if complete:
        shape = f"nRanks {nranks} nNodes {nodes} localRanks 1 localRank 0 MNNVL 0"  # known when every rank has come
        lines += [f"{at} comm 0x5{rank}0 rank {rank} {shape}", f"{at} {comm} - Init COMPLETE"]
    return "\n".join(lines)


def channels(via, pairs=((0, 1), (1, 0))):
    """Both ends of each connection."""
    lines = []
    for sender, receiver in pairs:
        where = f"Channel 00/0 : {sender}[0] -> {receiver}[0]"
        lines.append(f"n{sender}:{100 + sender}:{300 + sender} [0] NCCL INFO {where} [send] via {via}")
        lines.append(f"n{receiver}:{100 + receiver}:{300 + receiver} [0] NCCL INFO {where} [receive] via {via}")
    return "\n".join(lines)


IB = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
ROCE = "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>"
CXI = "NET/OFI Selected Provider is cxi (found 4 nics)"


def run(via, network="IB", more=(IB,), **options):
    ranks = [start_up(rank, network=network, more=more, **options) for rank in (0, 1)]
    return "\n".join([*ranks, channels(via)])

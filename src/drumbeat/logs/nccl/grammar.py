"""The grammar of NCCL's and RCCL's own log lines, 2.4 to 2.30: a line becomes records, a record an observation.

Other writers tear standard output, so one physical line may hold several records, or half of one. A record says if it was cut
off; the missing text is never guessed.
"""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Optional

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.logs.nccl.records import (
    Channel,
    Devices,
    Formed,
    Gdr,
    Init,
    Interface,
    Network,
    Observation,
    Plugin,
    Provider,
    Ranks,
    Setting,
    Shape,
    Used,
    Version,
)

# NCCL's and RCCL's lines about networks: cards, interfaces, plug-ins, GPUDirect.


_DEVICE = regex(r"\[(\d+)\]\s?(?:=\s?)?([\w.+-]+):\d+(?::\d+:\d+)?/(\w+)")
_OLD_LIST = regex(r"NET/IB ?: ?\[\d+\] ?\w")  # up to 2.3
_MERGED = regex(r"\[(\d+)\]=\{([^}]*)\}")
_MADE = regex(r"Made v(?:irtual device|Nic) (?:\[(\d+)\]|(\d+)) ?(?:/ )?(?:name=)?([\w.+-]+)")
_SOCKET = regex(r"\[(\d+)\]([\w.@:-]+?):[0-9a-fA-F.:%\w-]*<")
_OOB = regex(r"OOB ([\w.@-]+?):")
_LINK_LOCAL = regex(r":(?:169\.254\.|fe80:)")  # RFC 3927, RFC 4291
_BOOTSTRAP = regex(r"(?:\[\d+\]|Using )([\w.@-]+?):[0-9a-fA-F.:%]")
_PROVIDER = regex(r"Selected [Pp]rovider is ([\w;-]+)(?:, fabric is [^()]+?)?(?: \(found (\d+) nics\))?\s*$")
_ON_DEVICE = regex(r"on dev ([\w.+-]+?):\d+")
_HCA = regex(r"\bhca ([\w.+-]+)")


def network(message: str) -> Optional[Observation]:
    for head in ("Using network ", "Using internal Network "):  # the second up to 2.3
        if message.startswith(head):
            return Network(message[len(head) :].strip(), True)
    if message.startswith("Assigned NET plugin "):
        return Network(message[20:].split(" to comm")[0].strip(), True)
    if message.startswith("NET/IB"):
        return _ib(message)
    if message.startswith("NET/Socket"):
        found = (
            tuple((int(index), name, "TCP") for index, name in _SOCKET.findall(message)) if "Using [" in message else ()
        )
        if found:
            return Devices("Socket", found)
        return Used("Socket") if "threads and" in message or "truncated" in message else None
    if message.startswith("NET/OFI"):
        return _ofi(message)
    if "GPU Direct RDMA" in message:
        return _gpu_direct(message)
    if message.startswith("Connected all rings, use ring"):
        # `GDR 1` may be a stale value, so it proves nothing; `GDR 0` does.
        return Gdr(False, "ring") if re.search(r" GDR 0\b", message) else Formed()
    if message.startswith("Connected all "):
        return Formed()
    if message.startswith(("NET/FastSocket : Connected", "NET/FastSocket : Accepted")):
        return Formed("Socket")
    if message.startswith("GDRDMA not enabled"):
        return Gdr(False, "hca")
    if message.startswith("Bootstrap"):
        names = tuple(dict.fromkeys(_BOOTSTRAP.findall(message))) if "Using " in message else ()
        return Interface(names, bool(_LINK_LOCAL.search(message))) if names else None
    if message.startswith("P2P plugin "):
        return Plugin(message[len("P2P plugin ") :].strip())
    if "shared memory segment" in message or "failed to extend /dev/shm" in message:
        return Used("SHM")
    if message.startswith("Call to ibv_modify_qp failed"):
        device = _ON_DEVICE.search(message)
        return Used("IB", device[1] if device else "", _link_of_gid(message))
    return None


def _ib(message: str) -> Optional[Observation]:
    if ": Using " in message or _OLD_LIST.match(message):
        oob = _OOB.search(message)
        found = [(int(index), name, link) for index, name, link in _DEVICE.findall(_MERGED.sub("", message))]
        for index, inner in _MERGED.findall(message):
            parts = _DEVICE.findall(inner)
            if parts:
                found.append((int(index), "+".join(name for _, name, _ in parts), parts[0][2]))
        return Devices("IB", tuple(sorted(found)), oob[1] if oob else "")
    made = _MADE.search(message)
    if made:
        return Devices("IB+", ((int(made[1] or made[2]), made[3], ""),))
    if "GPU Direct RDMA" in message:
        return _gpu_direct(message)
    if "No device found" in message:
        return Devices("IB", ())
    if "Got completion" in message:
        hca = _HCA.search(message)
        return Used("IB", hca[1] if hca else "", _link_of_gid(message))
    return None


def _link_of_gid(message: str) -> str:
    """Return RoCE for a GID with an IPv4 address in it, or with an index."""
    return (
        "RoCE"
        if re.search(
            r"[Gg][Ii][Dd]s? ?(?:index \d+, local GID )? ?(?:::ffff:|f[cd][0-9a-f]{2}:|2[0-9a-f]{3}:)|GID index \d",
            message,
        )
        else ""
    )


def _gpu_direct(message: str) -> Optional[Gdr]:
    low = message.lower()
    if "enabled for" not in low and "disabled for" not in low:
        return None
    scope = "gpu" if " for gpu" in low else "hca"
    return Gdr("enabled for" in low, scope)


def _ofi(message: str) -> Optional[Observation]:
    match = _PROVIDER.search(message)
    if match:
        return Provider(match[1].lower(), int(match[2]) if match[2] else None)
    if "aws-ofi-nccl" in message and ("Initializing" in message or "Using aws" in message):
        return Plugin(message.split(" ", 2)[-1].strip())
    if "disabling GDR" in message or "GDR not supported" in message:
        return Gdr(False, "plugin")
    if "completed with error" in message:
        provider = re.search(r"\b(efa|cxi)\b", message, re.IGNORECASE)
        return Used("OFI", provider[1].lower() if provider else "")
    return None


_HEAD = regex(
    r"(?P<host>[A-Za-z0-9_<][\w.<>-]*):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) (?:\[(?P<device>-?\d+)\] )?"
    r"(?:(?:[\d.]+ )?(?:(?P<file>\S{1,300}):\d+(?: \(\w+\))?|\w+, \d+) )?NCCL "
    r"(?P<level>INFO|WARN|TRACE|VERSION|ABORT) "
)
# Up to 2.2 the library did not write its own name.
_OLD_HEAD = regex(
    r"(?P<host>[A-Za-z_][\w.-]*):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) \[(?P<device>\d+)\] (?:\S{1,100}:\d+ )?"
    r"(?P<level>INFO|WARN) "
)
_BARE = regex(
    r"(?:(?P<file>[\w./]{1,300}):\d+ )?\bNCCL (?P<level>INFO|WARN) "
)  # the header was cut off, or left out in a quotation
_PROSE = regex(r"[A-Za-z]{2,} [a-z]{2,}[ :]")  # a sentence that quotes such a line
# Lines that only NCCL writes, for quotations without the header.
_HEADLESS = regex(
    r"\s{0,8}(?:(?:Channel|Ring) \d+(?:/\d+)? : \d+(?:\[\w+\])? -> \d+\S* (?:\[(?:send|receive)\]\s+)?via "
    r"|NET/(?:IB|Socket) ?: Using |NET/IB ?: Got completion "
    r"|NET/OFI |Using network \w|Bootstrap ?: Using |\w*\s?comm 0x[0-9a-f]+ rank \d+ n[rR]anks )"
)
HEADLESS_STARTS = (
    b"Channel ",
    b"Ring 0",
    b"NET/IB",
    b"NET/Soc",
    b"NET/OFI",
    b"Using network",
    b"Bootstrap",
    b"comm 0x",
)
HEADLESS_SIGNS = (b"Channel ", b"Ring ", b"NET/", b"Using network", b"Bootstrap", b"comm 0x")  # each has one of these
_TRANSPORT_FILE = regex(r"(?:^|/)(net_ib|net_socket|p2p|shm|shmutils)(?:/\w+)?\.(?:cc|cu|h)\b")
_RESULT = regex(r"\S{1,120}:\d+ -> (\d)\b")


@dataclass(frozen=True)
class Record:
    """One NCCL message. Host and pid are empty if the header is missing."""

    host: str
    pid: int
    tid: int
    level: str
    message: str
    torn: bool = False  # another record begins in the middle of it
    device: Optional[int] = None  # in square brackets: tells the ranks of one process apart
    file: str = ""  # of NCCL's source, which WARN lines name


def records(text: str) -> Iterator[Record]:
    """The NCCL records of one physical line."""
    heads = list(_HEAD.finditer(text)) or list(_OLD_HEAD.finditer(text))
    if not heads:
        bare = _BARE.search(text)
        if bare and not _PROSE.search(text, 0, bare.start()):
            yield Record("", 0, 0, bare["level"], text[bare.end() :], file=bare["file"] or "")
        elif _HEADLESS.match(text):
            yield Record("", 0, 0, "INFO", text.strip())
        return
    for index, head in enumerate(heads):
        torn = index + 1 < len(heads)
        message = text[head.end() : heads[index + 1].start() if torn else len(text)]
        host = head["host"].split(".")[0]
        device = int(head["device"]) if head["device"] else None
        message = message.rstrip(" \t\r\n\u2502")
        file = head.groupdict().get("file") or ""
        yield Record(host, int(head["pid"]), int(head["tid"]), head["level"], message, torn, device, file)


_OLD_INIT = regex(r"comm (0x[0-9a-f]+) rank (\d+) nranks (\d+)( - COMPLETE)?\s*$")  # 2.3
_INIT = regex(
    r"(?:comm (0x[0-9a-f]+|\(nil\))|ncclCommInit\w+ \S{1,40}) rank (\d+) n[rR]anks (\d+) .{0,300}?"
    r"(?:commId (0x[0-9a-f]+).{0,60}?)?- (Init START|Init COMPLETE|Abort COMPLETE|Destroy COMPLETE|Destroy START)"
)
_TIMINGS = regex(r"Init timings - ncclComm\w+: rank \d+ nranks (\d+) ")  # written once the communicator is complete
_SHAPE = regex(r"comm (0x[0-9a-f]+) rank (\d+) nRanks (\d+) nNodes (\d+)")
_RCCL_SHAPE = regex(r"comm:(0x[0-9a-f]+), nRanks:(\d+), nNodes:(\d+)")
_CHANNEL = regex(
    r"(?:(?:Channel|Ring) \d+(?:/\d+)? : |(?=\d+(?:\[\w+\])? -> \d+(?:\[\w+\])? (?:\[\w+\]\s+)?via (?:NET|P2P|SHM)/))"
    r"(\d+)(?:\[[0-9a-f]+\])? -> (\d+)(?:\[[0-9a-f]+\])? (?:\[(send|receive)\]\s+)?via (\S.*)"
)
_RING = regex(r"Channel \d+(?:/\d+)? :((?:\s+\d+)+)\s*$")  # the ring of all ranks, printed by rank 0
_CUDA_DEVICE = regex(r"cudaDev (\d+)")
_COLLNET = regex(r"CollNet \d+(?:/\d+)? : (\d+) \[(send|receive)\] via (COLLNET/.+)")
_NET_PATH = regex(r"(?:COLL)?NET/(?P<name>[^/]+)/(?P<device>\d+)(?:\(\d+\))?(?P<rest>.*)")
_COMM_SUFFIX = regex(r" comm (0x[0-9a-f]+) nRanks (\d+)\s*$")
_VERSION = regex(
    r"(?:\b|(?<=\d))(?P<library>[NR]CCL) version ?(?:: ?)?(?P<version>2\.\d+(?:\.\d+)*)"
    r"(?P<build>\+(?:cuda|hip)[\d.]*\d)?"
)
_SETTING = regex(r"(N?R?CCL_[A-Z0-9_]+) set by environment to (.*)")
_COLLECTIVE = regex(r"\bcomm (0x[0-9a-f]+) \[nranks=(\d+)\]")

# First word of a message -> True if worth parsing. All other messages are skipped unread.
# fmt: off
HEADS = frozenset((
    b"Channel", b"Ring", b"CollNet", b"comm", b"[Rank", b"NCCL", b"RCCL", b"Using", b"Initialized", b"Assigned",
    b"NET/IB", b"NET/IB:", b"NET/Socket", b"NET/Socket:", b"NET/OFI", b"Bootstrap", b"Bootstrap:", b"GPU",
    b"Connected", b"GDRDMA", b"P2P", b"Call", b"AllReduce:", b"Broadcast:", b"AllGather:", b"ReduceScatter:",
    b"Reduce:", b"Send:", b"Recv:", b"AlltoAll:", b"AllToAll:", b"NET/Plugin:", b"NET/Plugin", b"ANP",
    b"NET/IBext", b"NET/SHARP", b"NET/RCCL-ANP", b"Error:", b"Error", b"Init",
))
# fmt: on


def may_be_headless(raw: bytes) -> bool:
    """Return True if such a beginning occurs anywhere in the line (a cheap test)."""
    return any(start in raw for start in HEADLESS_STARTS)


def looks_headless(raw: bytes) -> bool:
    """Return True if this may be a NCCL line quoted without its header."""
    return raw.lstrip().startswith(HEADLESS_STARTS)


def worth(message: bytes) -> bool:
    """Return True if this message may hold information, judged by its first word without its digits."""
    word = message.split(b" ", 1)[0]
    if word[:1].isdigit():  # 0[0] -> 8[0] via NET/IB/0; lines of the tuner begin with a number too
        return b" via " in message
    return word in HEADS or word.startswith((b"ncclComm", b"NCCL_", b"RCCL_", b"NET/", b"comm:", b"transport/"))


def observe(record: Record) -> Optional[Observation]:
    """Return what one record says about communicators, networks or settings, if anything."""
    message = record.message
    if message.startswith(("Channel", "Ring")) or " -> " in message[:20]:
        return _channel(message, record.torn) or _failed_in(record)
    if message.startswith("CollNet"):
        return _collnet(message, record.torn)
    if "CCL version" in message and (match := _VERSION.search(message)):
        return version_of(match)
    if "nRanks" in message or "nranks" in message:
        return _communicator(message)
    if " set by environment to " in message and (match := _SETTING.match(message)):
        return Setting(match[1], match[2].rstrip(". \t"))
    return network(message) or _failed_in(record)


def _failed_in(record: Record) -> Optional[Used]:
    """Return the transport that an error was raised in or passed up from: that transport was in use."""
    trail = _RESULT.match(record.message)
    if trail and trail[1] not in "1234567":
        return None
    name = _TRANSPORT_FILE.search(record.file if record.level == "WARN" else record.message if trail else "")
    if not name:
        return None
    return Used({"net_ib": "IB", "net_socket": "Socket", "p2p": "P2P", "shm": "SHM", "shmutils": "SHM"}[name[1]])


def version_of(match: re.Match[str]) -> Version:
    return Version(match["library"].lower(), match["version"] + (match["build"] or ""))


def find_version(text: str) -> List[Version]:
    """Return versions from bare version lines; two processes may have printed theirs into one line."""
    return [version_of(match) for match in _VERSION.finditer(text)]


_STAGES: Dict[str, str] = {
    "Init START": "start",
    "Init COMPLETE": "complete",
    "Abort COMPLETE": "abort",
    "Destroy COMPLETE": "destroy",
    "Destroy START": "destroy",
}


def _communicator(message: str) -> Optional[Observation]:
    match = _SHAPE.search(message)
    if match:
        return Shape(match[1], int(match[2]), int(match[3]), int(match[4]))
    match = _INIT.search(message)
    if match:
        device = _CUDA_DEVICE.search(message)
        return Init(
            match[1] or "",
            int(match[2]),
            int(match[3]),
            _STAGES[match[5]],
            match[4] or "",
            int(device[1]) if device else None,
        )
    match = _OLD_INIT.search(message)
    if match:
        return Init(match[1], int(match[2]), int(match[3]), "complete" if match[4] else "start", "", None)
    match = _RCCL_SHAPE.search(message)
    if match:
        return Shape(match[1], -1, int(match[2]), int(match[3]))
    match = _COLLECTIVE.search(message)
    if match:
        return Ranks(match[1], int(match[2]))
    match = _TIMINGS.match(message)
    if match:
        return Ranks("", int(match[1]))
    return None


def _channel(message: str, torn: bool) -> Optional[Observation]:
    match = _CHANNEL.match(message)
    if not match:
        ring = None if torn else _RING.match(message)
        numbers = ring[1].split() if ring else []
        return Ranks("", len(numbers)) if len(set(numbers)) == len(numbers) > 1 else None
    sender, receiver, side, path = int(match[1]), int(match[2]), match[3] or "", match[4]
    comm, nranks = "", None
    suffix = _COMM_SUFFIX.search(path)
    if suffix:
        comm, nranks, path = suffix[1], int(suffix[2]), path[: suffix.start()]
    if path.startswith("NET/"):
        net = _NET_PATH.match(path)
        if not net:
            return None  # cut before the device: nothing to learn
        gdr = _gdr(net["rest"], torn)
        return Channel(sender, receiver, side, "NET", net["name"], int(net["device"]), gdr, comm, nranks)
    if path.startswith("P2P"):
        return Channel(sender, receiver, side, "P2P", path.split(" ")[0], comm=comm, nranks=nranks)
    if path.startswith(("SHM", "direct shared memory")):
        return Channel(sender, receiver, side, "SHM", comm=comm, nranks=nranks)
    return None


def _gdr(rest: str, torn: bool) -> Optional[bool]:
    if rest.startswith("/GDRDMA"):
        return True
    return None if torn or (rest and "/GDRDMA".startswith(rest)) else False


def _collnet(message: str, torn: bool) -> Optional[Channel]:
    match = _COLLNET.match(message)
    net = _NET_PATH.match(match[3]) if match else None
    if not match or not net:
        return None
    gdr = _gdr(net["rest"], torn)
    return Channel(int(match[1]), -1, match[2], "COLLNET", net["name"], int(net["device"]), gdr)

"""What NCCL's and RCCL's lines say of networks: cards, interfaces, plug-ins, GPUDirect. Part of the grammar in nccl.py."""

from __future__ import annotations

import re
from typing import Optional

from drumbeat.logs.nccl.records import Devices, Formed, Gdr, Interface, Network, Observation, Plugin, Provider, Used

_DEVICE = re.compile(r"\[(\d+)\]\s?(?:=\s?)?([\w.+-]+):\d+(?::\d+:\d+)?/(\w+)")
_OLD_LIST = re.compile(r"NET/IB ?: ?\[\d+\] ?\w")  # up to 2.3
_MERGED = re.compile(r"\[(\d+)\]=\{([^}]*)\}")
_MADE = re.compile(r"Made v(?:irtual device|Nic) (?:\[(\d+)\]|(\d+)) ?(?:/ )?(?:name=)?([\w.+-]+)")
_SOCKET = re.compile(r"\[(\d+)\]([\w.@:-]+?):[0-9a-fA-F.:%\w-]*<")
_OOB = re.compile(r"OOB ([\w.@-]+?):")
_BOOTSTRAP = re.compile(r"(?:\[\d+\]|Using )([\w.@-]+?):[0-9a-fA-F.:%]")
_PROVIDER = re.compile(r"Selected [Pp]rovider is ([\w;-]+)(?:, fabric is [^()]+?)?(?: \(found (\d+) nics\))?\s*$")
_ON_DEVICE = re.compile(r"on dev ([\w.+-]+?):\d+")
_HCA = re.compile(r"\bhca ([\w.+-]+)")


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
        # `GDR 1` is the value that nobody cleared, so it proves nothing; `GDR 0` does.
        return Gdr(False, "ring") if re.search(r" GDR 0\b", message) else Formed()
    if message.startswith("Connected all "):
        return Formed()
    if message.startswith(("NET/FastSocket : Connected", "NET/FastSocket : Accepted")):
        return Formed("Socket")
    if message.startswith("GDRDMA not enabled"):
        return Gdr(False, "hca")
    if message.startswith("Bootstrap"):
        names = tuple(dict.fromkeys(_BOOTSTRAP.findall(message))) if "Using " in message else ()
        return Interface(names) if names else None
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
    """A GID with an IPv4 address in it belongs to RoCE; so does one with an index."""
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

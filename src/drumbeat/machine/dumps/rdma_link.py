"""`rdma link` (old and new forms, JSON) and ibdev2netdev: which RDMA device belongs to which interface, and its state."""

from __future__ import annotations

import re
from typing import Dict, Optional, Tuple

from drumbeat.machine.dumps import ports
from drumbeat.machine.dumps.content import Content

_LINK = re.compile(
    r"^\s*(?:link |\d+/\d+: )(?P<device>[\w-]+)/(?P<port>\d+):? (?P<ib>subnet_prefix .*)?.*?state (?P<state>\w+)"
    r" physical_state (?P<physical>\w+)(?: netdev (?P<netdev>\S+))?",
    re.MULTILINE,
)
_IBDEV = re.compile(
    r"^\s*(?P<device>[\w-]+)[ \t]+port[ \t]+(?P<port>\d+)[ \t]+==>[ \t]+(?P<netdev>\S+)[ \t]+\((?P<state>Up|Down)\)",
    re.MULTILINE,
)
_JSON = re.compile(
    r'"ifname":\s*"(?P<device>[\w-]+)",\s*"port":\s*(?P<port>\d+),(?P<rest>[^{}]*?)"state":\s*"(?P<state>\w+)",\s*'
    r'"physical_state":\s*"(?P<physical>\w+)"(?:[^{}]*?"netdev":\s*"(?P<netdev>[^"]+)")?'
)


def read(text: str) -> Optional[Content]:
    found: Dict[Tuple[str, str], ports.Port] = {}
    for match in (*_LINK.finditer(text), *_JSON.finditer(text)):
        # A port without an interface is InfiniBand; so is one with a subnet prefix.
        ib = not match["netdev"] or "subnet_prefix" in match[0]
        found[match["device"], match["port"]] = ports.Port(
            match["device"],
            int(match["port"]),
            match["state"].upper(),
            match["physical"],
            "InfiniBand" if ib else "Ethernet",
            netdev=match["netdev"] or "",
        )
    kind = "rdma link"
    if not found:
        kind = "ibdev2netdev"
        for match in _IBDEV.finditer(text):
            state = "ACTIVE" if match["state"] == "Up" else "DOWN"
            if state == "DOWN" and match["netdev"].startswith("ib"):
                state = ports.NOT_SHOWN  # the tool shows the IP interface: an InfiniBand port works without one
            port = ports.Port(match["device"], int(match["port"]), state, netdev=match["netdev"])
            found[match["device"], match["port"]] = port
    if not found:
        return None
    listed = list(found.values())
    return Content(kind, tuple(port.words for port in listed), ports.findings(listed), ports.data(listed))

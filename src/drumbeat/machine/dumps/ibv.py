"""ibv_devinfo and ibv_devices: which RDMA devices a process sees, and the state of their ports."""

from __future__ import annotations

import re
from typing import List, Optional

from drumbeat.findings.model import WARNING, Finding
from drumbeat.machine.dumps import ports
from drumbeat.machine.dumps.content import Content

_HCA = re.compile(r"^\s*hca_id:\s*(\S+)")
_FIELD = re.compile(r"^\s*(port|state|link_layer|active_mtu|active_width|active_speed):\s*(.*?)\s*$")
_DEVICES = re.compile(
    r"^\s*device\s+node GUID\s*\n\s*-+\s+-+\s*\n((?:\s*\S+\s+[0-9a-f]{16}\s*(?:\n|$))+)", re.MULTILINE
)


def read(text: str) -> Optional[Content]:
    found: List[ports.Port] = []
    findings: List[Finding] = []
    device, number, state, link, lanes, speed = "", 0, "", "", 0.0, 0.0

    def close() -> None:
        if device and number and state:
            found.append(ports.Port(device, number, state, link=link, rate=lanes * speed or None))

    for line in text.splitlines():
        if match := _HCA.match(line):
            close()
            device, number, state, link, lanes, speed = match[1], 0, "", "", 0.0, 0.0
        elif device and (match := _FIELD.match(line)):
            if match[1] == "port":
                close()
                number, state, link = int(match[2]) if match[2].isdigit() else 0, "", ""
                lanes, speed = 0.0, 0.0
            elif match[1] == "state":
                state = match[2].split(" ")[0].replace("PORT_", "")
            elif match[1] == "active_width":
                lanes = _number(match[2], r"(\d+)X")
            elif match[1] == "active_speed":
                speed = _number(match[2], r"(\d+(?:\.\d+)?) Gbps")
            elif match[1] == "link_layer":
                link = match[2]
            elif match[1] == "active_mtu" and state == "ACTIVE" and match[2].startswith(("256 ", "512 ", "1024 ")):
                findings.append(_small_mtu(device, match[2].split(" ")[0]))
    close()
    listed = _DEVICES.search(text)
    if not found and not listed:
        return None
    names = [line.split()[0] for line in listed[1].splitlines() if line.split()] if listed else []
    known = [port for port in found if port.device]
    software = [ports.Port(name, 1, "ACTIVE") for name in names if not known]
    facts = tuple(port.words for port in found) or tuple(f"device {name}" for name in names)
    kind = "ibv_devinfo" if found else "ibv_devices"
    data = ports.data(found) if found else {"devices": names}
    return Content(kind, facts, ports.findings(found or software) + tuple(findings), data)


def _number(text: str, pattern: str) -> float:
    match = re.match(pattern, text)
    return float(match[1]) if match else 0


def _small_mtu(device: str, mtu: str) -> Finding:
    return Finding(
        "mtu-small",
        WARNING,
        f"{device} uses an MTU of {mtu} bytes",
        "RoCE takes the largest MTU that fits into the interface's: 1500 there makes it 1024 here",
        "set the interface and the switches to 4200 or 9000; only an administrator can",
    )

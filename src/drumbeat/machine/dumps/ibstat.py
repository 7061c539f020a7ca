"""ibstat and ibstatus: state, rate and link type of every port."""

from __future__ import annotations

import re
from typing import Dict, List, Optional

from drumbeat.machine.dumps import ports
from drumbeat.machine.dumps.content import Content

_CA = re.compile(r"^\s*CA '([\w-]+)'")
_PORT = re.compile(r"^\s*Port (\d+):")
_STATUS = re.compile(r"^\s*Infiniband device '([\w-]+)' port (\d+) status:")  # ibstatus
_STATUS_FIELD = re.compile(r"^\s*(state|phys state|rate|link_layer):\s*(?:\d+: )?(.*?)\s*$")
_NAMES = {"state": "State", "phys state": "Physical state", "rate": "Rate", "link_layer": "Link layer"}
_FIELD = re.compile(r"^\s*(State|Physical state|Rate|Link layer|SM lid|Base lid): *(.*?)\s*$")


def read(text: str) -> Optional[Content]:
    found: List[ports.Port] = []
    device, number, kind = "", 0, "ibstat"
    fields: Dict[str, str] = {}

    def close() -> None:
        if device and number and fields.get("State"):
            found.append(_port(device, number, fields))

    for line in text.splitlines():
        if match := _CA.match(line):
            close()
            device, number, fields = match[1], 0, {}
        elif match := _PORT.match(line):
            close()
            number, fields = int(match[1]), {}
        elif match := _STATUS.match(line):
            close()
            device, number, fields, kind = match[1], int(match[2]), {}, "ibstatus"
        elif match := _FIELD.match(line):
            fields[match[1]] = match[2]
        elif match := _STATUS_FIELD.match(line):
            fields[_NAMES[match[1]]] = match[2]
    if text.rstrip().rpartition("\n")[2].lstrip().lower().startswith("rate:"):
        fields.pop("Rate", None)  # 40 may be the start of 400
    close()
    if not found:
        return None
    return Content(kind, tuple(port.words for port in found), ports.findings(found), ports.data(found))


def _port(device: str, number: int, fields: Dict[str, str]) -> ports.Port:
    rate = re.match(r"\d+(?:\.\d+)?", fields.get("Rate", ""))
    state = fields["State"].upper()
    return ports.Port(
        device,
        number,
        "INIT" if state.startswith("INIT") else state,
        fields.get("Physical state", ""),
        fields.get("Link layer", ""),
        float(rate[0]) if rate else None,
    )

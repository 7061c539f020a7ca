"""`ip a`: which interfaces could carry a job, which are down, which belong to this host alone."""

from __future__ import annotations

import re
from typing import List, Optional

from drumbeat.findings.model import WARNING, Finding
from drumbeat.machine.dumps.content import Content

_LINK = re.compile(
    r"^\d+: ([\w.@:-]+?)(?:@[\w.-]+)?: <([A-Z0-9_,-]*)>(?: mtu (\d+))?.*?(?: state (\w+))?", re.MULTILINE
)
_ADDRESS = re.compile(r"^\s*inet (\d{1,3}(?:\.\d{1,3}){3})(?:/(\d+))?", re.MULTILINE)
_HOST_ONLY = re.compile(r"(?:docker|veth|virbr|br-|cni|flannel|cali|podman|lo$|tun|tailscale)")


def read(text: str) -> Optional[Content]:
    links = list(_LINK.finditer(text))
    if not links:
        return None
    facts: List[str] = []
    findings: List[Finding] = []
    usable: List[str] = []
    for number, link in enumerate(links):
        body = text[link.end() : links[number + 1].start() if number + 1 < len(links) else len(text)]
        line_end = body.find("\n")
        state = re.search(r" state (\w+)", text[link.start() : link.end() + max(line_end, 0)])
        name, flags = link[1], link[2].split(",")
        addresses = [match[1] for match in _ADDRESS.finditer(body)]
        carrier = "LOWER_UP" in flags or (state is not None and state[1] == "UP")
        kind = "InfiniBand" if "link/infiniband" in body else ""
        about = ["up" if carrier else "down", kind, f"mtu {link[3]}" if link[3] else "", ", ".join(addresses)]
        facts.append(f"{name}: {', '.join(part for part in about if part)}")
        if _HOST_ONLY.match(name):
            continue
        if carrier and addresses:
            usable.append(name)
        elif addresses and not carrier:
            findings.append(
                Finding(
                    "interface-down",
                    WARNING,
                    f"{name} has an address but no link",
                    "no cable, or the other side is off",
                    f"leave {name} out of NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
                )
            )
    if usable:
        facts.append(f"could carry a job: {', '.join(usable)}")
    return Content("ip addr", tuple(facts), tuple(findings), {"usable": usable})

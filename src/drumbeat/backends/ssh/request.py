"""What each host is asked to start, once all of them have answered."""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
from typing import Any, Dict, List, Mapping, Protocol, Sequence

from drumbeat.backends.contract import Handle
from drumbeat.base.order import Order, dump_order

SILENCE = 120.0  # seconds without a word from the desk, after which an attached run ends
BEAT_EVERY = 5.0  # seconds between two words of the desk


class Answered(Protocol):
    """A host that has answered: session.Session."""

    host: str

    def reply(self, name: str) -> Any: ...


def key_of(order: Order) -> str:
    """The run's id in the letters that a handle may have."""
    return hashlib.sha256(order.run_id.encode()).hexdigest()[:12]


def handle_of(order: Order) -> str:
    return str(Handle("ssh", order.hosts[0], key_of(order)))


def node_requests(
    order: Order, hosts: Sequence[Answered], token: str, environ: Mapping[str, str], detach: bool
) -> List[Dict[str, Any]]:
    """One for each host, in the order of nodes. The order is complete now: it says where the lead is reached."""
    whole = dump_order(dataclasses.replace(order, master=master_of(order, hosts[0])))
    passed = {name: environ[name] for name in order.passed if name in environ}
    about = {"do": "node", "key": key_of(order), "handle": handle_of(order), "detach": detach, "silence": SILENCE}
    common = {**about, "order": whole, "token": token, "env": passed}
    return [{**common, "node": node} for node in range(len(hosts))]


def master_of(order: Order, lead: Answered) -> str:
    """Where the other hosts reach the lead: as the user says; else the address by which we reached it, which is its own;
    else, where that is the loopback, what it calls itself."""
    if order.master and order.master != order.hosts[0]:
        return order.master
    words = str(lead.reply("connection") or "").split()
    try:
        address = ipaddress.ip_address(words[2]) if len(words) == 4 else None
    except ValueError:
        address = None
    if address is not None and not address.is_loopback and not address.is_link_local:
        return str(address)
    return str(lead.reply("host") or lead.host)

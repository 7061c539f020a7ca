"""Bytes that the ranks of this node have sent each other so far, per TCP connection, from the kernel's own counters. If ranks
may use other means (a device, shared memory), these bytes say nothing, and the row says why."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import replace
from typing import Container, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.base import proc
from drumbeat.base.proc import Ports
from drumbeat.inspector.record import SHARED, Row
from drumbeat.inspector.tree import Snapshot, above
from drumbeat.machine.host import netlink, netlink_values

_SOCK_DIAG, _BY_FAMILY, _TCP_INFO = 4, 20, 2  # netlink's numbers
_CONNECTED = ~(1 << 6 | 1 << 7 | 1 << 10) & 0xFFFFFFFF  # all states but TIME-WAIT, CLOSE and LISTEN
_SHOW_PEER, _UNIX_PEER = 4, 2
_TO_CONNECT = 64  # bytes of each connection for its ends to identify each other; gloo needs 8
_MOST_ENDS = 8  # connections that leave this node, reported to the lead
# Devices that any program may have open. Through all others (a GPU, an RDMA port) data may pass unseen.
_PLAIN = ("null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx", "console", "shm", "mqueue", "fuse", "log")


def tcp_sockets(among: Optional[Container[int]] = None) -> Dict[str, Tuple[int, int]]:
    """Return by inode, for each TCP connection of this network namespace, or for those `among` these inodes, the bytes it has
    transferred and the packets in flight; empty if the kernel does not say. Data waiting at a receiver that does not read is not
    in flight."""
    found = {}
    with suppress(OSError, struct.error):
        for family in (socket.AF_INET, socket.AF_INET6):
            asked = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), _CONNECTED)
            for message in netlink(_SOCK_DIAG, _BY_FAMILY, asked):
                (inode,) = struct.unpack_from("=I", message, 68)
                if among is not None and inode not in among:
                    continue
                about = netlink_values(message, 72).get(_TCP_INFO, b"")
                if len(about) >= 136:
                    (under_way,) = struct.unpack_from("=I", about, 24)
                    found[str(inode)] = sum(struct.unpack_from("=QQ", about, 120)), under_way
    return found


def unix_peers() -> Dict[str, str]:
    """Return the inode of the other end of each connected unix socket, by inode."""
    found = {}
    with suppress(OSError, struct.error):
        for message in netlink(
            _SOCK_DIAG, _BY_FAMILY, struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, ~0 & 0xFFFFFFFF, 0, 4, 0, 0)
        ):
            peer = netlink_values(message, 16).get(_UNIX_PEER, b"")
            if len(peer) == 4:
                found[str(struct.unpack_from("=I", message, 4)[0])] = str(struct.unpack("=I", peer)[0])
    return found


def with_exchange(rows: Sequence[Row], ports: Mapping[int, Optional[int]], seen: Snapshot) -> List[Row]:
    """Add to each row the bytes that it and its helpers have exchanged. `ports`: the port at which each row's process meets
    the others."""
    pids = {row.pid for row in rows}
    owned: Dict[int, List[int]] = {pid: [] for pid in pids}
    for pid in seen.processes:
        owner = next((each for each in (pid, *above(pid, seen.parents)) if each in pids), None)
        if owner is not None:
            owned[owner].append(pid)
    held = {
        pid: {inode: link for one in tree for inode, link in (seen.sockets(one) or {}).items() if link[1]}
        for pid, tree in owned.items()
    }
    holders: Dict[Ports, Set[int]] = {}
    for pid, links in held.items():
        for link in links.values():
            holders.setdefault(link, set()).add(pid)
    counted, hidden, here_ns = tcp_sockets(), _hidden(rows, owned, seen), proc.network(os.getpid())
    found = []
    for row in rows:
        met = sent = 0
        leaving: List[Tuple[int, Ports]] = []
        for inode, (here, there) in held[row.pid].items():
            whole = counted.get(inode, (0, 0))[0]
            carried, others = max(0, whole - _TO_CONNECT), holders.get((there, here), set())
            if ports[row.pid] in (here, there):
                met += whole
            elif others - {row.pid}:
                sent += carried
            elif not others:
                leaving.append((carried, (here, there)))
        why, unseen = hidden.get(row.pid, ""), counted.keys().isdisjoint(held[row.pid])
        if not why and row.joined and unseen and proc.network(row.pid) not in (here_ns, None):
            why = "sockets of another network namespace"
        elif not why and row.joined and unseen and not counted:  # otherwise it has just closed them
            why = "this kernel does not count them"
        ends = tuple(link for _, link in sorted(leaving, reverse=True)[:_MOST_ENDS])
        out = sum(carried for carried, _ in leaving)
        found.append(replace(row, met=met, sent=sent, out=out, ends=ends, hidden="MPI" if row.alone is None else why))
    return found


def _hidden(rows: Sequence[Row], owned: Mapping[int, Sequence[int]], seen: Snapshot) -> Dict[int, str]:
    """Name the means by which each rank may exchange data unseen: a device, or memory or a unix socket shared with another
    rank."""
    found: Dict[int, str] = {}
    opened = {
        row.pid: [name for one in owned[row.pid] for name in seen.processes[one].open_files or ()] for row in rows
    }
    shared = {row.pid: proc.shared_memory(row.pid) for row in rows}
    locals_ = {pid: {name[8:-1] for name in names if name.startswith("socket:[")} for pid, names in opened.items()}
    peers = unix_peers()
    for pid, names in opened.items():
        others = [each for each in opened if each != pid]
        devices = (name for name in names if name.startswith("/dev/") and not name[5:].startswith(_PLAIN))
        device = next((name for name in devices if os.path.basename(name)), "")
        there = {peers[inode] for inode in locals_[pid] if inode in peers}
        if device:
            found[pid] = f"they use {device}"
        elif any(shared[pid] & shared[each] for each in others):
            found[pid] = SHARED
        elif any((there - locals_[pid]) & locals_[each] - locals_[pid] for each in others):
            found[pid] = "they are connected by local sockets"
    return found

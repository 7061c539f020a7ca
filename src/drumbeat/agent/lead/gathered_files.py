"""At the end, where nodes share no storage: the lead takes the files that its members still send."""

from __future__ import annotations

import selectors
import socket
import time
from typing import Mapping

from drumbeat.agent.lead.connections import Connection
from drumbeat.agent.wire.files import take
from drumbeat.agent.wire.messages import FilePart, WireError
from drumbeat.runfolder.layout import RunFolder


def gather_files(
    connections: Mapping[socket.socket, Connection], folder: RunFolder, most: float, silence: float
) -> None:
    """For a child: until all members have gone, nothing has come for `silence` seconds, or `most` seconds are over."""
    deadline = time.monotonic() + most
    quiet = time.monotonic() + silence
    with selectors.DefaultSelector() as selector:
        for sock in connections:
            selector.register(sock, selectors.EVENT_READ, connections[sock])
        while selector.get_map() and time.monotonic() < min(deadline, quiet):
            for key, _ in selector.select(0.1):
                quiet = time.monotonic() + silence
                if not _take(key.data, folder):
                    selector.unregister(key.fileobj)
            for connection in connections.values():
                connection.channel.flush()


def _take(connection: Connection, folder: RunFolder) -> bool:
    """Write the files that have come by one connection; False when it is closed."""
    try:
        for message in connection.channel.receive():
            if isinstance(message, FilePart) and connection.member is not None:
                take(folder.node(connection.member), message)
    except WireError:
        connection.channel.close()
    return not connection.channel.closed

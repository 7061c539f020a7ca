"""Nodes that share no storage: their files reach the lead over the muster, whole, however many there are."""

import os
import selectors
import socket
import time

from drumbeat.agent.wire.channel import Channel
from drumbeat.agent.wire.messages import FilePart, RankStarted, files_of, take
from drumbeat.runfolder.layout import NodeFolder

NODES, FILES, SIZE = 8, 6, 1 << 20


def test_6_files_of_a_mebibyte_from_each_of_8_nodes(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        children = [member(server.getsockname(), tmp_path, node) for node in range(NODES)]
        channels = [Channel(server.accept()[0], "token", lead=True) for _ in range(NODES)]
    gathered = gather(channels, tmp_path / "lead")
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert gathered == NODES * FILES * 4
    for node in range(NODES):
        for number in range(FILES):
            data = (tmp_path / "lead" / str(node) / "attempt-0" / f"rank-{number}.out").read_bytes()
            assert len(data) == SIZE and data == bytes([65 + number]) * SIZE


def member(address, tmp_path, node):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        folder = tmp_path / f"member-{node}" / "attempt-0"
        folder.mkdir(parents=True)
        for number in range(FILES):
            (folder / f"rank-{number}.out").write_bytes(bytes([65 + number]) * SIZE)
        channel = Channel(socket.create_connection(address), "token", lead=False)
        while not channel.opened:
            channel.receive()
        channel.send(RankStarted(node))  # says which node this is
        for part in files_of(NodeFolder(str(tmp_path / f"member-{node}"), node)):
            channel.send(part)  # all at once, as fast as it goes: what the socket does not take waits here
        while channel.wants_write:
            channel.flush()
            time.sleep(0.001)
        code = 0
    finally:
        os._exit(code)


def gather(channels, place):
    nodes, count = {}, 0
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel.sock, selectors.EVENT_READ, channel)
        while selector.get_map():
            for key, _ in selector.select(5):
                for message in key.data.receive():
                    if isinstance(message, RankStarted):
                        nodes[id(key.data)] = message.pid
                    elif isinstance(message, FilePart):
                        node = nodes[id(key.data)]
                        take(NodeFolder(str(place / str(node)), node), message)
                        count += 1
                if key.data.closed:
                    selector.unregister(key.fileobj)
    return count

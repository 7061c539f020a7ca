"""A real run comes together while strangers knock at its lead. `make faults` sends 100,000 of them, `make test` 2,000."""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from drumbeat.agent.wire.meet import free_port
from tests.faults.strangers import own_address
from tests.runs.test_nobody_left import tree

KNOCKS = int(os.environ.get("DRUMBEAT_KNOCKS", "2000"))
HELD = 250  # connections that are kept open at a time: some silent, some with garbage


class Flood:
    def __init__(self, place):
        self.place, self.knocks, self.stop = place, 0, threading.Event()
        self.thread = threading.Thread(target=self._knock, daemon=True)
        self.thread.start()

    def _knock(self):
        held = []
        while not self.stop.is_set():
            try:
                sock = socket.create_connection(self.place, timeout=5)
                if self.knocks % 3 == 0:
                    sock.sendall(b'{"proof":"\\u00e9","challenge":7}\n')
                elif self.knocks % 3 == 1:
                    sock.sendall(os.urandom(64))
                self.knocks += 1
                held.append(sock)
            except OSError:  # not up yet, or over
                self.stop.wait(0.01)
            if len(held) > HELD:
                held.pop(0).close()
            if self.knocks > KNOCKS:
                self.stop.wait(0.005)
        for sock in held:
            sock.close()


def cost_of(pid):
    """Seconds of CPU time and kB of memory at its peak."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.timeout(1800)
def test_a_run_starts_while_strangers_knock(drumbeat):
    address = own_address()
    port = free_port(address, ())
    words = ("run", "--nodes", 2, "--master", f"{address}:{port}", "--node-rank")
    command = ("--", sys.executable, "-c", "print('up')")
    lead = drumbeat.start(*words, 0, *command)
    begin, flood = time.monotonic(), Flood((address, port))
    try:
        while flood.knocks < KNOCKS:
            assert lead.poll() is None, lead.stdout.read()
            flood.stop.wait(0.05)
        used, peak = cost_of(tree(drumbeat.run_folder().name)["agent"][0])
        second = drumbeat.start(*words, 1, *command)  # the strangers go on
        outputs = [process.communicate(timeout=300)[0] for process in (lead, second)]
    finally:
        flood.stop.set()
        flood.thread.join(30)
    assert [lead.returncode, second.returncode] == [0, 0], outputs
    assert "up" in outputs[0] and "up" in outputs[1] and "Traceback" not in "".join(outputs), outputs
    seconds = time.monotonic() - begin
    lead_used = f"{used:.1f} s of CPU, {peak >> 10} MiB at most"
    print(f"{flood.knocks} connections of strangers in {seconds:.0f} s: the lead used {lead_used}")
    assert peak < 300 << 10

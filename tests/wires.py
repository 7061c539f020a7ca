"""Machines on one machine: network namespaces with their own host names, on two networks, each with a switch between."""

import os
import shutil
import subprocess

import pytest

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))),
    reason="network namespaces need root, iproute2 and util-linux (apt install iproute2 util-linux)",
)

# A script that knows better than its environment: it talks over the interface that is named to it, so many times.
TALK = """
import os, sys
os.environ["GLOO_SOCKET_IFNAME"] = sys.argv[1]  # as a script does that knows better
import torch, torch.distributed as dist
dist.init_process_group("gloo")
data = torch.ones(1 << 20)
for step in range(int(sys.argv[2])):
    dist.all_reduce(data)
dist.destroy_process_group()
"""

NETWORKS = {"fast0": "10.92.1", "mgmt0": "10.92.2"}


class Machines:
    def __init__(self, count):
        self.switch = f"db{os.getpid()}s"
        self.names = [f"db{os.getpid()}n{number}" for number in range(count)]
        try:
            for name in (self.switch, *self.names):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            for interface, network in NETWORKS.items():
                ip("-n", self.switch, "link", "add", f"b-{interface}", "type", "bridge")
                ip("-n", self.switch, "link", "set", f"b-{interface}", "up")
                for number, name in enumerate(self.names):
                    port = f"{interface}-{number}"
                    ip(
                        "link",
                        "add",
                        interface,
                        "netns",
                        name,
                        "type",
                        "veth",
                        "peer",
                        "name",
                        port,
                        "netns",
                        self.switch,
                    )
                    ip("-n", self.switch, "link", "set", port, "master", f"b-{interface}", "up")
                    ip("-n", name, "addr", "add", f"{network}.{number + 1}/24", "dev", interface)
                    ip("-n", name, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"no network namespaces here: {error.stderr.decode()}")

    def prefix(self, number):
        """Before a command that is to run on machine `number`."""
        become = f'hostname n{number}; exec "$@"'
        return ("ip", "netns", "exec", self.names[number], "unshare", "--uts", "sh", "-c", become, "sh")

    def close(self):
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)

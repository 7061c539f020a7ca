"""Machines on one machine: network namespaces with their own host names, on two networks, each with a switch between."""

import os
import shutil
import subprocess

import pytest

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))),
    reason="network namespaces need root, iproute2 and util-linux (apt install iproute2 util-linux)",
)

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

    def limit(self, number, interface, rate):
        """A link that sends no faster than this: 100mbit."""
        words = ("qdisc", "add", "dev", interface, "root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
        subprocess.run(["tc", "-n", self.names[number], *words], check=True, capture_output=True)

    def cut(self, number, other, interface):
        """Machine `number` gets nothing more from the other; what they send is lost without a word."""
        address = f"{NETWORKS[interface]}.{other + 1}"
        ip("-n", self.names[number], "route", "add", "blackhole", f"{address}/32")

    def close(self):
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)

"""A GPU vendor that drumbeat does not have: what a third one has to write, and nothing more.

Its driver shows one folder per GPU, /sys/class/toy/toyN, with the files `pci`, `memory`, `busy`, `errors` and `users`.
"""

import sys
from dataclasses import replace

from drumbeat.findings.model import OK, Finding
from drumbeat.machine.model import Gpu, GpuHealth, GpuSample
from drumbeat.machine.parse import integer, line, natural, number
from drumbeat.machine.vendors import VENDORS
from drumbeat.machine.vendors.contract import ContainerFlags, GpuEvent, Vendor, place

BASE = "/sys/class/toy"


class Toy(Vendor):
    name, title, pci_id = "toy", "Toy", "0x70e0"
    prefixes = ("TOY_",)
    visibility = ("TOY_VISIBLE_DEVICES",)
    collectives, net_plugin = "tccl", "libtccl-net.so"
    needs_iommu_off = True
    caches = (("TOY_CACHE", "toy", "kernels of toys are compiled on each node"),)
    pod_resource = "toys.example.org/gpu"
    kernel_mark = "toydrm"

    def detect(self, host):
        folders = sorted(host.list(BASE), key=natural)
        return [
            Gpu(index, self.name, "Toy T1", line(host, f"{BASE}/{folder}/pci"), uuid=f"GPU-toy{index}",
                memory_bytes=number(host, f"{BASE}/{folder}/memory"), device=f"/dev/toy{index}")
            for index, folder in enumerate(folders)
        ]  # fmt: skip

    def versions(self, host):
        return {"toy-driver": line(host, "/sys/module/toydrm/version")}

    def health(self, host, gpus):
        errors = [number(host, f"{BASE}/toy{gpu.index}/errors") for gpu in gpus]
        return [replace(gpu, health=GpuHealth(True, count)) for gpu, count in zip(gpus, errors)]

    def sampler(self, host, gpus):
        return lambda: [GpuSample(gpu.index, busy=number(host, f"{BASE}/toy{gpu.index}/busy")) for gpu in gpus]

    def users(self, host, gpus):
        return {
            integer(word): (gpu.index,)
            for gpu in gpus
            for word in (host.read(f"{BASE}/toy{gpu.index}/users") or "").split()
        }

    def container_flags(self, runtime):
        if runtime in ("docker", "podman"):
            return ContainerFlags("--device /dev/toys", "toys", "/dev/toy*")
        return ContainerFlags("--toy", "--toy: the host's toys")

    def software(self, versions):
        return [Finding("toy-driver", OK, f"Toy driver {versions.get('toy-driver')}")]

    def absence(self, versions):
        return "no toy"

    def kernel_event(self, text):
        _, _, words = text.partition("toydrm ")
        if not words:
            return None
        address, _, what = words.partition(": ")
        return GpuEvent(f"toydrm {words}", place(address), "gpu-lost" if "lost" in what else "", "is lost")


if __name__ == "__main__":  # drumbeat as a build with toys would run
    VENDORS.append(Toy())
    from drumbeat.cli import main

    sys.exit(main(sys.argv[1:]))

"""Intel GPUs: found on the bus, without those integrated in a CPU. Nothing else is known about them."""

from __future__ import annotations

from typing import List

from drumbeat.machine.model import Gpu, Host
from drumbeat.machine.vendors.contract import Vendor, on_bus


class Intel(Vendor):
    name, title, pci_id = "intel", "Intel", "0x8086"

    def detect(self, host: Host) -> List[Gpu]:
        """Find Intel GPUs; one integrated in a CPU is at a fixed place of its root complex, where a card never is."""
        found = [address for address, vendor in on_bus(host).items() if vendor == self.pci_id]
        return [
            Gpu(index, self.name, pci=address, integrated=address.endswith(":00:02.0"))
            for index, address in enumerate(found)
        ]

"""Intel GPUs: found on the bus, and told apart from those inside a CPU. Nothing else is known of them."""

from __future__ import annotations

from typing import List

from drumbeat.machine.host_protocol import Host
from drumbeat.machine.model import Gpu
from drumbeat.machine.vendors.contract import Vendor, on_bus


class Intel(Vendor):
    name, title, pci_id = "intel", "Intel", "0x8086"

    def detect(self, host: Host) -> List[Gpu]:
        """One inside a CPU is at a fixed place of its root complex, where a card never is."""
        found = [address for address, vendor in on_bus(host).items() if vendor == self.pci_id]
        return [
            Gpu(index, self.name, pci=address, integrated=address.endswith(":00:02.0"))
            for index, address in enumerate(found)
        ]

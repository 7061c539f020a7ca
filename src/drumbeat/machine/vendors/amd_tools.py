"""What rocm-smi and amd-smi say about AMD GPUs, as JSON: by PCI address, since the two count differently from HIP."""

from __future__ import annotations

import json
from typing import Any, Dict, Iterable, Optional

from drumbeat.machine.model import Gpu
from drumbeat.machine.parse import integer, pci_address

ROCM_SMI = ("rocm-smi", "--showproductname", "--showbus", "--showmeminfo", "vram", "--json")
AMD_SMI = ("amd-smi", "static", "--bus", "--asic", "--vram", "--json")
_UNITS = {"MB": 1 << 20, "GB": 1 << 30}


def parse_rocm_smi(text: str) -> Dict[Optional[str], Gpu]:
    """`{"card0": {"PCI Bus": "0000:C1:00.0", ...}}`; keys changed their spelling over the years."""
    cards = _json(text)
    found: Dict[Optional[str], Gpu] = {}
    for card in _objects(cards.values() if isinstance(cards, dict) else ()):
        about = {str(key).lower(): str(value) for key, value in card.items()}
        pci = pci_address(about.get("pci bus"))
        if pci:
            name = about.get("card series") or about.get("card model")
            found[pci] = _gpu(len(found), name, pci, integer(about.get("vram total memory (b)")))
    return found


def parse_amd_smi(text: str) -> Dict[Optional[str], Gpu]:
    """A list, one object a GPU, with `bus`, `asic` and `vram` in it; since ROCm 7 below `gpu_data`."""
    data = _json(text)
    if isinstance(data, dict):
        data = data.get("gpu_data")
    found: Dict[Optional[str], Gpu] = {}
    for card in _objects(data if isinstance(data, list) else ()):
        pci = pci_address(str(_inside(card, "bus", "bdf")))
        if pci:
            found[pci] = _gpu(
                len(found), _inside(card, "asic", "market_name"), pci, _size(_inside(card, "vram", "size"))
            )
    return found


def _inside(card: Dict[str, Any], part: str, key: str) -> Any:
    value = card.get(part)
    return value.get(key) if isinstance(value, dict) else None


def _gpu(index: int, name: Any, pci: str, memory: Optional[int]) -> Gpu:
    known = name if isinstance(name, str) and name not in ("N/A", "") else None
    return Gpu(index, "amd", known, pci, memory_bytes=memory)


def _size(value: Any) -> Optional[int]:
    """`{"value": 196592, "unit": "MB"}`, or the same as a text."""
    words = [str(value.get("value")), str(value.get("unit"))] if isinstance(value, dict) else str(value).split()
    amount = integer(words[0]) if len(words) == 2 else None
    return amount * _UNITS[words[1]] if amount and words[1] in _UNITS else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _objects(values: Iterable[Any]) -> Iterable[Dict[str, Any]]:
    return (value for value in values if isinstance(value, dict))

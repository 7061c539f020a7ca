"""The amdgpu driver's `gpu_metrics` file: energy, what slows the GPU down, and bytes over xGMI. Pure.

A table in binary form whose layout depends on its revision (Linux: drivers/gpu/drm/amd/include/kgd_pp_interface.h). MI200 has
revision 1.3, MI300 1.4 to 1.8 depending on the driver. Of any other revision nothing is known.
"""

from __future__ import annotations

import struct
from typing import Dict, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass

_JOULES = 2.0**-16  # per unit of the energy counter
_LINKS = 8
# Revision -> where things stand, in bytes: energy (u64), throttle bits (u64) or residency counters (u32 each), xGMI (u64 each).
_ENERGY = {1: 24, 2: 24, 3: 24, 4: 24, 5: 88, 6: 16, 7: 24, 8: 24}
_THROTTLE_BITS = {3: 112}
_RESIDENCIES = {6: 36, 7: 44, 8: 44}
_XGMI = {4: 104, 5: 176, 6: 128, 7: 136, 8: 136}
_NAMES = ("temperature (hardware)", "power limit", "temperature", "voltage regulator temperature", "memory temperature")
_KINDS = ("power limit", "current limit", "temperature", "other")  # 16 throttle bits each
_UNKNOWN_64 = (1 << 64) - 1  # what the driver fills in where it has nothing
_UNKNOWN_32 = (1 << 32) - 1


@dataclass(frozen=True)
class AmdMetrics:
    energy: Optional[float] = None  # joules
    throttle: Optional[Tuple[str, ...]] = None  # what slows it down now, where the table says so itself
    residencies: Optional[Dict[str, int]] = None  # counters that grow while something slows it down
    link_received: Optional[int] = None  # bytes
    link_sent: Optional[int] = None


def parse_gpu_metrics(data: Optional[bytes]) -> AmdMetrics:
    if not data or len(data) < 4:
        return AmdMetrics()
    size, major, minor = struct.unpack_from("<HBB", data)
    if major != 1 or size > len(data):
        return AmdMetrics()
    energy = _number(data, _ENERGY.get(minor), "<Q", _UNKNOWN_64)
    bits = _number(data, _THROTTLE_BITS.get(minor), "<Q", _UNKNOWN_64)
    throttle = None
    if bits is not None:
        throttle = tuple(kind for place, kind in enumerate(_KINDS) if bits >> (16 * place) & 0xFFFF)
    at = _XGMI.get(minor)
    return AmdMetrics(
        energy=None if energy is None else energy * _JOULES,
        throttle=throttle,
        residencies=_residencies(data, _RESIDENCIES.get(minor)),
        link_received=_links(data, at),
        link_sent=_links(data, None if at is None else at + 8 * _LINKS),
    )


def slowed_by(before: Optional[Dict[str, int]], after: Optional[Dict[str, int]]) -> Optional[Tuple[str, ...]]:
    """Throttlers whose counters grew between two readings; None where there are not two."""
    if before is None or after is None:
        return None
    return tuple(name for name, value in after.items() if value > before.get(name, value))


def _number(data: bytes, at: Optional[int], form: str, unknown: int) -> Optional[int]:
    if at is None or at + struct.calcsize(form) > len(data):
        return None
    value = int(struct.unpack_from(form, data, at)[0])
    return None if value == unknown else value


def _residencies(data: bytes, at: Optional[int]) -> Optional[Dict[str, int]]:
    if at is None:
        return None
    found = {name: _number(data, at + 4 * place, "<I", _UNKNOWN_32) for place, name in enumerate(_NAMES)}
    known = {name: value for name, value in found.items() if value is not None}
    return known or None


def _links(data: bytes, at: Optional[int]) -> Optional[int]:
    """The table counts in kilobytes, per link."""
    if at is None:
        return None
    values = [_number(data, at + 8 * link, "<Q", _UNKNOWN_64) for link in range(_LINKS)]
    known = [value for value in values if value is not None]
    return sum(known) * 1024 if known else None

"""NVIDIA GPUs: nvidia-smi where it is, /proc/driver/nvidia where it is not, the PCI bus as the last word."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from typing import Dict, List, Optional, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.model import Gpu
from drumbeat.machine.parse import integer, line, natural, pci_address

_PROC = "/proc/driver/nvidia/gpus"
_FIELDS = ("index", "name", "uuid", "pci.bus_id", "memory.total", "driver_version", "compute_cap")


def read(host: Host) -> List[Gpu]:
    if driver_version(host) is None and not host.list(_PROC) and host.resolve("/dev/nvidiactl") is None:
        return []  # asking nvidia-smi without a driver takes half a second
    return _from_tool(host) or _from_proc(host)


def _from_tool(host: Host) -> List[Gpu]:
    for fields in (_FIELDS, _FIELDS[:-1]):  # compute_cap is unknown to drivers before 470
        text = host.command(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
        if text:
            users = _users(host)
            minors = _minors(host)
            return [_with_users(_with_device(gpu, minors), users) for gpu in parse_query(text)]
    return []


def parse_query(text: str) -> List[Gpu]:
    """Rows of `--query-gpu` in the order of _FIELDS; `[N/A]` and its relatives are unknown."""
    gpus: List[Gpu] = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        cells = [_known(cell) for cell in row] + [None] * len(_FIELDS)
        index = integer(cells[0])
        if index is None:
            continue  # a warning line of the driver, not a GPU
        memory = integer(cells[4])
        capability = cells[6]
        gpus.append(
            Gpu(
                index=index,
                vendor="nvidia",
                name=cells[1],
                pci=pci_address(cells[3]),
                uuid=cells[2],
                memory_bytes=memory << 20 if memory else None,
                arch=f"sm_{capability.replace('.', '')}" if capability else None,
                driver=cells[5],
            )
        )
    return gpus


def _known(cell: str) -> Optional[str]:
    cell = cell.strip()
    return None if not cell or cell.startswith("[") or cell in ("N/A", "Unknown") else cell


def _users(host: Host) -> Optional[Dict[str, Tuple[int, ...]]]:
    text = host.command(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"])
    if text is None:
        return None
    found: Dict[str, Tuple[int, ...]] = {}
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        pid = integer(row[1]) if len(row) == 2 else None
        if pid is not None:
            found[row[0]] = (*found.get(row[0], ()), pid)
    return found


def _with_users(gpu: Gpu, users: Optional[Dict[str, Tuple[int, ...]]]) -> Gpu:
    return gpu if users is None or gpu.uuid is None else dataclasses.replace(gpu, pids=users.get(gpu.uuid, ()))


def _minors(host: Host) -> Dict[str, str]:
    """PCI address -> number of the device file; it need not be nvidia-smi's index."""
    found: Dict[str, str] = {}
    for name in host.list(_PROC):
        minor = _information(host, name).get("Device Minor")
        address = pci_address(name)
        if minor and address:
            found[address] = minor
    return found


def _with_device(gpu: Gpu, minors: Dict[str, str]) -> Gpu:
    minor = minors.get(gpu.pci or "")
    return dataclasses.replace(gpu, device=f"/dev/nvidia{minor}") if minor else gpu


def _information(host: Host, name: str) -> Dict[str, Optional[str]]:
    about: Dict[str, Optional[str]] = {}
    for entry in (host.read(f"{_PROC}/{name}/information") or "").splitlines():
        key, colon, value = entry.partition(":")
        if colon:
            about[key.strip()] = _known(value)
    return about


def _from_proc(host: Host) -> List[Gpu]:
    """This folder names all GPUs of the machine; ours are those whose device file is in this container."""
    gpus: List[Gpu] = []
    device_files = host.list("/dev")
    for name in sorted(host.list(_PROC), key=natural):
        about = _information(host, name)
        uuid = about.get("GPU UUID")
        if device_files and f"nvidia{about.get('Device Minor')}" not in device_files:
            continue
        gpus.append(
            Gpu(
                index=len(gpus),
                vendor="nvidia",
                name=about.get("Model"),
                pci=pci_address(about.get("Bus Location")) or pci_address(name),
                uuid=uuid if uuid and "?" not in uuid else None,
                driver=driver_version(host),
                device=f"/dev/nvidia{about['Device Minor']}" if about.get("Device Minor") else None,
            )
        )
    return gpus


def driver_version(host: Host) -> Optional[str]:
    version = line(host, "/sys/module/nvidia/version")
    if version:
        return version
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)\s", host.read("/proc/driver/nvidia/version") or "")
    return found.group(1) if found else None


def cuda_version(host: Host) -> Optional[str]:
    """Of the toolkit on this machine or in this image; the version torch was built with is torch's to say."""
    for home in (host.environ.get("CUDA_HOME"), host.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        text = host.read(f"{home}/version.json") if home else None
        try:
            version = json.loads(text or "{}")["cuda"]["version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(version, str):
            return version
    named = host.environ.get("CUDA_VERSION", "")  # NVIDIA's images set it
    if re.fullmatch(r"\d+\.\d+(\.\d+)*", named):
        return named
    real = host.resolve("/usr/local/cuda") or ""
    folder = re.fullmatch(r"/usr/local/cuda-(\d+\.\d+)", real)
    return folder.group(1) if folder else _compiler_version(host)


def _compiler_version(host: Host) -> Optional[str]:
    for folder in ("/usr/local/cuda/bin", *host.environ.get("PATH", "").split(":")[:64]):
        if folder.startswith("/") and host.resolve(f"{folder}/nvcc"):
            found = re.search(r"release (\d+\.\d+)", host.command([f"{folder}/nvcc", "--version"]) or "")
            return found.group(1) if found else None
    return None


def driver_cuda(host: Host) -> Optional[str]:
    """The newest CUDA that the driver can run."""
    if driver_version(host) is None and host.resolve("/dev/nvidiactl") is None:
        return None
    text = host.command(["nvidia-smi", "--version"]) or ""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", text)
    return found.group(1) if found else None

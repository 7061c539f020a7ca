"""What GPU drivers write into the kernel's log: which lines count, whose GPU it was, and what the lead makes of it."""

import os
import time

import pytest

from drumbeat.agent.lead.attempt import hardware_behind
from drumbeat.agent.ranks.start import End
from drumbeat.agent.watchers.contract import Emit, Saw, Warn
from drumbeat.agent.watchers.kernel_log import GpuErrors, KernelLog, gpu_failure
from drumbeat.agent.wire.messages import Done, RankEnded
from drumbeat.findings.model import ERROR, LIKELY, WARNING, Finding
from drumbeat.inspector import kernel_log
from drumbeat.inspector.kernel_log import open_log
from drumbeat.machine.model import Gpu
from tests.agent.test_lead import kinds, mustered, told
from tests.conftest import wait_for

GPUS = (
    Gpu(0, "nvidia", pci="0000:4e:00.0", pci_path="pci0000:4a/0000:4a:02.0/0000:4e:00.0"),
    Gpu(1, "nvidia", pci="0000:ca:00.0"),
    Gpu(2, "amd", pci="0000:c1:00.0"),
    Gpu(3, "amd", pci="0000:66:00.0", integrated=True),
)

# The forms in which drivers are known to write: NVIDIA's documents and open kernel modules, amdgpu_ras.c, public logs.
BROKEN = [
    ("NVRM: Xid (PCI:0000:4e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "gpu-lost", 0),
    ("NVRM: Xid (PCI:0000:4e:00): 79, pid=1122, GPU has fallen off the bus.", "gpu-lost", 0),
    ("[ 1234.5] NVRM: Xid (PCI:0000:ca:00): 48, pid=812, name=python, An uncorrectable double bit error (DBE) has been "
     "detected on GPU in the framebuffer at partition 6, subpartition 0.", "gpu-ecc", 1),
    ("NVRM: Xid (PCI:0000:CA:00): 95, pid=812, name=python, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No", "gpu-ecc", 1),
    ("NVRM: Xid (PCI:0000:4e:00): 94, pid=812, name=python, Ch 00000008", "gpu-ecc", 0),
    ("NVRM: Xid (PCI:0000:4e:00): 64, pid=812, Row Remapper: Failed to remap", "gpu-ecc", 0),
    ("NVRM: Xid (PCI:0000:4e:00): 74, pid=812, NVLink: fatal error detected on link 6(0x0, 0x0, 0x10000)", "gpu-xid", 0),
    ("NVRM: Xid (PCI:0000:4e:00): 119, pid=812, name=python, Timeout after 6s of waiting for RPC response from GPU0 GSP! "
     "Expected function 76 (GSP_RM_CONTROL) (0x20800a4c 0x4).", "gpu-xid", 0),
    ("NVRM: Xid (PCI:0000:4e:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "gpu-xid", 0),
    ("NVRM: Xid (0000:4e:00): 62, 8c1d(3028) 00000000 00000000", "gpu-xid", 0),
    ("Nov 01 16:52:04 n1 kernel: amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!", "amdgpu-reset", 2),
    ("amdgpu 0000:c1:00.0: amdgpu: GPU reset(4) failed", "amdgpu-reset", 2),
    ("amdgpu 0000:c1:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc block", "gpu-ecc", 2),
    ("amdgpu 0000:c1:00.0: {3} socket: 0, die: 1, 1 new uncorrectable hardware errors detected in gfx block", "gpu-ecc", 2),
    ("nvidia 0000:4e:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)", "pcie-error", 0),
    ("pcieport 0000:4a:02.0: AER: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Data Link Layer", "pcie-error", 0),
]  # fmt: skip

HARMLESS = [
    "NVRM: Xid (PCI:0000:4e:00): 13, pid=812, name=python, Graphics SM Warp Exception on (GPC 0, TPC 1, SM 0)",
    "NVRM: Xid (PCI:0000:4e:00): 31, pid=79749, name=exe, Ch 0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC2 faulted",
    "NVRM: Xid (PCI:0000:4e:00): 43, pid=812, name=python, Ch 00000010",
    "NVRM: Xid (PCI:0000:4e:00): 45, pid=812, name=python, Ch 00000008",
    "NVRM: Xid (PCI:0000:4e:00): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.",
    "NVRM: Xid (PCI:0000:4e:00): 92, pid=812, High single-bit ECC error rate",
    "NVRM: Xid (PCI:0000:4e:00): 145, NVLINK: RLW Error, Link 3, Non-fatal",
    "NVRM: Xid (PCI:0000:4e:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    "NVRM: Xid (PCI:0000:4e:00): 790, pid=1",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
    "amdgpu 0000:c1:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc block",
    "amdgpu 0000:c1:00.0: amdgpu: no uncorrectable hardware errors detected in umc block",
    "amdgpu 0000:c1:00.0: amdgpu: 3 correctable hardware errors detected in gfx block",
    "amdgpu 0000:c1:00.0: amdgpu: 7 uncorrectable hardware errors detected in total in gfx block",
    "amdgpu 0000:c1:00.0: amdgpu: GPU reset succeeded, trying to resume",
    "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring sdma0 timeout, but soft recovered",
    "amdgpu 0000:c1:00.0: amdgpu: SMU is initialized successfully!",
    "nvidia 0000:4e:00.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
    "usb 1-1: reset high-speed USB device number 2 using xhci_hcd",
]

OTHERS = [  # right lines, of devices that are not ours
    "NVRM: Xid (PCI:0000:4f:00): 79, pid=1, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0001:4e:00): 48, pid=1, name=python",
    "amdgpu 0000:66:00.0: amdgpu: GPU reset begin!",  # part of the CPU
    "pcieport 0000:00:03.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
    "mlx5_core 0000:4b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
]


def on(watcher, text):
    return watcher.on(Saw("kernel", {"source": "/dev/kmsg", "text": text}), 1.0)


@pytest.mark.parametrize("text,code,index", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_gpu_is_named_with_its_node_once(text, code, index):
    watcher = GpuErrors(GPUS, 1, "n1", {})
    (action,) = on(watcher, text)
    finding = action.finding
    assert isinstance(action, Warn) and finding.code == code and (finding.node, finding.host) == (1, "n1")
    assert f"GPU {index} (" in finding.title and "node 1 (n1)" in finding.title, finding.title
    assert finding.evidence[0].text == text and "/dev/kmsg" in finding.seen[0]
    assert on(watcher, text) == []


@pytest.mark.parametrize("text", [*HARMLESS, *OTHERS])
def test_what_breaks_nothing_of_ours_is_not_told(text):
    assert on(GpuErrors(GPUS, 1, "n1", {}), text) == []
    assert gpu_failure(text) is None or text in OTHERS


def test_the_pid_of_an_xid_names_the_rank():
    watcher = GpuErrors(GPUS, 1, "n1", {812: 3, 79749: 5})
    (warned,) = on(watcher, HARMLESS[1])  # Xid 31 with pid=79749: the program's own fault
    assert (warned.finding.code, warned.finding.rank, warned.finding.node) == ("gpu-app-fault", 5, 1)
    assert warned.finding.title == "rank 5 on n1: GPU 0 stopped its work (Xid 31)" and on(watcher, HARMLESS[1]) == []
    assert on(watcher, HARMLESS[4]) == [], "another process"
    (broken,) = on(watcher, BROKEN[2][0])
    assert (broken.finding.code, broken.finding.rank) == ("gpu-ecc", 3)


def test_the_rank_that_a_driver_named_is_the_first_of_those_that_fail_alike():
    lead, _ = mustered()
    (warned,) = on(GpuErrors(GPUS, 1, "h1", {812: 3}), HARMLESS[0])
    lead.found(1, warned.finding)
    for rank, at in ((0, 5.0), (1, 5.1), (2, 5.2), (3, 5.3)):
        words = Finding(
            "illegal-memory-access", ERROR, "CUDA error: an illegal memory access", rank=rank, node=rank // 2
        )
        lead.rank_ended(rank // 2, RankEnded(0, End(rank, 1, None, at, finding=words)), at)
    lead.member_done(0, Done(0), 6.0)
    lead.member_done(1, Done(0), 6.0)
    failed = lead.history[-1].finding
    assert failed.rank == 3 and "Xid" in failed.evidence[-1].text


def test_where_no_gpu_is_known_any_counts():
    (action,) = on(GpuErrors((), 1, "n1", {}), OTHERS[0])
    assert action.finding.title == "a GPU (0000:4f:00) of node 1 (n1) fell off the bus (Xid 79)"


# -- the child ---------------------------------------------------------------------------------------------------------


def seen(log, count):
    found = []

    def enough():
        found.extend(log.poll(time.monotonic()))
        return len(found) >= count

    wait_for(enough, what="what the child says")
    return found


def ended(log):
    pid = log.pid
    log.end()
    os.waitpid(pid, 0)


def test_only_lines_that_come_after_the_start_and_only_of_drivers(tmp_path):
    path = tmp_path / "kmsg"
    path.write_text("NVRM: Xid (PCI:0000:4e:00): 79, of yesterday\n")
    log = KernelLog(str(path))
    (source,) = seen(log, 1)
    assert source == Saw("kernel-log", {"source": str(path), "why": ""})
    with path.open("a") as file:
        file.write("usb 1-1: reset\nNVRM: Xid (PCI:0000:4e:00): 48, pid=1\namdgpu 0000:c1:00.0: amdg")
        file.flush()
        (first,) = seen(log, 1)
        file.write("pu: GPU reset begin!\n")
        file.flush()
        (second,) = seen(log, 1)
    assert [first.data["text"], second.data["text"]] == [
        "NVRM: Xid (PCI:0000:4e:00): 48, pid=1", "amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!",
    ]  # fmt: skip
    ended(log)
    assert log.poll(0.0) == [] and log.pid == 0


def test_a_rotated_log_is_followed(tmp_path):
    path = tmp_path / "kern.log"
    path.write_text("x" * 5000 + "\n")
    source = open_log(str(path))
    assert source.read() == []
    path.write_text("after copytruncate\n")  # the same file, cut and written anew
    assert source.read() == [b"after copytruncate"] and source.read() == []
    os.rename(path, tmp_path / "kern.log.1")
    assert source.read() == []  # the new file is not there
    path.touch()
    assert source.read() == []
    path.write_text("into the new one\n")
    assert source.read() == [b"into the new one"] and source.read() == []
    with path.open("a") as file:
        file.write("and on\n")
    assert source.read() == [b"and on"]
    path.unlink()
    os.mkfifo(path)  # never blocks, whatever stands there
    assert source.read() == []


STAMPS = {
    "since boot": "[{:>5}.000001] ",
    "rsyslog": "2026-11-16T13:{:02}:00.5+01:00 n1 kernel: ",
    "syslog": "Nov  6 13:{:02}:00 n1 kernel: ",
    "dmesg -T": "[Mon Nov 16 13:{:02}:00 2026] ",
    "none": "",
}


@pytest.mark.parametrize("form", STAMPS)
@pytest.mark.parametrize("how", ["renamed", "in place"])
def test_a_newer_copy_of_the_log_brings_no_old_line_back(tmp_path, form, how):
    path, copy = tmp_path / "kern.log", tmp_path / "copy"
    lines = [f"{STAMPS[form].format(number)}line {number}\n" for number in range(1, 9)]
    path.write_text("".join(lines[:5]))
    source = open_log(str(path))

    def replace(text):
        if how == "renamed":
            copy.write_text(text)
            copy.rename(path)
        else:
            path.write_text("")  # shorter than what was read, for a moment
            assert source.read() == []
            path.write_text(text)

    replace("".join(lines[:6]))
    assert source.read() == [lines[5].strip().encode()] and source.read() == []
    replace("".join(lines[:6]))  # the very same
    assert source.read() == []
    with path.open("a") as file:
        file.write(lines[6])
    assert source.read() == [lines[6].strip().encode()]
    if form != "none":  # the last line read is not in it: its time tells
        replace("".join(lines[2:6]) + lines[7])
        assert source.read() == [lines[7].strip().encode()]


def test_a_log_that_was_empty_and_gets_lines_from_before_the_start(tmp_path):
    path = tmp_path / "kern.log"
    path.touch()
    source = open_log(str(path))
    (tmp_path / "copy").write_text(f"[    0.000001] of the boot\n[{time.monotonic() + 5:.6f}] of now\n")
    (tmp_path / "copy").rename(path)
    (line,) = source.read()
    assert line.endswith(b"of now")


def test_only_the_end_of_a_large_log_is_read(tmp_path):
    path = tmp_path / "kern.log"
    path.write_text("[ 1.0] first\n")
    source = open_log(str(path))
    (tmp_path / "copy").write_text(f"[ 0.5] {'old ' * 40}\n" * 60_000 + "[ 2.0] new\n")
    (tmp_path / "copy").rename(path)
    assert source.read() == [b"[ 2.0] new"]


def test_a_program_whose_last_line_is_gone_brings_no_old_line_back(tmp_path, monkeypatch):
    log = tmp_path / "ring"
    tool(tmp_path, "dmesg", f"cat {log}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    log.write_text("[ 1.0] one\n[ 2.0] two\n")
    source = kernel_log.Command(("dmesg",))
    log.write_text("[ 1.5] between\n[ 3.0] three\n")
    assert source.read() == [b"[ 3.0] three"]


def test_a_log_that_cannot_be_read_is_said_so_once(tmp_path):
    log = KernelLog(str(tmp_path / "missing"))
    (saw,) = seen(log, 1)
    (event,) = GpuErrors(GPUS, 0, "n0", {}).on(saw, 1.0)
    assert isinstance(event, Emit) and event.kind == "kernel-log" and event.data["source"] == ""
    assert "No such file" in event.data["why"]
    wait_for(lambda: log.poll(0.0) == [] and log.pid == 0, what="the child's end")


def tool(folder, name, text):
    path = folder / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def test_every_way_without_root_is_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_log, "_KMSG", str(tmp_path / "none"))
    monkeypatch.setattr(kernel_log.Kmsg.__init__, "__defaults__", (str(tmp_path / "none"),))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool(tmp_path, "dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    tool(tmp_path, "journalctl", "echo '-- No entries --'")
    with pytest.raises(OSError, match="No such file or directory; dmesg ended with 1; journalctl shows nothing"):
        open_log()
    log = tmp_path / "journal"
    log.write_text("[ 1.0] n1 kernel: one\n[ 2.0] n1 kernel: two\n")
    tool(tmp_path, "journalctl", f"cat {log}")
    source = open_log()
    assert source.name == "journalctl" and source.read() == []
    with log.open("a") as file:
        file.write("[ 3.0] n1 kernel: three\n")
    assert source.read() == [b"[ 3.0] n1 kernel: three"] and source.read() == []


# -- what the lead makes of it -------------------------------------------------------------------------------------------

XID = Finding("gpu-lost", WARNING, "GPU 0 of node 1 fell off the bus", "the driver wrote it", node=1, host="h1")


@pytest.mark.parametrize(
    "code,node,explained",
    [
        ("hang-waits", 0, True), ("killed", 0, True), ("nccl-error", 0, True), ("peer-lost", 0, True),
        ("nan-loss", 1, True), ("nan-loss", 0, False), ("illegal-memory-access", 1, True),
        ("illegal-memory-access", 0, False), ("exception", 1, False), ("gpu-out-of-memory", 1, False),
        ("gpu-ecc", 1, False), ("disk-full", 1, False), ("command-not-found", 1, False),
    ],
)  # fmt: skip
def test_which_failures_a_broken_gpu_explains(code, node, explained):
    failure = Finding(code, ERROR, "what was said", node=node)
    found = hardware_behind(failure, 1, [XID])
    assert (found is not None) == explained
    if found:
        assert (found.code, found.node, found.severity, found.confidence) == ("gpu-lost", 1, ERROR, LIKELY)
        assert "after it: what was said" in found.cause
    assert hardware_behind(failure, 1, []) is None


def fails(lead, now):
    lead.rank_ended(0, RankEnded(lead.attempts[-1].number, End(0, None, 9, now)), now)
    acts = []
    for member in lead.attempts[-1].assignment:
        acts += lead.member_done(member, Done(lead.attempts[-1].number), now + 1)
    return acts


def test_the_node_of_a_broken_gpu_is_excluded_and_a_spare_takes_its_place():
    lead, _ = mustered(spares=1)
    lead.found(0, XID)  # node 0 cannot speak for node 1
    assert lead.attempts[-1].broken == []
    lead.found(1, XID)
    acts = fails(lead, 10.0)
    assert "excluded" in kinds(acts) and (2, "start") in told(acts) and lead.members[1].bad
    assert lead.history[-1].finding.code == "gpu-lost" and lead.history[-1].member == 1


def test_what_drivers_say_while_ranks_are_being_ended_explains_nothing():
    lead, _ = mustered(spares=1)
    lead.watcher_stop(Finding("hang-x", ERROR, "x", node=0), 5.0)
    lead.found(1, XID)
    assert lead.attempts[-1].broken == []

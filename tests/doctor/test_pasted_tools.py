"""What GPU tools print without options, with errors, or instead of an answer: read into the same facts, and named if unread."""

import textwrap

from drumbeat.doctor.dumps import judge
from drumbeat.logs.read.pasted_jobs import read_pasted_jobs
from drumbeat.machine.dumps import read

TABLE = """
Tue Mar  3 10:12:44 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.127.08             Driver Version: 550.127.08     CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:1B:00.0 Off |                    0 |
| N/A   32C    P0             62W /  700W |       4MiB /  81559MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:43:00.0 Off |                    {ecc} |
| N/A   31C    P0             61W /  700W |   61204MiB /  81559MiB |     98%      Default |
|                                         |                        |              Enabled |
+-----------------------------------------+------------------------+----------------------+
{third}
+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI        PID   Type   Process name                              GPU Memory |
|=========================================================================================|
|    1   N/A  N/A    881234      C   python                                      61196MiB |
|    1   N/A  N/A      2201      G   /usr/lib/xorg/Xorg                             4MiB |
+-----------------------------------------------------------------------------------------+
"""
BROKEN = """|   2  ERR!                          ERR! |   00000000:52:00.0 ERR! |                 ERR! |
|ERR!  ERR! ERR!             ERR! / ERR!  |  Unknown Error         |    ERR!         ERR! |
|                                         |                        |                 ERR! |
+-----------------------------------------+------------------------+----------------------+"""


def found(*texts):
    """Judge texts as files of one node; return the findings, and what was not understood."""
    dumps, unread = [], []
    for number, text in enumerate(texts):
        some, rest = read(textwrap.dedent(text), f"{number}.txt")
        dumps, unread = [*dumps, *some], [*unread, *rest]
    return [each for _, each in judge(dumps)], unread


def codes(*texts):
    return {each.code for each in found(*texts)[0]}


def shown(finding):
    return [(line.place, line.text.split()[0]) for line in finding.evidence]


def gpus(text, kind):
    (dump,) = [each for each in read(textwrap.dedent(text), "x")[0] if each.kind == kind]
    return dump.facts.gpus


def test_the_plain_table_of_nvidia_smi():
    text = TABLE.format(ecc=3, third="")
    one, other = gpus(text, "nvidia-smi")
    assert (one.name, one.pci, one.mig, one.pids) == ("NVIDIA H100 80GB HBM3", "0000:1b:00.0", False, ())
    assert (other.mig, other.pids, other.memory_bytes) == (True, (881234,), 81559 << 20)
    assert other.health.uncorrected_errors == 3 and other.health.power_limit_w == 700
    findings, unread = found(text)
    by_code = {each.code: each for each in findings}
    assert by_code["gpu-memory-errors"].severity == "error" and not unread
    assert [each.line for each in by_code["gpu-memory-errors"].evidence] == [14]
    assert "Enabled" in by_code["gpu-divided"].evidence[0].text and by_code["gpu-divided"].evidence[0].line == 16
    assert by_code["gpu-in-use"].severity == "info" and "881234" in by_code["gpu-in-use"].evidence[0].text
    assert "gpu-memory-errors" not in codes(TABLE.format(ecc=0, third=""))
    assert gpus(TABLE.format(ecc="Off", third=""), "nvidia-smi")[1].health.ecc is False
    assert gpus(TABLE.format(ecc="N/A", third=""), "nvidia-smi")[1].health.ecc is None


def test_a_gpu_with_err_in_place_of_its_values_is_lost():
    findings, _ = found(TABLE.format(ecc=0, third=BROKEN))
    (lost,) = [each for each in findings if each.code == "gpu-lost"]
    assert lost.severity == "error" and "0000:52:00.0" in lost.title and lost.evidence[0].line == 18
    assert "gpus-differ" not in {each.code for each in findings}


QUERY = """
==============NVSMI LOG==============
Timestamp                                 : Tue Mar  3 10:12:44 2026
Driver Version                            : 550.127.08
Attached GPUs                             : {attached}
"""
SECTION = """GPU 00000000:{bus}:00.0
    Product Name                          : NVIDIA A100
    ECC Mode
        Current                           : Enabled
    ECC Errors
        Volatile
            SRAM Uncorrectable            : 0
            DRAM Uncorrectable            : {errors}
    Clocks Event Reasons
        HW Slowdown                       : Not Active
    PCI
        GPU Link Info
            Link Width
                Max                       : 16x
                Current                   : 16x
    Processes                             : None
"""
LOST = "GPU 00000000:C1:00.0\n    Product Name                          : ERR!\n    GPU is lost\n"


def query(*buses, attached=None, errors=0, more=""):
    sections = "".join(SECTION.format(bus=bus, errors=errors) for bus in buses)
    return QUERY.format(attached=attached or len(buses)) + sections + more


def test_a_gpu_that_does_not_answer_is_named():
    refusal = "Unable to determine the device handle for GPU0000:41:00.0: Unknown Error\n"
    text = refusal + query("01", "81", "C1", attached=4)
    (lost,) = found(text)[0]
    assert (lost.code, lost.severity) == ("gpu-lost", "error") and shown(lost) == [("0.txt:1", "Unable")]
    assert [gpu.index for gpu in gpus(text, "nvidia-smi -q")] == [0, 2, 3], "the lost one keeps its number"
    (lost,) = found(query("01", "41", attached=3, more=LOST))[0]
    assert lost.code == "gpu-lost" and "GPU is lost" in lost.title and lost.evidence[0].text == "GPU is lost"
    (missing,) = found(query("01", "41", attached=3))[0]
    assert missing.code == "gpus-missing" and missing.evidence[0].text.startswith("Attached GPUs")
    assert not found(query("01", "41"))[0]


def test_a_driver_that_fails_is_an_error():
    for words in (
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that it is running.",
        "Failed to initialize NVML: Driver/library version mismatch",
        "No devices were found",
    ):
        (finding,) = found(words + "\n")[0]
        assert (finding.code, finding.severity) == ("gpu-driver-fails", "error") and words[:20] in finding.title


def test_unknown_is_not_different():
    topology = "\tGPU0\tGPU1\tGPU2\tCPU Affinity\nGPU0\t X \tNV4\tNV4\t0-3\nGPU1\tNV4\t X \tNV4\t0-3\nGPU2\tNV4\tNV4\t X \t0-3\n"
    assert "gpus-differ" not in codes(query("01", "41"), topology)
    other = query("01", "41").replace("NVIDIA A100", "NVIDIA H100", 1)
    (differ,) = [each for each in found(other, topology)[0] if each.code == "gpus-differ"]
    assert [line.place for line in differ.evidence] == ["0.txt:7", "0.txt:23"], "the lines that name them"
    short = TABLE.format(ecc=0, third="").replace("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB ...", 1)
    assert "gpus-differ" not in codes(short), "a name that is cut off is not another name"


def test_what_a_section_does_not_show_is_said():
    (dump,) = read("GPU 00000000:01:00.0\n    Product Name   : NVIDIA A100\n    GPU UUID   : GPU-1\n", "x")[0]
    (words,) = dump.facts.unknown
    assert (
        "GPU at 0000:01:00.0" in words and "memory errors" in words and "PCIe link" in words and "its name" not in words
    )


def test_of_two_dumps_the_one_with_more_errors_counts():
    findings, _ = found(query("1B", "43"), TABLE.format(ecc=3, third=""))
    (errors,) = [each for each in findings if each.code == "gpu-memory-errors"]
    assert errors.evidence[0].place == "1.txt:14" and errors.seen == ("nvidia-smi: 1.txt",)


CONCISE = """
============================================ ROCm System Management Interface ============================================
====================================================== Concise Info ======================================================
Device  Node  IDs              Temp    Power   Partitions          SCLK    MCLK     Fan  Perf  PwrCap  VRAM%  GPU%
              (DID,     GUID)  (Edge)  (Avg)   (Mem, Compute, ID)
==========================================================================================================================
0       4     0x74a1,   19785  43.0\u00b0C  93.0W   NPS1, SPX, 0        800Mhz  1600Mhz  0%   auto  750.0W  0%     0%
1       5     0x74a1,   45421  46.0\u00b0C  90.0W   NPS1, CPX, 0        800Mhz  1600Mhz  0%   auto  750.0W  97%    100%
==========================================================================================================================
================================================== End of ROCm SMI Log ===================================================
"""
RAS = """
======================= ROCm System Management Interface =======================
=================================== RAS Info ===================================
GPU[0]: \tRAS INFO
         Block       Status    {header}
           UMC        ENABLED                  0                0
         ATHUB        ENABLED
________________________________________________________________________________
GPU[1]\t\t: GPU[1]: RAS INFO
         Block       Status    {header}
           UMC        ENABLED                  7                2
           GFX        ENABLED                  0                0
________________________________________________________________________________
============================= End of ROCm SMI Log ==============================
"""


def test_rocm_smi_without_options():
    one, other = gpus(CONCISE, "rocm-smi")
    assert (one.name, one.partition, other.partition) == ("AMD Instinct MI300X", "SPX", "CPX")
    assert one.health.power_limit_w == 750
    (dump,) = read(CONCISE, "x")[0]
    assert dump.notes == ("GPU 1: 100 % busy",) and codes(CONCISE) == {"gpu-divided", "gpu-in-use"}
    old = "==== Concise Info ====\nGPU  Temp   AvgPwr  SCLK    MCLK     Fan  Perf  PwrCap  VRAM%  GPU%\n"
    old += "0    39.0c  88.0W   800Mhz  1600Mhz  0%   auto  560.0W    0%   0%\n"
    assert [gpu.index for gpu in gpus(old, "rocm-smi")] == [0]


def test_rocm_smi_showrasinfo_counts_the_second_column():
    """rocm-smi prints correctable errors first, also in releases whose header says the reverse."""
    for header in ("Correctable Error  Uncorrectable Error", "uncorrectable err  correctable err"):
        (errors,) = found(RAS.format(header=header))[0]
        assert errors.code == "gpu-memory-errors" and errors.title.startswith("GPU 1") and "2 errors" in errors.title
        assert errors.evidence[0].text.startswith("UMC") and errors.evidence[0].line == 11


def test_sections_of_rocm_smi_that_no_reader_knows_are_named():
    fan = "============ Fan Metric ============\nGPU[0]\t\t: Fan Level: 0\nGPU[1]\t\t: Fan Level: 0\n"
    _, ((line, count),) = found(CONCISE + fan)
    assert "Fan Metric" in line.text and count == 3


METRIC = """
GPU: 0
    USAGE:
        GFX_ACTIVITY: 0 %
    ECC:
        TOTAL_CORRECTABLE_COUNT: 9
        TOTAL_UNCORRECTABLE_COUNT: 0
    PCIE:
        WIDTH: 16
        REPLAY_COUNT: 0
GPU: 1
    USAGE:
        GFX_ACTIVITY: 0 %
    ECC:
        TOTAL_CORRECTABLE_COUNT: 0
        TOTAL_UNCORRECTABLE_COUNT: 2
    PCIE:
        WIDTH: 8
        REPLAY_COUNT: 311
"""
PAGES = """
GPU: 0
    RETIRED: No bad pages found.
    PENDING: No bad pages found.
    UN_RES: No bad pages found.

GPU: 1
    RETIRED:
        PAGE_ADDRESS: 0x1f3a000
        PAGE_SIZE: 0x1000
        STATUS: RESERVED
        PAGE_ADDRESS: 0x1f3b000
        PAGE_SIZE: 0x1000
        STATUS: RESERVED
    PENDING:
        PAGE_ADDRESS: 0x2f3a000
        PAGE_SIZE: 0x1000
        STATUS: PENDING
    UN_RES: N/A
"""


def test_amd_smi_metric():
    findings, unread = found(METRIC)
    by_code = {each.code: each for each in findings}
    assert set(by_code) == {"gpu-memory-errors", "pcie-unequal"} and not unread
    assert by_code["gpu-memory-errors"].evidence[0].text == "TOTAL_UNCORRECTABLE_COUNT: 2"
    assert [line.text for line in by_code["pcie-unequal"].evidence] == ["WIDTH: 16", "WIDTH: 8"]
    (dump,) = read(METRIC, "x")[0]
    assert dump.notes == ("GPU 1: 311 PCIe replays", "not read: USAGE")
    blocks = "GPU: 0\n    ECC_BLOCKS:\n        UMC:\n            UNCORRECTABLE_COUNT: 0\n"
    blocks += "        GFX:\n            UNCORRECTABLE_COUNT: 4\n"
    assert gpus(blocks, "amd-smi metric")[0].health.uncorrected_errors == 4
    unknown = "GPU: 0\n    ECC:\n        TOTAL_UNCORRECTABLE_COUNT: N/A\n"
    assert gpus(unknown, "amd-smi metric")[0].health is None


def test_amd_smi_bad_pages():
    one, other = gpus(PAGES, "amd-smi bad-pages")
    assert (one.health.remapped_rows, one.health.remap_pending, one.health.remap_failed) == (0, False, False)
    assert (other.health.remapped_rows, other.health.remap_pending, other.health.remap_failed) == (2, True, None)
    (pending,) = found(PAGES)[0]
    assert pending.code == "gpu-remap-pending" and pending.evidence[0].line == 16
    failed = PAGES.replace("    UN_RES: N/A", "    UN_RES:\n        PAGE_ADDRESS: 0x1\n        STATUS: UNRESERVABLE")
    assert "gpu-memory-errors" in codes(failed)


MTU = "hca_id: mlx5_{0}\n  port:   1\n  state:  PORT_ACTIVE (4)\n  active_mtu:  {1} (3)\n  link_layer: Ethernet\n\n"
LINKS = "".join(f"link mlx5_{n}/1 state ACTIVE physical_state LINK_UP netdev ens{n}\n" for n in (0, 1))
ADDRESS = "{0}: ens{0}: <UP,LOWER_UP> mtu {1} state UP\n    link/ether 9c:63\n    inet 10.{0}.0.1/24 scope global\n"


def test_each_interface_has_its_own_mtu_and_every_dump_its_evidence():
    findings, _ = found(
        MTU.format(0, 4096) + MTU.format(1, 1024), LINKS, ADDRESS.format(0, 9000) + ADDRESS.format(1, 1500)
    )
    (small,) = [each for each in findings if each.code == "mtu-small"]
    assert "ens1 1500, mlx5_1 1024" in small.title
    texts = [line.text for line in small.evidence]
    assert any("active_mtu:  1024" in text for text in texts) and any("mtu 1500" in text for text in texts)


def test_a_finding_of_several_dumps_cites_those_without_which_it_is_not_found():
    ibstat = "CA 'mlx5_9'\n\tPort 1:\n\t\tState: Active\n\t\tRate: 200\n\t\tLink layer: InfiniBand\n"
    findings, _ = found(
        ibstat, query("01"), query("41").replace("A100", "H100").replace("GPU 00000000:41", "GPU 00000000:01")
    )
    assert all("ibstat" not in str(each.seen) for each in findings)


def test_unread_text_is_named_with_its_line():
    _, ((line, count),) = found(
        "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\n\n$ lspci\n01:00.0 3D controller\n02:00.0 Ethernet\n"
    )
    assert (line.place, line.text, count) == ("0.txt:5", "$ lspci", 3)
    assert found("nothing that a tool prints\nand more of it\n")[1]


def test_doctor_names_the_files_that_it_could_not_read(drumbeat, tmp_path):
    (tmp_path / "ras.txt").write_text(RAS.format(header="Correctable Error  Uncorrectable Error"))
    (tmp_path / "other.txt").write_text("what is this\nnobody knows\n")
    (tmp_path / "job.txt").write_text(
        "JobId=7 JobName=x\n   JobState=TIMEOUT Reason=TimeLimit\n   RunTime=1:00 TimeLimit=1:00\n"
    )
    done = drumbeat.here("doctor", "--from", *(tmp_path / name for name in ("ras.txt", "other.txt", "job.txt")))
    assert done.returncode == 1 and "nothing in" in done.stdout and "other.txt is known" in done.stdout
    assert "job 7: the job reached its time limit" in done.stdout and "job.txt:2: JobState=TIMEOUT" in done.stdout
    (tmp_path / "ras.txt").write_text(CONCISE + "=== Fan Metric ===\nGPU[0]\t\t: Fan Level: 0\n")
    done = drumbeat.here("doctor", "--from", tmp_path / "ras.txt")
    assert done.returncode == 0 and "were not understood: 2 from line" in done.stdout
    assert "97 % of the memory of GPU 1 was in use" in done.stdout
    (tmp_path / "ras.txt").write_text(query("01", attached=2))
    done = drumbeat.here("doctor", "--from", tmp_path / "ras.txt")
    assert "not looked at nvidia-smi -q: 1 of the 2 attached GPUs are shown" in done.stdout


def test_jobs_cite_the_line_of_the_field():
    text = "JobId=7 JobName=x\n   JobState=PENDING Reason=QOSMaxGRES\n   NumNodes=2\n\nNodeName=n1 CPUTot=8\n   State=DOWN*\n"
    dump = read_pasted_jobs(text, "x")
    assert [[line.line for line in each.evidence] for each in dump.findings] == [[1, 2], [5, 6]]


HALF_LOST = """| {0}  NVIDIA H100 80GB HBM3          On  |   00000000:{1}:00.0 Off |                    {2} |
| N/A   32C    P0             62W /  700W |       4MiB /  81559MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
"""
BUSES = ("1B", "43", "52", "9D")


def table(*cards, ending="|  No running processes found                                                             |"):
    """Print nvidia-smi for (number, bus, uncorrected errors)."""
    start, _, rest = TABLE.partition("|   0  NVIDIA")
    end = rest[rest.index("| Processes:") :].partition("|    1   N/A  N/A    881234")[0]
    frame = "+" + "-" * 89 + "+\n"
    body = "".join(HALF_LOST.format(f"{number:>3}", bus, errors) for number, bus, errors in cards)
    return start + body + " " * 91 + "\n" + frame + end + ending + "\n" + frame


def topo(count):
    names = [f"GPU{n}" for n in range(count)]
    rows = [f"{one}\t" + "\t".join("X" if one == other else "NV18" for other in names) + "\t0-3\t0\n" for one in names]
    return "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\n" + "".join(rows)


def test_an_idle_table_is_understood_with_what_stands_around_it():
    idle = table((0, "1B", 0))
    assert found(idle) == ([], []) and found("Every 2.0s: nvidia-smi      gpu07: Tue\n\n" + idle) == ([], [])
    assert found(idle.replace("\n", "\r\n")) == ([], [])
    _, ((line, count),) = found(idle + "\nWARNING: infoROM is corrupted at gpu 0000:1B:00.0\n")
    assert "infoROM" in line.text and count == 1


def test_gpus_of_two_dumps_are_matched_by_address_not_by_place():
    """nvidia-smi -q -i 3, a container's table and a kernel log each show one GPU; it is the fourth of the node."""
    whole = table(*((n, bus, 0) for n, bus in enumerate(BUSES)))
    log = "[ 98.2] NVRM: Xid (PCI:0000:9d:00): 94, pid=33211, name=python, Contained: SM (0x1). RST: No, D-RST: No\n"
    one, inside = query("9D", attached=4, errors=2), table((0, "9D", 2))
    for texts in ((whole, one), (one, whole), (query(*reversed(BUSES)), inside, topo(4)), (inside, query(*BUSES))):
        (errors,) = [each for each in found(*texts)[0] if each.code == "gpu-memory-errors"]
        assert errors.title.startswith("GPU 3 (0000:9d:00.0): "), (errors.title, texts)
    (events,) = [each for each in found(whole, log)[0] if each.code == "gpu-events"]
    assert events.title.endswith("1 error on GPU 3 (0000:9d:00.0) since boot")
    assert [line.place for line in events.evidence] == ["1.txt:1"]
    (narrow,) = found(query(*BUSES).replace("Current                   : 16x", "Current                   : 8x", 1))[0]
    assert narrow.title.startswith("GPU 0 (0000:1b:00.0) has 8 of 16")


def test_a_gpu_that_nothing_matches_is_named_by_its_address():
    errors, missing = found(query("9D", attached=4, errors=2), topo(4))[0]
    assert errors.title.startswith("GPU at 0000:9d:00.0: ") and missing.code == "gpus-missing"
    listed = "".join(f"GPU {n}: NVIDIA A100 (UUID: GPU-{n}-{bus})\n" for n, bus in enumerate(BUSES))
    one = query("9D", attached=4, errors=2).replace("    ECC Mode", "    GPU UUID      : GPU-3-9D\n    ECC Mode")
    assert found(one, listed)[0][0].title.startswith("GPU 3 (0000:9d:00.0): "), "by UUID"
    csv = "index, pci.bus_id, ecc.errors.uncorrected.volatile.total\n0, 00000000:1B:00.0, 0\n1, 00000000:9D:00.0, 4\n"
    (errors,) = found(csv)[0]
    assert errors.title.startswith("GPU 1 (0000:9d:00.0): ") and errors.evidence[0].line == 3


def test_two_nodes_in_one_text_are_judged_apart_and_named():
    tables = [table(*((n, bus, 5 * bad if n == 2 else 0) for n, bus in enumerate(BUSES))) for bad in (False, True)]
    text = "".join(f"[root@gpu0{n} ~]# nvidia-smi\n{each}" for n, each in enumerate(tables, 1))
    (errors,) = found(text)[0]
    assert errors.host == "gpu02" and errors.title.startswith("GPU 2 (0000:52:00.0)")
    ports = (
        "CA 'mlx5_0'\n\tPort 1:\n\t\tState: {}\n\t\tPhysical state: LinkUp\n\t\tRate: 400\n\t\tLink layer: InfiniBand\n"
    )
    text = "".join(f"root@gpu0{n}:~# ibstat\n{ports.format(state)}" for n, state in enumerate(("Active", "Down"), 1))
    assert {each.host for each in found(text)[0]} == {"gpu02"}


def test_a_gpu_that_shows_no_values_is_named():
    row = next(line for line in CONCISE.splitlines() if line.startswith("1 "))
    dead = CONCISE.replace(row, row[:30] + "N/A  N/A  N/A, N/A, 0  None  None  0%  unknown  N/A  N/A  N/A")
    (silent,) = found(dead)[0]
    assert (silent.code, silent.severity) == ("gpu-lost", "warning") and silent.title.startswith("GPU 1 does not tell")
    assert [line.line for line in silent.evidence] == [8]
    metric = METRIC.partition("GPU: 1")[0]
    mute = "GPU: 1\n    USAGE: N/A\n    ECC:\n        TOTAL_UNCORRECTABLE_COUNT: N/A\n    PCIE:\n        WIDTH: N/A\n"
    assert [each.title for each in found(metric + mute)[0]] == [
        "GPU 1 does not tell its state: N/A in place of all its values"
    ]
    assert not found(mute)[0], "where no GPU has values, the tool may have none"
    (fan,) = found(table((0, "1B", 0)).replace("| N/A   32C", "|ERR!   32C"))[0]
    assert fan.severity == "warning" and "some of its values" in fan.title and "0000:1b:00.0" in fan.title
    (reset,) = found(query("01", attached=2, more="GPU 00000000:C1:00.0\n    GPU requires reset\n"))[0]
    assert reset.severity == "error" and reset.title.startswith("GPU 1 (0000:c1:00.0)")


def test_numbers_of_amd_tools_are_matched_by_address_where_they_show_one():
    bus = "".join(f"GPU[{n}]\t\t: PCI Bus: 0000:{at}:00.0\n" for n, at in enumerate(("C1", "0C")))
    bus = f"=========== PCI Bus ID ===========\n{bus}============\n"
    static = "GPU: 0\n  BUS:\n    BDF: 0000:0c:00.0\n  PARTITION:\n    COMPUTE_PARTITION: CPX\n"
    static += "GPU: 1\n  BUS:\n    BDF: 0000:c1:00.0\n  PARTITION:\n    COMPUTE_PARTITION: SPX\n"
    titles = [each.title for each in found(bus + RAS.format(header="x") + static)[0]]
    assert any(title.startswith("GPU 1 (0000:0c:00.0): uncorrected memory errors (2") for title in titles), titles
    assert any(title.startswith("GPU 1 (0000:0c:00.0) is divided") for title in titles), titles
    rows = "0000:c1:00.0 SELF XGMI\n0000:0c:00.0 XGMI SELF\n"
    head = "             0000:c1:00.0 0000:0c:00.0\n"
    access = "0000:0c:00.0 DISABLED ENABLED\n"  # its first row is cut
    text = f"LINK TYPE TABLE:\n{head}{rows}ACCESS TABLE:\n{head}{access}"
    one, other = gpus(text, "amd-smi topology")
    assert (one.no_access, other.no_access) == ((), (0,)) and other.links == {"GPU 0": "XGMI"}


def test_a_kernel_log_is_judged_by_what_diagnose_reads(drumbeat, tmp_path):
    (tmp_path / "dmesg").write_text(
        "[ 1021.331207] mlx5_core 0000:12:00.0 ens1np0: Link down\n[ 1022.101330] mlx5_core 0000:12:00.0: print_health_info:425\n"
    )
    done = drumbeat.here("doctor", "--from", tmp_path / "dmesg")
    assert done.returncode == 0 and "is a log: the link of an RDMA port went down" in done.stdout, done.stdout
    assert "dmesg:1: mlx5_core" in done.stdout and "drumbeat diagnose " in done.stdout


def test_nothing_is_printed_as_empty_brackets(drumbeat, tmp_path):
    (tmp_path / "ras").write_text(RAS.format(header="x") + CONCISE + METRIC + PAGES)
    for command in (("doctor", "--from"), ("diagnose",)):
        done = drumbeat.here(*command, tmp_path / "ras")
        assert "GPU 1" in done.stdout and not [word for word in ("()", "[]", "None") if word in done.stdout], (
            done.stdout
        )


def test_lines_with_the_host_before_them_are_of_that_host():
    ports = "CA 'mlx5_0'\n\tPort 1:\n\t\tState: {}\n\t\tPhysical state: LinkUp\n\t\tLink layer: InfiniBand"
    parts = [
        (host, line)
        for host, state in (("gpu01", "Active"), ("gpu02", "Down"))
        for line in ports.format(state).split("\n")
    ]
    for order in (parts, sorted(parts, key=lambda part: parts.index(part) % 5)):  # one after the other, and mixed
        ((finding,), unread) = found("".join(f"{host}: {line}\n" for host, line in order))
        assert (finding.code, finding.host, unread) == ("rdma-port-down", "gpu02", [])
        assert finding.evidence[0].line == order.index(("gpu02", "\t\tState: Down")) + 1


def test_parts_of_a_divided_amd_gpu_have_no_sensors():
    row = next(line for line in CONCISE.splitlines() if line.startswith("1 "))
    part = row[:30] + "N/A  N/A  NPS1, CPX, 1  N/A  N/A  0%  auto  N/A  0%  0%"
    assert codes(CONCISE.replace(row, part)) == {"gpu-divided"}


def test_a_row_of_csv_that_tells_nothing_is_named():
    text = "name, uuid, ecc.errors.uncorrected.volatile.total\nNVIDIA A100, GPU-1, 1\n"
    text += "NVIDIA A100, [Unknown Error], [Unknown Error]\n"
    titles = [each.title for each in found(text)[0]]
    assert titles[0] == "GPU at GPU-1: uncorrected memory errors (1 error)"
    assert titles[1].startswith("unnumbered GPU 2 does not tell its state: Unknown Error")

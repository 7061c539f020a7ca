"""Which network carried it: every format, and every false friend one by one."""

import pytest

from drumbeat.findings.model import CERTAIN, LIKELY
from drumbeat.logs.nccl.grammar import observe, records
from drumbeat.logs.nccl.records import Channel, Ranks
from drumbeat.logs.show import render
from tests.logs.reading import CXI, IB, ROCE, channels, read, run, start_up

EFA = "NET/OFI Selected provider is efa, fabric is efa (found 1 nics)"


def path(text):
    return read(text).transport.path


# --- what each combination is called ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "via,network,more,answer,gdr,link,provider",
    [
        ("NET/IB/0/GDRDMA", "IB", [IB], "rdma", True, "IB", ""),
        ("NET/IB/0", "IB", [IB], "rdma", False, "IB", ""),
        ("NET/IB/0/GDRDMA", "IB", [ROCE], "rdma", True, "RoCE", ""),
        ("NET/IB/1(3)/GDRDMA/Shared", "IB", [IB], "rdma", True, "IB", ""),
        ("NET/IB/0/GDRDMA(PCI)", "IB", [IB], "rdma", True, "IB", ""),
        ("NET/IB/0/Shared", "IB", [IB], "rdma", False, "IB", ""),
        ("NET/IBext_v8/0/GDRDMA", "IBext_v8", [IB], "rdma", True, "IB", ""),
        ("NET/IBext/0/GDRDMA", "IBext", [IB], "rdma", True, "IB", ""),
        ("NET/RCCL-ANP/0/GDRDMA", "RCCL-ANP", [ROCE], "rdma", True, "RoCE", ""),
        ("NET/Socket/0", "Socket", ["NET/Socket : Using [0]eth0:10.0.0.1<0>"], "tcp", None, "", ""),
        ("NET/FastSocket/0", "FastSocket", [], "tcp", None, "", ""),
        ("NET/AWS Libfabric/2/GDRDMA", "AWS Libfabric", [CXI], "ofi", True, "", "cxi"),
        ("NET/Libfabric/0", "Libfabric", [EFA], "ofi", False, "", "efa"),
        ("NET/OFI/0/GDRDMA", "OFI", [EFA.replace("is efa (", "is efa-direct (")], "ofi", True, "", "efa"),
    ],
)  # fmt: skip
def test_answers(via, network, more, answer, gdr, link, provider):
    found = path(run(via, network, more))
    assert (found.answer, found.gdr, found.link, found.provider) == (answer, gdr, link, provider)
    assert found.confidence == "certain"
    assert "via NET/" in found.evidence[0].text and found.evidence[0].line


def test_an_unknown_plug_in_is_unknown_and_named():
    found = path(run("NET/Frobnicator/0", "Frobnicator", []))
    assert (found.answer, found.network) == ("unknown", "Frobnicator")


def test_who_where_and_which_version():
    transport = read(run("NET/IB/0/GDRDMA")).transport
    assert (transport.library, transport.versions) == ("nccl", ("2.21.5+cuda12.4",))
    assert (transport.nranks, transport.nnodes, transport.nodes) == (2, 2, ("n0", "n1"))
    assert transport.path.devices == ("mlx5_0",)
    assert transport.devices == ("mlx5_0/IB", "mlx5_1/IB")
    (pair,) = transport.pairs
    assert (pair.a, pair.b, pair.path.words) == ("n0", "n1", "rdma+gdr (IB)")
    assert transport.verdict().answer == "rdma"


def test_pairs_that_differ_make_it_mixed():
    text = "\n".join(
        [
            *(start_up(rank, 3, 3, more=[IB]) for rank in range(3)),
            channels("NET/IB/0/GDRDMA", [(0, 1)]),
            channels("NET/Socket/0", [(1, 2)]),
        ]
    )
    transport = read(text).transport
    assert transport.path.answer == "mixed"
    assert {(p.a, p.b): p.path.answer for p in transport.pairs} == {("n0", "n1"): "rdma", ("n1", "n2"): "tcp"}


def test_gdr_at_one_end_only_is_said_and_is_not_gdr():
    text = "\n".join([start_up(0, more=[IB]), start_up(1, more=[IB])])
    text += "\nn0:100:300 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA"
    text += "\nn1:101:301 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [receive] via NET/IB/0"
    report = read(text)
    assert report.transport.path.gdr is False and report.transport.path.partial_gdr
    assert "B2" in report.failure.rules


# --- false friends ---------------------------------------------------------------------------------------------------


def test_empty_device_list_is_not_rdma():
    more = [
        "NET/IB : No device found.",
        "NET/IB : Using [RO]; OOB eth0:10.0.0.1<0>",
        "NET/Socket : Using [0]eth0:10.0.0.1<0>",
    ]
    transport = read(run("NET/Socket/0", "Socket", more)).transport
    assert transport.path.answer == "tcp" and transport.devices == ()


def test_empty_device_list_alone_is_unknown():
    assert path("n1:7:9 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.0.1<0>").answer == "unknown"


def test_bootstrap_interface_is_not_the_data_path():
    transport = read("n1:7:7 [0] NCCL INFO Bootstrap : Using hsn0:10.0.0.1<0>").transport
    assert transport.path.answer == "unknown" and transport.interfaces == ("hsn0",)
    transport = read(run("NET/IB/0/GDRDMA")).transport
    assert transport.path.answer == "rdma" and transport.interfaces == ("eth0",)


@pytest.mark.parametrize("provider", ["tcp", "tcp;ofi_rxm", "sockets", "udp;ofi_rxd"])
def test_libfabric_over_tcp_is_tcp(provider):
    found = path(
        run("NET/AWS Libfabric/0", "AWS Libfabric", [f"NET/OFI Selected Provider is {provider} (found 1 nics)"])
    )
    assert (found.answer, found.provider) == ("tcp", provider)
    assert "libfabric" in found.words


def test_using_network_ib_does_not_mean_gdr():
    assert path(run("NET/IB/0")).gdr is False


def test_using_network_ib_on_one_node_means_no_network():
    text = "\n".join(start_up(rank, nodes=1, host="n0", more=[IB]) for rank in (0, 1))
    transport = read(text).transport
    assert transport.path.answer == "local" and transport.selected == ("IB",)


def test_gdr_1_at_the_rings_proves_nothing_and_gdr_0_does():
    ring = "n0:100:300 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR {}"
    chosen = "\n".join(start_up(rank, more=[IB]) for rank in (0, 1))
    assert path(chosen + "\n" + ring.format(1)).gdr is None
    assert path(chosen + "\n" + ring.format(0)).gdr is False
    one_node = "\n".join(start_up(rank, nodes=1, host="n0", network="Socket") for rank in (0, 1))
    assert path(one_node + "\n" + ring.format(1)).answer == "local"


def test_plugin_probing_is_noise():
    more = [
        "NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.",
        "NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.",
        IB,
    ]
    report = read(run("NET/IB/0/GDRDMA", more=more))
    assert report.transport.path.answer == "rdma" and not report.failure.notes and report.failure.answer == "none"


def test_anp_success_at_warn_level_is_no_failure():
    text = "n0:100:200 [0] net_ib.cc:855 NCCL WARN ANP plugin loaded successfully with telemetry v1"
    assert read(text).failure.answer == "none"


def test_the_status_counts_not_the_hint():
    text = """
    n0:1:2 [0] net_ib/p2p.cc:688 NCCL WARN NET/IB: Got completion from peer 10.0.0.2<4> with status=IBV_WC_RETRY_EXC_ERR(12)
    n0:1:2 [0] NCCL INFO HINT: In many cases this error occurs when ACS is enabled which would break GPU Direct RDMA
    """
    assert read(text).failure.answer == "ib-retry-exceeded"


def test_rccl_advice_is_no_failure():
    text = """
    n0:1:1 [0] /src/hipify/src/init.cc:140 NCCL WARN NUMA auto balancing enabled which can lead to variability
    n0:1:1 [0] /src/hipify/src/init.cc:150 NCCL WARN Missing "iommu=pt" from kernel command line
    """
    report = read(text)
    assert report.failure.finding is None and report.transport.library == "rccl"
    assert [note.code for note in report.failure.notes] == ["numa-balancing"]


@pytest.mark.parametrize("bracket", ["0", "1a000", "c1000"])
def test_the_bracket_is_opaque(bracket):
    (record,) = records(f"n0:1:2 [0] NCCL INFO Channel 00/0 : 3[{bracket}] -> 4[{bracket}] [send] via NET/IB/0/GDRDMA")
    assert observe(record) == Channel(3, 4, "send", "NET", "IB", 0, True)


def test_lazy_connect_is_likely_not_certain():
    found = path("\n".join(start_up(rank, more=[IB]) for rank in (0, 1)))
    assert (found.answer, found.gdr, found.confidence) == ("rdma", None, "likely")
    assert found.evidence[0].text.endswith("Using network IB")


def test_a_ring_dump_is_not_a_connection_but_shows_the_size():
    (record,) = records("n0:1:2 [0] NCCL INFO Channel 00/02 :    0   1   2   3")
    assert observe(record) == Ranks("", 4)


def test_gdr_enabled_for_the_card_is_not_gdr_in_use():
    more = [
        IB,
        "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",
        "GPU Direct RDMA Disabled for GPU 81000 / HCA 0 (distance 6 > 4)",
    ]
    report = read(run("NET/IB/0", more=more))
    assert report.transport.path.gdr is False
    assert "B3" in report.failure.rules


# --- formats by version ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line,kind,name,gdr",
    [
        ("Ring 00 : 15 -> 0 [send] via NET/Socket/0", "NET", "Socket", False),  # 2.4
        ("Channel 00 : 0[1a000] -> 1[1c000] via P2P/IPC", "P2P", "P2P/IPC", None),  # 2.7
        ("Channel 00 : 0[1a000] -> 1[1c000] via direct shared memory", "SHM", "", None),  # 2.10
        ("Channel 03 : 2[88000] -> 6[88000] [send] via NET/IB/3/GDRDMA/Shared", "NET", "IB", True),  # 2.10
        ("Channel 01/1 : 7[ca000] -> 8[1a000] [send] via NET/IB/0(7)/GDRDMA/Shared", "NET", "IB", True),  # 2.12, PXN
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read", "P2P", "P2P/CUMEM/read", None),  # 2.18
        ("Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct", "SHM", "", None),
        ("Channel 00/0 : 0[0] -> 4[0] [send] via NET/IBext_v10/2/GDRDMA(PCI)", "NET", "IBext_v10", True),  # 2.26
        ("Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0 comm 0x2083dd50 nRanks 02", "NET", "Socket", False),  # RCCL
        ("Channel 00/0 : 3[1e000] -> 0[b000] via P2P/direct pointer comm 0x588ff9 nRanks 04", "P2P", "P2P/direct", None),
        ("CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA", "COLLNET", "SHARP", True),
    ],
)  # fmt: skip
def test_channel_formats(line, kind, name, gdr):
    (record,) = records(f"n0:1:2 [0] NCCL INFO {line}")
    found = observe(record)
    assert (found.kind, found.name, found.gdr) == (kind, name, gdr)


@pytest.mark.parametrize(
    "line,library,version",
    [
        ("NCCL version 2.7.8+cuda10.2", "nccl", "2.7.8+cuda10.2"),
        ("n0:1:1 [0] NCCL INFO NCCL version 2.28.9+cuda12.9", "nccl", "2.28.9+cuda12.9"),
        ("RCCL version 2.16.5+hip5.6 HEAD:abc", "rccl", "2.16.5+hip5.6"),
        ("n0:1:1 [0] NCCL INFO RCCL version : 2.30.4-HEAD:2b22ab0", "rccl", "2.30.4"),
        ("NCCL version 2.7.8+cuda10.2NCCL version 2.7.8+cuda10.2", "nccl", "2.7.8+cuda10.2"),
        ("(Worker pid=7) n0:1:1 [0] NCCL INFO RCCL version : 2.26.6-HEAD:f22", "rccl", "2.26.6"),
    ],
)
def test_version_lines(line, library, version):
    transport = read(line).transport
    assert (transport.library, transport.versions) == (library, (version,))


@pytest.mark.parametrize(
    "line,devices",
    [
        ("NET/IB : Using [0]hfi1_0:1/IB [1]hfi1_1:1/IB ; OOB ib0:10.0.0.1<0>", ("hfi1_0/IB", "hfi1_1/IB")),
        ("NET/IB : Using [0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE} [RO]; OOB eth0:10.0.0.1<0>", ("mlx5_2+mlx5_3/RoCE",)),
        ("NET/IB : Using [0]mlx5_0:1:0:1/IB [RO]; OOB eth0:10.0.0.1<0>", ("mlx5_0/IB",)),
        ("NET/IB : Using [0]mlx5_2:1/IB/SHARP [RO]; OOB eth0:10.0.0.1<0>", ("mlx5_2/IB",)),
        ("NET/IB : Using [0]ibP1p0s0:1/IB [1]rocep4s0f0:1/RoCE [RO]; OOB e0:10.0.0.1<0>", ("ibP1p0s0/IB", "rocep4s0f0/RoCE")),
    ],
)  # fmt: skip
def test_device_lists(line, devices):
    assert read(f"n0:1:1 [0] NCCL INFO {line}").transport.devices == devices


def test_old_library_without_using_network_or_start_lines():
    text = """
    NCCL version 2.4.8+cuda10.1
    0: n0:100:200 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:10.0.0.1<0>
    1: n1:101:201 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:10.0.0.2<0>
    0: n0:100:200 [0] NCCL INFO Ring 00 : 0 -> 1 [send] via NET/IB/0
    1: n1:101:201 [0] NCCL INFO Ring 00 : 0 -> 1 [receive] via NET/IB/0
    0: n0:100:200 [0] NCCL INFO comm 0x2a rank 0 nranks 2 cudaDev 0 nvmlDev 0 - Init COMPLETE
    1: n1:101:201 [0] NCCL INFO comm 0x2a rank 1 nranks 2 cudaDev 0 nvmlDev 0 - Init COMPLETE
    """
    transport = read(text).transport
    assert (transport.path.words, transport.nranks) == ("rdma, staged through host memory (IB)", 2)
    assert [(p.a, p.b) for p in transport.pairs] == [("n0", "n1")]


def test_groups_of_a_big_job_are_told_apart():
    """Four ranks on two nodes: the world over the network, pairs inside the nodes not."""
    lines = []
    for rank in range(4):
        at = f"n{rank // 2}:{100 + rank}:{200 + rank} [0] NCCL INFO"
        peer, side = (rank + 2) % 4, "[send]"
        lines += [
            f"{at} Using network IB",
            f"{at} Channel 00 : {rank}[1a000] -> {peer}[1a000] {side} via NET/IB/0/GDRDMA",
            f"{at} comm 0xa{rank} rank {rank} nranks 4 cudaDev 0 busId 1a000 - Init COMPLETE",
            f"{at} Channel 00 : {rank % 2}[1a000] -> {1 - rank % 2}[1c000] via P2P/IPC",
            f"{at} comm 0xb{rank} rank {rank % 2} nranks 2 cudaDev 0 busId 1a000 - Init COMPLETE",
        ]
    found = {(c.nranks, c.count): c.path.answer for c in read("\n".join(lines)).transport.communicators}
    assert found == {(4, 1): "rdma", (2, 2): "local"}


def test_nccl_tests_table_gives_the_ranks():
    text = """
    #  Rank  0 Group  0 Pid 147147 on nodeA device  0 [0000:2d:00] NVIDIA H100
    #  Rank  1 Group  0 Pid  99094 on nodeB device  0 [0000:07:00] NVIDIA H100
    """
    transport = read(text).transport
    assert (transport.nranks, transport.nnodes, transport.nodes) == (2, 2, ("nodeA", "nodeB"))


def test_a_reader_can_be_asked_on_the_way():
    from drumbeat.logs.reader import Reader

    reader = Reader()
    answers = []
    for number, line in enumerate(run("NET/IB/0/GDRDMA").split("\n"), 1):
        reader.feed("nccl.n0.100", number, line.encode())
        answers.append(reader.transport().path.words)
    assert answers[0] == "unknown" and answers[-1] == "rdma+gdr (IB)"
    assert reader.transport() == reader.transport() == reader.report().transport


def test_words_never_promise_more_than_was_seen():
    assert "unknown" in path("\n".join(start_up(rank, more=[IB]) for rank in (0, 1))).words


@pytest.mark.parametrize(
    "line,answer,link",
    [
        (
            "n1:7:9 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-AbCdEf to 9637892 bytes",
            "local",
            "",
        ),
        ("n1:7:9 [0] NCCL INFO transport/shm.cc:114 -> 2", "local", ""),
        ("n1:7:9 [0] transport/p2p.cc:275 NCCL WARN Cuda failure 'peer access is not supported'", "local", ""),
        ("n1:7:9 [0] transport/net_ib.cc:789 NCCL WARN NET/IB : Got completion with error 12, opcode 1", "rdma", ""),
        (
            "n1:7:9 [0] transport/net_ib.cc:1 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4> with status=12 "
            "opcode=0 len=0 vendor err 129 (Recv) localGid ::ffff:10.0.0.1 remoteGids ::ffff:10.0.0.2",
            "rdma",
            "RoCE",
        ),
        ("n1:7:9 [0] transport/net_socket.cc:500 NCCL WARN Call to recv failed", "tcp", ""),
        ("n1:7:9 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)", "ofi", ""),
        ("Channel 03/0 : 11[0] -> 3[0] [send]    via NET/IB/0", "rdma", ""),
        # Near misses: the bootstrap's own files, and prose, say nothing about the data path.
        (
            "misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.1<3> failed : Connection refused",
            "unknown",
            "",
        ),
        ("n1:7:9 [0] NCCL INFO bootstrap.cc:450 -> 6", "unknown", ""),
        ("see transport/net_ib.cc:789 in NCCL's source", "unknown", ""),
        ("Channel 3 of the radio is via NET", "unknown", ""),
    ],
)
def test_an_excerpt_shows_what_was_in_use(line, answer, link):
    path = read(line).transport.path
    assert (path.answer, path.link) == (answer, link)
    assert path.confidence != "certain" or "via NET" in line


def test_one_host_and_shared_memory_only_is_local_whatever_was_chosen():
    lines = ["n1:7:9 [0] NCCL INFO Using network Socket", "n1:7:9 [0] NCCL INFO Channel 00/02 :    0   1"]
    lines += [
        f"n1:{7 + rank}:9 [{rank}] NCCL INFO Channel 00 : {rank}[1] -> {1 - rank}[2] via direct shared memory"
        for rank in (0, 1)
    ]
    transport = read("\n".join(lines)).transport
    assert transport.path.answer == "local" and transport.nranks == 2


def test_nccls_count_of_nodes_beats_counted_names():
    text = "\n".join(start_up(rank, nodes=1, host=f"pod-{rank}") for rank in (0, 1))
    assert read(text).transport.nnodes == 1


def test_connections_of_torn_processes_belong_to_the_only_group():
    """Ranks 0, 2 and 3 are connected inside the host and rank 1 speaks from it: all four, so no network was needed."""
    lines = [
        "n1:7:7 [3] NCCL INFO Using network Socket",
        "n1:6:6 [1] NCCL INFO ncclCommInitRank comm 0x5e rank 1 nranks 4 cudaDev 1 busId 41000 commId 0x1d - Init START",
        "n1:7:7 [3] NCCL INFO Channel 00 : 3[4] -> 0[1] via SHM/direct/direct",
        "n1:5:5 [2] NCCL INFO Channel 00 : 2[3] -> 0[1] via SHM/direct/direct",
    ]
    assert path("\n".join(lines)).answer == "local"
    # Of eight ranks four may be elsewhere: then the network that was chosen is all there is to say.
    eight = "\n".join(lines).replace("nranks 4", "nranks 8")
    assert (path(eight).answer, path(eight).confidence) == ("tcp", "likely")
    # A group of another host is not theirs.
    assert path("\n".join(lines).replace("n1:6:6", "n2:6:6")).answer != "local"


def test_a_subsystem_that_hides_the_network_proves_nothing():
    line = "n1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
    alone = read(line).transport
    assert alone.path.answer == "unknown" and any("NCCL_DEBUG_SUBSYS" in text for text in alone.unseen)
    assert path("n1:7:9 [0] NCCL INFO Using network IB\n" + line).answer == "local"


@pytest.mark.parametrize("prefix", ["[rank0]: ", "0: ", "[1,3]<stderr>:", "(WorkerDict pid=7) ", ""])
def test_a_line_without_its_head_behind_a_prefix(prefix):
    line = "NET/OFI Request 0x7f completed with error. RC: 103. Error: 4126 (Unresponsive receiver (reachable by EFA device))"
    assert (path(prefix + line).answer, path(prefix + line).provider) == ("ofi", "efa")


def test_the_cards_that_each_rank_uses():
    text = "\n".join(
        [
            start_up(0, more=["NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/IB [RO]; OOB eth0:10.0.0.1<0>"]),
            "n0:100:200 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/1/GDRDMA",
            "n0:100:200 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/NCCL RDMA Plugin v6/1(2)/GDRDMA/Shared",
            start_up(1, network="AWS Libfabric"),
            "n1:101:201 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/AWS Libfabric/3/GDRDMA",
        ]
    )
    report = read(text)
    assert report.transport.nics == ((0, ("mlx5_3",)), (1, ("AWS Libfabric/3",)))
    assert "NIC used    rank 0: mlx5_3; rank 1: AWS Libfabric/3" in render(report)


def test_the_share_of_missing_ranks_counts_the_world():
    text = start_up(0, nranks=8) + "\nn0:100:200 [0] NCCL INFO Channel 00/0 : 9[0] -> 3[0] [send] via NET/IB/0"
    assert "7 of 8 ranks: not in these logs" in read(text).transport.unseen


def test_a_plugin_is_named_once():
    text = run("NET/IBext_v8/0", "IBext_v8") + "\nn0:100:200 [0] NCCL INFO P2P plugin IBext_v8"
    assert "plug-in IBext_v8" in render(read(text))


def test_the_ring_that_rank_0_prints_says_how_many_ranks_there_are():
    ring = "n1:7:8 [0] NCCL INFO Channel 00 :    0   1"
    edges = ["n1:7:8 [0] NCCL INFO Ring 00 : 0[0] -> 1[1] via P2P/direct pointer"]
    edges += ["n1:7:9 [1] NCCL INFO Ring 00 : 1[1] -> 0[0] via P2P/direct pointer"]
    path = read("\n".join([ring, *edges])).transport.path
    assert (path.answer, path.confidence) == ("local", CERTAIN)
    assert read("\n".join(edges)).transport.path.answer == "unknown"


def test_ranks_of_one_host_that_are_all_connected_are_likely_alone():
    edges = [f"n1:{n}:{n} [{n}] NCCL INFO Channel 00 : {n}[1d000] -> {n + 1}[1e000] via P2P/IPC" for n in range(4)]
    formed = "n1:2:2 [2] NCCL INFO Connected all rings"
    path = read("\n".join([*edges, formed])).transport.path
    assert (path.answer, path.confidence) == ("local", LIKELY)
    assert read("\n".join(edges)).transport.path.answer == "unknown", "nothing says that this is all"
    assert read("\n".join([*edges[:2], formed])).transport.path.answer == "unknown", "too few to tell"
    network = "n1:3:3 [3] NCCL INFO Channel 01 : 3[1d000] -> 9[1e000] [send] via NET/IB/0"
    assert read("\n".join([*edges, formed, network])).transport.path.answer == "rdma"


INSIDE = "n1:7:8 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"


def test_connections_inside_a_host_say_local_where_no_ring_is_larger():
    formed = [INSIDE, "n1:7:8 [0] NCCL INFO Connected all rings"]
    found = path("\n".join([*formed, "n1:11:12 [0] NCCL INFO Channel 00/02 :    0   1"]))
    assert (found.answer, found.confidence) == ("local", LIKELY)
    assert path("\n".join([*formed, "n1:11:12 [0] NCCL INFO Channel 00/02 :    0   1   2   3"])).answer == "unknown"


def test_connections_that_are_shown_are_not_denied():
    found = path(INSIDE)
    assert found.answer == "unknown" and found.words.startswith("unknown: connections inside a host are shown")


def test_a_connection_without_the_number_of_its_channel():
    line = "[17:07:40] [node-a rank 0] NCCL INFO 0[0] -> 8[0] [send]    via NET/IB/0"
    assert (path(line).answer, path(line).confidence) == ("rdma", CERTAIN)
    assert path("NCCL INFO 0[0] -> 8[0] scheduled").answer == "unknown"


def test_how_long_its_start_took_names_the_size_of_a_communicator():
    ends = [
        f"n1:2{r}:9{r} [{r}] NCCL INFO Channel 00 : {r}[{r}] -> {1 - r}[{1 - r}] via SHM/direct/direct" for r in (0, 1)
    ]
    formed = [f"n1:2{r}:9{r} [{r}] NCCL INFO Connected all rings, use ring PXN 0 GDR 1" for r in (0, 1)]
    timings = "n1:21:80 [1] NCCL INFO Init timings - ncclCommInitRankConfig: rank 1 nranks {} total 0.09 (kernels 0.07)"
    assert path("\n".join([*ends, *formed])).answer == "unknown"
    assert path("\n".join([timings.format(2), *ends, *formed])).answer == "local"
    assert path("\n".join([timings.format(4), *ends, *formed])).answer == "unknown"


def test_the_last_error_that_torch_quotes_shows_the_network_it_came_from():
    quoted = (
        "Last error:\nNET/IB : Got completion from peer 10.5.0.34<33956> with error 5, opcode 0, len 1, vendor err 244"
    )
    assert (path(quoted).answer, path(quoted).confidence) == ("rdma", LIKELY)
    assert path("Last error:\nGot completion from peer").answer == "unknown"


def test_what_was_tried_and_failed_is_not_certain_to_have_carried_anything():
    began = [
        f"n{r}:100:110 [0] NCCL INFO comm 0x{r} rank {r} nranks 2 cudaDev 0 busId 1000 commId 0xaa - Init START"
        for r in (0, 1)
    ]
    tried = "n{0}:100:110 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [{1}] via NET/IB/0/GDRDMA"
    tried = [tried.format(0, "send"), tried.format(1, "receive")]
    failed = (
        "n1:100:110 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with 110 timed out, on dev mlx5_0:1"
    )
    assert path("\n".join([*began, *tried])).confidence == CERTAIN
    assert path("\n".join([*began, *tried, failed])).confidence == LIKELY
    assert (
        path("\n".join([*began, *tried, "n0:100:110 [0] NCCL INFO Connected all rings", failed])).confidence == CERTAIN
    )


def test_a_sentence_about_a_line_of_nccl_is_no_connection():
    line = "NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA"
    assert path(f"The docs say: {line} is what you want to see.").answer == "unknown"
    assert path(f"[2026-11-17 01:02:03] worker 3 | {line}").answer == "rdma"


def test_a_pair_of_hosts_is_one_pair_though_only_one_end_of_each_connection_is_in_the_log():
    text = "\n".join(
        [
            "n3:41:41 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.20.0.3<0>",
            "n3:41:41 [0] NCCL INFO Using network IB",
            "n3:41:42 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [send] via NET/IB/0/GDRDMA",
            "n4:51:52 [0] NCCL INFO Channel 00/0 : 7[3] -> 0[0] [send] via NET/IB/0/GDRDMA",
        ]
    )
    report = read(text)
    assert [(pair.a, pair.b) for pair in report.transport.pairs] == [("n3", "n4")]
    assert report.transport.nics == ((3, ("mlx5_0",)), (7, ("IB device 0",))), "a number is no card's name"
    text = text.replace("4[0]", "8[0]")  # of a third node, which is not in the log
    assert {(pair.a, pair.b) for pair in read(text).transport.pairs} == {("n3", "rank 8"), ("n3", "n4")}

"""What a user exported is kept, and questioned where it looks wrong."""

import dataclasses

import pytest

from drumbeat.plan.exported import against_expected
from drumbeat.plan.show import plan_node
from drumbeat.plan.variables import steers
from tests.plan.archetype import facts_of, order_of, peers_of
from tests.plan.making import machine, order, peers


def asked(name, exported, nodes=2, **changes):
    facts = [
        dataclasses.replace(each, environment={**each.environment, **exported}, **changes)
        for each in facts_of(name, nodes)
    ]
    plan = plan_node(order_of(name, facts_of(name, nodes)), facts[0], peers_of(facts), 0)
    return [finding for finding in plan.findings if finding.code not in ("variable-overruled", "alt-read-idle")]


def said(name, exported, **more):
    return [(finding.code, finding.severity) for finding in asked(name, exported, **more)]


@pytest.mark.parametrize(
    "machine,exported,expected",
    [
        ("lumi-g", {"MIOOPEN_USER_DB_PATH": "/tmp/x"}, ("variable-dead", "warning")),
        ("lumi-g", {"MIOPEN_USER_DB": "/tmp/x"}, ("variable-dead", "warning")),
        ("lumi-g", {"PYTORCH_ROCM_DEVICE": "0"}, ("variable-dead", "warning")),
        ("lumi-g", {"NCCL_SOCKET_IFNAMES": "hsn0"}, ("variable-misspelt", "warning")),
        ("lumi-g", {"NCCL_IB_GIDINDEX": "3"}, ("variable-misspelt", "warning")),
        ("lumi-g", {"NCCL_ASYNC_ERROR_HANDLING": "1"}, ("variable-old", "info")),
        ("lumi-g", {"NCCL_DEBUG": "INFO"}, ("debug-left-on", "info")),
        ("lumi-g", {"NCCL_DEBUG": "TRACE"}, ("debug-left-on", "warning")),
        ("lumi-g", {"CUDA_LAUNCH_BLOCKING": "1"}, ("debug-left-on", "warning")),
        ("lumi-g", {"FI_MR_CACHE_MONITOR": "memhooks"}, ("memhooks", "warning")),
        ("lumi-g", {"NCCL_SOCKET_IFNAME": "nmn0"}, ("interface-not-fast", "warning")),
        ("lumi-g", {"NCCL_SOCKET_IFNAME": "eth7"}, ("interface-missing", "error")),
        ("lumi-g", {"GLOO_SOCKET_IFNAME": "hsn"}, ("interface-missing", "error")),
        ("workstation", {"GLOO_SOCKET_IFNAME": "=enp5s0"}, ("interface-missing", "error")),
        ("lumi-g", {"NCCL_NET": "AWS Libfabric", "NCCL_NET_PLUGIN": "ofi"}, ("ofi-named-twice", "warning")),
        ("lumi-g", {"NCCL_NET": "IB"}, ("ib-without-device", "error")),
        ("lumi-g", {"NCCL_P2P_DISABLE": "1"}, ("p2p-off", "warning")),
        ("dgx-h100", {"NCCL_IB_HCA": "mlx5_1"}, ("hca-prefix", "warning")),
        ("dgx-h100", {"NCCL_IB_HCA": "rdma0,rdma1"}, ("hca-missing", "error")),
        ("dgx-h100", {"NCCL_IB_HCA": "=mlx5_0,mlx5_99"}, ("hca-missing", "warning")),
        ("dgx-h100", {"NCCL_IB_HCA": "=mlx5_0,mlx5_1"}, ("hca-unfit", "warning")),
        ("dgx-h100", {"NCCL_IB_GID_INDEX": "3"}, ("gid-on-infiniband", "warning")),
        ("dgx-h100", {"NCCL_IB_DISABLE": "1"}, ("fast-network-off", "warning")),
        ("dgx-h100", {"NCCL_NET": "Socket"}, ("fast-network-off", "warning")),
        ("dgx-h100", {"NCCL_NET": "OFI"}, ("ofi-without-plugin", "error")),
        ("dgx-h100", {"HIP_VISIBLE_DEVICES": "0"}, ("variable-dead", "warning")),
        ("rcp-pod", {"NCCL_IB_GID_INDEX": "3"}, ("gid-wrong", "error")),
        ("rcp-pod", {"NCCL_IB_GID_INDEX": "RoCE v2"}, ("gid-unreadable", "error")),
        ("rcp-pod", {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}, ("too-many-sockets", "warning")),
        ("workstation", {"NCCL_SOCKET_IFNAME": "^lo"}, ("interface-exclusion", "warning")),
        ("workstation", {"NCCL_SOCKET_IFNAME": "lo"}, ("interface-local", "error")),
        ("workstation", {"NCCL_SOCKET_IFNAME": "docker0"}, ("interface-down", "warning")),
        ("mi300x-thor2", {"NCCL_IGNORE_NET_MISMATCH": "1"}, ("mismatch-hidden", "warning")),
    ],
)
def test_a_wrong_value_is_said(machine, exported, expected):
    assert expected in said(machine, exported)
    assert expected not in said(machine, {})


@pytest.mark.parametrize(
    "machine,exported",
    [
        ("lumi-g", {"NCCL_SOCKET_IFNAME": "hsn", "NCCL_NET_GDR_LEVEL": "PHB", "FI_MR_CACHE_MONITOR": "kdreg2"}),
        ("lumi-g", {"NCCL_DEBUG": "WARN", "RCCL_MSCCL_ENABLE": "0", "TORCH_NCCL_HIGH_PRIORITY": "1"}),
        ("rcp-pod", {"NCCL_IB_GID_INDEX": "7", "NCCL_IB_HCA": "mlx5_bond_", "NCCL_SOCKET_IFNAME": "net1"}),
        ("rcp-pod", {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "8", "NCCL_IB_SL": "1"}),
        ("workstation", {"NCCL_SOCKET_IFNAME": "^lo,docker", "NCCL_IB_DISABLE": "1", "HSA_ENABLE_SDMA": "0"}),
        ("mi300x-thor2", {"NCCL_IB_TIMEOUT": "23", "NCCL_IB_RETRY_CNT": "7", "NCCL_IB_FIFO_TC": "192"}),
    ],
)
def test_a_good_value_is_left_in_peace(machine, exported):
    assert said(machine, exported) == said(machine, {})


def test_msccl_is_dead_only_on_a_new_rccl():
    def on(rocm):
        versions = {**facts_of("mi300x-thor2")[0].versions, "rocm": rocm}
        return said("mi300x-thor2", {"RCCL_MSCCL_ENABLE": "0"}, versions=versions)

    assert on("7.14.0") == [("variable-dead", "warning")] and on("6.4.1") == []


def test_gh200_on_slingshot_must_not_lose_its_guard_against_wrong_sums():
    unsafe = {"FI_CXI_RDZV_THRESHOLD": "16384"}
    assert ("ll128-wrong-sums", "error") in said("olivia", unsafe)
    assert ("ll128-wrong-sums", "error") not in said("olivia", {**unsafe, "NCCL_PROTO": "^LL128"})
    assert ("ll128-wrong-sums", "error") not in said("olivia", {**unsafe, "NCCL_PROTO": "Simple"})
    assert ("ll128-wrong-sums", "error") in said("olivia", {**unsafe, "NCCL_PROTO": "LL,LL128"})
    assert ("ll128-wrong-sums", "error") not in said("lumi-g", unsafe)


def test_the_plug_in_is_not_forced_on_one_slingshot_node():
    assert ("ofi-on-one-node", "error") in said("slingshot-single-node", {"NCCL_NET": "AWS Libfabric"}, nodes=1)


def test_overlapping_masks_of_slurm_are_an_error():
    mask = "quiet,mask_cpu:0xfe000000000000,0xfe000000000000,0xfe0000"
    assert ("mask-overlap", "error") in said("lumi-g", {"SLURM_CPU_BIND": mask})
    assert said("lumi-g", {"SLURM_CPU_BIND": "quiet,mask_cpu:0xfe,0xfe00"}) == []


def test_alt_read_is_idle_without_its_option():
    facts = facts_of("olivia")
    on = [
        dataclasses.replace(each, environment={**each.environment, "SLURM_NETWORK": "disable_rdzv_get"})
        for each in facts
    ]
    job = order_of("olivia", facts)
    assert "alt-read-idle" in [each.code for each in plan_node(job, facts[0], peers_of(facts), 0).findings]
    assert "alt-read-idle" not in [each.code for each in plan_node(job, on[0], peers_of(on), 0).findings]


def test_lo_is_right_where_nodes_are_emulated():
    facts = machine(4, environment={"NCCL_SOCKET_IFNAME": "lo"})
    assert plan_node(order(), facts, peers(facts), 0).findings == ()


def test_what_images_and_modules_export_is_no_slip_of_the_pen():
    names = """NCCL_VERSION NCCL_HOME NCCL_ROOT NCCL_LIB_DIR NCCL_INCLUDE_DIR CUDA_VERSION CUDA_DRIVER_VERSION CUDA_HOME
    CUDA_PATH CUDA_ROOT CUDA_MODULE_LOADING CUDA_CACHE_MAXSIZE TORCH_CUDA_ARCH_LIST TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    PYTORCH_VERSION PYTORCH_BUILD_VERSION PYTORCH_HOME PYTORCH_ROCM_ARCH PYTORCH_TEST_WITH_ROCM UCX_VERSION UCX_HOME
    OMPI_MCA_coll_hcoll_enable OMPI_MCA_pml OMPI_MCA_btl HIP_PLATFORM HIP_PATH HIP_CLANG_PATH HSA_PATH ROCM_PATH GPU_ARCHS
    HF_ENDPOINT HF_DATASETS_TRUST_REMOTE_CODE TRITON_PTXAS_PATH TRITON_HOME MPICH_GPU_SUPPORT_ENABLED MPICH_DIR
    MPICH_OFI_NIC_POLICY FI_CXI_ATS CXI_DIR OMP_WAIT_POLICY OMP_DISPLAY_ENV MKL_THREADING_LAYER KMP_BLOCKTIME
    MIOPEN_SYSTEM_DB_PATH MIOPEN_FIND_ENFORCE MIOPEN_DEBUG_CONV_WINOGRAD AMD_DIRECT_DISPATCH GLOO_DEVICE_TRANSPORT
    TORCH_CPP_LOG_LEVEL TORCH_NCCL_USE_COMM_NONBLOCKING TORCHINDUCTOR_MAX_AUTOTUNE NCCL_NVLS_NCHANNELS NCCL_IB_PKEY
    NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_OOO_RQ NCCL_MNNVL_SCATTER_NETS_ENABLE RCCL_P2P_NET_DISABLE""".split()  # noqa: SIM905
    found = asked("lumi-g", dict.fromkeys(names, "1"))
    assert [finding.title for finding in found if finding.code == "variable-misspelt"] == []


def test_what_steers_a_rank():
    assert all(
        map(steers, ("NCCL_DEBUG", "HF_HOME", "MIOPEN_USER_DB_PATH", "MIOOPEN_USER_DB_PATH", "TRITON_CACHE_DIR"))
    )
    assert not any(map(steers, ("NCCL_VERSION", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST", "PATH", "SLURM_JOB_ID", "RANK")))


def test_openib_is_questioned_and_other_settings_of_open_mpi_are_left_alone():
    from drumbeat.plan.exported import _transport
    from drumbeat.plan.network import ComputeNics
    from drumbeat.plan.scene import Scene

    here = Scene("infiniband", "", ComputeNics(), "many")
    found = {value: [*_transport({"OMPI_MCA_btl": value}, here)] for value in ("openib,self", "^openib", "tcp,self")}
    assert [each.code for each in found["openib,self"]] == ["mpi-openib"]
    assert found["^openib"] == found["tcp,self"] == []


@pytest.mark.parametrize(
    "env, transport, gdr, named",
    [
        ({"NCCL_IB_DISABLE": "1"}, "ib", None, ["NCCL_IB_DISABLE"]),
        ({"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}, "rdma", None, ["NCCL_IB_DISABLE", "NCCL_NET"]),
        ({"NCCL_IB_DISABLE": "1", "FI_PROVIDER": "efa"}, "rdma", None, []),
        ({"NCCL_IB_DISABLE": "1"}, "ofi", None, []),
        ({"NCCL_NET": "Socket"}, "any", None, []),
        ({"NCCL_NET_GDR_LEVEL": "LOC"}, "ib", True, ["NCCL_NET_GDR_LEVEL"]),
        ({"NCCL_NET_GDR_LEVEL": "PHB"}, "ib", True, []),
    ],
)
def test_a_variable_against_what_is_expected_is_questioned_before_any_node_is_known(env, transport, gdr, named):
    found = against_expected(env, transport, gdr, 2)
    assert [each.title.partition("=")[0] for each in found] == named
    assert against_expected(env, transport, gdr, 1) == []

"""Which variable is set when: versions, fabrics, one node or several, and who wins."""

import dataclasses

import pytest

from drumbeat.base.order import EnvVar, Expect
from drumbeat.machine.model import Facts, Interface, Library, Peer, Peers
from drumbeat.plan.environment import decide, environment
from drumbeat.plan.show import desk_lines
from tests.plan.archetype import facts_of, order_of, peers_of
from tests.plan.making import machine, named, order, peers


def env(name, change=None, text="command: x\n", nodes=2, **order_changes):
    facts = facts_of(name, nodes)
    if change:
        facts = [dataclasses.replace(each, **change(each)) for each in facts]
    job = dataclasses.replace(order_of(name, facts_of(name, nodes), text), **order_changes)
    return decide(job, facts[0], peers_of(facts), 0)


def values(decision):
    return {each.name: each.value for each in decision.variables}


def version(**versions):
    return lambda facts: {"versions": {**facts.versions, **versions}}


def left(decision, name):
    return next(each.why for each in decision.left if each.name == name)


@pytest.mark.parametrize(
    "machine,index", [("rcp-pod", "7"), ("one-ipv4-gid", "3"), ("two-ipv4-gids", "7"), ("mi300x-thor2", "3")]
)
def test_an_old_library_is_told_the_gid(machine, index):
    old = version(nccl="2.18.3", rccl="2.18.3")
    assert values(env(machine, old))["NCCL_IB_GID_INDEX"] == index


def test_a_new_library_finds_the_gid_itself_and_infiniband_has_none():
    assert "2.21.5 looks up" in left(env("rcp-pod"), "NCCL_IB_GID_INDEX")
    assert "InfiniBand" in left(env("dgx-h100"), "NCCL_IB_GID_INDEX")


def test_where_no_index_is_right_none_is_set():
    old = version(nccl="2.18.3", rccl="2.18.3")
    assert "no RoCE v2 GID" in left(env("no-ipv4-gid", old), "NCCL_IB_GID_INDEX")
    assert "no RoCE v2 GID" in left(env("empty-gid", old), "NCCL_IB_GID_INDEX")


def test_rocm_says_which_rccl_it_is():
    def unknown_rccl(rocm):
        return lambda facts: {"versions": {"rocm": rocm}}

    assert "NCCL_IB_GID_INDEX" in values(env("mi300x-thor2", unknown_rccl("6.2.4")))
    assert "NCCL_IB_GID_INDEX" not in values(env("mi300x-thor2", unknown_rccl("6.3.0")))


@pytest.mark.parametrize("rocm,expected", [("6.0.3", "PHB"), ("6.2.4", None), ("6.10.1", None)])
def test_gdr_level_by_rocm(rocm, expected):
    assert values(env("lumi-g", version(rocm=rocm))).get("NCCL_NET_GDR_LEVEL") == expected


@pytest.mark.parametrize("rocm,expected", [("7.0.2", None), ("7.1.1", "1"), ("7.10.0", "1")])
def test_cumem_on_thor_by_rocm(rocm, expected):
    assert values(env("mi300x-thor2", version(rocm=rocm))).get("NCCL_CUMEM_ENABLE") == expected


def test_old_kernels_on_slingshot_are_made_fork_safe():
    def kernel(facts):
        return {"kernel": dataclasses.replace(facts.kernel, release="5.3.18-default")}

    assert values(env("lumi-g", kernel))["CXI_FORK_SAFE"] == "1"
    assert "CXI_FORK_SAFE" not in values(env("lumi-g"))


def test_no_silent_tcp_but_not_on_one_slingshot_node():
    assert values(env("lumi-g"))["NCCL_NET"] == "AWS Libfabric"
    single = env("slingshot-single-node", nodes=1)
    assert "NCCL_NET" not in values(single) and "one node" in left(single, "NCCL_NET")
    assert "NCCL_NET" not in values(env("dgx-h100", nodes=1))


def test_a_missing_plug_in_is_not_forced():
    without = env("lumi-g", lambda facts: {"libraries": ()})
    assert "NCCL_NET" not in values(without) and "not found" in left(without, "NCCL_NET")
    broken = env("lumi-g", lambda facts: {"libraries": (Library("librccl-net.so", "/x", None, False, "GLIBC"),)})
    assert "NCCL_NET" not in values(broken)


def test_a_node_without_the_fast_network_of_its_peers_does_not_fall_back():
    facts = facts_of("dgx-h100")
    bare = dataclasses.replace(facts[0], rdma=())
    plan = decide(order_of("dgx-h100", facts), bare, peers_of([bare, facts[1]]), 0)
    assert values(plan)["NCCL_NET"] == "IB" and "NCCL_IB_HCA" not in values(plan)


def test_fast_ethernet_gets_more_sockets():
    facts = machine(8, interfaces=(Interface("eth0", True, ("10.0.0.1/24",), 100000),))
    job = order(emulated=False)
    found = values(decide(job, facts, peers(facts), 0))
    assert (found["NCCL_SOCKET_NTHREADS"], found["NCCL_NSOCKS_PERTHREAD"]) == ("4", "4")
    slow = machine(8, interfaces=(Interface("eth0", True, ("10.0.0.1/24",), 10000),))
    assert "NCCL_SOCKET_NTHREADS" not in values(decide(job, slow, peers(slow), 0))


def interfaces(*given):
    return tuple(Interface(name, up, (address,), speed) for name, up, address, speed in given)


@pytest.mark.parametrize(
    "here,there,chosen",
    [
        # the one in the other node's subnet, though another is faster
        ((("a0", True, "10.1.0.1/24", 100000), ("b0", True, "10.2.0.1/24", 1000)), "10.2.0.2/24", "b0"),
        # down, or a container's bridge, never
        ((("a0", False, "10.1.0.1/24", 1000), ("docker0", True, "10.1.0.1/24", None), ("c0", True, "10.1.0.5/24", 10)),
         "10.1.0.2/24", "c0"),
        # link-local addresses reach nobody
        ((("a0", True, "fe80::1/64", 1000), ("b0", True, "10.1.0.1/24", 10)), "10.1.0.2/24", "b0"),
        # among equals the fastest, for data goes over it
        ((("a0", True, "10.1.0.1/24", 1000), ("b0", True, "10.1.0.3/24", 25000)), "10.1.0.2/24", "b0"),
    ],
)  # fmt: skip
def test_the_interface_leads_to_the_other_nodes(here, there, chosen):
    mine = Facts("a", interfaces=interfaces(*here))
    other = Facts("b", interfaces=interfaces(("x0", True, there, 1000)))
    both = Peers((Peer(0, "a", "", mine), Peer(1, "b", "", other)), "", 0)
    found = values(decide(order(emulated=False), mine, both, 0))
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=" + chosen, chosen)


def test_no_interface_is_an_error_and_no_guess():
    lone = Facts("a", interfaces=interfaces(("lo", True, "127.0.0.1/8", None), ("docker0", True, "172.17.0.1/16", 10)))
    plan = decide(order(emulated=False), lone, Peers((Peer(0, "a", "", lone),), "", 0), 0)
    assert "NCCL_SOCKET_IFNAME" not in values(plan)
    assert [(each.code, each.severity) for each in plan.findings] == [("no-interface", "error")]


def test_a_strangers_subnet_is_said():
    mine = Facts("a", interfaces=interfaces(("a0", True, "10.1.0.1/24", 1000)))
    other = Facts("b", interfaces=interfaces(("x0", True, "10.9.0.2/24", 1000)))
    both = Peers((Peer(0, "a", "", mine), Peer(1, "b", "", other)), "", 0)
    plan = decide(order(emulated=False), mine, both, 0)
    assert [each.code for each in plan.findings] == ["no-common-subnet"] and "NCCL_SOCKET_IFNAME" in values(plan)


def test_what_the_user_exported_is_kept_and_the_other_value_is_said():
    def exported(facts):
        return {"environment": {**facts.environment, "NCCL_SOCKET_IFNAME": "hsn0", "LD_LIBRARY_PATH": "/x"}}

    plan = env("lumi-g", exported)
    variable = named(plan.variables)["NCCL_SOCKET_IFNAME"]
    assert (variable.value, variable.source) == ("hsn0", "user")
    overruled = [each for each in plan.findings if each.code == "variable-overruled"]
    assert len(overruled) == 1 and "hsn0,hsn1,hsn2,hsn3" in overruled[0].title
    assert "LD_LIBRARY_PATH" not in named(plan.variables), "only what concerns the ranks' libraries"


def test_the_job_wins_over_what_is_exported():
    facts = machine(4, environment={"NCCL_DEBUG": "WARN"})
    asked = EnvVar("NCCL_DEBUG", "INFO", "as the job asks", "user")
    plan = decide(order(env=(asked,)), facts, peers(facts), 0)
    assert named(plan.variables)["NCCL_DEBUG"] == asked
    assert any("NCCL_DEBUG=INFO" in finding.title for finding in plan.findings)


def test_caches_go_to_the_nodes_own_disk_and_to_the_projects_storage():
    found = values(env("lumi-g", text="command: x\ncaches: /scratch/p\n", user="me", local_dir="/local"))
    assert found["MIOPEN_USER_DB_PATH"] == found["MIOPEN_CUSTOM_CACHE_DIR"] == "/local/me-miopen-cache-0"
    assert found["TRITON_CACHE_DIR"] == "/local/me-triton-cache-0"
    assert (found["HF_HOME"], found["TORCH_HOME"]) == ("/scratch/p/huggingface", "/scratch/p/torch")
    assert "MIOPEN_USER_DB_PATH" not in values(env("olivia"))


def test_every_variable_is_there_once_in_order():
    facts = facts_of("olivia")
    names = [each.name for each in environment(order_of("olivia", facts), facts[0], peers_of(facts), 0)]
    assert names == sorted(set(names))


def expecting(name, transport, level="warn", change=None):
    plan = env(name, change, expect=Expect(transport), checks={"transport": level})
    return plan, [(each.code, each.severity) for each in plan.findings if each.code == "expected-network-missing"]


def test_a_network_that_is_expected_must_be_there():
    assert expecting("lumi-g", "ofi")[1] == expecting("rcp-pod", "roce")[1] == expecting("dgx-h100", "rdma")[1] == []
    assert expecting("dgx-h100", "roce")[1] == [("expected-network-missing", "warning")]
    assert expecting("workstation", "rdma", "stop")[1] == [("expected-network-missing", "error")]
    without = expecting("lumi-g", "ofi", "stop", lambda facts: {"libraries": ()})
    assert without[1] == [("expected-network-missing", "error")]


def test_a_job_that_expects_tcp_gets_it():
    plan, findings = expecting("dgx-h100", "tcp")
    assert values(plan)["NCCL_NET"] == "Socket" and findings == []


def test_an_interface_that_was_named_needs_none_to_be_found():
    lone = Facts("a", interfaces=interfaces(("docker0", True, "172.17.0.1/16", 10)))
    named_one = EnvVar("NCCL_SOCKET_IFNAME", "ib0", "as the job asks", "user")
    plan = decide(order(emulated=False, env=(named_one,)), lone, Peers((Peer(0, "a", "", lone),), "", 0), 0)
    assert [each.code for each in plan.findings] == []


def test_a_value_against_a_default_is_kept_and_said():
    def exported(facts):
        return {"environment": {**facts.environment, "FI_MR_CACHE_MONITOR": "kdreg2"}}

    plan = env("lumi-g", exported)
    assert values(plan)["FI_MR_CACHE_MONITOR"] == "kdreg2"
    assert any("userfaultfd" in each.title for each in plan.findings if each.code == "variable-overruled")


def test_a_plug_in_of_the_vendor_is_not_switched_off():
    def hpcx(facts):
        return {"libraries": (*facts.libraries, Library("libnccl-net.so", "/opt/hpcx/lib/libnccl-net.so", None, True))}

    plan = env("dgx-h100", hpcx)
    assert "NCCL_NET" not in values(plan) and "/opt/hpcx" in left(plan, "NCCL_NET")


def pensando(rocm):
    def change(facts):
        return {
            "rdma": tuple(dataclasses.replace(device, driver="ionic_rdma") for device in facts.rdma),
            "libraries": (Library("librccl-anp.so", "/opt/rocm/lib/librccl-anp.so", None, True),),
            "versions": {"rocm": rocm, "rccl": "2.26.6"},
        }

    return values(env("mi300x-thor2", change))


def test_pensando_nics():
    old, new = pensando("7.0.2"), pensando("7.2.1")
    assert (old["NCCL_NET_PLUGIN"], old["NCCL_NET"], old.get("RCCL_AINIC_ROCE")) == ("librccl-anp.so", "RCCL-ANP", None)
    assert (new["NCCL_NET_PLUGIN"], new["NCCL_NET"], new["RCCL_AINIC_ROCE"]) == ("none", "IB", "1")
    assert old["NCCL_DMABUF_ENABLE"] == new["NCCL_DMABUF_ENABLE"] == "0" and "NCCL_CUMEM_ENABLE" not in new


def test_open_mpi_is_told_which_network_only_where_it_started_the_job_and_can_use_it():
    def under(scheduler, *names):
        def change(facts):
            found = tuple(Library(name, f"/usr/lib/{name}", None, True) for name in names)
            return {
                "identity": dataclasses.replace(facts.identity, scheduler=scheduler),
                "libraries": (*facts.libraries, *found),
            }

        return change

    infiniband = values(env("dgx-h100", under("openmpi", "libucp.so.0")))
    assert (infiniband["OMPI_MCA_pml"], infiniband["OMPI_MCA_osc"]) == ("ucx", "ucx")
    slingshot = values(env("lumi-g", under("openmpi", "libfabric.so.1")))
    assert (slingshot["OMPI_MCA_pml"], slingshot["OMPI_MCA_mtl"]) == ("cm", "ofi")
    assert not any("openib" in value for value in {**infiniband, **slingshot}.values())
    for other in (under("slurm", "libucp.so.0"), under("openmpi")):  # not its job; UCX is not there
        assert not any(name.startswith("OMPI_MCA_") for name in values(env("dgx-h100", other)))


def test_away_from_the_nodes_only_the_other_vendors_settings_are_left_out():
    def later(**changes):
        lines = desk_lines(order(**changes), (), None)
        return {line.split(":")[0] for line in lines[lines.index("decided on each node, from what it has:") + 1 :]}

    assert {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"} <= later(), "any, where the site does not say whose GPUs"
    assert {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"} & later(vendor="nvidia") == {"CUDA_VISIBLE_DEVICES"}
    assert "ROCR_VISIBLE_DEVICES" in later(vendor="amd")
    sockets = EnvVar("NCCL_SOCKET_IFNAME", "=ib0", "", "site")
    assert not any(name.startswith(("FI_", "CXI_")) for name in later(env=(sockets,), expect=Expect("rdma"), nodes=2))

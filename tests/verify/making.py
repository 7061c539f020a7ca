"""Results and machines for the judge, written by hand."""

from drumbeat.machine.model import Cpus, CxiDevice, Facts, Gpu, Interface, Peer, Peers, RdmaDevice, RdmaPort


def results(nodes=2, per_node=1, **changes):
    """A finished, flawless test; hosts are n0, n1, ..."""
    size = nodes * per_node
    ranks = [
        {
            "rank": r,
            "node": r // per_node,
            "local_rank": r % per_node,
            "host": f"n{r // per_node}",
            "gpu": "NVIDIA H100 80GB HBM3",
        }
        for r in range(size)
    ]
    plain = {
        "schema": "1.0", "torch": "2.11", "backend": "nccl", "library": "nccl 2.27.3", "device": "cuda",
        "world_size": size, "quick": False, "complete": True, "interfaces": {}, "ranks": ranks, "pairs": [],
        "collectives": [], "mistakes": [], "mistake_count": 0, "checked_elements": 10, "seconds": 1.0,
        "gemm": {"side": 8, "dtype": "bfloat16", "ranks": [gemm(r) for r in range(size)]},
    }  # fmt: skip
    return {**plain, **changes}


def gemm(rank, seconds=0.01, check=5.0):
    return {"rank": rank, "seconds": seconds, "tflops": 1.0, "check": check}


def measured(op="all_reduce", size=1 << 30, busbw=100.0, dtype="float32"):
    return {"op": op, "dtype": dtype, "bytes": size, "seconds": 0.1, "iterations": 3, "algbw": busbw, "busbw": busbw}


def pair(a, b, there=10.0, back=10.0, kind="between", **more):
    return {
        "a": a,
        "b": b,
        "kind": kind,
        "bytes": 1 << 26,
        "a_to_b": there,
        "b_to_a": back,
        "latency": 1e-5,
        "wrong": 0,
        **more,
    }


def rails(nodes=2, gpus=8, rate=400.0, per_node=None, nics=8, **more):
    """Nodes with GPUs and as many RDMA ports."""
    ports = [
        RdmaDevice(f"mlx5_{i}", ports=(RdmaPort(1, "ACTIVE", link_layer="Ethernet", rate_gbps=rate),))
        for i in range(nics)
    ]
    cards = tuple(Gpu(i, "nvidia", "NVIDIA H100 80GB HBM3") for i in range(gpus))
    facts = Facts("n", gpus=cards, rdma=tuple(ports), cpus=Cpus(allowed=tuple(range(64))), **more)
    return peers(facts, nodes, gpus if per_node is None else per_node)


def slingshot(nodes=2):
    cards = tuple(Gpu(i, "nvidia", "NVIDIA GH200 120GB") for i in range(4))
    nics = tuple(CxiDevice(f"cxi{i}", f"hsn{i}", speed_gbps=200.0) for i in range(4))
    return peers(Facts("n", gpus=cards, cxi=nics), nodes, 4)


def ethernet(nodes=2, speed=10_000, kind="physical"):
    interface = Interface("eth0", True, ("10.0.0.1/24", "10.0.0.2/24"), speed, kind=kind)
    return peers(Facts("n", interfaces=(interface,), cpus=Cpus(allowed=(0, 1, 2, 3))), nodes, 1)


def peers(facts, nodes, per_node):
    each = tuple(Peer(k, f"n{k}", f"10.0.0.{k % 2 + 1}", facts, ranks=per_node) for k in range(nodes))
    return Peers(each, "10.0.0.1", 61000)

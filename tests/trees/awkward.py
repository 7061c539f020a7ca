"""Machines that broke other people's scripts: each is an archetype with one thing wrong or unusual about it."""

import shutil

from tests.trees.tree import NO_GID, ipv4_gid, roce_gids


def builders(lumi, pod, dgx, thor2):
    """The archetypes come as arguments: this file changes them, and has none of its own."""

    def twelve_infiniband(root, node):
        """Twelve active mlx5: a lexical sort takes mlx5_10 before mlx5_2; four are slower and beside no GPU."""
        return dgx(root, node, others="infiniband")

    def one_gid(root, node):
        """Exactly one IPv4 GID: the one-liner from the documents then yields the text "RoCE v2"."""
        return pod(
            root, node, lambda four, local: [(0, local, "IB/RoCE v1"), (1, local, "RoCE v2"), (3, four, "RoCE v2")]
        )

    def two_gids(root, node):
        """Two IPv4 RoCE v2 GIDs, of two addresses."""
        second = ipv4_gid(f"172.16.9.{20 + node}")
        return pod(
            root, node, lambda four, local: [(1, local, "RoCE v2"), (7, four, "RoCE v2"), (9, second, "RoCE v2")]
        )

    def no_gid(root, node):
        """No IPv4 GID at all: only link-local ones."""
        return pod(root, node, lambda four, local: [(0, local, "IB/RoCE v1"), (1, local, "RoCE v2")])

    def bond_only(root, node):
        """A server whose only RDMA device is a bond, over bond0."""
        tree = dgx(root, node, others="mixed")
        for device in list((tree.root / "sys/class/infiniband").iterdir()):
            for netdev in (device / "device/net").iterdir():
                tree.remove_net(netdev.name)
            device.unlink()
        address = f"10.9.0.{1 + node}/24"
        tree.rdma(
            "mlx5_bond_0",
            "pci0000:04/0000:04:01.0/0000:05:00.0",
            0,
            link_layer="Ethernet",
            rate="200 Gb/sec (4X HDR)",
            netdev="bond0",
            netdev_kind="bond",
            address=address,
            gids=roce_gids(address),
        )
        return tree

    def three_cores(root, node):
        """A cpuset of three cores on a LUMI node, as a badly asked job gets it."""
        tree = lumi(root, node, allowed=[1, 2, 3])
        tree.file("/proc/self/cgroup", "0::/system.slice/job_8123/step_0")
        tree.file("/sys/fs/cgroup/system.slice/job_8123/step_0/cpuset.cpus.effective", "1-3")
        tree.file("/sys/fs/cgroup/system.slice/job_8123/memory.max", 32 << 30)
        tree.file("/sys/fs/cgroup/system.slice/job_8123/step_0/memory.max", "max")
        return tree

    def interface_down(root, node):
        """The front-end interface has an address but no link; so has one of the eight rails."""
        tree = thor2(root, node)
        for name in ("ens50f0np0", "rail5"):
            base = (tree.root / "sys/class/net" / name).resolve()
            (base / "operstate").write_text("down\n")
            (base / "speed").write_text("-1\n")
        port = tree.root / "sys/class/infiniband/bnxt_re5/ports/1"
        (port / "state").write_text("1: DOWN\n")
        (port / "phys_state").write_text("3: Disabled\n")
        return tree

    def empty_gid(root, node):
        """After a link flap the port is active again and its GID table empty; the types can no longer be read."""
        tree = thor2(root, node)
        port = tree.root / "sys/class/infiniband/bnxt_re5/ports/1"
        for gid in (port / "gids").iterdir():
            gid.write_text(NO_GID + "\n")
        shutil.rmtree(port / "gid_attrs")
        return tree

    def mixed_fabrics(root, node):
        """InfiniBand and RoCE devices in one node, both active, both beside GPUs."""
        tree = dgx(root, node)
        for place, name in enumerate(("mlx5_9", "mlx5_10", "mlx5_11")):
            port = tree.root / f"sys/class/infiniband/{name}/ports/1"
            (port / "link_layer").write_text("Ethernet\n")
            for index, gid, kind in roce_gids(f"10.30.{place}.{1 + node}", mac=place):
                for file, text in ((f"gids/{index}", gid), (f"gid_attrs/types/{index}", kind)):
                    (port / file).parent.mkdir(parents=True, exist_ok=True)
                    (port / file).write_text(text + "\n")
        return tree

    def one_slingshot_node(root, node):
        """One LUMI node alone: the fabric gives no VNI to single-node jobs."""
        return lumi(root, 0, nodes=1)

    return {
        "twelve-mlx5": twelve_infiniband,
        "one-ipv4-gid": one_gid,
        "two-ipv4-gids": two_gids,
        "no-ipv4-gid": no_gid,
        "bond-only": bond_only,
        "cpuset-of-3": three_cores,
        "interface-down": interface_down,
        "empty-gid": empty_gid,
        "ib-and-roce": mixed_fabrics,
        "slingshot-single-node": one_slingshot_node,
    }

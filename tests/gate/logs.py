"""NCCL's lines as this gate meets them, written by us after the formats in NCCL's sources: two nodes, one rank each."""

HOST = "n0:{pid}:{pid} [0] NCCL INFO "


def log(rank=0, network="IB", gdr=True, link="RoCE", nodes=2, channels=True, before=()):
    """One rank's file."""
    pid = 100 + rank
    start = f"n{rank}:{pid}:{pid + 50} [0] NCCL INFO "
    comm = f"comm 0x5555 rank {rank} nranks 2 cudaDev 0 nvmlDev 0 busId 1000 commId 0xabc"
    lines = [
        "NCCL version 2.27.3+cuda12.9",
        f"{start}Bootstrap: Using eth0:10.0.0.{rank + 1}<0>",
        *(start + b for b in before),
    ]
    if network == "IB":
        lines.append(f"{start}NET/IB : Using [0]mlx5_0:1/{link} [RO]; OOB eth0:10.0.0.{rank + 1}<0>")
    elif network == "Socket":
        lines.append(f"{start}NET/Socket : Using [0]eth0:10.0.0.{rank + 1}<0>")
    elif network:
        lines.append(f"{start}NET/OFI Selected provider is cxi, fabric is cxi (found 1 nics)")
    if network:
        lines.append(f"{start}Using network {network}")
    lines += [
        f"{start}ncclCommInitRankConfig {comm} - Init START",
        f"{start}comm 0x5555 rank {rank} nRanks 2 nNodes {nodes} localRanks {2 // nodes} localRank 0 MNNVL 0",
        f"{start}ncclCommInitRankConfig {comm} - Init COMPLETE",
    ]
    return lines + (channel_lines(rank, network, gdr, nodes) if channels else [])


def channel_lines(rank=0, network="IB", gdr=True, nodes=2):
    start = f"n{rank}:{100 + rank}:{150 + rank} [0] NCCL INFO "
    other = 1 - rank
    if nodes == 1:
        return [f"{start}Channel 00/0 : {rank}[0] -> {other}[1] via P2P/CUMEM"]
    via = f"NET/{network}/0" + ("/GDRDMA" if gdr and network != "Socket" else "")
    return [
        f"{start}Channel 00/0 : {other}[0] -> {rank}[0] [receive] via {via}",
        f"{start}Channel 00/0 : {rank}[0] -> {other}[0] [send] via {via}",
        f"{start}Connected all rings, use ring PXN 0 GDR {int(gdr and network != 'Socket')}",
    ]

"""Ranks of processes: what each says of itself, the numbers of its launcher's units, and where its node's ranks begin.

Numbers of units (srun's tasks, mpirun's processes, pods) are ranks unless each unit starts several: a launcher of ranks
speaks in the same file, ranks label lines behind the unit's number, or a rank speaks whose number is higher than that of
every unit. A local rank becomes a rank where the log says which ranks its node has.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Dict, Optional, Sequence, Set, Tuple

from drumbeat.logs.read.prefixes import Line

MAX_FILES = 1_000
MAX_NUMBERS = 20_000
_KUBERNETES, _SLURM = (b"kube", b"[pod/", b"PyTorchJob"), (b"slurm", b"SLURM", b"srun")
# torchrun and the like, by what they print; `--nproc-per-node 1` starts one rank per unit.
_LAUNCHER = re.compile(
    rb"torch[./]distributed[./](?:elastic|run\b|launch)|elastic/multiprocessing|\(exitcode: -?\d+\) local_rank: \d"
    rb"|\(local_rank: \d|--(?:nproc[_-]per[_-]node|num[_-]gpus)[= ](?:[2-9]|1\d|gpu|auto|\$)|deepspeed[./]launcher[./]launch"
)
_REPORTED = re.compile(rb"(?m)srun: error: \S{1,80}: tasks? (\d[\d,-]{0,200}): ")
_RANK = re.compile(rb"(?m)^\W{0,3}(?:\d{1,6}: ?)?\[[Rr]ank ?(\d{1,6})\]")
_NUMBER = re.compile(rb"\d+")
# The size of the world, in words of any program; `--nnodes 4 --nproc-per-node 8` gives it as a product.
_WORLD = re.compile(
    rb"(?i)\b(?:world[_ -]?size|num[_ ]processes|process_count)['\"]?[\s.]{0,60}(?:[:=]|is|of)?\s{0,3}(\d{1,6})\b"
    rb"|\b\d{1,6}(?:/| of )(\d{1,6}) (?:clients |ranks )?joined|\bMEMBER: \d{1,6}/(\d{1,6})"
)
_SIZED = re.compile(rb"(?i)world|joined|process|MEMBER")
# A process says which rank it is: in its settings, its environment, or where it joins the others.
_OWN = re.compile(
    rb"(?m)\bGLOBAL_RANK: (\d{1,6})|\bdistributed init \(rank (\d{1,6})\)|^[ \t]*(?:export )?RANK=(\d{1,6})[ \t]*$"
    rb"|^[ \t]*rank \.{5,60} (\d{1,6})[ \t]*$|(?<![Ll]ocal[_ ])\b[Pp]rocess[_ ](?:index|id)[=:] ?(\d{1,6})\b"
)
# The first rank of a node: in torchrun's list and in its table of failures, and DeepSpeed's of every node.
_GLOBAL = re.compile(rb"\bglobal_ranks['\"]?[=:] ?\[(\d{1,6})\b")
_TABLE = re.compile(rb"\brank\s*: (\d{1,6}) \(local_rank: (\d{1,3})\)")
_MAPPING = re.compile(rb"\bglobal_rank_mapping=[^{]{0,60}\{(.{1,200000})\}")
_ON_HOST = re.compile(rb"'([\w.-]{1,80})': \[(\d{1,6})\b")
_NODE = re.compile(rb"\bnode_rank[=:] ?(\d{1,5})\b")
_UNIT = re.compile(r"\b(?P<kind>master|chief|worker|task|proc|process)[-_.]?(?P<number>\d{1,5})$")
_NODES = re.compile(rb"\bnnodes['\"]?[=: ]{1,3}(?:\d{1,4}:)?(\d{1,4})\b")
# The only host of a job, in its own batch file's or its scheduler's words.
_HOST = re.compile(
    rb"(?m)executed on host\(s\) <(?:\d+\*)?([\w.-]+)>, in queue|^\s*exec_host = ([\w.-]+?)(?:/[\d*,-]+)?\s*$"
    rb"|\bSLURM_(?:JOB_|STEP_)?NODELIST['\"]?(?: ?[=:] ?| is )['\"]?([\w.-]+)['\"]?\s*$"
)
_PER_NODE = re.compile(rb"\bnproc[_-]per[_-]node['\"]?[=: ]{1,3}(\d{1,3})\b")
# Ray says once which process is which rank: `(ip=10.0.0.5, pid=2902) world_rank=3`, `(Worker pid=811) ... [rank=0, world_size=3]`
_RANK_OF = re.compile(rb"(?m)^(?P<head>.*?)(?:\bworld_rank=(?P<rank>\d{1,6})|\[rank=(?P<own>\d{1,6}), world_size=)")
_PID, _IP = re.compile(rb"\bpid=(\d{1,9})\b"), re.compile(rb"\bip=([\w.:-]{1,60})")
_DEVICE = re.compile(rb":(\d{1,9}):\d{1,9} \[(\d{1,3})\] ")  # NCCL's host:pid:tid [device]
_SPEAKS = re.compile(
    r"Worker PID: (?P<died>\d{1,9})|\((?:\w{1,60} )?pid=(?P<pid>\d{1,9})(?:, ip=(?P<ip>[\w.:-]{1,60}))?[,)]"
)


class _Nodes:
    """Nodes of which a file speaks."""

    def __init__(self) -> None:
        self.numbers: Set[int] = set()
        self.starts: Set[int] = set()  # first ranks
        self.per_node = 0

    def start(self, hosts: Sequence[int]) -> Optional[int]:
        """Return the first rank of the only node. `hosts`: that of each node, where the launcher lists them."""
        if self.starts or len(self.numbers) != 1:
            return next(iter(self.starts)) if len(self.starts) == 1 else None
        number = next(iter(self.numbers))
        if hosts:
            return hosts[number] if number < len(hosts) else None
        return number * self.per_node if self.per_node else None


class Units:
    def __init__(self) -> None:
        self._of_several: Set[str] = set()  # files in which a unit is seen to start several ranks
        self._reported: Dict[str, Set[int]] = {}  # file -> units that its launcher reports
        self._ranks: Dict[str, int] = {}  # file -> the highest rank that labels a line
        self._schedulers: Set[Tuple[bytes, ...]] = set()
        self._worlds: Dict[str, int] = {}  # file -> number of ranks that its lines give
        self._hosts: Dict[str, Set[bytes]] = {}  # file -> hosts that were the only one of a job
        self._failing: Dict[str, Set[int]] = {}  # file -> ranks that label a line of an event
        self._of_process: Dict[str, Dict[str, Dict[str, int]]] = {}  # file -> process id -> address -> rank
        self._own: Dict[str, Set[int]] = {}  # file -> ranks that processes call their own
        self._nodes: Dict[str, _Nodes] = {}  # file -> the nodes of which it speaks
        self._of_host: Dict[str, int] = {}  # host -> its first rank, in the order of nodes
        self._devices: Dict[int, Set[int]] = {}  # process id -> GPUs for which it speaks
        self._masters = False  # a pod of the job is its master, which has rank 0

    @property
    def of_kubernetes(self) -> bool:
        """Return True if lines speak of Kubernetes and none of Slurm."""
        return self._schedulers == {_KUBERNETES}

    def look(self, file: str, lines: Sequence[bytes]) -> None:
        """Learn from lines of a file."""
        text = b"\n".join(lines)
        self._schedulers.update(words for words in (_KUBERNETES, _SLURM) if any(word in text for word in words))
        if file not in self._of_several and len(self._of_several) < MAX_FILES and _LAUNCHER.search(text):
            self._of_several.add(file)
        world = 0
        if _SIZED.search(text):
            world = max((int(next(filter(None, found))) for found in _WORLD.findall(text)), default=0)
        nodes, per_node = _NODES.search(text), _PER_NODE.search(text)
        world = max(world, int(nodes[1]) * int(per_node[1]) if nodes and per_node else 0)
        if world > self._worlds.get(file, 0) and len(self._worlds) < MAX_FILES:
            self._worlds[file] = world
        hosts = _HOST.findall(text) if b"executed on" in text or b"exec_host" in text or b"NODELIST" in text else ()
        if hosts and len(self._hosts) < MAX_FILES:
            self._hosts.setdefault(file, set()).update(b"".join(each) for each in hosts)
        highest = max((int(found[1]) for found in _RANK.finditer(text)), default=-1) if b"ank" in text else -1
        if highest > self._ranks.get(file, -1) and len(self._ranks) < MAX_FILES:
            self._ranks[file] = highest
        for found in _RANK_OF.finditer(text) if b"rank=" in text and len(self._of_process) < MAX_FILES else ():
            known = self._of_process.setdefault(file, {})
            pids, addresses = _PID.findall(found["head"]), _IP.findall(found["head"]) or [b""]
            if pids and len(known) < MAX_NUMBERS:
                known.setdefault(pids[-1].decode(), {})[addresses[-1].decode()] = int(found["rank"] or found["own"])
        for found in _REPORTED.finditer(text) if b"srun: error" in text else ():
            units = self._reported.setdefault(file, set())
            units.update(int(each) for each in _NUMBER.findall(found[1]) if len(units) < MAX_NUMBERS)
        for pid, device in _DEVICE.findall(text) if b"CCL" in text and len(self._devices) < MAX_NUMBERS else ():
            self._devices.setdefault(int(pid), set()).add(int(device))
        if len(self._own) < MAX_FILES:
            self._look_for_ranks(file, text, int(per_node[1]) if per_node else 0)

    def _look_for_ranks(self, file: str, text: bytes, per_node: int) -> None:
        """Learn which ranks processes call their own, and which ones their node has."""
        own = (int(next(filter(None, found.groups()))) for found in _OWN.finditer(text))
        self._own.setdefault(file, set()).update(own)
        self._masters = self._masters or b"-master-0" in text or "-master-0" in file
        nodes = self._nodes.setdefault(file, _Nodes())
        nodes.per_node = per_node or nodes.per_node
        nodes.numbers.update(map(int, _NODE.findall(text)) if b"node_rank" in text else ())
        nodes.starts.update(map(int, _GLOBAL.findall(text)) if b"global_ranks" in text else ())
        nodes.starts.update(int(rank) - int(local) for rank, local in _TABLE.findall(text) if b"(local_rank" in text)
        mapping = _MAPPING.search(text) if b"global_rank_mapping" in text else None
        if mapping:
            self._of_host.update({host.decode(): int(first) for host, first in _ON_HOST.findall(mapping[1])})

    def of_local(self, file: str, host: Optional[str], local: int) -> Optional[int]:
        """Return the rank with this local rank on a host, or on the only node of a file."""
        first = self._of_host.get(host or "", self._nodes.get(file, _Nodes()).start(list(self._of_host.values())))
        return None if first is None else first + local

    def has_several_gpus(self, pid: int) -> bool:
        """Return True if this process speaks for several GPUs, none of which is its rank."""
        return len(self._devices.get(pid, ())) > 1

    def writer(self, file: str) -> Optional[int]:
        """Return the rank of the only process that writes to a file and says which one it is. The first rank may speak for
        all of them, unless the others have files of their own."""
        own = self._own.get(file, set())
        alone = len(own) == 1 and self._ranks.get(file, -1) <= max(own) and file not in self._of_several
        return max(own) if alone and (max(own) or sum(map(bool, self._own.values())) > 1) else None

    def of_name(self, file: str, host: Optional[str]) -> Optional[int]:
        """Return the rank of a pod or a file that stands for one process, by its name: behind a master, worker 0 is rank 1.
        Without a master a host may hold several."""
        found = _UNIT.search(host or PurePath(file).stem) if file not in self._of_several else None
        known = found is not None and (self._masters or not host)
        return int(found["number"]) + (found["kind"] == "worker" and self._masters) if found and known else None

    def note(self, file: str, line: Line) -> None:
        """Learn from a line of an event."""
        if line.rank is None or line.rank == line.task:
            return
        failing = self._failing.setdefault(file, set())
        if len(failing) < MAX_NUMBERS:
            failing.add(line.rank)
        if line.task is not None and len(self._of_several) < MAX_FILES:
            self._of_several.add(file)

    def knows(self, file: str) -> bool:
        """Return True if the file says which process is which rank."""
        return file in self._of_process

    def speaker(self, file: str, text: str) -> Optional[int]:
        """Return the rank of the process that a line names as its writer, where the log says which is which."""
        found = _SPEAKS.search(text) if self.knows(file) else None
        ranks = self._of_process[file].get(found["pid"] or found["died"], {}) if found else {}
        if found and found["ip"]:
            return ranks.get(found["ip"], ranks.get(""))
        return next(iter(ranks.values())) if len(ranks) == 1 else None  # a line of the driver's own node has no address

    def host(self, file: str) -> Optional[str]:
        """Return the host of a file's job if it ran on only one."""
        hosts = self._hosts.get(file, set())
        return next(iter(hosts)).decode() if len(hosts) == 1 else None

    def world(self, file: str = "") -> int:
        """Return the number of ranks that the lines of this file, or of any, give; 0 if none does."""
        return self._worlds.get(file, 0) if file else max(self._worlds.values(), default=0)

    def are_ranks(self, file: str, count: int = 0) -> bool:
        """Return True if the launcher's numbers are ranks. `count`: how many there are, if known."""
        world = self._worlds.get(file, 0)
        if file in self._of_several or count > 1 and world > count and world % count == 0:
            return False
        reported = self._reported.get(file, set())
        return (
            not reported
            or self._ranks.get(file, -1) <= max(reported)
            or bool(reported & self._failing.get(file, set()))
        )

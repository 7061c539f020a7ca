"""A real Kubernetes cluster on one machine: the head and each node have a network namespace of their own.

Needs root, the programs that build.sh makes (or KUBE_BIN=FOLDER with others), and Debian's etcd, containerd, runc, CNI plug-ins,
kubectl, dnsmasq, openssl and gcc. Daemons run in the foreground with their files in one folder, and are ended by recorded pid.

Without kubelets the nodes exist on paper only: the real server stores, admits, counts and schedules, and no pod ever runs.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, Sequence, Set

from tests.cluster.image import host_image, pause_image

HERE = Path(__file__).parent
BUSY = 4  # limits are so many times those of idle cores: other work on this machine costs time, never a test
NET = "10.79.0"
HEAD = f"{NET}.254"
CGROUPS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")
PAUSE = """
#include <signal.h>
#include <unistd.h>
static void end(int number) { _exit(0); }
int main() { signal(SIGTERM, end); signal(SIGINT, end); for (;;) pause(); }
"""
USERS = ("nobody", "ada", "bob")
TOKENS = 'admin-token,admin,admin,"system:masters"\n' + "".join(f"{user}-token,{user},{user}\n" for user in USERS)


# What a newer kubelet must be told: these machines have the first version of control groups.
_NEWER = {"failCgroupV1": False}


class Cluster:
    def __init__(self, base: Path, programs: Path, nodes: int = 2, kubelets: bool = True) -> None:
        self.base, self.programs, self.count, self.kubelets = base, programs, nodes, kubelets
        self.prefix = f"kb{secrets.token_hex(4)}"
        self.pids: Dict[str, int] = {}
        self.kubeconfig = base / "kubeconfig"
        self.before = networks()

    # -- what tests use ----------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> List[str]:
        return [f"k{number}" for number in range(1, self.count + 1)]

    def program(self, name: str) -> str:
        """The one beside the API server's program, else Debian's."""
        own = self.programs / name
        return str(own) if own.exists() else name

    def inside(self, *words: object) -> List[str]:
        """A command in the head's network, where the API server is."""
        return ["nsenter", f"--net=/run/netns/{self.prefix}-head", *map(str, words)]

    def kubectl(self, *words: str, check: bool = True, **more) -> str:
        argv = self.inside(self.program("kubectl"), f"--kubeconfig={self.kubeconfig}", *words)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=BUSY * 60, check=False, **more)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def wait(self, what: Callable[[], object], seconds: float, words: str) -> None:
        """`seconds` are those of idle cores."""
        until = time.monotonic() + BUSY * seconds
        while not what():
            assert time.monotonic() < until, f"{words}: not within {BUSY * seconds:g} s; logs in {self.base}/log"
            time.sleep(0.5)

    # -- up and down -------------------------------------------------------------------------------------------------

    def up(self) -> None:
        for name in ("log", "pki", "image", "names"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        self._network()
        self._control_plane()
        if self.kubelets:
            self._images()
        for number in range(1, self.count + 1):
            (self._node if self.kubelets else self._paper_node)(number)
        self.wait(lambda: self.kubectl("get", "nodes", check=False).count(" Ready") == self.count, 600, "nodes")

    def down(self) -> None:
        for name in sorted(self.pids, key=lambda name: not name.startswith("kubelet")):
            if name.startswith("kubelet"):
                self._end(name)
        for number in range(1, self.count + 1):
            self._end_containers(self.base / f"node{number}" / "containerd.sock")
        for name in list(self.pids):
            self._end(name)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((each for each in mounts if each.startswith(f"{self.base}/")), reverse=True):
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
        self._end_networks()
        for name in CGROUPS:
            for folder in Path(f"/sys/fs/cgroup/{name}").glob(f"{self.prefix}-*"):
                subprocess.run(["find", str(folder), "-depth", "-type", "d", "-exec", "rmdir", "{}", ";"],
                               check=False, capture_output=True)  # fmt: skip

    def lose(self, node: str) -> None:
        """As when a machine loses its power: no word from it any more."""
        self._sh("ip", "-n", f"{self.prefix}-{node}", "link", "set", "eth0", "down")

    def back(self, node: str) -> None:
        number = int(node[1:])
        self._sh("ip", "-n", f"{self.prefix}-{node}", "link", "set", "eth0", "up")
        self._routes(number)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _sh(self, *words: object) -> None:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"

    def _start(self, name: str, argv: Sequence[object], **environ: str) -> None:
        with open(self.base / "log" / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [str(word) for word in argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                cwd=self.base, env={**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environ},
            )  # fmt: skip
        self.pids[name] = process.pid

    def _end(self, name: str) -> None:
        pid = self.pids.pop(name, 0)
        for number in (15, 9):
            try:
                os.kill(pid, number)
                for _ in range(50):
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        return
                    time.sleep(0.1)
            except (ProcessLookupError, ChildProcessError):
                return

    def _network(self) -> None:
        head = f"{self.prefix}-head"
        self._sh("ip", "netns", "add", head)
        self._sh("ip", "-n", head, "link", "set", "lo", "up")
        self._sh("ip", "-n", head, "link", "add", "br0", "type", "bridge")
        self._sh("ip", "-n", head, "addr", "add", f"{HEAD}/24", "dev", "br0")
        self._sh("ip", "-n", head, "link", "set", "br0", "up")
        for number in range(1, self.count + 1):
            node = f"{self.prefix}-k{number}"
            self._sh("ip", "netns", "add", node)
            self._sh("ip", "-n", node, "link", "set", "lo", "up")
            self._sh(
                "ip", "link", "add", "eth0", "netns", node, "type", "veth", "peer", "name", f"v{number}", "netns", head
            )
            self._sh("ip", "-n", head, "link", "set", f"v{number}", "master", "br0", "up")
            self._sh("ip", "-n", node, "addr", "add", f"{NET}.{number}/24", "dev", "eth0")
            self._sh("ip", "-n", node, "link", "set", "eth0", "up")
            self._sh("ip", "netns", "exec", node, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            self._routes(number)
            self._sh("ip", "-n", head, "route", "add", f"10.88.{number}.0/24", "via", f"{NET}.{number}")

    def _routes(self, number: int) -> None:
        node = f"{self.prefix}-k{number}"
        self._sh("ip", "-n", node, "route", "replace", "default", "via", HEAD)
        for other in range(1, self.count + 1):
            if other != number:
                self._sh("ip", "-n", node, "route", "replace", f"10.88.{other}.0/24", "via", f"{NET}.{other}")

    def _end_networks(self) -> None:
        pods = {name for name in networks() - self.before if name.startswith("cni-")}
        for name in networks():
            if name.startswith(f"{self.prefix}-") or name in pods:
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _control_plane(self) -> None:
        pki = self.base / "pki"
        self._sh("openssl", "genrsa", "-out", pki / "sa.key", "2048")
        self._sh("openssl", "rsa", "-in", pki / "sa.key", "-pubout", "-out", pki / "sa.pub")
        (pki / "tokens.csv").write_text(TOKENS)
        self.kubeconfig.write_text(json.dumps(config("admin")))
        for user in USERS:
            (self.base / f"kubeconfig-{user}").write_text(json.dumps(config(user)))
        store = "http://127.0.0.1:2379"
        self._start(
            "etcd",
            self.inside(self.program("etcd"), "--data-dir", self.base / "etcd", "--listen-client-urls", store,
                        "--advertise-client-urls", store, "--unsafe-no-fsync"),
            ETCD_UNSUPPORTED_ARCH="arm64",
        )  # fmt: skip
        old = self.old
        self._start("apiserver", self.inside(
            self.programs / "kube-apiserver", f"--etcd-servers={store}", "--bind-address=0.0.0.0", f"--advertise-address={HEAD}",
            "--secure-port=6443", f"--cert-dir={pki}/run", f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key", "--service-account-issuer=https://cluster.local",
            f"--token-auth-file={pki}/tokens.csv", "--authorization-mode=RBAC", "--service-cluster-ip-range=10.96.0.0/24",
            "--allow-privileged=true", "--endpoint-reconciler-type=none", "--disable-admission-plugins=ServiceAccount",
            "--kubelet-preferred-address-types=InternalIP", *(["--insecure-port=0"] if old else []),
        ))  # fmt: skip
        self.wait(lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok", 600, "the API server")
        more = ["--port=0", "--secure-port=0"] if old else ["--secure-port=0"]
        self._start("controllers", self.inside(
            self.programs / "kube-controller-manager", f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", *more,
            f"--service-account-private-key-file={pki}/sa.key", "--node-monitor-grace-period=16s", "--node-monitor-period=2s",
            *(["--pod-eviction-timeout=5s"] if old else []), *([] if self.kubelets else ["--controllers=*,-nodelifecycle"]),
        ))  # fmt: skip
        self._start("scheduler", self.inside(
            self.programs / "kube-scheduler", f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", *more
        ))  # fmt: skip
        self._start("names", self.inside(
            sys.executable, HERE / "names.py", self.kubeconfig, self.base / "names", HEAD
        ))  # fmt: skip

    @property
    def old(self) -> bool:
        """Whether it is the release that Debian has the source of; newer ones have other options."""
        return "v1.20." in self.version()

    def version(self, program: str = "kube-apiserver") -> str:
        argv = [self.program(program), "--version"]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    @property
    def old_kubelet(self) -> bool:
        return "v1.20." in self.version("kubelet")

    def _images(self) -> None:
        source, program = self.base / "image" / "pause.c", self.base / "image" / "pause.bin"
        source.write_text(PAUSE)
        self._sh("gcc", "-Os", "-static", "-o", program, source)
        pause_image(self.base / "image" / "pause", program, self.base / "image" / "pause.tar")
        host_image(self.base / "image" / "host", self.base / "image" / "host.tar")

    def _node(self, number: int) -> None:
        name, folder = f"k{number}", self.base / f"node{number}"
        (folder / "cni").mkdir(parents=True, exist_ok=True)
        (folder / "cni" / "10.conflist").write_text(json.dumps(pod_network(number, folder)))
        (folder / "containerd.toml").write_text(containerd_config(folder))
        (folder / "kubelet.yaml").write_text(
            json.dumps({**kubelet_config(f"{self.prefix}-{name}"), **({} if self.old_kubelet else _NEWER)})
        )
        for group in CGROUPS:
            Path(f"/sys/fs/cgroup/{group}/{self.prefix}-{name}").mkdir(exist_ok=True)
        for entry in ("cpuset.cpus", "cpuset.mems"):
            text = Path(f"/sys/fs/cgroup/cpuset/{entry}").read_text()
            Path(f"/sys/fs/cgroup/cpuset/{self.prefix}-{name}/{entry}").write_text(text)
        hold = (
            f"hostname {name}; mkdir -p /var/log/pods /var/log/containers; mount -t tmpfs t /var/log/pods; "
            "mount -t tmpfs t /var/log/containers; mount --make-rshared /; exec sleep infinity"
        )
        self._start(f"hold{number}", ["nsenter", f"--net=/run/netns/{self.prefix}-{name}", "unshare", "--mount", "--uts",
                                      "--propagation", "private", "sh", "-c", hold])  # fmt: skip
        time.sleep(1.0)
        enter = ["nsenter", "-t", self.pids[f"hold{number}"], "--net", "--mount", "--uts", f"--wd={self.base}", "--"]
        self._start(f"containerd{number}", [*enter, "containerd", "-c", folder / "containerd.toml"])
        socket = folder / "containerd.sock"
        ready = ["ctr", "-a", str(socket), "version"]
        self.wait(lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0, 200, "containerd")
        for image in ("pause", "host"):
            self._sh("ctr", "-a", socket, "-n", "k8s.io", "images", "import", self.base / "image" / f"{image}.tar")
        runtime = ["--container-runtime=remote"] if self.old_kubelet else []
        self._start(f"kubelet{number}", [
            *enter, self.program("kubelet"), f"--config={folder}/kubelet.yaml", f"--kubeconfig={self.kubeconfig}",
            f"--root-dir={folder}/kubelet", f"--cert-dir={folder}/pki", f"--hostname-override={name}",
            f"--node-ip={NET}.{number}", *runtime, f"--container-runtime-endpoint=unix://{socket}",
        ])  # fmt: skip

    def _paper_node(self, number: int) -> None:
        name = f"k{number}"
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        self.kubectl("create", "-f", "-", input=json.dumps(node))
        amounts = {"cpu": "8", "memory": "16Gi", "pods": "50"}
        ready = {"type": "Ready", "status": "True", "reason": "OnPaper", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}
        node = {**node, "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}}
        path = f"/api/v1/nodes/{name}/status"
        self.kubectl("replace", "--raw", path, "-f", "-", input=json.dumps(node))
        # Admission taints a new node until a controller, which is off here, has seen it ready.
        self.kubectl("taint", "node", name, "node.kubernetes.io/not-ready-", check=False)

    def _end_containers(self, socket: Path) -> None:
        ctr = ["ctr", "-a", str(socket), "-n", "k8s.io"]
        done = subprocess.run([*ctr, "tasks", "ls", "-q"], capture_output=True, text=True, check=False, timeout=120)
        for task in done.stdout.split():
            subprocess.run([*ctr, "tasks", "kill", "-s", "9", task], capture_output=True, check=False, timeout=120)
            subprocess.run([*ctr, "tasks", "rm", "-f", task], capture_output=True, check=False, timeout=120)


def networks() -> Set[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return {line.split()[0] for line in done.stdout.splitlines() if line.strip()}


def config(user: str) -> Dict[str, object]:
    """A kubeconfig; JSON is YAML."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "bench", "cluster": {"server": f"https://{HEAD}:6443", "insecure-skip-tls-verify": True}}
        ],
        "users": [{"name": user, "user": {"token": f"{user}-token"}}],
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": user}}],
        "current-context": "bench",
    }


def pod_network(number: int, folder: Path) -> Dict[str, object]:
    addresses = {"type": "host-local", "ranges": [[{"subnet": f"10.88.{number}.0/24"}]], "dataDir": f"{folder}/ipam"}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "isDefaultGateway": True, "ipMasq": False}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{**bridge, "ipam": addresses}]}


def containerd_config(folder: Path) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{folder}/containerd"
state = "{folder}/state"
[grpc]
  address = "{folder}/containerd.sock"
[ttrpc]
  address = "{folder}/containerd.sock.ttrpc"
[{cri}]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
[{cri}.cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{folder}/cni"
"""


def kubelet_config(cgroup: str) -> Dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "cgroupsPerQOS": True,
        "clusterDNS": [HEAD],
        "clusterDomain": "cluster.local",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "makeIPTablesUtilChains": False,
        "nodeStatusUpdateFrequency": "2s",
        "imageGCHighThresholdPercent": 100,  # never: what is removed on a full disk cannot be pulled again
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
    }


def why_not(programs: Path, kubelets: bool) -> str:
    if os.geteuid() != 0:
        return "a real cluster needs root"
    missing = [
        name for name in ("kube-apiserver", *(["kubelet"] if kubelets else [])) if not (programs / name).exists()
    ]
    if missing:
        return f"{programs} has no {missing[0]}: make {'cluster' if kubelets else 'kube-server'} builds it"
    tools = ("etcd", "kubectl", "dnsmasq", "ip", "openssl", *(("containerd", "runc", "ctr", "gcc") if kubelets else ()))
    missing = [name for name in tools if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
    return f"needs {', '.join(missing)}" if missing else ""

"""The files of the test cluster: Slurm's own, the hosts table, and what a node does first."""

from __future__ import annotations

from typing import Dict, Iterable, Mapping, Tuple

PACKAGES = "slurmctld slurmd slurm-client munge libpmix2 iproute2 util-linux procps"


def address(last: str) -> str:
    return f"10.77.0.{last}"


def files(
    base: str,
    nodes: Dict[str, str],
    cpus: int,
    gpus: int,
    partitions: Mapping[str, Iterable[str]],
    version: Tuple[int, ...],
) -> Dict[str, str]:
    lines = [f"{address(last)} {name}" for name, last in nodes.items()]
    # Slurm writes IPv4 addresses of nodes as IPv6 ones in some places, and asks for their names.
    lines += [f"::ffff:{address(last)} {name}" for name, last in nodes.items()]
    hosts = "\n".join(["127.0.0.1 localhost", f"{address('254')} head", *lines]) + "\n"
    shape = f"CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=4000"
    node_lines = "\n".join(
        f"NodeName={name} NodeAddr={address(last)} {shape} Gres=gpu:h200:{gpus}" for name, last in nodes.items()
    )
    names = ",".join(nodes)
    parts = partitions or {"debug": nodes}
    partition_lines = "\n".join(
        f"PartitionName={name} Nodes={','.join(members)} Default={'NO' if number else 'YES'} MaxTime=INFINITE State=UP"
        # `urgent` takes nodes from whoever has them, who is told by their own signal and has 20 s, or none.
        + (" PriorityTier=10" if name.endswith("urgent") else " PriorityTier=1")
        + (" GraceTime=0" if name.endswith(("urgent", "at-once")) else " GraceTime=20")
        for number, (name, members) in enumerate(parts.items())
    )
    return {
        "hosts": hosts,
        "init.sh": INIT,
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n" if version >= (21, 8) else "",
        "gres.conf": f"NodeName={names} Name=gpu Type=h200 File={base}/dev/nvidia[0-{gpus - 1}]\n",
        "slurm.conf": SLURM.format(base=base, head=address("254"), nodes=node_lines, partitions=partition_lines),
    }


# Short times throughout: a node that is gone must be seen within a test, and a killed job must not wait 30 s.
# Processes are tracked by their groups: like the cgroups of real clusters, that signals the tasks and not all below them.
SLURM = """
ClusterName=bench
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge/socket,cred_expire=12
CredType=cred/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/run/slurmctld.pid
SlurmdPidFile={base}/run/slurmd.%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/affinity
SwitchType=switch/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,bf_interval=1
EnforcePartLimits=ALL
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/linux
SlurmctldTimeout=30
SlurmdTimeout=45
MessageTimeout=20
InactiveLimit=0
KillWait=8
OverTimeLimit=0
MinJobAge=3600
JobRequeue=1
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
{partitions}
"""

INIT = """#!/bin/sh
# First process of a node: NAME BASE CODE SYSTEM PROGRAM...
name=$1 base=$2 code=$3 system=$4
if [ -n "$system" ]; then  # again, in a copy of that system of which only the changes are written
  mount --make-rprivate /
  mount -t tmpfs node /mnt
  mkdir /mnt/upper /mnt/work /mnt/root
  mount -t overlay node -o "lowerdir=$system,upperdir=/mnt/upper,workdir=/mnt/work" /mnt/root
  for place in /proc /sys /dev; do mount --rbind "$place" "/mnt/root$place"; done
  for place in "$base" "$code"; do mkdir -p "/mnt/root$place" && mount --rbind "$place" "/mnt/root$place"; done
  bin=${PATH%%:*}  # of the Python that runs the tests; there it is that system's own
  mkdir -p "/mnt/root$bin" && mount -t tmpfs node "/mnt/root${bin%/*}" && mkdir "/mnt/root$bin"
  for python in python python3; do ln -s /usr/bin/python3 "/mnt/root$bin/$python"; done
  echo "$code/src" > /mnt/root/usr/lib/python3/dist-packages/drumbeat.pth
  touch /mnt/root/etc/hosts
  shift 4
  exec chroot /mnt/root sh "$base/etc/init.sh" "$name" "$base" "$code" "" "$@"
fi
shift 4
hostname "$name"
mount --make-rprivate /
mount --bind "$base/etc/hosts" /etc/hosts
# Slurm's PMIx plug-in opens libpmix.so, a name that only the development package has.
for lib in /usr/lib/*/pmix2/lib; do
  [ -e "$lib/libpmix.so" ] || mount -t overlay pmix -o "lowerdir=$base/pmix:$lib" "$lib"
done 2>/dev/null
for place in /run /dev/shm; do mount -t tmpfs -o mode=1777 node "$place"; done
# Each node has a /tmp of its own; a checkout that lies there must stay visible all the same.
case "$code" in /tmp/*) mkdir /run/code && mount --rbind "$code" /run/code ;; esac
mount -t tmpfs -o mode=1777 node /tmp
case "$code" in /tmp/*) mkdir -p "$code" && mount --move /run/code "$code" ;; esac
"$@" &
while :; do sleep 3600 & wait $!; done
"""

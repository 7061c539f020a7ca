"""deepspeed, the runner (DeepSpeed 0.19). Its per-node launcher, deepspeed.launcher.launch, is what drumbeat starts."""

from __future__ import annotations

from drumbeat.commands.options import Options, names

VALUED = names(
    "-H hostfile -i include -e exclude num-nodes num-gpus num-accelerators master-port master-addr node-rank launcher "
    "launcher-args enable-each-rank-log autotuning bind-core-list ssh-port venv-script log-level"
)
# Of older releases: elastic-training and its sizes.
BARE = names(
    "-h help module no-python no-local-rank no-ssh no-ssh-check force-multi save-pid bind-cores-to-rank -q quiet "
    "elastic-training"
)
REPLACED = names(
    "hostfile include exclude num-nodes num-gpus node-rank master-addr master-port launcher launcher-args no-ssh "
    "no-ssh-check force-multi ssh-port save-pid"
)

OPTIONS = Options(
    valued=VALUED,
    bare=BARE,
    replaced=REPLACED,
    shape=names("module no-python"),
    aliases={
        "-H": "--hostfile",
        "-i": "--include",
        "-e": "--exclude",
        "-q": "--quiet",
        "-h": "--help",
        "--num-accelerators": "--num-gpus",
    },
    refused={
        "--autotuning": "run the autotuner by hand, on one node; drumbeat tune batch searches for a batch size",
        "--venv-script": "write it as setup: source SCRIPT",
        "--elastic-training": "leave it out; restarts: N starts the job again after a failure",
    },
)

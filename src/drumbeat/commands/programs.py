"""Programs that batch scripts call beside the training, by what they do; convert and lint ask here."""

from __future__ import annotations

from typing import FrozenSet

from drumbeat.base.regex import regex


def words(text: str) -> FrozenSet[str]:
    return frozenset(text.split())


# Only print or wait.
PRINTS = words(
    "echo printf date hostname set wait sleep pwd nvidia-smi rocm-smi amd-smi ls env printenv true : "
    "scontrol sinfo squeue sacct which type free df lscpu uname id whoami cat head tail grep wc numactl "
    "lspci ibstat ibv_devinfo ifconfig ip nvcc gcc lstopo du history groups uptime tput clear"
)
WAIT = words("sleep wait")
# Change the shell, but no variable; what a script says to its own shell.
STATE = words("ulimit umask shopt stty alias hash enable complete pushd popd dirs let")
CONTROL = words("exit true false : unset [ [[ test return local trap cd export set")
ASK = words(
    "[ [[ test command which type grep egrep pgrep nvidia-smi ping nc hash cmp diff"
)  # their exit code is the answer
# Change nothing, for what they print.
FILTERS = words("awk cut head tr sed getent grep nslookup dig host echo hostname xargs printf ping tail egrep cat")
LOOK = FILTERS | words(
    "basename dirname realpath readlink sort uniq expr seq jq nproc shuf openssl bc find stat git pip conda jobs tac rev "
    "paste base64 md5sum sha1sum sha256sum getconf nodeset sacctmgr module ml cd [ read export unset uuidgen"
)
# Change files: no variable of the environment changes what they do. The first ones are over at once.
QUICK_WITH_FILES = words("rm rmdir mkdir touch ln chmod")
WITH_FILES = QUICK_WITH_FILES | words("cp mv rsync tar unzip unsquashfs cat sed tee")
# Speak to a service, or to other processes, and are over soon.
QUICK_WITH_OTHERS = words("scancel dcgmi sacct seff sstat jobstats kill pkill curl sbatch")
_OTHERS = words("nvtop sudo apt apt-get conda git wget killall sbcast find enroot nproc module")
_NO_TRAINING = regex(
    r"(?:\S*/)?(?:dcgmproftester\d*|stress\S*|ray(?!\s+job\s+submit\b)|pip3?|env\s*$|python3?\s+-m\s+(?:pip|venv)"
    r"|\S+\s+(?:-V|--version|--help)\s*$|python3?\s+-c(?!\s[\s\S]*\n)|python3?\s*$|python3?\s+-\s*$|sh\s*$|bash\s*$)(?=\s|$)"
)


def is_utility(text: str) -> bool:
    """Return true for a command that is no training, whatever its arguments."""
    name = text.split(maxsplit=1)[0].rsplit("/", 1)[-1] if text.strip() else ""
    known = PRINTS | ASK | WITH_FILES | QUICK_WITH_OTHERS | _OTHERS
    return name in known - {"env", "numactl", "command"} or bool(_NO_TRAINING.match(text))

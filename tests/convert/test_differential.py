"""Scripts under bash and their job files as drumbeat starts them, on an emulated cluster: nothing changes without a word."""

# ruff: noqa: E501
import os
import subprocess

import pytest

from tests.convert.differential import FILES, PROGRAMS, Case, case_of, generated, judge

HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"
SCRIPTS = {
    "set -e where a file is missing": "set -e\nsource ./missing.sh\nsrun python train.py",
    "a file that starts a program": "source ./reads.sh\nsrun python train.py",
    "an environment that must be there": "srun bash -c 'true && source none/bin/activate && python train.py'",
    "a loop that counts from zero under -e": "set -e\nfor ((i = 0; i < 2; i++)); do A=$A$i; done\nsrun python train.py $A",
    "a folder that a variable names": 'cd /tmp\ncd "$NOWHERE"\nsrun python train.py',
    "a variable that it ends without": 'if [ -z "$A" ]; then exit 1; fi\nsrun python train.py',
    "a variable that it asks for": '[ -n "$A" ] && export F=$A\nsrun python train.py $A',
    "a launcher by path": "srun ./pt/bin/torchrun --nproc_per_node=2 --nnodes=2 --rdzv_endpoint=$(hostname):1 $(basename train.py)",
    "a step in a function": "main() { srun python train.py; }\nmain",
    "a folder of the image": "srun apptainer exec a.sif bash -c 'cd /image/code && python train.py'",
    "what is left behind": "monitor &\n(prep later; prep last) &\nsrun python train.py",
    "steps one by one": "NODES=($(scontrol show hostnames))\nfor ((i = 0; i < 2; i++)); do srun -N1 -n1 -w ${NODES[$i]} python train.py & done\nwait",
}  # fmt: skip


def sandboxed():
    done = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True)
    return os.geteuid() == 0 and done.returncode == 0


pytestmark = pytest.mark.skipif(not sandboxed(), reason="needs root and namespaces, as scripts run in their own")


def silent(verdicts):
    return "\n\n".join(f"{name}: {each.silent}\n{each.job}" for name, each in verdicts.items() if each.silent)


def test_nothing_changes_silently():
    cases = {name.replace(" ", "-"): case_of([HEAD, text]) for name, text in SCRIPTS.items()}
    verdicts = judge(cases, PROGRAMS)
    assert not silent(verdicts)
    assert not any(each.refused for each in verdicts.values())


def test_the_judge_sees_what_differs():
    """A judge that sees nothing would let everything pass: an `after` that nothing here does differs, and is said."""
    (verdict,) = judge({"after": Case(f"{HEAD}srun python train.py\nserver after\n", (), FILES)}, PROGRAMS).values()
    assert verdict.differences == ["after: ['server after in /submit on node 0'] there, [] here"] and not verdict.silent


@pytest.mark.proof
def test_generated_scripts_change_nothing_silently():
    cases = {f"g{seed}": case_of(generated(seed)) for seed in range(10_000, 10_200)}
    names = list(cases)
    verdicts = {}
    for start in range(0, len(names), 40):
        verdicts |= judge({name: cases[name] for name in names[start : start + 40]}, PROGRAMS)
    assert not silent(verdicts)

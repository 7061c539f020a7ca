"""--fix: what is safe is fixed, everything else stays byte for byte."""

import pytest

from drumbeat.lint.context import rules
from drumbeat.lint.engine import apply_edits, lint


@pytest.mark.parametrize(
    "before,after",
    [
        ("sbatch –N 8 a.sh\n", "sbatch -N 8 a.sh\n"),
        ("srun —nodes=2 x\n", "srun --nodes=2 x\n"),
        ("srun –-nodes=2 x\n", "srun --nodes=2 x\n"),
        ("mpirun –np 4 x\n", "mpirun –np 4 x\n"),  # one dash or two? not ours to guess
        ("echo “two words”\n", 'echo "two words"\n'),
        ("echo a\u00a0b\n", "echo a b\n"),
        ('X="$(SLURM_NODEID)-$(whoami)"\n', 'X="${SLURM_NODEID}-$(whoami)"\n'),
        ("echo '$(SLURM_NODEID)' $(SLURM_NODEID)\n", "echo '$(SLURM_NODEID)' ${SLURM_NODEID}\n"),
        ("srun bash -c 'echo $(SLURM_PROCID)'\n", "srun bash -c 'echo ${SLURM_PROCID}'\n"),
        ("if [ $A = 1 ] then\n  b\nfi\n", "if [ $A = 1 ]; then\n  b\nfi\n"),
        ("a \\  \n  -b\n", "a \\\n  -b\n"),
        ("x\n  a --b \\ # why\n    -c\n", "x\n  # why\n  a --b \\\n    -c\n"),
        (
            'export MIOOPEN_USER_DB_PATH=/tmp/x\nexport Y="$MIOOPEN_USER_DB_PATH" # MIOOPEN_USER_DB_PATH\n',
            'export MIOPEN_USER_DB_PATH=/tmp/x\nexport Y="$MIOPEN_USER_DB_PATH" # MIOOPEN_USER_DB_PATH\n',
        ),
        ("export NCCL_SOKET_IFNAME=hsn0\n", "export NCCL_SOKET_IFNAME=hsn0\n"),  # a guess of what was meant
        (
            "#!/bin/bash\n#SBATCH -N 1\n\nsrun a | tee b\n",
            "#!/bin/bash\n#SBATCH -N 1\n\nset -o pipefail\nsrun a | tee b\n",
        ),
        (
            "#!/bin/bash\nset -e\nsrun a | tee b\n",
            "#!/bin/bash\nset -e\nsrun a | tee b\n",
        ),  # other pipelines could stop it
        ("#!/bin/sh\nsrun a | tee b\n", "#!/bin/sh\nsrun a | tee b\n"),  # sh has no pipefail
        ("#!/bin/bash\r\nsrun a\r\n", "#!/bin/bash\nsrun a\n"),
        ("pkill -f x\nexport NCCL_IB_GID_INDEX=3\n", "pkill -f x\nexport NCCL_IB_GID_INDEX=3\n"),
    ],
)
def test_mended(before, after):
    assert apply_edits(lint(before)) == after


def test_a_page_keeps_its_prose_and_indentation():
    page = "Use sbatch –N, “so”:\n\n   ```bash\n   sbatch –N 2 x  # –N\n   ```\n"
    assert apply_edits(lint(page, "page.md")) == "Use sbatch –N, “so”:\n\n   ```bash\n   sbatch -N 2 x  # –N\n   ```\n"


@pytest.mark.parametrize("rule", [rule for rule in rules() if rule.fixes], ids=lambda rule: rule.id)
def test_a_mended_example_is_clean_and_stays_so(rule):
    once = apply_edits(lint(rule.bad))
    assert rule.id not in [finding.code for finding in lint(once).findings]
    assert apply_edits(lint(once)) == once

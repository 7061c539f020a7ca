"""Exports are judged by what the interpreter of scripts computed, not by the words of a line."""

import pytest

from drumbeat.lint.engine import lint

HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n"


def codes(body):
    return [finding.code for finding in lint(f"{HEAD}{body}\n", "x.sh").findings]


@pytest.mark.parametrize(
    "body",
    [
        "set -a\nMASTER_ADDR=n1\nset +a\nsrun python t.py", "declare -x MASTER_ADDR=n1\nsrun python t.py",
        "export MASTER_ADDR\nMASTER_ADDR=n1\nsrun python t.py",
        "go() { export MASTER_ADDR; }\nMASTER_ADDR=n1\ngo\nsrun python t.py",
        "NAME=MASTER_ADDR\nMASTER_ADDR=n1\nexport $NAME\nsrun python t.py",
    ],
)  # fmt: skip
def test_what_reaches_the_launch_is_exported(body):
    assert "not-exported" not in codes(body)


@pytest.mark.parametrize(
    "body",
    [
        "MASTER_ADDR=n1\nsrun python t.py", "export MASTER_ADDR=n1\nexport -n MASTER_ADDR\nMASTER_ADDR=n2\nsrun python t.py",
        "set -a\nset +a\nMASTER_ADDR=n1\nsrun python t.py", "MASTER_ADDR=n1\nsrun python t.py\nexport MASTER_ADDR",
    ],
)  # fmt: skip
def test_what_does_not_reach_it_is_not(body):
    assert "not-exported" in codes(body)

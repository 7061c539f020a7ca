"""Where a script's exit code 0 proves that what stands behind `||` ended well."""

import pytest

from drumbeat.plan.launchers.fallback import fallback


@pytest.mark.parametrize(
    "script, program",
    [
        ("set -u\ntorchrun a.py || python b.py", "python b.py"),
        ("torchrun a.py \\\n  || python b.py\n# end\n\n", "python b.py"),
        ("torchrun a.py ||\n  python b.py > log 2>&1\nexit $?\n", "python b.py > log 2>&1"),
        ("cd /x && /opt/bin/torchrun a.py 2>&1 || A=1 python b.py && echo fine", "A=1 python b.py && echo fine"),
        ("torchrun a.py || {\n  echo again\n  python b.py\n}\n", "python b.py"),
    ],
)
def test_a_program_that_must_have_ended_well(script, program):
    assert fallback(script, "torchrun") == program


@pytest.mark.parametrize(
    "script",
    [
        "torchrun a.py",
        "torchrun a.py | tee log || python b.py",  # tee's exit code decides
        "torchrun a.py || python b.py | tee log",
        "torchrun a.py || python b.py &",
        "torchrun a.py || true",
        "torchrun a.py || python b.py || true",
        "torchrun a.py || echo 'python b.py failed'",
        "torchrun a.py || python b.py; echo done",
        "torchrun a.py || python b.py\necho done",
        "torchrun a.py || {\n  python b.py\n  echo done\n}",
        "torchrun a.py || {\n  python b.py || {\n  true\n}\n}",
        "trap 'exit 0' EXIT\ntorchrun a.py || python b.py",
        "cat <<END\ntorchrun a.py || python b.py\nEND",
        "torchrun 'a.py || python b.py",
        "exec torchrun a.py || python b.py",
        "! torchrun a.py || python b.py",
        "torchrun a.py; python c.py || python b.py",
        "python c.py || python b.py",
        "",
    ],
)
def test_nothing_is_proved(script):
    assert fallback(script, "torchrun") == ""

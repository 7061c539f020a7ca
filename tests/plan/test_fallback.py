"""Where a script's exit code 0 proves that what it ran in the place of its launcher ended well."""

import pytest

from drumbeat.commands.program import fallback


@pytest.mark.parametrize(
    "script, program",
    [
        ("set -u\ntorchrun a.py || python b.py", "python b.py"),
        ("torchrun a.py \\\n  || python b.py\n# end\n\n", "python b.py"),
        ("torchrun a.py ||\n  python b.py > log 2>&1\nexit $?\n", "python b.py > log 2>&1"),
        ("cd /x && /opt/bin/torchrun a.py 2>&1 || A=1 python b.py && echo fine", "A=1 python b.py"),
        ("torchrun a.py || {\n  echo again\n  python b.py\n}\n", "python b.py"),
        ("# torchrun as ever\ntimeout 60 torchrun a.py || /opt/bin/python3.11 -u -m b", "/opt/bin/python3.11 -u -m b"),
        ("torchrun a.py || A=1 accelerate launch b.py", "A=1 accelerate launch b.py"),
        ("if ! torchrun a.py; then python b.py; fi", "python b.py"),
        ("if ! torchrun a.py; then python b.py; else echo; fi", "python b.py"),
        ("set -u\nif ! timeout 9 torchrun a.py\nthen\n  echo again\n  python b.py\nfi\n", "python b.py"),
        ("if ! torchrun a.py 2>&1; then\n  echo 'once more' # one\n  python b.py\nfi\nexit $?\n", "python b.py"),
        ("torchrun a.py || python -c 'import b; b.train()'", "python -c 'import b; b.train()'"),
        (
            'torchrun a.py || python -u -c "from b import train_alone as t; t.train(steps=3)"',
            'python -u -c "from b import train_alone as t; t.train(steps=3)"',
        ),
        (
            "if ! torchrun a.py; then python3 -c 'import b; b.model().fit(b.x)'; fi",
            "python3 -c 'import b; b.model().fit(b.x)'",
        ),
        ("if cd x && torchrun a.py; then\n  echo fine\nelse\n  A=1 python -m b\nfi", "A=1 python -m b"),
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
        "torchrun a.py # || python b.py",
        "torchrun a.py || exit 0\ntorchrun a.py || python b.py",  # the last line may not have been reached
        "[ -e x ] || exit 0\ntorchrun a.py || python b.py",
        "exec bash y.sh\ntorchrun a.py || python b.py",
        "torchrun a.py | tee log\ntorchrun b.py || python c.py",
        "bash y.sh | tee log\nwhich torchrun || python b.py",
        "if torchrun a.py; then python b.py; fi",
        "if ! torchrun a.py | tee log; then python b.py; fi",
        "if ! torchrun a.py; then python b.py; fi\necho done",
        "if ! torchrun a.py; then python b.py; echo done; fi",
        "if ! torchrun a.py; then python b.py || true; fi",
        "if ! torchrun a.py; then true; fi",
        "if ! torchrun a.py; then exit 0; python b.py; fi",
        "if ! cd x && torchrun a.py; then python b.py; fi",
        "if ! torchrun a.py; then\n  if [ -e x ]; then\n    python b.py\n  fi\nfi",
        "if [ -e x ]; then torchrun a.py; else python b.py; fi",
        "if torchrun a.py; then echo; elif python c.py; then echo; else python b.py; fi",
        "while ! torchrun a.py; do python b.py; done",
        "if ! torchrun a.py; then 'python b.py; fi",
    ],
)
def test_nothing_is_proved(script):
    assert fallback(script, "torchrun") == ""


OTHERS = [
    "tail -n 2 log",
    "notify",
    "/bin/true",
    "/bin/echo failed",
    "curl -s http://h",
    "mail -s failed me",
    "cp a b",
    "rm -rf a",
    "cd /tmp",
    "export A=1",
    "A=1",
    "[ -f x ]",
    "[[ $? -eq 1 ]]",
    "test -e x",
    "eval true",
    "command true",
    "env true",
    "source clean.sh",
    "sbatch again.sh",
    "bash -c 'python b.py || true'",
    "python",
    "python -V",
    "python -c 'print(1)'",
    "python -c",
    "python -c 'import torch; print(torch.cuda.is_available())'",
    "python -c 'print(\"train() failed\")'",
    "python -c 'import shutil; shutil.rmtree(\"out\")'",
    "python -c 'import requests; requests.post(\"http://h/main\")'",
    "python -c 'import train; train.constrain()'",
    "python -c 'import b; b.train() | tail'  'log'; tail log",
    "python -c 'b.train('",
    "python -c 'import sendmail; sendmail.main()'",
    "python -c 'import b; b.notify_train()'",
    "python -c 'import b; b.train_failed()'",
    "python -",
    "python > log",
    "python -m pip install torch",
    "torchrun --version",
    "accelerate env",
]


@pytest.mark.parametrize("command", OTHERS)
def test_only_what_is_known_to_train_takes_the_place_of_a_training(command):
    assert fallback(f"torchrun a.py || {command}", "torchrun") == ""
    assert fallback(f"torchrun a.py || {{\n  echo failed\n  {command}\n}}", "torchrun") == ""
    assert fallback(f"if ! torchrun a.py; then\n  echo failed\n  {command}\nfi", "torchrun") == ""

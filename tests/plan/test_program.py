"""Launchers inside scripts: the text decides whether a command is started once per node or once per rank."""

import shlex

import pytest

from drumbeat.commands.program import Script, read_script
from drumbeat.plan.argv import choose_launcher

RUN = "torch.distributed.run"


@pytest.mark.parametrize(
    "text,launcher",
    [
        ("torchrun --standalone train.py", "torchrun"),
        ("set -e\nFOO=1 nohup torchrun \\\n --nproc_per_node=2 train.py | tee log", "torchrun"),
        (f"python -m {RUN} \\\n  --nnodes=$N train.py", f"python -m {RUN}"),
        (f"python3 -um {RUN} train.py", f"python3 -m {RUN}"),
        ("accelerate  launch train.py", "accelerate launch"),
        ("accelerate-launch train.py", "accelerate-launch"),
        ("deepspeed --num_gpus 2 train.py", "deepspeed"),
        ("$TORCHRUN_PATH --nnodes=2 x.py", "torchrun"),
        ('"${TORCHRUN_PATH}" x.py', "torchrun"),
        ("'${TORCHRUN_PATH}' x.py", ""),  # a name with a dollar sign
        ("L=torchrun\nexec $L x.py", "torchrun"),
        ("again() { torchrun x.py; }\ntrap again USR1\nwait", "torchrun"),
        ('tried() { for i in 1 2; do "$@" && break; done; }\ntried torchrun x.py', "torchrun"),
        ("cat > r.sh <<'E'\ntorchrun x.py\nE\nbash r.sh", "torchrun"),
        ("grep -q x y || { if [ -e z ]; then torchrun x.py; fi; }", "torchrun"),
        ("{ torchrun x.py; } 2>&1 | tee log", "torchrun"),
        ("(cd x; exec /opt/bin/torchrun train.py)", "torchrun"),
        ("# torchrun train.py\npython train.py", ""),
        ("echo torchrun is not used\npython train.py", ""),
        ("pip install deepspeed accelerate\npython train.py --deepspeed ds.json", ""),
        ("python -m pip install deepspeed \npython train.py", ""),
        ("cd deepspeed && python train.py", ""),
        ("python my_torchrun.py", ""),
    ],
)
def test_launcher_in_a_shell_script(text, launcher):
    script = Script("bash", text)
    assert script.launcher({"TORCHRUN_PATH": "/usr/local/bin/torchrun"}) == launcher
    chosen, why = choose_launcher(["bash", "x.sh"], "auto", script, {"TORCHRUN_PATH": "/usr/local/bin/torchrun"})
    assert chosen == ("once" if launcher else "ranks") and launcher in why
    assert choose_launcher(["bash", "x.sh"], "ranks", script)[0] == "ranks"  # what the job asks for counts


def test_a_program_that_uses_mpi_is_told_where_mpirun_belongs():
    launcher, why = choose_launcher(["python", "a.py"], "auto", Script(python="from mpi4py import MPI\n"))
    assert launcher == "ranks" and "mpirun -n N before drumbeat" in why


def test_interpreters_that_start_a_launchers_module():
    assert Script("bash", f"python3.11 -m {RUN} x.py").pythons({}) == ["python", "python3", "python3.11"]
    assert Script("bash", "python3.11 x.py\ntorchrun y.py").pythons({}) == []  # left alone


def test_number_of_ranks_that_a_script_says():
    assert Script("sh", "torchrun --nproc_per_node=2 x.py").ranks_per_node({}) == 2
    assert Script("sh", "torchrun --nproc-per-node $GPUS x.py").ranks_per_node({"GPUS": "4"}) == 4
    assert Script("sh", "torchrun --nproc-per-node $GPUS x.py").ranks_per_node({}) is None
    assert Script("sh", "GPUS=8\ntorchrun --nproc-per-node $GPUS x.py").ranks_per_node({}) == 8
    assert Script("sh", "torchrun --nproc-per-node ${GPUS:-8} x.py").ranks_per_node({"GPUS": "4"}) == 4
    assert Script("sh", "torchrun --nproc-per-node 2 a.py\ntorchrun --nproc-per-node 4 b.py").ranks_per_node({}) is None


@pytest.mark.parametrize(
    "command,ranks",
    [
        ("bash n.sh train.py 2", 2),
        ("bash n.sh train.py", 4),
        ("./n.sh train.py 2", 2),
        ("bash -c 'torchrun --nproc_per_node=${1:-4} x.py' name 3", 3),
        ("env NGPU=2 bash v.sh", 2),
        ("nice env NGPU=3 timeout 9 bash v.sh", 3),
        ("bash v.sh", 8),
        ("bash shifts.sh train.py 2", 4),
        ("bash calls.sh train.py 2", 1),
    ],
)
def test_a_scripts_arguments_and_variables_of_its_command(command, ranks):
    files = {
        "n.sh": "#!/bin/bash\ntorchrun --nproc_per_node=${2:-4} $1",
        "v.sh": "torchrun --nproc_per_node=${NGPU:-8} x.py",
        "shifts.sh": "shift\ntorchrun --nproc_per_node=${2:-4} $1",
        "calls.sh": "go() {\n  torchrun --nproc_per_node=${2:-4} $1\n}\ngo x.py 1",
    }
    files["./n.sh"] = files["n.sh"]
    assert read_script(shlex.split(command), lambda word: files.get(word, "")).ranks_per_node({}) == ranks


@pytest.mark.parametrize(
    "text,paths",
    [
        ('VENV=/opt/env\n"$VENV/bin/torchrun" x.py', ["/opt/env/bin/torchrun"]),
        ("export V='/opt/env'  # mine\n${V}/bin/torchrun x.py", ["/opt/env/bin/torchrun"]),
        ("B=${BASE:-/opt/base}; ls\nV=$B/env\n$V/bin/torchrun x.py", ["/opt/base/env/bin/torchrun"]),
        ("V=$HOME/env\nexec $V/bin/torchrun x.py", ["/home/u/env/bin/torchrun"]),
        ("V=/a\n[ -d /b ] && V=/b\n$V/bin/torchrun x.py", []),  # which of them?
        ("V=/a\n[ -d /b ] && V=/b\nV=/c\n$V/bin/torchrun x.py", ["/c/bin/torchrun"]),
        ("V=$(pwd)/env\n$V/bin/torchrun x.py", []),
        ("V=`pwd`\n$V/bin/torchrun x.py", []),
        ("HOME=/other\n$HOME/bin/torchrun x.py", ["/other/bin/torchrun"]),
    ],
)
def test_paths_that_a_script_puts_together_from_plain_values(text, paths):
    assert Script("bash", text).paths({"HOME": "/home/u"})[0] == paths
    assert Script("bash", text).launcher({}) == "torchrun"


FILES = {
    "x.sh": "#!/bin/bash\ntorchrun a.py",
    "./run": "#!/usr/bin/env bash\ntorchrun a.py",
    "a.py": "import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)",
    "exe": "#!/usr/bin/env python3\nprint(1)",
}


@pytest.mark.parametrize(
    "command,shell,text",
    [
        ("bash x.sh 1", "bash", FILES["x.sh"]),
        ("bash -o pipefail -e x.sh", "bash", FILES["x.sh"]),
        ("env A=b bash -l x.sh", "bash", FILES["x.sh"]),
        ("./run --flag", "bash", FILES["./run"]),
        ("bash -lc exit", "bash", "exit"),
        ("sh", "sh", ""),
        ("bash missing.sh", "bash", ""),
    ],
)
def test_script_of_a_command(command, shell, text):
    script = read_script(command.split(), lambda path: FILES.get(path, ""))
    assert (script.shell, script.text) == (shell, text)


def test_programs_that_start_their_ranks_themselves():
    def chosen(text, ranks=None):
        return choose_launcher(["python", "a.py"], "auto", Script(python=text), {}, ranks)[0]

    spawn = FILES["a.py"]
    assert read_script(["python", "-u", "-X", "dev", "a.py"], FILES.get).python == spawn
    assert chosen(spawn) == "once" and chosen("os.environ['RANK'] = str(rank)\n" + spawn, 2) == "once"
    assert chosen("from torch.multiprocessing import Queue, spawn\nspawn(main, nprocs=2)") == "once"
    assert chosen("rank = int(os.environ['LOCAL_RANK'])\n" + spawn) == "ranks"  # it also takes ranks from outside
    lightning = "import lightning as L\ntrainer = L.Trainer(max_epochs=1,\n  devices=2)"
    assert chosen(lightning) == "once" and chosen(lightning, 2) == "ranks"  # LOCAL_RANK tells Lightning who it is
    assert chosen("import os, torch as t, " + lightning.partition("import ")[2]) == "once"
    assert chosen("import torch, notlightning as L\nL.Trainer(devices=2)") == "ranks"
    assert chosen("print('Trainer(devices=2)')") == "ranks"


@pytest.mark.parametrize("piece", ["\n", " ", "Trainer(", "deepspeed ", "accelerate ", "-m ", "python", "$", "import "])
def test_long_texts_are_read_at_once(piece):
    text = piece * ((1 << 18) // len(piece))
    script = Script("bash", text, text)
    assert (script.launcher({}), script.spawns, script.pythons({}), script.ranks_per_node({})) == ("", "", [], None)

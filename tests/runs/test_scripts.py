"""Scripts that start a launcher themselves: one world, a log for each rank, true exit codes, whatever the script hides."""

import json
import os
import signal
import sys

import pytest

from tests.conftest import need_torch, wait_for
from tests.runs import little_torch

BIN = os.path.dirname(sys.executable)
WHO = (
    "import os, sys\n"
    "ours = any('DRUMBEAT_LAUNCHERS' in name + text for name, text in os.environ.items())\n"
    "print('who', *(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_PORT')), ours, *sys.argv[1:])\n"
)


@pytest.fixture
def environ(home, tmp_path):
    """With a small torch in place of the real one."""
    library, programs = little_torch.install(tmp_path / "little", sys.executable)
    path = os.pathsep.join([programs, os.environ["PATH"]])
    library = os.pathsep.join([library, os.environ["PYTHONPATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": library}


def run(drumbeat, environ, script, *flags, command=("bash", "x.sh")):
    (drumbeat.folder / "who.py").write_text(WHO)
    (drumbeat.folder / "x.sh").write_text("#!/bin/bash\n" + script)
    return drumbeat("run", "--nodes", 2, *flags, "--", *command, env=environ, timeout=330)


def worlds(done):
    return sorted(line.split("who ")[1].split() for line in done.stdout.splitlines() if "who " in line)


def test_stages_one_after_another_each_make_one_world(drumbeat, environ):
    done = run(
        drumbeat,
        environ,
        "torchrun --standalone --nproc_per_node=2 who.py a && python3 -u -m torch.distributed.run --nproc-per-node 2 who.py b",
    )
    assert done.returncode == 0, done.stderr
    seen = worlds(done)
    assert [(rank, size) for rank, size, *_ in seen] == [(str(n // 2), "4") for n in range(8)]
    ports = {stage: {port for _, _, port, _, said in seen if said == stage} for stage in "ab"}
    assert len(ports["a"]) == len(ports["b"]) == 1 and ports["a"] != ports["b"]
    assert {ours for _, _, _, ours, _ in seen} == {"False"}  # a rank gets back the environment of before
    assert "its script starts torchrun" in done.stderr and "--standalone" in done.stderr  # what is replaced is shown
    names = {path.name for path in drumbeat.run_folder().glob("nodes/*/attempt-0/rank-*.out")}
    assert names == {f"rank-{rank}.out" for rank in range(4)}


# script, words before and behind it, flags -> ranks of each of two nodes.
# What the text tells is read by tests/plan/test_program.py too.
COUNTS = {
    "an argument": ("torchrun --nproc_per_node=${2:-4} $1\n", (), ("who.py", "2"), (), 2),
    "env before it": ("torchrun --nproc_per_node=${NGPU:-4} who.py\n", ("env", "NGPU=2"), (), (), 2),
    "nothing that its text tells": (
        "N=4\nif [ -d . ]; then N=$(echo 2); fi\ntorchrun --nproc_per_node=$N who.py\n", (), (), (), 2,
    ),
    "a wrong guess": ("N=4\n[ ! -d . ] || read N <<< 2\ntorchrun --nproc_per_node=$N who.py\n", (), (), (), 2),
    "what the job asks": ("torchrun --nproc_per_node=${2:-4} $1\n", (), ("who.py", "1"), ("--ranks-per-node", 2), 2),
}  # fmt: skip
RUN = ("a wrong guess", "what the job asks")  # the others: less of the same


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in RUN else pytest.mark.proof) for case in COUNTS]
)
def test_a_launcher_in_a_script_starts_as_many_ranks_as_it_says(drumbeat, environ, case):
    script, before, words, flags, ranks = COUNTS[case]
    done = run(drumbeat, environ, script, *flags, command=(*before, "bash", "x.sh", *words))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [[str(rank), str(2 * ranks)] for rank in range(2 * ranks)]
    assert [each[:2] for each in worlds(done)] == expected, done.stderr


def test_a_launcher_called_by_its_path_is_met_too(drumbeat, environ, tmp_path):
    torchrun = tmp_path / "little" / "bin" / "torchrun"
    (drumbeat.folder / "mine.sh").write_text("export MINE=read\n")
    script = f"{torchrun} --standalone --nproc_per_node=2 who.py $MINE\n"
    done = run(drumbeat, {**environ, "BASH_ENV": str(drumbeat.folder / "mine.sh")}, script, "--nodes", 1)
    assert done.returncode == 0, done.stderr
    seen = worlds(done)
    assert sorted(rank for rank, *_ in seen) == ["0", "1"] and {each[-1] for each in seen} == {"read"}
    names = {path.name for path in drumbeat.run_folder().glob("nodes/*/attempt-0/rank-*.out")}
    assert names == {f"rank-{rank}.out" for rank in range(2)}


def test_launchers_behind_other_programs(drumbeat, environ, tmp_path):
    """Each of them looks for torchrun in PATH; bash's functions do not reach them. The script's own shell is as it always is."""
    own = tmp_path / "little"
    flags = "--standalone --nproc_per_node=2 who.py"
    script = f"""set -eu
OWN={own}
case $- in *T*) exit 9 ;; esac
[ -z "$(trap -p)" ] || exit 9
timeout 300 torchrun {flags} timeout
nice -n 1 stdbuf -oL torchrun {flags} nice
sh -c 'torchrun {flags} sh'
"$OWN/bin/torchrun" {flags} path
readonly PATH
[ "$(echo word)" = word ] || exit 9
last() {{ exec torchrun {flags} exec; }}
last
"""
    done = run(drumbeat, environ, script, "--nodes", 1)
    assert done.returncode == 0, done.stderr
    seen = worlds(done)
    stages = {stage: sorted(rank for rank, *_, said in seen if said == stage) for stage in {each[-1] for each in seen}}
    assert stages == {stage: ["0", "1"] for stage in ("timeout", "nice", "sh", "path", "exec")}
    names = {path.name for path in drumbeat.run_folder().glob("nodes/*/attempt-0/rank-*.out")}
    assert names == {f"rank-{rank}.out" for rank in range(2)} and "no logs of their own" not in done.stderr


def test_a_launcher_that_is_not_met_is_named(drumbeat, environ):
    """By a path that a command puts together: its ranks share one log, and one line says why."""
    wait = "for i in $(seq 600); do grep -q launcher-not-met runs/*/events.jsonl && exit 0; sleep 0.1; done; exit 9"
    (drumbeat.folder / "bin").mkdir()
    launcher = drumbeat.folder / "bin" / "torchrun"
    launcher.write_text(
        f"#!/bin/sh\nexport WORLD_SIZE=2 MASTER_PORT=1\nRANK=1 sh -c '{wait}' & RANK=0 sh -c '{wait}'\n"
    )
    launcher.chmod(0o755)
    done = run(drumbeat, environ, "$(pwd)/bin/torchrun --standalone who.py\n", "--nodes", 1)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the ranks have no logs of their own: the script bypasses drumbeat's launcher") == 1
    assert "call it by its name, from bash" in done.stderr


def test_a_launcher_behind_exec_after_a_change_of_path_is_stopped_before_the_first_step(drumbeat, environ):
    """No stand-in is met. The census sees a world of its own on each node and stops the run, long before a rank makes a step."""
    (drumbeat.folder / "bin").mkdir()
    launcher = drumbeat.folder / "bin" / "torchrun"
    (drumbeat.folder / "joins.py").write_text(
        "import os, socket, time\n"
        "where = ('127.0.0.1', int(os.environ['MASTER_PORT']))\n"
        "door = socket.create_server(where) if os.environ['RANK'] == '0' else None\n"
        "link = None\n"
        "while link is None:\n"
        "    try: link = socket.create_connection(where)\n"
        "    except OSError: time.sleep(0.05)\n"
        "time.sleep(300)\n"
        "open(f\"stepped-{os.environ['NODE_RANK']}-{os.environ['RANK']}\", 'w').close()\n"
    )
    train = f"{sys.executable} joins.py"
    launcher.write_text(
        "#!/bin/sh\nexport WORLD_SIZE=2 MASTER_PORT=$((20000 + NODE_RANK))\n"
        f"RANK=1 LOCAL_RANK=1 {train} & RANK=0 LOCAL_RANK=0 {train}\n"
    )
    launcher.chmod(0o755)
    done = run(drumbeat, environ, 'PATH="$PWD/bin:$PATH"\nexec torchrun --standalone --nproc_per_node=2 who.py\n')
    assert done.returncode == 1, done.stderr
    assert "2 separate worlds of 2 ranks each instead of one of 4 ranks" in done.stderr
    assert "--nnodes=$NNODES --node_rank=$NODE_RANK" in done.stderr and not list(drumbeat.folder.glob("stepped-*"))


def test_true_exit_code_behind_tee_and_a_last_command(drumbeat, environ):
    (drumbeat.folder / "f.py").write_text(
        "import os, sys, time\nrank = os.environ['RANK']\n"
        "if rank == '3':\n"
        "    while not all(os.path.exists(f'said-{other}') for other in range(3)): time.sleep(0.05)\n"
        "    sys.exit(7)\n"
        "print('mine', flush=True)\nopen(f'said-{rank}', 'w').close()\ntime.sleep(600)\n"
    )
    script = f"export PATH={environ['PATH']}\ntorchrun --nproc_per_node=2 f.py 2>&1 | tee log-$NODE_RANK.txt\necho done"
    done = run(drumbeat, environ, script, command=("bash", "-l", "x.sh"))
    assert done.returncode == 7, done.stderr
    assert "rank 3 on" in done.stderr and "exit code 7\ncause      not known: it wrote nothing" in done.stderr
    log = (drumbeat.folder / "log-1.txt").read_text()
    assert (
        "[rank 2] mine" in log and "its own table: f.py FAILED" in log
    )  # the script's own log has what it would have had
    assert "[rank 2]" not in done.stdout and done.stdout.count("mine") == 3  # a line is shown once


EARLY = (
    "import os, sys, time\n"
    "if os.environ['RANK'] == '1':\n"
    "    with open('pid.tmp', 'w') as file: file.write(str(os.getpid()))\n"
    "    os.rename('pid.tmp', 'pid'), sys.exit(0)\n"
    "while not os.path.exists('pid'): time.sleep(0.05)\n"
    "while os.path.exists('/proc/' + open('pid').read()): time.sleep(0.05)\n"  # until its launcher has reaped it
    "sys.exit('RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:33419')\n"
)


@pytest.mark.parametrize("command", [("torchrun", "--nproc-per-node", 2, "e.py"), ("bash", "x.sh")])
def test_a_rank_that_ends_with_0_before_the_others_is_named_though_a_launcher_started_it(drumbeat, environ, command):
    (drumbeat.folder / "e.py").write_text(EARLY)
    done = run(drumbeat, environ, "torchrun --nproc-per-node 2 e.py | cat\n", "--nodes", 1, command=command)
    assert done.returncode == 1, done.stderr
    failure = json.loads((drumbeat.run_folder() / "summary.json").read_text())["failure"]
    assert (failure["code"], failure["rank"]) == ("early-exit", 1), failure
    assert failure["title"] == "rank 1 ended with exit code 0 while the others went on"
    ended = json.loads(drumbeat.here("status", "--json", drumbeat.run_folder()).stdout)["ranks"]["ended"]
    assert [(end["rank"], end["exit_code"]) for end in ended] == [(1, 0), (0, 1)]


def test_a_rank_that_has_ended_is_seen_while_torchrun_goes_on(drumbeat, environ):
    (drumbeat.folder / "e.py").write_text("import os, time\ntime.sleep(600 if os.environ['RANK'] == '0' else 0)\n")
    started = drumbeat.start("run", "--", "torchrun", "--nproc-per-node", 2, "e.py", env=environ)
    wait_for(lambda: "1 of 2 have ended" in drumbeat.here("status").stdout, 120, "the end of rank 1")
    ended = json.loads(drumbeat.here("status", "--json").stdout)["ranks"]["ended"]
    assert [(end["rank"], end["exit_code"], end["of_command"]) for end in ended] == [(1, 0, False)]
    started.send_signal(signal.SIGTERM)
    started.communicate(timeout=180)


def test_a_script_that_does_not_wait_for_its_launcher_has_failed(drumbeat, environ):
    (drumbeat.folder / "s.py").write_text("import time\nopen('up', 'w').close()\ntime.sleep(600)\n")
    script = "torchrun s.py &\nuntil [ -e up ]; do sleep 0.1; done\necho started\n"
    done = run(drumbeat, environ, script, "--nodes", 1)
    assert done.returncode == 1, done.stderr
    assert "the script ended while its torchrun s.py had not reported its end" in done.stderr
    assert "or the script did not wait for it" in done.stderr and "remove the &" in done.stderr


def test_a_failed_stage_that_was_made_up_for_is_told_with_its_rank_and_cause(drumbeat, environ):
    (drumbeat.folder / "f.py").write_text("import os\nif os.environ['RANK'] == '1': raise RuntimeError('too large')\n")
    script = "if ! torchrun --nproc_per_node=2 f.py > log.txt 2>&1; then\n  python3 -c 1\n  python3 ok.py\nfi\n"
    (drumbeat.folder / "ok.py").write_text("print('made up for')\n")
    done = run(drumbeat, environ, script, "--nodes", 1)
    assert done.returncode == 65 and "made up for" in done.stdout, done.stderr
    assert (
        "doubt      rank 1 on " in done.stderr
        and "torchrun --nproc_per_node=2 f.py failed (exit code 1)" in done.stderr
    )
    assert (
        "RuntimeError: too large: raised at " in done.stderr
        and "although a stage of the script had failed" in done.stderr
    )
    assert json.loads((drumbeat.run_folder() / "summary.json").read_text())["outcome"] == "doubtful"


def test_two_launchers_at_once_are_refused(drumbeat, environ):
    (drumbeat.folder / "s.py").write_text(
        "import os, time\nnode = os.environ['NODE_RANK']\nopen(f'up-{node}', 'w').close()\n"
        "while not os.path.exists(f'refused-{node}'): time.sleep(0.05)\n"
    )
    script = (
        "torchrun s.py a &\nuntil [ -e up-$NODE_RANK ]; do sleep 0.1; done\n"
        "torchrun s.py b; touch refused-$NODE_RANK\nwait\n"
    )
    done = run(drumbeat, environ, script, "--nodes", 1)
    assert done.returncode == 2 and "torchrun s.py b: this script's torchrun s.py a is still running" in done.stderr
    assert "two trainings at once are two jobs" in done.stderr


def test_a_launcher_in_every_rank_is_refused(drumbeat, environ):
    (drumbeat.folder / "y.sh").write_text("torchrun who.py\n")
    done = run(drumbeat, environ, "bash ./y.sh\n", "--nodes", 1, "--ranks-per-node", 2)  # nothing in x.sh says so
    assert done.returncode == 2 and "add --launcher once" in done.stderr
    assert not worlds(done)


def test_mpirun_in_a_script_is_refused_with_the_line_to_type(drumbeat, environ, tmp_path):
    program = tmp_path / "little" / "bin" / "mpirun"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    done = run(drumbeat, environ, "mpirun -n 4 python who.py\n", "--launcher", "once")
    assert done.returncode == 2 and "mpirun -n 4 drumbeat run -- python who.py" in done.stderr


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_a_failure_that_only_the_text_shows(drumbeat, environ):
    fails = f"import sys\nprint('Traceback (most recent call last):\\n  File \"x.py\", line 1, in <module>\\n{OOM}')\nsys.exit(1)"
    (drumbeat.folder / "f.py").write_text(fails)
    done = run(drumbeat, environ, "python3 f.py | tee log.txt\necho done\n", "--nodes", 1)
    assert done.returncode == 65 and "but what was written last is a failure" in done.stderr, done.stderr
    assert "doubt      rank 0" in done.stderr and "the GPU ran out of memory" in done.stderr
    (folder,) = drumbeat.runs()
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "doubtful"


def test_a_stop_reaches_the_ranks_and_their_save_gets_the_whole_grace(drumbeat, environ):
    """Before it, `status` tells how many ranks run, and the step that they print."""
    (drumbeat.folder / "s.py").write_text(
        "import os, signal, sys, time\n"
        "def save(number, frame):\n"
        "    time.sleep(2)\n"
        "    open('saved-' + os.environ['RANK'], 'w').close()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('Epoch [1/3], Step [30/30], Loss: 0.6\\nEpoch [2/3], Step [5/30], Loss: 0.5', flush=True)\n"
        "open('up-' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(600)\n"
    )
    (drumbeat.folder / "x.sh").write_text("torchrun --nproc_per_node=2 s.py 2>&1 | tee log.txt\necho done\n")
    started = drumbeat.start("run", "--nodes", 1, "--", "bash", "x.sh", env=environ)
    wait_for(lambda: len(list(drumbeat.folder.glob("up-*"))) == 2, 120, "two ranks")
    wait_for(
        lambda: "progress   step 35/90  loss 0.500" in drumbeat.here("status").stdout, 120, "the step of all epochs"
    )
    assert "ranks      2 started by the command of 1 node, which is running" in drumbeat.here("status").stdout
    started.send_signal(signal.SIGTERM)
    out = started.communicate(timeout=180)[0]
    assert started.returncode == 143 and len(list(drumbeat.folder.glob("saved-*"))) == 2, out


def test_with_the_real_torchrun(drumbeat):
    need_torch("torchrun needs torch")
    (drumbeat.folder / "f.py").write_text(
        "import os, time\nrank = os.environ['RANK']\nassert int(os.environ['LOCAL_RANK']) == int(rank) % 2\n"
        "print('who', rank, os.environ['WORLD_SIZE'], flush=True)\n"
        "open(f'here-{rank}', 'w').close()\n"
        "while not all(os.path.exists(f'here-{other}') for other in range(4)): time.sleep(0.05)\n"
        "if rank == '2': raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')\n"
        "time.sleep(60)\n"
    )
    environ = {**os.environ, "PATH": BIN + os.pathsep + os.environ["PATH"]}
    script = (
        "python -m torch.distributed.run --nnodes=$PET_NNODES --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT "
        "--rdzv_backend=c10d --nproc-per-node=2 --role $(hostname -s|tr -dc '0-9'): --max-restarts=0 --tee 1 \\\n"
        "  f.py 2>&1 | tee rank_${NODE_RANK}.log\nEXIT_CODE=$?\nexit $EXIT_CODE\n"
    )
    done = run(drumbeat, {**environ, "PET_NNODES": "2"}, script)
    assert done.returncode == 1, done.stderr
    assert worlds(done) == [[str(rank), "4"] for rank in range(4)], done.stdout
    assert "rank 2 on" in done.stderr and "the GPU ran out of memory" in done.stderr


def test_stages_that_were_seen_to_start_are_told_apart(drumbeat, environ):
    """The pause between them is no training, and their steps are those of a stage."""
    steps = "import time\nfor n in range(1, 13): print(f'step {n} loss {1 / n:.4f}', flush=True); time.sleep(0.1)\n"
    (drumbeat.folder / "steps.py").write_text(steps)
    launch = "torchrun --nproc_per_node=1 steps.py"
    done = run(drumbeat, environ, f"{launch} && sleep 3 && {launch}", "--nodes", 1)
    assert done.returncode == 0, done.stderr
    summary = json.loads((drumbeat.run_folder() / "summary.json").read_text())
    parts = summary["ledger"]
    assert parts["between stages"] > 3 and parts["training"] < sum(parts.values()) - 3
    assert summary["progress"]["laps"] == summary["progress"]["stages"] == 1
    assert "steps are counted anew in each stage" in done.stderr

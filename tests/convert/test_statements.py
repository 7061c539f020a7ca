"""Statements around the training: chains, background, steps of their own, `set -e`, and how a script is called."""

import os
import subprocess
import sys

import pytest

from drumbeat.commands.launch import find_launcher
from drumbeat.convert.convert import convert
from drumbeat.convert.draft import job_file
from drumbeat.jobfile.job import job_from_text
from drumbeat.plan.argv import rank_argv
from tests.convert.test_convert import job, script

TWO_NODES = ("--nodes=2", "--gpus-per-node=4", "--ntasks-per-node=4")


def test_what_follows_a_chain_is_the_training():
    made = job(script("python prepare.py && srun python train.py --lr 1", sbatch=TWO_NODES))
    assert made.command == ("python", "train.py", "--lr", "1") and made.ranks_per_node is None
    assert "python prepare.py || exit" in made.on_start


def test_what_follows_a_chain_inside_a_step():
    made = job(script('srun -n2 bash -c "pip install -e . && torchrun --nproc-per-node 4 train.py"', sbatch=TWO_NODES))
    assert made.command == ("torchrun", "train.py")
    assert made.setup.split("\n")[-1] == "pip install -e . || exit"


def test_a_second_training_in_a_chain_is_named():
    asked = convert(script("srun python train.py && python eval.py", sbatch=TWO_NODES)).to_check
    assert [note.text for note in asked if "job of its own" in note.why] == ["python eval.py"]


@pytest.mark.parametrize("line", ["bash watch.sh &", "(while true; do date >> beat; sleep 9; done) &", "monitor out &"])
def test_what_runs_in_the_background_stays_there(line):
    text = script("monitor() { while true; do rocm-smi >> $1; sleep 5; done; }", line, "srun python train.py")
    assert line in job(text).on_start.split("\n")


def test_a_step_of_its_own_stays_one():
    text = script("srun tar -C /tmp -xf x.tar", "srun -n 1 mkdir -p out", "srun python train.py", sbatch=TWO_NODES)
    assert job(text).on_start.split("\n") == [
        "SLURM_NTASKS=8  # as in the script", "SLURM_NTASKS_PER_NODE=4  # as in the script", "set +e  # as in the script",
        "srun tar -C /tmp -xf x.tar", "srun -n 1 mkdir -p out",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("set -euo pipefail", "touch a"), ["set -u -o pipefail  # as in the script; -e is on already"]),
        (("set -o errexit -o nounset", "set -x", "touch a"), ["set -u  # as in the script; -e is on already"]),
        (("touch a",), ["set +e  # as in the script"]),
        (("touch a", "set -e", "touch b"), ["set +e  # as in the script", "set -e  # as in the script"]),
    ],
)
def test_errors_end_on_start_where_they_end_the_script(lines, expected):
    made = job(script(*lines, "srun python train.py"))
    assert [line for line in made.on_start.split("\n") if line.startswith("set ")] == expected


@pytest.mark.parametrize(
    "text",
    [
        "set -eo pipefail\nfalse | cat",
        "set -eo pipefail\nset +o pipefail\nfalse | cat",
        "set -e\nfalse | cat",
        "set -u\nmkdir -p out-$NOT_SET",
        "set -u\nset +u\nmkdir -p out-$NOT_SET\nset -u",
        "set -u\nexport OUT=$SLURM_NOT_SET/$(pwd | wc -l)",
        "export FOUND=$(grep nothing /dev/null)",
        "set -e\nexport FOUND=$(grep nothing /dev/null)",
        "set -e\nFOUND=$(grep nothing /dev/null)\nexport FOUND",
        "FOUND=$(grep nothing /dev/null)\nexport FOUND",
        "set -f\n[ *.no = '*.no' ]\n>| a\nset -C\nset -e\n: > a",
    ],
)
@pytest.mark.parametrize("shell", ["#!/bin/bash", "#!/bin/bash -l", "#!/bin/bash -e"])
def test_on_start_fails_where_the_script_does(text, shell, tmp_path):
    batch = f"{shell}\n{text}\nsrun python train.py\n"
    environ = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "1"}
    there = subprocess.run(["bash", *shell.split()[1:], "-c", "srun() { :; }\n" + batch], cwd=tmp_path, env=environ)
    made = "\n".join(convert(batch).on_start)
    here = subprocess.run(["bash", "-c", f"set -e; {made}\ntrue"], cwd=tmp_path, env=environ)
    assert bool(here.returncode) == bool(there.returncode), made


def test_a_variable_that_must_be_set_ends_the_rank():
    made = convert(script("set -u", "srun python t.py --n $SLURM_ARRAY_TASK_ID")).keys["command"]
    assert made[2] == "set -u; exec python t.py --n ${SLURM_ARRAY_TASK_ID}"


def test_how_the_launcher_calls_the_program_is_kept():
    made = job(script("srun torchrun --no_python --nproc-per-node 4 fast-llm train", sbatch=TWO_NODES[:2]))
    assert made.command == ("torchrun", "--no-python", "fast-llm", "train")


@pytest.mark.parametrize(
    ("options", "memory"),
    [
        (("--mem=512gb",), "512G"),
        (("--mem-per-gpu=60G", "--gpus-per-node=8"), "480G"),
        (("--mem-per-cpu=2000", "--cpus-per-task=8"), "16000M"),
    ],
)
def test_memory_of_a_node(options, memory):
    assert job(script("srun python train.py", sbatch=options)).memory == memory


def test_a_time_without_leading_zeros():
    assert job(script("srun python train.py", sbatch=("--time=1:0:5",))).time == 3605


def test_the_number_of_nodes_is_known():
    made = job(
        script(
            'n=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | wc -l)',
            'if [ $n -gt 1 ]; then run="srun torchrun --nnodes $n"; else run=torchrun; fi',
            "$run --nproc-per-node 4 train.py --nodes $n", sbatch=TWO_NODES[:2],
        )
    )  # fmt: skip
    assert made.command == ("torchrun", "train.py", "--nodes", "2")


def test_a_list_in_a_loop_keeps_all_its_words():
    head = ("n=$(nvidia-smi -L | wc -l)", "args=(--per $n)")
    text = script(*head, "for x in a b; do args+=(--data $x); done", 'srun python train.py "${args[@]}"')
    assert job(text).command[2].endswith("train.py --per ${n} --data a --data b".replace("$", "$$"))
    text = script(*head, "for x in /d/*; do args+=(--data $x); done", 'srun python train.py "${args[@]}"')
    draft = convert(text)
    assert not draft.to_check and not draft.differences
    assert draft.on_start[-1] == 'export AS_TEXT_args="$(declare -p args 2> /dev/null)"'


def test_arguments_of_the_script_that_begin_with_a_dash(drumbeat, tmp_path):
    lines = ('[ -n "$2" ] || exit 1', "srun python train.py --model $2")
    (tmp_path / "run.sh").write_text(script(*lines))
    done = drumbeat("convert", str(tmp_path / "run.sh"), "--", "--model", "big")
    assert done.returncode == 0 and job_from_text(done.stdout).command == ("python", "train.py", "--model", "big")


def test_options_are_named_as_they_are_written():
    dropped = convert(script("srun -u --open-mode=append python train.py")).left_out
    assert [note.text for note in dropped] == ["srun -u", "srun --open-mode append"]
    assert job_file(convert(script("srun python train.py")), "x")


def test_a_wrapper_around_srun():
    made = job(script("timeout 3h srun python train.py", sbatch=TWO_NODES))
    assert made.command == ("python", "train.py") and made.nodes == 2
    assert job(script("srun timeout 3h python train.py")).command == ("timeout", "3h", "python", "train.py")


def test_every_round_of_a_loop_is_named():
    asked = convert(script("for seed in 1 2 3; do srun python train.py --seed $seed; done")).to_check
    assert [note.text[-1] for note in asked if "job of its own" in note.why] == ["2", "3"]


def test_files_that_the_shell_opens_are_named():
    draft = convert(script("srun python train.py > out.log 2>&1", sbatch=TWO_NODES))
    assert [note.text for note in draft.left_out if "run folder" in note.why] == ["> out.log"]
    asked = convert(script("srun python train.py < words.txt", sbatch=TWO_NODES)).to_check
    assert [note.text for note in asked] == ["< words.txt"]


def test_a_range_of_nodes_and_what_was_never_filled_in():
    draft = convert(script("srun python train.py", sbatch=("-N 2-4", "-p { partition }", "-A <account>")))
    assert (draft.keys["nodes"], draft.options) == (2, []) and not {"partition", "account"} & set(draft.keys)
    assert {note.line for note in draft.to_check} == {2, 3, 4}


def test_a_known_list_travels_with_the_command():
    lines = ("RATES=(0 1e-3 '1e-4 x')", 'srun python train.py --lr "${RATES[$SLURM_ARRAY_TASK_ID]}"')
    text = script(*lines, sbatch=("--array=1-2",))
    draft = convert(text)
    assert not draft.to_check and not draft.setup
    said = job(text).command[2].replace("$$", "$").replace("exec python", "printf '%s,'")
    environ = {"SLURM_ARRAY_TASK_ID": "2", "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", said], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "train.py,--lr,1e-4 x,"


def test_what_ran_outside_of_a_container_stays_outside():
    text = script(
        "ulimit -c 0", "module use /my", "module load bindings", "srun singularity exec x.sif python train.py"
    )
    draft = convert(text)
    assert not draft.to_check and draft.setup == ["set +e  # as in the script", "ulimit -c 0"]
    assert draft.on_start == ["module use /my", "module load bindings"]


def test_a_list_with_comments_and_continued_lines_keeps_all_its_items():
    text = script("ARGS=(\n  --lr 1  # of the paper\n  --wd 2 \\\n  --steps=3\n)", 'srun python train.py "${ARGS[@]}"')
    assert convert(text).keys["command"] == ["python", "train.py", "--lr", "1", "--wd", "2", "--steps=3"]


def test_a_program_that_is_read_from_a_heredoc_is_carried_over():
    inside = convert(script("srun bash <<EOF", "cd src", "python train.py $X", "EOF"))
    assert job_file(inside, "x").count("command: python train.py $X") == 1 and inside.keys["workdir"].endswith("src")
    assert convert(script("srun python - <<'EOF'", "print(1)", "EOF")).keys["command"] == ["python", "-c", "print(1)"]
    for fed in ('<<< "$X"', "<<EOF\na\nEOF"):
        assert any("no standard input" in note.why for note in convert(script(f"srun python train.py {fed}")).to_check)


def test_functions_that_a_kept_statement_calls_are_kept_too():
    body = ("log() { echo $*; }", "timed() { $*; log done; }")
    text = script(*body, "if [ -d data ]; then log there; mkdir out; fi", "timed make data", "srun python train.py")
    on_start = "\n".join(convert(text).on_start)
    assert "log() {" in on_start and "timed() {" in on_start and "timed make data" in on_start


def test_a_number_that_is_compared_with_nothing_is_an_error_and_not_zero():
    draft = convert(script("if [ $NODES -le 4 ]; then : ${TP:=4}; fi", "srun python train.py --tp $TP"))
    assert "command: python train.py --tp $TP" in job_file(draft, "x")


def test_uv_run_starts_the_training():
    draft = convert(script("uv sync", "uv run python -m lab.train --lr 1"))
    assert draft.keys["command"] == ["uv", "run", "python", "-m", "lab.train", "--lr", "1"]


def test_mappings_and_parts_of_lists():
    text = script("declare -A M", "M[a]=1", "L=(1 2 3 4)", 'srun python t.py ${M[a]} ${L[@]:1:2} ${L[@]:3} "${@:2}"')
    draft = convert(text, ["x", "y", "z"])
    assert draft.keys["command"][2].endswith("exec python t.py ${M[a]} 2 3 4 y z")
    assert draft.on_start[1:3] == ["declare -A M", "M[a]=1"]


LOOP = """set -u
export LR=1e-3
NAME=run
SEEDS=(1 2)
STAMP=$(date +%s)
log() { echo "$*"; }
for seed in "${SEEDS[@]}"; do
  log "$seed" "$STAMP" > /dev/null
  python3 show.py "$seed" "$NAME" "$1"
done
python3 show.py after "$NAME" || exit 3
"""


def test_a_loop_of_trainings_and_what_follows_is_one_command(tmp_path):
    text = script(LOOP, sbatch=("--nodes=1", "--gres=gpu:1"))
    draft = convert(text, ["an argument"])
    assert not draft.to_check and not draft.differences and not draft.left_out
    made = job_from_text(job_file(draft, "script"))
    (tmp_path / "script").write_text(text)
    (tmp_path / "show.py").write_text("import os, sys; print(sys.argv[1:], os.environ['LR'], 'NAME' in os.environ)")
    there = subprocess.run(["bash", "script", "an argument"], cwd=tmp_path, capture_output=True, text=True, check=True)
    brought = subprocess.run(
        ["bash", "-c", made.on_start + '\nexec "$0" "$@"', *(word.replace("$$", "$") for word in made.command)],
        cwd=tmp_path, env={**os.environ, **made.env}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert there.stdout == brought.stdout and there.stdout.count("an argument") == 2


def test_trainings_that_one_command_cannot_hold_are_asked_about_and_differ():
    draft = convert(script("for seed in 1 2 3; do srun python train.py $seed; done", sbatch=("--nodes=1",)))
    assert any("in a loop" in note.why for note in draft.to_check)
    assert [each.script for each in draft.differences] == ["srun python train.py 2", "srun python train.py 3"]


def test_a_loop_of_a_launcher_is_one_command():
    loop = "for fold in 0 1; do torchrun --standalone --nproc-per-node 2 train.py --fold $fold; done"
    draft = convert(script(loop, sbatch=("--nodes=1", "--gpus-per-node=4")))
    assert draft.keys["command"] == ["bash", "-c", loop] and draft.keys["ranks-per-node"] == 2
    assert not draft.to_check and not draft.differences
    unlike = f"{loop}\ntorchrun --nproc-per-node 4 last.py"
    draft = convert(script(unlike, sbatch=("--nodes=1", "--gpus-per-node=4")))
    assert draft.keys["command"][2].endswith(unlike) and draft.keys["launcher"] == "once"


OLD = "python -m torch.distributed.launch"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (f"{OLD} --use_env --nproc_per_node=4 train.py", f"{OLD} --use-env train.py"),
        (f"{OLD} --nproc_per_node=4 train.py", f"{OLD} train.py"),
        ("torchrun --nproc_per_node=4 --start-method=fork -m pkg.train", "torchrun --start-method=fork -m pkg.train"),
        ("torchrun --local-ranks-filter 0 --tee 3 train.py", "torchrun --local-ranks-filter 0 train.py"),
        ("deepspeed --num_gpus 4 --no_local_rank --module pkg.train", "deepspeed --no_local_rank --module pkg.train"),
        ("accelerate launch --num_processes 4 --no_python ./train", "accelerate launch --no-python ./train"),
        ("composer -n 4 -c ./train.sh", "composer --command-mode ./train.sh"),
    ],
)  # fmt: skip
def test_a_launcher_calls_each_rank_as_before(words, command):
    text = script(words, sbatch=("--nodes=1", "--gpus-per-node=4"))
    draft = convert(text)
    assert " ".join(draft.keys["command"]) == command and not draft.differences
    called = find_launcher(words.split()), find_launcher(command.split())
    assert rank_argv(called[0], "python") == rank_argv(called[1], "python")


WORLDS = """
for seed in 1 2; do
  PYTHON -m torch.distributed.run --nproc-per-node $((1 + seed)) train.py $seed < /dev/null
done
cp seen saved
python3 - saved <<'EOF'
import os, sys
print(sys.argv[1:], open(sys.argv[1]).read().split(), "WORLD_SIZE" in os.environ)
EOF
"""
# Without torch, which takes each rank seconds of CPU time to import: rank 0 waits until the others of its world have called.
MEETS = """
import os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = "port-" + os.environ["MASTER_PORT"]
if rank:
    while not os.path.exists(place):
        time.sleep(0.05)
    with socket.create_connection(("127.0.0.1", int(open(place).read()))) as call:
        call.sendall(b"%d" % rank)
else:
    door = socket.create_server(("127.0.0.1", 0))
    with open("port", "w") as file:
        file.write(str(door.getsockname()[1]))
    os.rename("port", place)
    met = {0}
    while len(met) < size:
        with door.accept()[0] as call:
            met.add(int(call.recv(9)))
    os.unlink(place)  # the next world may have the same port
    with open("seen", "a") as file:
        file.write(f"{sys.argv[1]}:{len(met)} ")
"""


def test_launchers_and_what_follows_on_one_node_keep_their_ranks(drumbeat):
    """The job file says that the command starts its own ranks: as many as each launcher is asked for."""
    draft = convert(script(WORLDS.replace("PYTHON", sys.executable), sbatch=("--nodes=1", "--time=10")))
    assert draft.keys["launcher"] == "once" and not draft.to_check and not draft.differences, draft.to_check
    (drumbeat.folder / "job.yaml").write_text(job_file(draft, "script"))
    (drumbeat.folder / "train.py").write_text(MEETS)
    done = drumbeat("run", "--site", "localhost", "job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "['saved'] ['1:2', '2:3'] False" in done.stdout


def test_what_follows_a_training_on_one_node_is_part_of_the_command():
    text = script("python train.py", "cp model.pt /store/", sbatch=("--nodes=1",))
    draft = convert(text)
    assert draft.keys["command"] == ["bash", "-c", "python train.py\ncp model.pt /store/"] and not draft.to_check
    wide = convert(script("srun python train.py", "cp model.pt /store/", sbatch=("--nodes=2",)))
    assert [note.text for note in wide.to_check] == ["cp model.pt /store/"]


def test_srun_gives_tasks_fewer_cores_than_the_job_has():
    text = script("srun -c 4 python t.py", sbatch=("--ntasks-per-node=2", "--cpus-per-task=12"))
    draft = convert(text)
    assert draft.keys["cpus"] == 8 and not draft.differences


def test_a_line_that_looks_secret_is_asked_about():
    draft = convert(script("pat=gpt4o", "srun python train.py $pat", "srun python train.py $pat"))
    assert "…" not in job_file(draft, "x") or draft.to_check


def test_a_program_in_the_script_itself_is_a_training():
    draft = convert(script('python -c "\nfrom lab import train\ntrain()\n"', "echo done"))
    assert draft.keys["command"] == ["python", "-c", "\nfrom lab import train\ntrain()\n"]


@pytest.mark.parametrize(
    "starter",
    [
        "srun --exact -n 8 -c8 -lu --exclusive --mpi pmix",
        "mpirun -np 8 --mca pml ob1 -mca btl ^openib --bind-to none -x A=1 -genv B two -report-bindings",
        "mpiexec -n 8 -ppn 4 -genvlist A,B -iface hsn0",
    ],
)
def test_the_program_begins_where_the_options_of_its_starter_end(starter):
    draft = convert(f"#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\n{starter} python train.py --x 1\n")
    assert draft.keys["command"] == ["python", "train.py", "--x", "1"]
    mca = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib"}
    assert "genv B" not in starter or draft.env == {"A": "1", "B": "two", **mca}


@pytest.mark.parametrize("name", ["DATA_PATH", "CONDA_HOME", "DATA"])
def test_a_default_that_is_assigned_reaches_the_rank_whatever_the_name(name):
    draft = convert(script(f': "${{{name}:=/d}}"', f"source ${name}/env", f'srun python t.py --a "${{{name}}}/x"'))
    written = job_file(draft, "x")
    assert f"${{{name}:-/d}}" in written or f"{name}=/d" in written, written
    assert not draft.to_export and not draft.differences


def test_no_exit_code_is_spoken_of_where_the_training_is_the_last_command_of_a_branch():
    draft = convert(script("set -e", "if [ -f /x/resume ]; then", "echo resume", "else", "srun python t.py", "fi"))
    assert not [note for note in draft.left_out if "exit code" in note.why]


@pytest.mark.parametrize(
    ("lines", "numbers"),
    [
        (["for i in a,1 b,2; do IFS=,; set -- $i; IFS=; python train.py $1 $2; done"], 0),
        (["go() { python train.py $1 $2; }", "for i in a b; do go $i $3; done"], 3),
        (["for i in a b; do python train.py $i $2; done"], 2),
        (["for i in a b; do python train.py $i $2; set -- $3; done", "python end.py $4"], 3),
        (["outer() { deep() { echo $7; }; deep $8; }", "for i in a b; do outer; python train.py $i $1; done"], 1),
        (["for i in a b; do ls | awk '{print $6}' | xargs python train.py $i; done"], 0),
    ],
)
def test_arguments_that_the_script_gives_itself_are_not_asked_for(lines, numbers):
    command = convert(script(*lines)).keys["command"]
    assert command[:2] == ["bash", "-c"] and len(command[4:]) == numbers


def test_the_name_of_the_script_is_that_of_the_batch_script(tmp_path):
    lines = [
        'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
        "srun python ${0%/*}/t.py --out $HERE/x ${BASH_SOURCE##*/}",
    ]
    made = job(script(*lines, sbatch=TWO_NODES))
    shown = 'printf "%s\\n" "$HERE" "$VALUE_1" "$VALUE_2"'
    argv = ["bash", "-c", f"set -e; {made.on_start}\n{shown}", "/spool/job7/slurm_script"]
    (tmp_path / "dirname").write_text("#!/bin/sh\necho /tmp\n")  # there is no such folder here
    (tmp_path / "dirname").chmod(0o755)
    seen = subprocess.run(argv, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True)
    assert seen.stdout.split() == ["/tmp", "/spool/job7", "slurm_script"], seen
    assert "spool folder" in job_file(convert(script(*lines, sbatch=TWO_NODES)), "x") and "$0" not in made.command[2]


def test_a_copy_of_the_script_is_named():
    assert "drumbeat's batch script" in job_file(convert(script("cp $0 run/", "srun python t.py")), "x")


def test_options_of_srun_in_variables():
    lines = ["export SLURM_CPU_BIND=none SLURM_MPI_TYPE=pmix", "srun --network=disable_rdzv_get python t.py"]
    made = job(script(*lines, sbatch=TWO_NODES))
    assert made.cpu_bind == ("none",) and "SLURM_CPU_BIND" not in made.env
    assert "SLURM_MPI_TYPE=pmix" in made.on_start and "SLURM_NETWORK=disable_rdzv_get" in made.on_start


def test_loops_that_wait_for_what_is_not_started():
    wait = "until ray status; do sleep 5; done"
    draft = convert(script("srun -n1 ray start --head --block &", wait, "python t.py", sbatch=TWO_NODES))
    assert wait in job_file(draft, "x") and any("waits in on-start" in note.why for note in draft.to_check)
    draft = convert(script("until [ -e ready ]; do sleep 5; done", "srun python t.py", sbatch=TWO_NODES))
    assert "until [ -e ready ]" in draft.on_start[-1] and not draft.to_check

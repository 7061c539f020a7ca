"""What an outsider's scripts changed silently: each is carried over now, or said with both values."""

import pytest

from drumbeat.convert.convert import convert
from drumbeat.convert.draft import job_file
from drumbeat.jobfile.job import job_from_text
from tests.convert.test_convert import job, script

NODES = ("--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=16")


def differing(text):
    return {each.what: (each.script, each.job) for each in convert(text).differences}


def test_a_launcher_behind_an_unread_wrapper_counts_by_its_own_size():
    line = "srun bash -c 'bash /opt/wrap.sh accelerate launch --num_processes 32 --num_machines 4 t.py'"
    made = job(script(line, sbatch=NODES))
    assert (made.launcher, made.ranks_per_node) == ("once", 8) and made.command[:2] == ("bash", "/opt/wrap.sh")
    assert not convert(script(line, sbatch=NODES)).differences


@pytest.mark.parametrize("which", ["`which torchrun`", "$(which torchrun)", "$(command -v torchrun)"])
def test_a_launcher_that_is_looked_up_by_name(which):
    made = job(script(f"srun python {which} --nnodes=4 --nproc_per_node=8 t.py --x 1", sbatch=NODES))
    assert made.command == ("torchrun", "t.py", "--x", "1") and not made.on_start


def test_ranks_in_total_are_counted_twice():
    assert differing(script("python t.py", sbatch=NODES))["rank processes in total"] == ("1", "4")


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("mpirun -np 8 python t.py", ""), ("time -p mpirun -np 8 python t.py", ""), ("srun --mpi=pmi2 -n 8 ./solver", "pmi2"),
        ("srun -n 8 ./solver", ""),
    ],
)  # fmt: skip
def test_a_program_of_mpi_is_one_task_per_rank(line, kind):
    text = script(line, sbatch=("--nodes=2", "--ntasks-per-node=4"))
    made = job(text)
    assert (made.launcher, made.ranks_per_node, made.command[-1]) == ("tasks", 4, line.split()[-1])
    assert (f"export SLURM_MPI_TYPE={kind}" in made.on_start) == bool(kind)
    assert ("MPI" in differing(text)) == ("mpirun" in line)


def test_a_condition_on_an_argument_stays_open():
    body = ("TASK=$1", 'if [ "$TASK" == ner ]; then FILES=a; else FILES=b; fi', "python t.py $FILES")
    made = job(script(*body))
    assert 'if [ "$TASK" == ner ]; then FILES=a; else FILES=b; fi' in made.on_start and made.command[2].endswith(
        "${FILES}"
    )
    assert job(script(*body[:2], "srun python t.py $FILES")).on_start
    assert convert(script(*body), ["ner"]).keys["command"] == ["python", "t.py", "a"]


def test_what_became_the_command_is_cut_out_of_on_start():
    text = script(
        'if [ -z "$MODE" ]; then exit 1; fi', "hvd() { srun --ntasks-per-node=4 python h.py; }",
        'if [ "$MODE" = ddp ]; then', "  srun torchrun --nnodes=2 --nproc_per_node=4 t.py", 'elif [ "$MODE" = hvd ]; then',
        "  hvd", "else", "  exit 2", "fi", sbatch=("--nodes=2", "--gpus-per-node=4"),
    )  # fmt: skip
    made, said = job(text), differing(text)
    assert made.command == ("torchrun", "t.py") and "exit 2" in made.on_start
    assert "torchrun" not in made.on_start and "  hvd" not in made.on_start.split("\n")
    assert ("started under a condition, or in a loop", "started once") in said.values()
    assert any(each[1] == "not started" and "h.py" in each[0] for each in said.values())


@pytest.mark.parametrize(
    "line",
    ["rm /tmp/lock || true", "mkdir a || true", "mv b a && cp x a", "tar xf d.tar || exit 1", "A=$(find x) || A=none"],
)
def test_guards_stay_with_what_they_guard(line):
    lines = job(script("set -e", line, "srun python t.py $A")).on_start.split("\n")
    assert line in "\n".join(lines)


def test_flags_of_a_container_reach_it_on_any_site():
    made = job(script("srun singularity exec --nv --writable-tmpfs x.sif python t.py"))
    assert made.on_start.split("\n")[:2] == [
        "export SINGULARITY_NV=1  # singularity --nv", "export SINGULARITY_WRITABLE_TMPFS=1  # singularity --writable-tmpfs"
    ]  # fmt: skip
    said = differing(script("srun apptainer exec --cleanenv x.sif python t.py"))
    assert said == {"option of the script": ("apptainer --cleanenv", "not used")}
    assert job(script("srun apptainer run x.sif python t.py")).command[0] == "/.singularity.d/runscript"


def test_an_option_that_nobody_knows_is_said():
    assert differing(script("srun --never-heard=1 python t.py")) == {
        "option of the script": ("srun --never-heard 1", "not used")
    }
    text = script(
        "srun --container-image=i --container-name=c pip install x",
        "srun --container-image=i --container-name=c python t.py",
    )
    assert ("srun --container-name c", "not used") in differing(text).values()
    assert "option of the script" not in differing(script("srun --container-image=i --container-name=c python t.py"))


def test_srun_looks_in_the_working_directory():
    assert job(script("srun --label go.sh t.py")).command == ("./go.sh", "t.py")
    assert job(script("srun python3.9 t.py")).command == ("python3.9", "t.py")


@pytest.mark.parametrize(
    ("sbatch", "cpus"),
    [
        (("--nodes=1", "--ntasks=8"), 8), (("--ntasks-per-node=4",), 4), (("--ntasks=1",), None),
        (("--ntasks-per-node=4", "--exclusive"), None), (("--ntasks=8", "--nodes=1", "-c", "2"), 16),
    ],
)  # fmt: skip
def test_a_task_has_one_core_unless_somebody_says_more(sbatch, cpus):
    sbatch = [" ".join(sbatch[-2:])] + list(sbatch[:-2]) if "-c" in sbatch else sbatch
    assert job(script("python t.py", sbatch=sbatch)).cpus == cpus


def test_modules_of_the_job_file_are_read_as_those_of_the_script():
    text = script("module load cuda", 'if [ -z "$LR" ]; then', "  LR=1", "fi", "srun python t.py --lr=$LR")
    assert not convert(text).differences


def test_a_variable_that_is_set_again_after_unset_reaches_the_ranks():
    text = script("unset XDG", "if [ -e /x ]; then export XDG=1; fi", "srun python t.py")
    assert "unset" not in job(text).setup and not convert(text).differences


def test_a_secret_of_the_command_is_handed_on_by_name():
    text = script("export API_TOKEN=5241590000000000", "srun python t.py --key $API_TOKEN")
    assert "524159" not in job_file(convert(text), "x") and '--key "$${API_TOKEN}"' in job_file(convert(text), "x")
    assert job_from_text(job_file(convert(text), "x")).env == {"API_TOKEN": None}


def test_files_of_a_group_and_options_without_a_value_are_named():
    text = script("{", "echo a", "srun python t.py", "} > out.txt", sbatch=("--mail-user=", "--container-image=a\\#b"))
    notes = [note.text for note in convert(text).left_out]
    assert "> out.txt" in notes and "#SBATCH --mail-user=" in notes
    assert job(text).submit_options == ("--container-image=a#b",)


def test_what_only_reports_at_the_end_is_on_end():
    text = script("bye() { seff ${SLURM_JOB_ID}; echo END; }", "trap bye EXIT", "python t.py")
    assert job(text).on_end[2].endswith("echo END; }\nbye") and not convert(text).to_check
    asked = convert(script("trap 'cp -r scratch /archive' EXIT", "python t.py"))  # perhaps longer than on-end has
    assert [note.text for note in asked.to_check] == ["cp -r scratch /archive"] and "on-end" not in asked.keys


@pytest.mark.parametrize(
    "statement",
    ["run() { srun python p.py $1; }\nrun 8 && run 4", "if ! srun python check.py; then exit 1; fi",
     "srun python p.py || { echo failed; exit 3; }", "(cd x && srun python sub.py)"],
)  # fmt: skip
def test_a_step_stays_in_the_statement_that_it_is_part_of(statement):
    draft = convert(script("set -e", statement, "srun python t.py", sbatch=("--nodes=2",)))
    assert statement in "\n".join(draft.on_start) and "\n".join(draft.on_start).count("srun") == 1
    assert draft.keys["command"] == ["python", "t.py"] and not draft.differences


def test_a_training_in_a_subshell_or_a_condition():
    draft = convert(script("(cd x && srun python t.py)", sbatch=("--nodes=2",)))
    assert (draft.keys["workdir"], draft.keys["command"]) == ("x", ["python", "t.py"]) and not draft.differences
    draft = convert(script("if srun python t.py; then cp out /x; else touch FAILED; fi", sbatch=("--nodes=2",)))
    assert draft.keys["command"] == ["python", "t.py"] and {note.text for note in draft.to_check} == {
        "cp out /x",
        "touch FAILED",
    }


@pytest.mark.parametrize(
    ("options", "ranks"),
    [("(--nproc_per_node=8 --rdzv_endpoint=$(hostname))", 8), ("(--nproc_per_node=$N --nnodes=$SLURM_NNODES)", 2),
     ("($(cat options))", None)],
)  # fmt: skip
def test_a_launcher_whose_options_stand_in_a_list(options, ranks):
    draft = convert(script("N=2", f"ARGS={options}", 'srun torchrun "${ARGS[@]}" t.py', sbatch=NODES))
    assert draft.keys.get("ranks-per-node", 8 if ranks else None) == ranks or not ranks
    assert [each.what for each in draft.differences if each.what == "rank processes"] == (
        [] if ranks else ["rank processes"]
    )


def test_a_variable_that_only_another_branch_gives_is_not_asked_for():
    text = script('if [ "${PROFILE:-0}" = 1 ]; then CMD="nsys profile"; fi', "srun $CMD python t.py")
    draft = convert(text)
    assert draft.keys["command"] == ["python", "t.py"] and set(draft.defaults) == {"PROFILE", "CMD"}
    assert "MORE" not in convert(script("MORE=$MORE:x", "srun python t.py $MORE")).defaults


def test_a_file_named_like_a_launcher_is_none():
    line = "srun python -m accelerate.commands.launch --config_file accelerate.yaml --num_machines 4 t.py"
    draft = convert(script(line, sbatch=NODES))
    assert draft.keys["command"][2:] == ["accelerate.commands.launch", "--config_file", "accelerate.yaml", "t.py"]
    assert not draft.differences


def test_tasks_and_tasks_per_node_say_the_nodes():
    draft = convert("#SBATCH -n 64\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-task=1\nsrun python t.py\n")
    assert (draft.keys["nodes"], draft.keys["gpus"]) == (16, 4) and not draft.differences


def test_a_launcher_in_the_text_of_an_unknown_wrapper_starts_the_ranks():
    draft = convert(
        "#SBATCH -N 2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:4\n"
        'srun site_wrapper exec bash -c "accelerate launch --num_machines=2 --num_processes=8 t.py"\n'
    )
    assert (draft.keys["launcher"], draft.keys["ranks-per-node"]) == ("once", 4) and not draft.differences


def test_a_monitor_that_writes_a_file_goes_on_writing_it():
    draft = convert("#SBATCH -N 1\nnvidia-smi -l 5 > gpu.log &\nPID=$!\nsrun python t.py\nkill $PID\n")
    assert "nvidia-smi -l 5 > gpu.log &" in draft.on_start and "kill $PID" in draft.keys["on-end"][2]
    assert not [each for each in draft.left_out if "nvidia-smi" in each.text]


def test_a_part_that_is_kept_whole_reads_no_variable_that_nothing_sets():
    name = "$(scontrol show hostnames | head -n 1)"
    draft = convert(
        f'#SBATCH -N 2\nif [ -e x ]; then\n  srun /opt/w -c "a --host={name}i:1 t.py"\nelse\n  srun ./other\nfi\n'
    )
    assert "VALUE_" not in " ".join(draft.keys["command"])


def test_long_values_are_shown_from_where_they_differ():
    draft = convert("#SBATCH -N 1\nsrun python t.py\n")
    draft.differs("argument 1", "x" * 200 + "1", "x" * 200 + "2")
    assert f"... {'x' * 60}1 there, ... {'x' * 60}2 here" in job_file(draft, "s")


def test_errexit_stays_on_for_what_relies_on_it():
    made = job(script("set -e", "source ./env.sh", 'cd "$REPO"', "srun python t.py", sbatch=("--nodes=2",)))
    assert made.on_start.startswith("source ./env.sh\n") and "set +e" not in made.on_start


def test_a_launcher_by_path_that_needs_a_shell_is_found_by_its_name():
    line = 'srun ./pt/bin/torchrun --nproc_per_node=1 --nnodes=2 --rdzv_backend=c10d $(dirname "$PWD")/t.py'
    assert "PATH=./pt/bin:$$PATH; torchrun " in job(script(line, sbatch=("--nodes=2",))).command[2]


def test_nodes_that_slurm_chooses_by_the_tasks_are_asked_for():
    body = ("N=$((SLURM_JOB_NUM_NODES * 8))", "srun -n $N python t.py --mesh $N")
    draft = convert(script(*body, sbatch=("-n 384", "--gpus-per-node=8")))
    assert any("write nodes" in each.why for each in draft.to_check) and "nodes" not in draft.keys
    assert "SLURM_JOB_NUM_NODES * 8" in draft.marks.shown(draft.keys["command"][2])
    assert convert(script(*body, sbatch=("-n 8", "--gpus-per-node=8"))).keys["command"][-1] == "8"


def test_a_function_in_the_background_stays_there():
    text = script(
        "run() { srun -N1 -n1 python t.py --part $1; }",
        "for i in 1; do",
        "  run $i &",
        "done",
        "run 0",
        "wait",
        sbatch=("--nodes=2",),
    )
    assert "run $i &" in job(text).on_start and job(text).command[-1] == "0"
    assert any("runs at the same time" in each.why for each in convert(text).to_check)


def test_a_server_that_on_start_leaves_in_the_background_is_not_called_left_out():
    text = script(
        "if grep -q x c.yaml; then", "  srun -N1 python serve.py &", "fi", "srun python t.py", sbatch=("--nodes=2",)
    )
    assert "python serve.py &" in job(text).on_start and not differing(text)


def test_jobs_of_the_script_s_own_shell_are_not_for_on_end():
    assert not job(script("monitor &", "srun python t.py", "kill %1")).on_end


@pytest.mark.parametrize("program", ["pmemd.MPI", "pw.x", "gmx_mpi"])
def test_a_compiled_program_keeps_its_name_and_is_one_task_per_rank(program):
    made = job(script(f"srun {program} -i in", sbatch=("--nodes=1", "--ntasks=28")))
    assert (made.command[0], made.launcher, made.ranks_per_node) == (program, "tasks", 28)


def test_a_folder_of_the_image_is_no_workdir():
    made = job(script('srun --container-image /x.sqsh bash -c "cd /opt/NeMo; python t.py"', sbatch=("--nodes=2",)))
    assert made.setup == "cd /opt/NeMo" and not made.workdir


def test_what_an_unread_file_may_read_stays_before_it():
    assert "out=b\n" in job(script("out=b", "source prepare.sh", "srun python t.py")).on_start


def test_two_equal_steps_are_two_here_too():
    assert not differing(script("./a.out x", "./a.out x"))


@pytest.mark.parametrize("option", ["--export=A,C=3", "--export=NONE", "--multi-prog"])
def test_options_of_a_step_that_a_job_file_has_not_are_asked_about(option):
    assert any(option in each.text for each in convert(script(f"srun {option} python t.py")).to_check)


def test_a_list_with_all_exports_all():
    assert not convert(script("srun --export=ALL,C=3 python t.py")).to_check

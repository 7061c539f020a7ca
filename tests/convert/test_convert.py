"""Batch scripts into job files: what is carried over, what is left out and why, and that the result is a job file."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from drumbeat.base.problem import Problem
from drumbeat.cli.entry import main
from drumbeat.convert.convert import convert
from drumbeat.convert.draft import job_file
from drumbeat.jobfile.check import expand
from drumbeat.jobfile.job import job_from_text

GOOD = Path(__file__).parent.parent / "lint" / "good"


def job(text):
    return job_from_text(job_file(convert(text), "x"))


def why(text, word):
    return [note.why for note in convert(text).left_out if word in note.text]


def script(*lines, sbatch=()):
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in sbatch), *lines, ""])


def test_options_become_keys():
    options = ("-J my job", "-N 2", "-A p1", "-p gpu", "-t 1-12", "--gres=gpu:a100:4", "--mem=100G", "--exclusive")
    made = job(script("srun python train.py", sbatch=(*options, "--ntasks-per-node=4", "-c 16", "--licenses=x")))
    assert (made.nodes, made.gpus, made.account, made.partition, made.memory) == (2, 4, "p1", "gpu", "100G")
    assert (made.time, made.cpus, made.exclusive) == (36 * 3600, 64, True)
    assert made.submit_options == ("--gres=gpu:a100:4", "--licenses=x")
    assert made.command == ("python", "train.py")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 5400), ("10:30", 630), ("1:00:00", 3600), ("2-0", 172800), ("1-02:30", 95400)]
)
def test_times_as_sbatch_reads_them(text, seconds):
    assert job(script("srun python train.py", sbatch=(f"--time={text}",))).time == seconds


def test_a_launcher_behind_srun_and_a_container():
    made = job((GOOD / "slurm_apptainer.sbatch").read_text())
    assert made.command == ("torchrun", "train_ddp.py", "--epochs", "100")
    assert (made.container, made.container_runtime) == ("$PROJ/pytorch_arm64.sif", "apptainer")
    assert made.binds == ("$EBROOTLIBFABRIC/lib:/opt/libfabric/lib",)
    assert "NCCL_SOCKET_IFNAME" not in made.env and made.env["FI_CXI_RDZV_GET_MIN"] == "0"


def test_a_launcher_kept_in_variables():
    text = script(
        "GPUS=8",
        'LAUNCHER="python -u -m torch.distributed.run \\\n  --nproc_per_node $GPUS --nnodes $SLURM_NNODES --max_restarts 0 "',
        'PROGRAM="train.py --lr 1e-4"',
        'srun --wait=60 --jobid $SLURM_JOB_ID bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $PROGRAM" | tee log',
    )
    made = job(text)
    assert made.command == ("python", "-u", "-m", "torch.distributed.run", "train.py", "--lr", "1e-4")
    assert made.ranks_per_node == 8
    assert why(text, "--nnodes") and why(text, "tee") and why(text, "--jobid")


def test_what_drumbeat_works_out_is_left_out_and_the_rest_kept():
    text = script(
        "module purge", "module load NRIS/GPU CUDA", "cd $HOME/code", "source env/bin/activate",
        "export MASTER_ADDR=$(scontrol show hostnames | head -n1)", "export NCCL_DEBUG=INFO", "export HF_HOME=$SCRATCH/hf",
        "export HF_TOKEN=hf_abcdefghijklmnopqrstuvwx", 'export CACHE="${TMPDIR:-/tmp}/c"', "mkdir -p out",
        "srun --cpu-bind=map_cpu:1,2 python train.py",
    )  # fmt: skip
    made = job(text)
    assert made.modules == ("purge", "NRIS/GPU", "CUDA") and made.workdir == "$HOME/code"
    assert made.env == {"NCCL_DEBUG": "INFO", "HF_TOKEN": None}
    assert made.on_start.split("\n") == [
        "set +e  # as in the script", 'cd "${SLURM_SUBMIT_DIR}"', "cd $HOME/code", "source env/bin/activate",
        'export HF_HOME="${SCRATCH}/hf"', 'export CACHE="${TMPDIR:-/tmp}/c"', "mkdir -p out",
    ]  # fmt: skip
    assert "abcdefgh" not in job_file(convert(text), "x")
    for word in ("MASTER_ADDR", "cpu-bind"):
        assert why(text, word), word


def test_nothing_with_a_consequence_is_left_out_without_a_question():
    text = script("srun python train.py --out /tmp/out", "cp -r /tmp/out $SCRATCH/", "rsync -a $TMPDIR/out/ $HOME/results/",
                  "conda deactivate")  # fmt: skip
    notes = convert(text).to_check
    assert [note.text.split()[0] for note in notes] == ["cp", "rsync"] and "after the training" in notes[0].why
    draft = convert(script("srun python train.py", sbatch=["--export=NONE"]))
    assert [note.text for note in draft.to_check] == ["#SBATCH --export=NONE"]
    assert why("#!/bin/bash -l\nsrun python train.py\n", "bash -l")


def test_options_that_change_the_job_are_carried_over():
    options = ("--no-requeue", "--hint=nomultithread", "--threads-per-core=1", "--export=ALL,WANDB_MODE=offline")
    text = script("srun python train.py --mode $WANDB_MODE", sbatch=options)
    made = job(text)
    assert made.requeues == 0 and not convert(text).to_check and not convert(text).differences
    assert made.submit_options == ("--hint=nomultithread", "--threads-per-core=1")
    assert made.env["WANDB_MODE"] == "offline" and made.command[-1] == "offline"


def test_what_only_the_job_knows_is_left_to_a_shell_on_the_node():
    draft = convert(script("srun python train.py --out out-$SLURM_JOB_ID"))
    assert draft.keys["command"] == ["bash", "-c", "exec python train.py --out out-${SLURM_JOB_ID}"]
    assert job_from_text(job_file(draft, "x")).command[2].endswith("out-$${SLURM_JOB_ID}")
    assert not draft.differences


def test_a_launcher_never_hides_behind_a_shell():
    text = script(
        'export LAUNCHER="torchrun --nnodes $SLURM_NNODES --rdzv_endpoint $(hostname -s):1 --role `hostname -s`:"',
        'export DIR="${DIR:-/code}"', 'export CMD="$LAUNCHER $DIR/train.py"', "srun $CMD",
    )  # fmt: skip
    draft = convert(text)
    assert draft.keys["command"] == ["torchrun", "/code/train.py"] and draft.defaults == {"DIR": "/code"}
    assert "its defaults hold: DIR=/code" in job_file(draft, "x")


def test_ranks_of_an_inner_shell_are_left_out_too():
    text = script(
        "export OMP_NUM_THREADS=8", "head=$(scontrol show hostnames | head -n1)",
        "srun -B x singularity exec $SIF bash -c '\n$WITH_CONDA\nexport RANK=$SLURM_PROCID\npython train.py' | tee out.log",
    )  # fmt: skip
    draft = convert(text)
    assert draft.setup[1:] == ["$WITH_CONDA"] and draft.keys["command"] == ["python", "train.py"]
    assert draft.env == {"OMP_NUM_THREADS": "8"} and not draft.to_check
    assert why(text, "RANK=$SLURM_PROCID") and why(text, "tee out.log")


def test_one_command_of_several():
    text = script("python prepare.py", "srun python train.py", "srun -n1 nvidia-smi")
    assert job(text).command == ("python", "train.py")
    assert job(text).on_start.split("\n")[-1] == "python prepare.py"
    draft = convert(script("srun -n1 python prepare.py | tee log", "srun python train.py", "srun python eval.py"))
    assert draft.on_start[-1] == "srun -n1 python prepare.py | tee log" and {each.line for each in draft.advice} == {2}
    assert [(each.line, each.why) for each in draft.to_check] == [
        (4, "a job file starts one command; give this one a job of its own")
    ]


def test_mpi_and_docker():
    made = job(script("mpirun -np 8 --map-by ppr:4:node -x A=1 python train.py"))
    assert made.command == ("python", "train.py") and made.env == {"A": "1"}
    made = job((GOOD / "docker.sh").read_text())
    assert (made.container, made.env, made.ranks_per_node) == ("rocm/pytorch-training:v25.6", {"HF_TOKEN": None}, 8)


def test_the_command(drumbeat, tmp_path):
    path = tmp_path / "a.sbatch"
    path.write_text(script("srun python train.py", sbatch=("-N 2",)))
    done = drumbeat("convert", path)
    assert done.returncode == 0 and job_from_text(done.stdout).nodes == 2
    path.write_text("echo nothing\n")
    done = drumbeat("convert", path)
    assert done.returncode == 1 and "no line starts a program" in done.stderr


def test_gpus_per_task_and_a_gres_without_a_number():
    options = ("-N 2", "--ntasks-per-node=4", "--gpus-per-task=1", "--overcommit")
    made = job(script("srun python train.py", sbatch=options))
    assert made.gpus == 4 and made.submit_options == ()
    assert job(script("srun python train.py", sbatch=("--gres=gpu:a100",))).gpus == 1


def test_variables_in_options_are_what_sbatch_makes_of_them():
    text = script("srun python train.py", sbatch=("--nodes=$NODES", "--err=x-%j.err"))
    assert job(text).nodes is None and job(text).submit_options == ()
    assert "expands no variable" in why(text, "$NODES")[0] and why(text, "x-%j.err")


def test_options_of_containers_that_stand_alone():
    text = script('srun --container-image a.sqsh --no-container-mount-home bash -c "cd /x\npython train.py"')
    assert job(text).command == ("python", "train.py") and job(text).container == "a.sqsh"


def test_arguments_of_the_script_are_given_at_submission():
    draft = convert(script("python3 $1 --lr ${2:-1e-3}"))
    text = job_file(draft, "script")
    assert "command: python3 $ARG_1 --lr 1e-3" in text and draft.defaults == {"$2": "1e-3"} and not draft.to_check
    assert [note.text for note in draft.to_export] == ["ARG_1"] and "# Export before you submit:" in text
    with pytest.raises(Problem, match="ARG_1 is not defined"):
        expand(job_from_text(text).command[1], {}, "command")
    given = convert(script("python3 $1 --lr ${2:-1e-3}"), ["train.py", "5"])
    assert given.keys["command"] == ["python3", "train.py", "--lr", "5"] and not given.to_check


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("--lr ${LR:-3e-4} --wd ${WD-0} --batch ${BATCH:=32} --epochs ${EPOCHS=3} --all $EPOCHS ${DEBUG:+--debug}", []),
        ("--lr ${LR:-$BASE} --wd $WD --steps $((${STEPS:-4} * 2)) --x ${X:?} --y ${Y:-y} --and ${Y}", ["BASE", "WD", "X", "Y"]),
    ],
)  # fmt: skip
def test_a_variable_with_a_default_need_not_be_exported(command, needed):
    draft = convert(script(f"for s in 1 2; do torchrun train.py --seed $s {command}; done", sbatch=("--nodes=1",)))
    assert draft.keys["command"][:2] == ["bash", "-c"] and [note.text for note in draft.to_export] == needed


def test_a_check_of_the_number_of_arguments_passes_when_they_are_given():
    usage = "if [ $# -lt 1 ]; then echo usage; exit 1; fi"
    draft = convert(script(usage, "srun python train.py $1"))
    assert "python train.py $ARG_1" in job_file(draft, "script") and not draft.to_check and not draft.on_start
    draft = convert(script('if [ -z "$1" ]; then echo usage; exit 1; fi', "srun python train.py $1"))
    assert "python train.py $ARG_1" in job_file(draft, "script") and not draft.to_check


def test_arguments_that_a_kept_statement_reads_reach_it():
    body = ('mkdir -p "out/$2"', "srun python train.py $1")
    draft = convert(script(*body))
    assert draft.on_start[0] == 'set -- "${ARG_1?}" "${ARG_2?}"' and {note.text for note in draft.to_export} == {
        "ARG_1",
        "ARG_2",
    }
    assert convert(script(*body), ["a b", "c"]).on_start[0] == "set -- 'a b' c"


def test_all_resources_of_a_gres_list_are_kept():
    def of(option):
        found = job(script("srun python train.py", sbatch=("--nodes=2", option)))
        return found.gpus, found.submit_options

    assert of("--gres=gpu:a100:4,nvme:1") == (4, ("--gres=gpu:a100:4,nvme:1",))
    assert of("--gres=nvme:1,gpu:4") == (4, ("--gres=nvme:1,gpu:4",)) and of("--gres=gpu:4") == (4, ())
    assert of("--gres=gpu:h100") == (1, ("--gres=gpu:h100:1",)) and of("--gres=craynetwork:0") == (
        None,
        ("--gres=craynetwork:0",),
    )
    assert of("--gpus=h100:8") == (4, ("--gpus-per-node=h100:4",))


def test_a_process_of_the_batch_script_has_all_cores_of_the_job():
    text = script("python make_data.py", sbatch=("--nodes=1", "--ntasks-per-node=4", "--cpus-per-task=1"))
    assert job(text).cpus == 4 and not convert(text).differences


def test_what_is_done_after_the_training_stays_with_it():
    text = script("srun bash -c 'cp data /tmp; python train.py; cp /tmp/model .'")
    assert job(text).command == ("bash", "-c", "cp data /tmp; python train.py; cp /tmp/model .")


def test_an_unknown_program_is_a_program():
    assert convert(script("srun nvidia-smi -L")).keys["command"] == ["nvidia-smi", "-L"]
    assert convert(script("mkdir out", "bash run.sh a")).keys["command"] == ["bash", "run.sh", "a"]
    assert convert(script("srun tune run --nnodes 2 recipe")).keys["command"] == ["tune", "run", "recipe"]


def test_the_first_node_is_what_drumbeat_calls_it():
    draft = convert(
        "#!/bin/bash\n#SBATCH --nodes=2\n"
        "nodes=( $(scontrol show hostnames $SLURM_JOB_NODELIST) )\nhead=${nodes[0]}\n"
        'export head_ip=$(srun -n1 -w "$head" hostname --ip-address)\n'
        "export DATA=$(srun -n1 cat /etc/root)\n"
        "export SEEN=$(date +%s)\n"
        "srun torchrun --nnodes 2 --rdzv_endpoint $head_ip:29500 train.py --data $DATA --url tcp://$head:1\n"
    )
    assert draft.on_start[-4:] == [
        "head=${nodes[0]}",
        'export head_ip=$(srun -n1 -w "$head" hostname --ip-address)',
        "export DATA=$(srun -n1 cat /etc/root)",
        "export SEEN=$(date +%s)",
    ]
    assert draft.keys["command"][2] == "exec torchrun train.py --data ${DATA} --url tcp://${MASTER_ADDR}:1"
    assert not draft.to_check and not draft.differences


def test_nothing_that_the_script_sets_is_dropped_without_a_word():
    draft = convert(
        "#SBATCH -N 2\nLRS=(1 2)\nml reset\nml load A\nml use /my\nml load B\nmapfile -t x < <(hostname)\nfor seed in 1 2; do\n"
        "  srun --export=ALL,SEED=3 python t.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]} --seed $seed\ndone\n"
    )
    assert (
        draft.modules == ["reset", "A"] and draft.on_start == ["ml use /my", "ml load B"] and draft.env == {"SEED": "3"}
    )
    assert draft.keys["command"][2].endswith("exec python t.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]} --seed 1")
    assert any(each.why.startswith("starts only under a condition, or in a loop") for each in draft.to_check)


def test_lines_for_another_scheduler_are_named():
    draft = convert("#PBS -l select=4:ngpus=4\nmpirun -np 16 -hostfile $PBS_NODEFILE python t.py\n")
    assert [each.text for each in draft.to_check] == ["#PBS -l select=4:ngpus=4", "mpirun -np 16"]
    with_nodes = convert("#SBATCH -N 4\nmpirun -np 16 python t.py\n")
    assert with_nodes.keys["ranks-per-node"] == 4 and not with_nodes.to_check


def test_one_task_per_node_stays_one():
    assert convert("#SBATCH --ntasks-per-node=1 --constraint=gpu\nsrun python t.py\n").keys["ranks-per-node"] == 1


LITERAL = "--fmt '$(touch x; echo \"a\\b\")' --re '`id -u`' --v '$HOME' --s 'it'\\''s $x'"
MEANT = ["--fmt", '$(touch x; echo "a\\b")', "--re", "`id -u`", "--v", "$HOME", "--s", "it's $x"]


def test_single_quotes_stay_literal_in_a_list():
    draft = convert(script(f"srun python train.py {LITERAL}"))
    assert draft.keys["command"] == ["python", "train.py", *MEANT] and not draft.to_check
    made = job_from_text(job_file(draft, "x"))
    assert [expand(word, {}, "command") for word in made.command[2:]] == MEANT


def test_single_quotes_stay_literal_behind_a_shell():
    draft = convert(script(f"srun python train.py {LITERAL} --m '$a'\"$SLURM_JOB_ID\""))
    assert draft.keys["command"][:2] == ["bash", "-c"]
    line = draft.keys["command"][2].replace("$$", "$").replace("exec python train.py", "printf '%s\\0'")
    env = {"SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}
    said = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, check=True).stdout
    assert said.split("\0")[:-1] == [*MEANT, "--m", "$a7"]


def test_single_quotes_of_a_variable_stay_literal():
    draft = convert(script("export A='$HOME/x'", "B='$(id)'", "srun python train.py $B"))
    made = job_from_text(job_file(draft, "x"))
    assert made.env == {"A": "$$HOME/x"} and made.command[2:] == ("$$(id)",)


def test_single_quotes_inside_what_the_batch_shell_fills_in():
    draft = convert(script("srun bash -c \"python train.py --job '$SLURM_JOB_ID'\""))
    assert draft.keys["command"] == ["bash", "-c", 'exec python train.py --job "${SLURM_JOB_ID}"']


def asked(text):
    return [(note.text, note.why) for note in convert(text).to_check]


@pytest.mark.parametrize(
    ("options", "nodes", "ranks"),
    [
        ("-N1 -n1 --gpus=1 python train.py", 1, 1),
        ("--nodes=4 --ntasks 8 python train.py", 4, 2),
        ("-N2 -n8 python train.py", 2, None),
        ("-N4 -n16 python train.py", 4, None),
        ("-N4 -n4 torchrun train.py", 4, 1),
        ("-N $SLURM_NNODES -n $SLURM_NTASKS python train.py", 4, None),
    ],
)
def test_a_size_of_sruns_own(options, nodes, ranks):
    draft = convert(script(f"srun {options}", sbatch=("--nodes=4", "--gpus-per-node=4", "-n 16")))
    assert (draft.keys["nodes"], draft.keys.get("ranks-per-node")) == (nodes, ranks) and not draft.to_check


@pytest.mark.parametrize("options", ["-N8 python train.py", "-N4 -n6 python train.py", "-n1 torchrun train.py"])
def test_a_size_that_does_not_fit_the_job(options):
    notes = asked(script(f"srun {options}", sbatch=("--nodes=4", "--gpus-per-node=4")))
    assert ["write nodes and ranks-per-node" in why for _, why in notes] == [True]


def test_two_programs_in_one_step():
    text = script("srun -n1 python a.py : -n1 python b.py")
    assert job(text).command == ("python", "a.py")
    assert [text for text, why in asked(text) if "several programs" in why] == ["srun ... : -n1 python b.py"]


def test_a_quote_that_is_never_closed():
    text = script("srun python train.py", "echo 'done")
    assert [why for _, why in asked(text) if "never closed" in why] and len(asked(text)) == 1


def test_what_lint_finds_is_to_check_unless_the_conversion_takes_it_away():
    text = script(
        "export MASTER_PORT=29500", "export NCCL_DEBUG=INFO", "export NCCL_SOCKET_IFNAME=eth0", "export NCCL_IB_DISABLE=1",
        "export NCCL_SOKET_IFNAME=ib0", "pkill -f old", "srun torchrun --nnodes=2 train.py --out <folder> | tee log",
        sbatch=("-N 2", "--ntasks-per-node=8"),
    )  # fmt: skip
    draft = convert(text)

    def codes(notes):
        return [(note.line, code) for note in notes for code in re.findall(r"\[(.*)\]", note.why)]

    assert not codes(draft.to_check)
    # As true of the script: nothing that the conversion changes.
    assert codes(draft.advice) == [
        (5, "debug-left-on"),
        (7, "rdma-off"),
        (8, "variable-misspelt"),
        (9, "kill-by-pattern"),
        (10, "placeholder-left"),
    ]
    assert "# Advice:" in job_file(draft, "x.sbatch")


def test_what_the_script_does_once_is_done_once():
    text = script(
        "CONFIG=$PWD/out/ds.json", "mkdir -p out", "cat <<EOT > $CONFIG", '{"nodes": $SLURM_NNODES}', "EOT",
        "srun --ntasks-per-node=1 cp data /tmp", "srun python train.py --config $CONFIG", sbatch=("-N 2", "-n 8"),
    )  # fmt: skip
    draft = convert(text)
    assert not draft.to_check and not draft.differences and not draft.setup
    assert draft.on_start == [
        "SLURM_NTASKS=8  # as in the script", "set +e  # as in the script", 'CONFIG="${PWD}/out/ds.json"', "mkdir -p out",
        "cat <<EOT > $CONFIG", '{"nodes": $SLURM_NNODES}', "EOT", "srun --ntasks-per-node=1 cp data /tmp",
    ]  # fmt: skip


def test_a_working_directory_of_dots_is_no_difference():
    assert not convert(script("srun python train.py", sbatch=("-D .",))).differences


def test_a_finding_cannot_break_out_of_its_comment():
    text = script('export NCCL_SOKET_IFNAME="a\nnodes: 7"', "srun python train.py <a\nnodes: 9>", sbatch=("-N 2",))
    assert job(text).nodes == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A=xxxxxxxx\n" + 12 * f"A={10 * '$A'}\n" + "srun python t.py $A\n", ""),
        (200 * "if true; then\n" + "srun python t.py\n" + 200 * "fi\n", "nested more than 100 deep"),
        (20_000 * "if true; then\n", "more than 10,000 lines"),
        (f"A={500 * '$(echo '}x{500 * ')'}\nsrun python t.py $A\n", ""),
        ("f() { f; f; }\nf\nsrun python t.py\n", "more than 20,000 steps"),
    ],
)
def test_time_and_memory_are_bounded(text, said):
    if said:
        with pytest.raises(Problem, match=said):
            convert(text)
    else:
        assert len(job_file(convert(text), "x")) < 1 << 16


def test_a_pipe_is_not_waited_for(drumbeat, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for command in ("convert", "lint"):
        done = drumbeat(command, tmp_path / "pipe")
        assert done.returncode == 2 and "is not a regular file" in done.stderr


OLIVIA = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4
IMAGE=/x/pytorch.sif
export APPTAINERENV_TRAINING_SCRIPT="train.py --epochs 100"
export APPTAINERENV_TORCHRUN_PATH="/usr/local/bin/torchrun"
nodes=( $(scontrol show hostnames $SLURM_JOB_NODELIST) )
export APPTAINERENV_head=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address | awk '{print $1}')
srun apptainer exec --nv --bind /a:/b --env HOME_OF=/opt $IMAGE bash -c 'export LD_LIBRARY_PATH=$HOME_OF/lib:$LD_LIBRARY_PATH; \\
  $TORCHRUN_PATH --nnodes=$SLURM_JOB_NUM_NODES --nproc_per_node=$SLURM_GPUS_ON_NODE --rdzv_endpoint=$head:29500 $TRAINING_SCRIPT'
"""


def test_a_training_command_kept_in_variables_of_the_container():
    draft = convert(OLIVIA)
    assert draft.keys["command"] == ["/usr/local/bin/torchrun", "train.py", "--epochs", "100"]
    assert draft.env["TRAINING_SCRIPT"] == "train.py --epochs 100" and draft.keys["binds"] == ["/a:/b"]
    assert draft.setup == ["export LD_LIBRARY_PATH=$HOME_OF/lib:$LD_LIBRARY_PATH"]
    assert draft.on_start[-1].startswith("export APPTAINERENV_head=$(srun ")  # it is `head` inside
    assert not draft.differences


SOURCED = ["set +e  # as in the script", "export A=1", "source setup.sh"]


def test_what_a_sourced_file_may_change_is_said():
    text = script("export A=1", "source setup.sh", "srun python t.py $A")
    draft = convert(text)
    assert not draft.to_check and not draft.differences and draft.on_start[:3] == SOURCED
    assert draft.on_start[3].startswith('[ "$A" = 1 ] || { echo "A was changed in line 3')
    draft = convert(text, None, lambda path: "A=2\n" if path == "setup.sh" else "")
    assert draft.keys["command"] == ["bash", "-c", "exec python t.py ${A}"] and draft.setup == SOURCED
    assert not [each for each in draft.to_check if "not read" in each.why]


def test_a_script_that_goes_through_its_arguments():
    text = script(
        'while [[ $# -gt 0 ]]; do case "$1" in --lr) LR="$2"; shift 2;; *) shift;; esac; done',
        "srun python t.py ${LR:-1}",
    )
    assert convert(text).keys["command"] == ["python", "t.py", "1"]
    assert convert(text, ["x", "--lr", "5"]).keys["command"] == ["python", "t.py", "5"]


@pytest.mark.parametrize(
    "line", ["python --version", "python3 -V", "/opt/my.env/bin/pip install x", "python -m pip list"]
)
def test_a_line_that_only_looks_is_not_the_command(line):
    draft = convert(script(line, "[ -e /data ] && python train.py --x 1", sbatch=("--nodes=2",)))
    assert draft.keys["command"] == ["python", "train.py", "--x", "1"]


RAY = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
nodes_array=($nodes)
head_node=${nodes_array[0]}
port=6379
srun --nodes=1 --ntasks=1 -w "$head_node" ray start --head --port=$port --block &
sleep 10
for ((i = 1; i < SLURM_JOB_NUM_NODES; i++)); do
  srun --nodes=1 --ntasks=1 -w "${nodes_array[$i]}" ray start --address "$head_node:$port" --block &
done
python -u driver.py --workers "$SLURM_NNODES"
"""


def test_a_ray_cluster_is_one_process_per_node(tmp_path):
    draft = convert(RAY)
    assert (
        draft.keys["nodes"] == 2 and draft.keys["launcher"] == "once" and not draft.to_check and not draft.differences
    )
    for name, body in (
        ("ray", 'echo ray "$@" >> $LOG.$NODE_RANK'),
        ("sleep", ""),
        ("python", 'echo python "$@" >> $LOG.$NODE_RANK'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    argv = [word.replace("$$", "$") for word in job_from_text(job_file(draft, "x")).command]
    seen = []
    for node in "01":
        environ = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "LOG": str(tmp_path / "log"),
            "NODE_RANK": node,
            "MASTER_ADDR": "n0",
        }
        assert subprocess.run(argv, env={**environ, "head_node": "n0"}).returncode == 0
        seen.append(sorted((tmp_path / f"log.{node}").read_text().split("\n")))
    assert seen[0] == ["", "python -u driver.py --workers 2", "ray start --head --port=6379 --block"]
    assert seen[1] == ["", "ray start --address n0:6379 --block"]


@pytest.mark.parametrize(
    "start",
    [
        'for h in 0 1; do\n  srun -N1 -n1 -w "${hosts[$h]}" ray start --address "$ip" --block &\ndone',
        'RAY="ray start"\nfor ((i = 0; i < 2; i++)); do\n  srun -N1 -n1 -r $i $RAY --block &\ndone',
        "for i in 0 1; do srun -N1 -n1 -r $i apptainer exec ray.sif ray start & done",
        'for i in 0 1; do srun -N1 -n1 -r $i bash -c "pip install ray && ~/.local/bin/ray start" & done',
        "for host in $(scontrol show hostnames); do [ $host = $HOSTNAME ] || srun -N1 -n1 -w $host ray start; done",
    ],
)
@pytest.mark.parametrize("driver", ["python driver.py", "ray job submit -- python driver.py"])
def test_a_ray_cluster_is_named_however_its_daemons_start(start, driver):
    hosts = 'hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))'
    draft = convert(script(hosts, start, driver, sbatch=("--nodes=2", "--ntasks-per-node=1")))
    assert draft.keys["command"] == driver.split() and draft.keys["launcher"] == "once"
    assert "drumbeat starts no Ray cluster" in str(draft.to_check) and "ranks-per-node" not in draft.keys
    assert "not started" in str(draft.differences) and "ray start" not in str([draft.on_start, draft.setup])


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("python t.py", 1),
        ("srun python t.py", 1),
        ("srun torchrun t.py", 1),
        ("srun torchrun --nproc-per-node=gpu t.py", None),
        ("srun -n4 python t.py", None),
    ],
)
def test_ranks_are_as_many_as_the_script_starts(line, ranks):
    assert job(script(line, sbatch=("--gres=gpu:4",))).ranks_per_node == ranks


def test_dollars_that_are_no_arguments_of_the_script():
    """`$5` in quotes is text, and `$0` of `bash -c` is the word behind its script."""
    text = script("export PRICE='$5'", 'srun bash -c \'exec "$0" "$@"\' python train.py "$PRICE"')
    draft = convert(text)
    assert not draft.to_check and draft.keys["command"] == ["python", "train.py", "$5"]


def test_a_variable_that_every_branch_exports_is_exported():
    line = "if [ -e /proc/nowhere ]; then export FOUND=yes; else export FOUND=no; fi"
    assert not convert(script(line, "srun python train.py $FOUND")).differences
    draft = convert(script(line.replace("else export", "else"), "srun python train.py $FOUND"))
    assert not draft.differences and draft.on_start[-1] == 'export AS_TEXT_FOUND="$(declare -p FOUND 2> /dev/null)"'


def test_cores_and_masks_are_carried_over_and_compared():
    text = script("srun -c 7 --cpu-bind=mask_cpu:fe,0xfe00 python t.py", sbatch=("--ntasks-per-node=2",))
    made = job(text)
    assert (made.cpus, made.cpu_bind) == (14, ("0xfe", "0xfe00")) and not convert(text).differences
    assert job(script("srun --cpu-bind=verbose,none python t.py")).cpu_bind == ("none",)
    assert job(script("srun --cpu-bind=mask_cpu:fe,fe00 torchrun --nproc-per-node 2 t.py")).cpu_bind == ()
    text = script("srun -n 4 -c 7 python t.py", sbatch=("--ntasks-per-node=2", "--cpus-per-task=7"))
    assert [(each.what, each.script, each.job) for each in convert(text).differences] == [("cores per task", "7", "3")]


def test_arguments_that_move():
    text = script("mkdir -p $1", "shift $((1 + 1))", "mkdir -p out/$1", "srun python t.py $1 --of ${2:-none}")
    given = convert(text, ["a", "b", "c"])
    assert given.keys["command"] == ["python", "t.py", "c", "--of", "none"] and not given.to_check
    assert given.on_start == ["set -- a b c", "set +e  # as in the script", "mkdir -p $1", "shift 2", "mkdir -p out/$1"]
    later = convert(text)
    assert later.on_start[0] == 'set -- "${ARG_1?}" "${ARG_2?}" "${ARG_3?}"' and "shift 2" in later.on_start
    assert "t.py $ARG_3 --of none" in job_file(later, "x")


def test_binds_that_only_the_job_knows():
    lines = ("d=$(realpath out)", "srun apptainer exec -B $d:/out,/x/$SLURM_JOB_ID x.sif python t.py")
    draft = convert(script(*lines))
    assert draft.keys["binds"] == ["${d}:/out", "/x/${SLURM_JOB_ID}"] and not draft.to_check and not draft.differences
    assert draft.on_start[1:] == ["export d=$(realpath out)"] and draft.setup == ["export -n d"]


def test_a_directory_of_the_image_is_entered_there():
    draft = convert(script("mkdir -p out", "srun --container-image=a#b --container-workdir=/in python t.py"))
    assert draft.setup == ["cd /in"] and "workdir" not in draft.keys and not draft.differences
    for line, setup in (
        ("srun --container-image=a#b python t.py", ['cd "$OLDPWD"']),  # the image's own folder
        ("srun docker run a python t.py", ['cd "$OLDPWD"']),
        ("srun --container-image=a#b bash -c 'cd sub; python t.py'", ['cd "$OLDPWD"', "cd sub"]),
        ("srun apptainer exec a.sif python t.py", []),  # begins where it is started
    ):
        draft = convert(script("mkdir -p out", line))
        assert draft.setup == setup and not draft.differences, line


def test_options_that_sruns_own_variables_carry():
    draft = convert(script("export SLURM_NETWORK=x", "srun --resv-ports=2 --cpu-freq=high python t.py"))
    lines = {line.split("  #")[0] for line in draft.on_start}
    assert {"export SLURM_RESV_PORTS=2", "export SLURM_CPU_FREQ_REQ=high", "export SLURM_NETWORK=x"} <= lines
    assert not draft.differences and not draft.to_check


def test_what_is_not_silently_changed():
    draft = convert(script('ADDR="$(hostname -f):29500"', "srun python t.py --coordinator_address=$ADDR"))
    assert "$${ADDR}" in job_file(draft, "x") and "${MASTER_ADDR}" not in job_file(draft, "x")
    text = job_file(convert(script('srun python t.py --lr $(bc <<< "$1/10")', sbatch=("--exclusive=user",))), "x")
    assert 'set -- "${ARG_1?}"' in text and "exclusive=user" in text and "exclusive: true" not in text
    loop = "for ((i = 0; i < 2; i++)); do", "node=${n[$i]}", "ip=$(nslookup $node | tail -n1)"
    for words, same in (
        ("--rank $i", True),
        ("--name a$i-b --rank=$i", True),
        ("--ip $ip", False),
        ("--twice $((i * 2))", False),
    ):
        lines = (
            "n=($(scontrol show hostnames $SLURM_JOB_NODELIST))",
            *loop,
            f"srun -N1 -n1 -w $node python t.py {words} &",
        )
        draft = convert(script(*lines, "done", "wait", sbatch=("--nodes=2", "--ntasks-per-node=1")))
        assert (not draft.to_check and draft.keys["nodes"] == 2) is same, words


@pytest.mark.parametrize(
    ("line", "words"),
    [('[ -n "$IMAGE" ] || exit 1', "it exits at line 2 before"), ("sbatch other.sh", "it submits other scripts")],
)
def test_a_script_that_starts_nothing(line, words, drumbeat, tmp_path):
    (tmp_path / "run.sh").write_text(script(line))
    done = drumbeat("convert", str(tmp_path / "run.sh"))
    assert done.returncode == 1 and words in done.stderr


def test_an_array_may_come_from_the_command_line_of_sbatch():
    draft = convert(script("export N=$SLURM_ARRAY_TASK_ID", "srun python t.py --n $N --m ${SLURM_ARRAY_TASK_ID:-0}"))
    assert draft.setup == ['export N="${SLURM_ARRAY_TASK_ID}"'] and not draft.differences
    assert draft.keys["command"][2].endswith("--m ${SLURM_ARRAY_TASK_ID:-0}")


@pytest.mark.parametrize(
    ("option", "kept"),
    [
        ("--gpus-per-node=mi250:8", ("--gpus-per-node=mi250:8",)),
        ("--gres=gpu:a100:4", ("--gres=gpu:a100:4",)),
        ("--gres=gpu:a100", ("--gres=gpu:a100:1",)),
        ("--gpus-per-task=l40s:1", ("--gpus-per-node=l40s:2",)),
        ("--gpus=h100:8", ("--gpus-per-node=h100:4",)),
        ("--gres=gpu:4", ()),
    ],
)
def test_the_type_of_gpu_is_kept(option, kept):
    made = job(script("srun python t.py", sbatch=(option, "--nodes=2", "--ntasks-per-node=2")))
    assert made.submit_options == kept and made.gpus


def test_more_ranks_than_gpus_are_asked_about():
    text = script("srun torchrun --nproc-per-node=8 train.py", sbatch=("-N 2", "--gpus-per-node=4"))
    assert [why for line, why in asked(text) if "4 of 8 ranks have no GPU of their own" in why]
    fits = script("srun torchrun --nproc-per-node=4 train.py", sbatch=("-N 2", "--gpus-per-node=4"))
    assert not asked(fits)


def test_variables_that_the_script_sets_nowhere_are_named():
    text = script(
        "LR=1", "export DATA=$SCRATCH/data",
        "srun bash -c 'torchrun --nproc-per-node=4 train.py --out $OUT --home $HOME'", "exit",
        sbatch=("-N 2", "--gpus-per-node=4"),
    )  # fmt: skip
    draft = convert(text)
    assert [note.text for note in draft.to_export] == ["OUT", "SCRATCH"], draft.to_export
    assert "sets it nowhere" in job_file(draft, "")
    later = script(
        "srun bash -c 'export A=1; python train.py --out $OUT --a $A $RANK $SLURM_PROCID' ", "srun python x.py $B"
    )
    assert [note.text for note in convert(later).to_export] == ["B"]
    unquoted = script("for i in 1; do C=2; done", "srun python train.py $OUT $C $i $SLURM_JOB_ID")
    assert [note.text for note in convert(unquoted).to_export] == ["OUT"]
    set_there = script("OUT=out", "srun python train.py --out $OUT --lr ${LR:-1} --price 5$")
    assert not convert(set_there).to_export


@pytest.mark.parametrize("value", ["$SLURM_NODEID", '"$SLURM_NODEID"', "${SLURM_NODEID}"])
def test_no_finding_about_a_flag_that_the_conversion_removes(value):
    line = f"srun torchrun --nnodes=2 \\\n  --node_rank={value} --master_addr=$H train.py"
    draft = convert(script("H=$(hostname)", line, sbatch=("-N 2",)))
    assert not [note.why for note in draft.advice if "rank-frozen" in note.why]
    own = convert(
        script(f"srun torchrun --nnodes=2 --node_rank={value} train.py --shard $SLURM_PROCID", sbatch=("-N 2",))
    )
    assert [note.why for note in own.advice if "rank-frozen" in note.why]


def test_options_of_mpirun_that_are_not_taken_over_are_named():
    head = "#!/bin/bash\n#SBATCH -N 4 --ntasks-per-node=4\n"
    draft = convert(f"{head}mpirun -np 16 --map-by ppr:4:node:PE=16 -x LD_LIBRARY_PATH -x A=1 python train.py\n")
    said = [note.text for note in draft.left_out]
    assert "mpirun --map-by ppr:4:node:PE=16" in said and "mpirun -x LD_LIBRARY_PATH" in said
    assert draft.keys["ranks-per-node"] == 4 and draft.env["A"] == "1"


def test_a_python_program_is_refused(tmp_path, capsys):
    program = tmp_path / "train.py"
    program.write_text("import torch\nprint(1)\n")
    assert main(["convert", str(program)]) == 2
    said = capsys.readouterr().err
    assert "is a Python program, not a batch script" in said and "drumbeat init" in said


def test_the_script_alone_is_required(capsys):
    with pytest.raises(SystemExit) as left:
        main(["convert"])
    assert left.value.code == 2 and capsys.readouterr().err.rstrip().endswith("required: SCRIPT")


@pytest.mark.parametrize("flag", ["--master_addr $head", "--master_addr=$head", "--rdzv_endpoint $head:29500"])
def test_what_is_left_out_is_quoted_in_the_words_of_the_script(flag):
    head = "head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)"
    draft = convert(f"#!/bin/bash\n#SBATCH -N 2 -G 8\n{head}\nsrun torchrun --nnodes=2 {flag} train.py\n")
    (said,) = [note.text for note in draft.left_out if "torchrun" in note.why]
    assert "head" in said and "MASTER_ADDR" not in said


@pytest.mark.parametrize(("minutes", "asked"), [(2, True), (30, False)])
def test_a_limit_that_submit_would_refuse_is_to_be_checked(minutes, asked, tmp_path, capsys):
    script = tmp_path / "run.sbatch"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time={minutes}\nsrun torchrun train.py\n")
    assert main(["convert", str(script)]) == 0
    told = capsys.readouterr()
    assert ("leave no time to train" in told.out) is asked and f"{int(asked)} to check" in told.err

"""Every rule carries a bad and a good example, and they are its first tests."""

import re

import pytest

from drumbeat.findings.model import SEVERITIES
from drumbeat.lint.context import rules
from drumbeat.lint.engine import CHECKS, lint
from drumbeat.lint.python_program import CHECKS as PROGRAM_CHECKS

RULES = {rule.id: rule for rule in rules()}
MADE = {"script-cut": "true\n" * 10_001}


def name_of(rule):
    return "t.py" if rule.python or rule.check in PROGRAM_CHECKS else "-"


def codes(text, name="-"):
    return [finding.code for finding in lint(text, name).findings]


READS_RANK = "import os\nrank = int(os.environ['RANK'])\nloss.backward()"
PROGRAMS = {"ranks-unset": READS_RANK, "tasks-without-step": READS_RANK, "output-folder-missing": ""}  # what they read


@pytest.mark.parametrize("name", RULES)
def test_bad_example_is_found(name):
    review = lint(
        MADE.get(name, RULES[name].bad), name_of(RULES[name]), lambda path: PROGRAMS.get(name, "loss.backward()")
    )
    found = [finding for finding in review.findings if finding.code == name]
    assert found
    for finding in found:
        assert finding.title and finding.cause and finding.fix and finding.evidence[0].line
        assert "{" not in finding.title.replace("${", ""), "a name in the title was not filled in"


@pytest.mark.parametrize("name", RULES)
def test_good_example_is_clean(name):
    assert name not in codes(RULES[name].good, name_of(RULES[name]))


def test_every_check_has_a_rule_and_every_rule_its_check():
    asked = {rule.check for rule in rules() if rule.check}
    assert asked == {*CHECKS, *PROGRAM_CHECKS}


SUBJECTS = ("command", "pipeline", "assign", "sbatch", "line", "python", "check")
PATTERNS = (*SUBJECTS[:-1], "value", "unless", "where", "without")


def test_every_key_of_a_rule_is_of_its_kind():
    assert len(RULES) == len(rules()), "two rules have one name"
    for rule in rules():
        kinds = {"settings": dict, **dict.fromkeys(("fixes", "whole", "converted"), bool)}
        wrong = [key for key, value in vars(rule).items() if not isinstance(value, kinds.get(key, str))]
        assert not wrong, f"{rule.id}: {wrong}"
        assert rule.severity in SEVERITIES, rule.id
        assert sum(bool(getattr(rule, name)) for name in SUBJECTS) == 1, rule.id
        assert all((rule.title, rule.reason, rule.fix, rule.bad, rule.good)), rule.id
        for name in PATTERNS:
            re.compile(getattr(rule, name))


HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n"


@pytest.mark.parametrize(
    "text,found",
    [
        ("srun -n1 ray start --head --block &\npython train.py\n", False),  # a service beside the work
        ("srun -n1 ray start --head --block &\nwhile true; do curl -s http://h:1; sleep 5; done\n", False),
        ("srun -n1 ./a &\nsleep 5\necho started\n", True),
        ("python -m torch.distributed.run --nproc_per_node=4 a.py &\n", True),
        ("accelerate launch --num_processes 4 a.py &\n", True),
        ("torchrun --standalone a.py &\nPID=$!\nwait $PID\n", False),
        ("python train.py --fold 1 &\npython train.py --fold 2 &\n", True),
        ("python train.py --fold 1 &\npython train.py --fold 2\n", False),
    ],
)
def test_a_service_in_the_background_needs_no_wait(text, found):
    assert ("not-waited-for" in codes(HEAD + text)) is found


def test_a_value_put_into_a_script_in_quotes_is_not_set_to_itself():
    nested = "OUT=/a\nsrun bash -c '\nOUT='\"${OUT}\"'\nls ${OUT}\n'\n"
    assert "export-of-itself" not in codes(HEAD + nested)
    assert "export-of-itself" in codes(HEAD + "export OUT=$OUT\n")


def test_a_step_after_every_backward_pass_accumulates_nothing():
    loop = "#!/usr/bin/env python\nfor i, x in enumerate(loader):\n    opt.zero_grad()\n    model(x).backward()\n    opt.step()\n"
    assert "accumulation-syncs" not in codes(f"{loop}gradient_accumulation_steps = 4\n", "t.py")
    assert "accumulation-syncs" not in codes(loop.replace("    opt.step()", "    loss_accum += 1"), "t.py")
    gathered = loop.replace("    opt.step()", "    if i % accumulation_steps == 0:\n        opt.step()")
    assert "accumulation-syncs" in codes(gathered, "t.py")


def test_ranks_that_share_a_model_may_be_given_the_same_rows():
    text = (
        "#!/usr/bin/env python\nimport torch\ntorch.distributed.init_process_group('nccl')\n{}"
        "loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)\nif __name__ == '__main__':\n    main()\n"
    )
    assert "sampler-missing" in codes(text.format(""), "t.py")
    assert "sampler-missing" not in codes(text.format("parallel_state.initialize_model_parallel(2, 1)\n"), "t.py")


def of_script(*lines):
    return {each.code for each in lint("#!/bin/bash\n" + "\n".join(lines) + "\n", "run.sbatch").findings}


def test_one_task_that_holds_all_gpus_of_its_node():
    one = ("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-task=8", "srun ./train.sh")
    assert "gpus-per-task" not in of_script(*one)
    assert "gpus-per-task" in of_script(*(line.replace("node=1", "node=8") for line in one))


def test_a_task_without_neighbours_shares_no_gpus():
    each = ("#SBATCH --nodes=1", "#SBATCH --ntasks=4", "#SBATCH --gpus-per-task=1")
    assert "gpus-per-task" in of_script(*each, "srun python t.py")
    assert "gpus-per-task" not in of_script(
        *each, "srun -n 1 --exclusive python t.py &", "srun -n 1 python u.py &", "wait"
    )
    assert "gpus-per-task" not in of_script("srun -n 1 --gpu-bind=single:1 python t.py")
    assert "gpus-per-task" not in of_script(
        *each[:1], "#SBATCH --ntasks-per-node=1", "srun --gpu-bind=closest python t.py"
    )


def test_names_alone_say_nothing():
    """A value that the near name cannot have, a function called like a launcher, a flag that nobody reads, a wrapper."""
    two = ("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1")
    assert "variable-misspelt" not in of_script("export NCCL_TIMEOUT=3600")
    assert "variable-misspelt" in of_script("export NCCL_IB_TIMEOUTS=22")
    assert "launched-on-one-node" not in of_script(
        *two, "torchrun-launcher() { srun torchrun t.py; }", "torchrun-launcher x"
    )
    assert "launched-on-one-node" in of_script(*two, "torchrun --nnodes=2 t.py")
    frozen = 'srun bash -c "torchrun --node-rank=$SLURM_NODEID --rdzv_backend={} t.py"'
    assert "rank-frozen" not in of_script(*two, frozen.format("c10d"))
    assert "rank-frozen" in of_script(*two, frozen.format("static"))
    assert "openib-excluded" not in of_script("export OMPI_MCA_btl='self,vader,openib'")
    assert "fabric-unset" not in of_script(*two, "srun --export=ALL,A=/opt/cray/libfabric ./wrapper.sh python t.py")


def test_values_that_no_library_knows():
    for line in ("FI_LOG_LEVEL=1", "FI_PROVIDER=eth", "NCCL_DEBUG=DEBUG"):
        assert of_script(f"export {line}") == {"value-unknown"}
    for line in (
        "FI_PROVIDER='verbs;ofi_rxm'",
        "FI_PROVIDER=^shm",
        "NCCL_DEBUG=warn",
        "FI_PROVIDER=$X",
        "NCCL_IB_TIMEOUT=22",
    ):
        assert of_script(f"export {line}") == set(), line


def test_a_name_that_is_set_beside_one_that_is_read():
    assert "never-set" in of_script("export STEPS=5", "python t.py --n=$STEP")
    for line in (
        "python t.py --n=${STEP:-1}",
        "python t.py --n=$STEP $STEPS",
        "STEP=1; python t.py $STEP",
        "read STEP; echo $STEP",
    ):
        assert "never-set" not in of_script("export STEPS=5", line), line


def test_infiniband_off_beside_another_network():
    off = ("#SBATCH --nodes=2", "export NCCL_IB_DISABLE=1", "srun ./train.sh")
    assert "rdma-off" in of_script(*off) and "rdma-off" not in of_script("export FI_PROVIDER=efa", *off[::-1])


def test_a_variable_that_lacks_a_part_of_its_name():
    assert "variable-misspelt" in of_script("export NCCL_IFNAME=ib0", "srun ./train.sh")


@pytest.mark.parametrize(
    ("text", "code", "found"),
    [
        ("#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\nsrun torchrun --nnodes 2 --nproc-per-node 2 t.py", "gpus-unused", True),
        ("#SBATCH --nodes=2\n#SBATCH --gres=gpu:4\nsrun accelerate launch --num_processes 8 t.py", "gpus-unused", False),
        ("#SBATCH --gres=gpu:4\ntorchrun --nproc-per-node 2 a.py &\ntorchrun --nproc-per-node 2 b.py", "gpus-unused", False),
        ("#SBATCH --time=30:00\nsrun x", "time-in-minutes", False),
        ("#SBATCH --time=48:00\nsrun x", "time-in-minutes", True),
        ("#SBATCH -n 1\nsource ~/.bashrc\nconda activate x", "conda-without-hook", False),
        ('#SBATCH -n 1\neval "$(conda shell.bash hook)"\nconda activate x', "conda-without-hook", False),
        ("#SBATCH -n 1\nnvidia-smi -l 5 > gpu.log &\nsrun python t.py\nwait", "wait-returns-zero", False),
        ("#SBATCH -n 1\nsrun python t.py &\nwait $!", "wait-returns-zero", False),
        ("#SBATCH -n 1\nfor i in 1 2; do\nsrun python t.py &\ndone\nwait", "wait-returns-zero", True),
        ('#SBATCH -n 1\nsbatch "$0"', "submits-itself", True),
        ('#SBATCH -n 1\necho "usage: sbatch $0 CONFIG"', "submits-itself", False),
        ("#SBATCH -n 1\ncd ${BASH_SOURCE[0]%/*}", "beside-script", True),
        ('#SBATCH -n 1\nsource "${SLURM_SUBMIT_DIR:-$(dirname $0)}/env.sh"', "beside-script", False),
        ('#SBATCH -n 1\nif [ -z "$SLURM_JOB_ID" ]; then D=$(dirname "$0"); fi\nsrun x', "beside-script", False),
        ("#SBATCH -n 1\nawk '{print $0}' hosts\nsrun x", "beside-script", False),
        ("#SBATCH -n 1\nsbatch $01.sh", "submits-itself", False),
        ('#SBATCH -n 1\nif [ -z "$SLURM_JOB_ID" ]; then\n  sbatch "$0"\n  exit\nfi\nsrun x', "submits-itself", False),
        ('#SBATCH -n 1\n[[ -z "${SLURM_JOB_ID:-}" ]] && exec sbatch "$0" "$@"\nsrun x', "submits-itself", False),
        ('#SBATCH -n 1\nif [ -n "$SLURM_JOB_ID" ]; then\n  sbatch "$0"\nfi\nsrun x', "submits-itself", True),
        ('#SBATCH -n 1\nif [ ! -f done ]; then sbatch "$0"; fi\nsrun x', "submits-itself", True),
        ("#SBATCH -N 2\nexport NCCL_SOCKET_IFNAME=lo0,eth0\nsrun ./x.sh", "socket-on-loopback", False),
        ("#SBATCH -N 1\nexport NCCL_SOCKET_IFNAME=lo\nsrun ./x.sh", "socket-on-loopback", False),
        ("#SBATCH -N 2\nsrun bash -c 'GLOO_SOCKET_IFNAME=lo ./x.sh'", "socket-on-loopback", True),
        ("#SBATCH -G 4\n#SBATCH --mem=500000\nsrun x", "memory-in-megabytes", False),
        ("#SBATCH -G 4\n#SBATCH --mem=0\nsrun x", "memory-in-megabytes", False),
        ("#SBATCH -G 4\n#SBATCH --mem=500\nsrun x", "memory-in-megabytes", True),
        ("#SBATCH -n 1\n#SBATCH --mem=500\nsrun x", "memory-in-megabytes", False),
    ],
)  # fmt: skip
def test_near_misses(text, code, found):
    assert (code in [each.code for each in lint(f"#!/bin/bash\n{text}\n", "job.sbatch").findings]) == found


def test_the_reason_against_the_old_launcher_holds_with_use_env():
    (found,) = lint("python -m torch.distributed.launch --use_env train.py", "x.sh").findings
    assert "without --use-env" in found.cause


def test_a_program_averages_its_gradients_wherever_that_stands():
    """An import alone does nothing; what a module beside it does counts, and one that cannot be read may do anything."""
    text = RULES["nothing-averaged"].bad
    code = "nothing-averaged"
    unused = text.replace("import torch", "from torch.nn.parallel import DistributedDataParallel\nimport torch", 1)
    assert code in codes(text, "t.py") and code in codes(unused, "t.py")
    renamed = unused.replace("Parallel\n", "Parallel as D\n").replace("optimizer.zero_grad()", "model = D(model)")
    assert not {code, "undefined-name"} & set(codes(renamed, "t.py"))
    own = text.replace("import torch", "from helpers.wrap import prepare\nimport torch", 1)
    files = {"helpers/wrap.py": "def prepare(model): return DistributedDataParallel(model)"}

    def told(files):
        return code in [finding.code for finding in lint(own, "t.py", lambda path: files.get(path, "")).findings]

    assert not told(files) and not told({}) and told({"helpers/wrap.py": "def prepare(model): return model"})
    for word in (
        "dist.all_reduce(grad)",
        "engine = deepspeed.initialize(model)[0]",
        "PostLocalSGDOptimizer.average(model)",
    ):
        assert code not in codes(text.replace("optimizer.zero_grad()", word), "t.py"), word


def test_an_interpreter_that_is_not_the_first_line():
    job = "#SBATCH -N 2\nsrun ./train.sh\n"
    for before in ("\n", "# my job\n", " "):
        (found,) = lint(f"{before}#!/bin/bash\n{job}", "job.sbatch").findings
        assert found.code == "interpreter-not-first" and found.severity == "error"
    assert not lint(f"#!/bin/bash\n#! /usr/bin/env bash\n{job}", "job.sbatch").findings


@pytest.mark.parametrize(
    ("program", "line", "severity"),
    [
        ("rank = os.environ['RANK']", "srun python train.py", "warning"),
        ("dist.init_process_group('nccl')", "export MASTER_ADDR=$H\nsrun -n 8 python -u train.py", "warning"),
        ("import setup\nrank = os.environ['RANK']", "srun python train.py", "warning"),
        ("rank = os.environ['RANK']", "srun bash -c 'RANK=$SLURM_PROCID python train.py'", None),
        ("rank = os.environ['RANK']", "srun -n 1 -N 1 python train.py", None),
        ("rank = os.environ['RANK']", "srun torchrun train.py", None),
        ("dist.init_process_group('nccl', rank=int(os.environ['SLURM_PROCID']))", "srun python train.py", None),
        ("dist.init_process_group('nccl', rank=me, world_size=n)", "srun python train.py", None),
        ("from mpi4py import MPI\ndist.init_process_group('nccl')", "srun python train.py", None),
        ("import lightning\nos.environ['LOCAL_RANK']", "srun python train.py", None),
        ("print(1)", "srun python train.py", None),
        ("", "srun python train.py", "info"),
        ("", "export MASTER_ADDR=$H\nsrun python train.py", "info"),
        ("", "srun python download.py", None),
    ],
)
def test_tasks_that_nobody_tells_their_ranks(program, line, severity):
    head = "#!/bin/bash\n#SBATCH -N 2\n#SBATCH --gpus-per-node=4\n#SBATCH --ntasks-per-node=4\n"
    found = lint(f"{head}{line}\n", "job.sbatch", lambda path: program if path == "train.py" else "").findings
    assert [each.severity for each in found if each.code == "ranks-unset"] == ([severity] if severity else [])


def test_ranks_that_a_module_beside_the_program_sets():
    files = {
        "train.py": "import setup\nrank = os.environ['RANK']",
        "setup.py": "os.environ['RANK'] = os.environ['SLURM_PROCID']",
    }
    text = "#!/bin/bash\n#SBATCH -N 2\nsrun python train.py\n"
    assert "ranks-unset" not in [
        each.code for each in lint(text, "j.sbatch", lambda path: files.get(path, "")).findings
    ]


def test_a_fix_names_what_the_script_has_and_guesses_nothing():
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\n#SBATCH --mem=1000\n"
    line = "srun --ntasks-per-node=4 --gpu-bind=closest accelerate launch --num_processes 8 t.py\n"
    found = {each.code: each for each in lint(head + line, "x.sbatch").findings}
    assert "1000G" not in found["memory-in-megabytes"].fix and "1000 MB" in found["memory-in-megabytes"].title
    assert found["gpus-per-task"].fix.startswith("--gpu-bind=none")
    per_task = found["launcher-per-task"]
    assert per_task.cause.startswith("accelerate launch starts") and "torchrun" not in per_task.fix

"""Scripts in the styles of several centres, labelled by hand: what reaches each rank, and what must be said."""

from pathlib import Path

import pytest

from drumbeat.convert.convert import convert
from drumbeat.convert.draft import job_file
from drumbeat.jobfile.job import job_from_text

STYLES = Path(__file__).parent / "styles"
MAP = ("49", "57", "17", "25", "1", "9", "33", "41")
# name -> nodes, ranks per node, GPUs that a rank sees, the end of its argv, keys of the job, what must be in the notes
LABELS = {
    "01_lumi_select_gpu": (2, 8, "own", "python train.py --epochs 3",
        {"cpu_bind": MAP, "env": {"OMP_NUM_THREADS": "6", "MPICH_GPU_SUPPORT_ENABLED": "1"}}, []),
    "02_lumi_container": (2, 8, "all", "python vit.py --batch 32",
        {"setup": "set +e  # as in the script\n$WITH_CONDA", "cpus": 56, "memory": "480G"}, []),
    "03_perlmutter_shifter": (4, 4, "all", "python train.py --config=bert.yaml\n    ",
        {"submit_options": ("--image=docker:nersc/pytorch:24.06.01", "--module=gpu,nccl-plugin")}, []),
    "04_juwels": (4, 4, "all", "python -u -m mypkg.train --lr 1e-3", {"cpu_bind": ("none",)}, []),
    "05_pyxis_array": (1, 8, "all", "exec python train.py --lr $${LR} --wd $${WD}",
        {"array": "1-8%2", "setup": "cd /workspace", "binds": ("$PWD:/workspace", "/data:/data:ro")}, []),
    "06_ray": (2, 4, "all", "python -u tune.py --workers 8", {"launcher": "once"}, []),
    "07_hetjob": (2, 4, "all", "exec python train.py --server $${SLURM_JOB_NODELIST_HET_GROUP_0}", {"cpus": 4},
        ["#SBATCH --cpus-per-task=16", "python server.py", "parts of the job"]),
    "08_packed_steps": (1, 1, "all", "python train.py --seed 1", {"gpus": 1}, ["--seed 2", "--seed 3", "--seed 4"]),
    "09_requeue_forward": (2, 4, "own", "python train.py --resume auto",
        {"stop_signal": "USR1", "stop_grace": 180, "env": {"WANDB_RESUME": "allow"}},
        ["scontrol requeue"]),
    "10_chain_deepspeed": (2, 4, "all", "exec deepspeed --no_local_rank train.py --deepspeed ds.json --run $${RUN}",
        {"setup": "cd /proj/code", "submit_options": ("--gres=gpu:a100:4",), "env": {"NCCL_DEBUG": "WARN"}},
        ["sbatch --export=ALL"]),
    "11_mpirun": (2, 4, "all", "python train.py --data /data/x",
        {"launcher": "tasks", "env": {"NCCL_DEBUG": "INFO", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib"}}, []),
}  # fmt: skip
# Those whose meaning no job file can hold: what differs is counted.
DIFFER = {"07_hetjob": 2, "08_packed_steps": 3, "11_mpirun": 1}


@pytest.mark.parametrize("name", sorted(LABELS))
def test_what_reaches_a_rank(name):
    nodes, ranks, sees, argv, keys, said = LABELS[name]
    draft = convert((STYLES / f"{name}.sh").read_text())
    made = job_from_text(job_file(draft, name))
    assert (made.nodes, made.ranks_per_node or made.gpus, made.visibility) == (nodes, ranks, sees)
    assert " ".join(made.command).endswith(argv)
    assert {key: getattr(made, key) for key in keys} == keys
    assert len(draft.differences) == DIFFER.get(name, 0)
    notes = "\n".join(
        [note.text for note in draft.to_check] + [f"{each.what} {each.script}" for each in draft.differences]
    )
    assert all(words in notes for words in said), notes
    assert bool(draft.to_check) == bool(said), draft.to_check

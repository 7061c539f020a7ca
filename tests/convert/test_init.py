"""`drumbeat init` in folders as people have them, and the line that a first run says of its script."""

import pytest

from drumbeat.convert.folder import job_of
from drumbeat.jobfile.job import job_from_text
from tests.conftest import ROOT

LOOP = "import torch\nfor x in data:\n    loss = model(x)\n    loss.backward()\n"
DDP = "import torch.distributed as dist\ndist.init_process_group()\nimport argparse\n" + LOOP
FOLDERS = {
    "one process": ({"train.py": LOOP, "model.py": "class Model: pass\n"}, "command: python train.py", "ranks-per-node: 1"),
    "ddp beside tools": ({"main.py": DDP, "plot.py": "print(1)\n", "test_x.py": LOOP}, "python main.py", "torch.distributed"),
    "accelerate": ({"run.py": "from accelerate import Accelerator\na = Accelerator()\n" + LOOP}, "python run.py", "accelerate"),
    "a launcher": ({"go.sh": "torchrun --nproc-per-node 2 train.py\n", "train.py": DDP}, "bash go.sh", "torchrun train.py"),
    "below": ({"src/train.py": DDP, "README.md": "x"}, "command: python src/train.py", "name: train"),
    "venv": ({"train.py": DDP, ".venv/bin/activate": "", ".venv/pyvenv.cfg": ""}, "setup: source .venv/bin/activate", "train"),
    "uv": ({"train.py": DDP, "uv.lock": ""}, "command: uv run python train.py", "train"),
    "conda": ({"train.py": DDP, "environment.yml": "name: bert\n"}, "conda activate bert", "train"),
    "needs": ({"train.py": DDP + "p.add_argument('--data', required=True)\n"}, "requires --data", "train"),
}  # fmt: skip


def fill(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_becomes_a_job_file(name, drumbeat):
    files, *words = FOLDERS[name]
    fill(drumbeat.folder, files)
    done = drumbeat.here("init")
    assert done.returncode == 0, done.stderr
    text = (drumbeat.folder / "job.yaml").read_text()
    assert text == done.stdout and all(word in text for word in words), text
    assert job_from_text(text).command and "next: drumbeat plan job.yaml" in done.stderr
    again = drumbeat.here("init")
    assert again.returncode == 2 and "job.yaml is there already" in again.stderr
    assert drumbeat.here("init", "--print").stdout == text


def test_a_batch_script_is_converted(drumbeat):
    fill(drumbeat.folder, {"run.sbatch": (ROOT / "examples/run.sbatch").read_text(), "train.py": DDP})
    made = drumbeat.here("init", "--print").stdout
    assert made == drumbeat.here("convert", "run.sbatch").stdout


def test_a_job_for_a_scheduler_is_submitted_on_the_cluster(drumbeat):
    head = "#!/bin/bash\n#SBATCH --account=a1\n#SBATCH -N 900\n#SBATCH --ntasks-per-node=8\n#SBATCH -t 60\n"
    fill(drumbeat.folder, {"run.sbatch": head + "srun python train.py\n"})
    done = drumbeat.here("init")
    assert "drumbeat plan --site NAME job.yaml" in done.stderr and "drumbeat submit job.yaml" in done.stderr
    assert "drumbeat run" not in done.stderr
    refused = drumbeat.here("plan", "--site", "localhost", "job.yaml")
    assert refused.returncode == 2 and "drumbeat submit on the cluster" in refused.stderr, refused.stderr
    assert "written for a scheduler (account)" in refused.stderr and "--oversubscribe" not in refused.stderr
    assert drumbeat.here("plan", "--site", "slurm", "job.yaml").returncode == 0


@pytest.mark.parametrize(
    "files, words",
    [
        ({}, "nothing here trains"),
        ({"plot.py": "print(1)\n"}, "nothing here trains"),
        (
            {"plot.py": "", "my book.ipynb": '["loss.backward()"]'},
            "my book.ipynb trains, but ranks cannot be started from",
        ),
        ({"my book.ipynb": '["loss.backward()"]'}, "jupyter nbconvert --to script 'my book.ipynb'"),
        ({"plots.ipynb": '["plot()"]'}, "nothing here trains"),
        ({"a.py": LOOP, "b.py": LOOP}, "2 files could be the job: a.py, b.py"),
        ({"a.sbatch": "#SBATCH -N1\nls\n"}, "a.sbatch: no line starts a program"),
    ],
)
def test_it_says_why_not(files, words, drumbeat):
    fill(drumbeat.folder, files)
    done = drumbeat.here("init")
    assert done.returncode == 1 and words in done.stderr and not (drumbeat.folder / "job.yaml").exists()


def test_a_script_that_is_named(drumbeat):
    fill(drumbeat.folder, {"a.py": LOOP, "b.py": DDP})
    assert "command: python b.py" in drumbeat.here("init", "b.py", "--print").stdout
    assert drumbeat.here("init", "c.py").returncode == 2
    fill(drumbeat.folder, {"d.ipynb": "{}"})
    assert "nbconvert --to script d.ipynb" in drumbeat.here("init", "d.ipynb").stderr


def test_copies_are_told_at_every_run(drumbeat):
    fill(
        drumbeat.folder,
        {"train.py": "if 0:\n    import torch\n    loss.backward()\nfor i in range(2):\n    print(i)\n"},
    )
    words = ["run", "--site", "localhost", "--ranks-per-node", "2", "--", "python3", "train.py"]
    first = drumbeat(*words).stderr
    assert [line for line in first.splitlines() if line.startswith("script")] == [
        "script     not distributed: each rank trains a copy of its own (docs page howto/one-gpu-to-many)"
    ]
    told = drumbeat(*words).stderr.splitlines()
    assert [line.split()[0] for line in told if "not distributed: each rank trains" in line] == ["script", "warning"]
    assert told[-1].startswith("warning"), "a good end says it again"


@pytest.mark.parametrize(
    "name", ["a\non-end: touch PWN\n#.py", "my train.py", "$HOME.py", '"q".py', "t #1.py", "a: b.py"]
)
def test_a_name_that_a_command_line_would_change_is_refused(name, drumbeat):
    fill(drumbeat.folder, {name: DDP})
    done = drumbeat.here("init")
    assert done.returncode == 1 and "characters that mean something in a command line" in done.stderr, done.stderr
    assert not (drumbeat.folder / "job.yaml").exists() and "Traceback" not in done.stderr


def test_a_name_that_looks_like_an_option(drumbeat):
    fill(drumbeat.folder, {"-x.py": DDP})
    assert "command: python ./-x.py" in drumbeat.here("init").stdout


def test_an_empty_script_is_no_job(drumbeat):
    fill(drumbeat.folder, {"train.py": ""})
    done = drumbeat.here("init", "train.py")
    assert done.returncode == 1 and "train.py is empty, or cannot be read as text" in done.stderr, done.stderr


def test_a_folder_of_very_many_files_needs_the_script(drumbeat):
    fill(drumbeat.folder, {"train.py": DDP, **{f"part-{number}": "" for number in range(501)}})
    done = drumbeat.here("init")
    assert done.returncode == 1 and "name the script: drumbeat init SCRIPT" in done.stderr
    assert "command: python train.py" in drumbeat.here("init", "train.py", "--print").stdout


def test_a_trainer_of_transformers_is_told_what_it_needs_on_cpus():
    text = "from transformers import Trainer\nTrainer(model=model).train()\n"
    assert '# env: {ACCELERATE_USE_CPU: "true"}  # without GPUs' in job_of("tune.py", ["tune.py"], lambda _: text)

"""The command itself, as a person starts it."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import Drumbeat

SOURCE = os.path.join(os.path.dirname(__file__), "..", "..", "src")


def drumbeat(*arguments, text=None, folder=None):
    """Call it as a process where it reads standard input, and else in this one: a start costs 0.2 s of CPU time."""
    if text is None:
        return Drumbeat(folder).here("lint", *arguments)
    environment = {**os.environ, "PYTHONPATH": os.path.abspath(SOURCE)}
    command = [sys.executable, "-m", "drumbeat", "lint", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, env=environment, cwd=folder, timeout=150)


def test_standard_input_and_exit_codes():
    done = drumbeat("-", text="pkill -f x\n")
    assert done.returncode == 1
    assert "standard input:1: warning: processes are killed by a pattern  [kill-by-pattern]" in done.stdout
    assert "fix  keep the process id" in done.stdout and "1 warning" in done.stdout
    assert drumbeat("-", text="ls\n").returncode == 0
    assert drumbeat("-", text="export NCCL_DEBUG=INFO\n").returncode == 0  # a note is no failure


def test_json(tmp_path):
    (tmp_path / "a.sh").write_text("ls\npkill -f x\n")
    (tmp_path / "b.sh").write_text("ls\n")
    done = drumbeat("--json", "a.sh", "b.sh", folder=tmp_path)
    first, second = json.loads(done.stdout)["files"]
    assert first["findings"][0]["evidence"] == [{"text": "pkill -f x", "file": "a.sh", "line": 2}]
    assert first["findings"][0]["source"] == "", "where it is documented; most rules are our own"
    assert second == {"file": "b.sh", "looked_at": "1 command", "findings": [], "fixed": []}


def test_fix_keeps_the_old_file_and_its_mode(tmp_path):
    script = tmp_path / "a.sh"
    script.write_text("#!/bin/bash\nsbatch –N 2 b.sh\npkill -f x\n")
    script.chmod(0o750)
    done = drumbeat("--fix", "a.sh", folder=tmp_path)
    assert done.returncode == 1
    assert "-sbatch –N 2 b.sh" in done.stdout and "+sbatch -N 2 b.sh" in done.stdout
    assert script.read_text() == "#!/bin/bash\nsbatch -N 2 b.sh\npkill -f x\n"
    assert (tmp_path / "a.sh.orig").read_text() == "#!/bin/bash\nsbatch –N 2 b.sh\npkill -f x\n"
    assert script.stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.sh", "a.sh.orig"]
    assert "fixed" not in drumbeat("--fix", "a.sh", folder=tmp_path).stdout  # nothing left to fix


def test_what_fix_has_fixed_is_no_reason_to_fail(tmp_path):
    (tmp_path / "a.sh").write_text("#!/bin/bash\nsbatch –N 2 b.sh\n")
    assert drumbeat("a.sh", folder=tmp_path).returncode == 1
    assert drumbeat("--fix", "a.sh", folder=tmp_path).returncode == 0


def test_fix_never_covers_an_older_backup(tmp_path):
    (tmp_path / "a.sh").write_text("sbatch –N 2 b.sh\n")
    (tmp_path / "a.sh.orig").write_text("precious")
    done = drumbeat("--fix", "a.sh", folder=tmp_path)
    assert done.returncode == 2 and "already there" in done.stderr
    assert (tmp_path / "a.sh.orig").read_text() == "precious"
    assert (tmp_path / "a.sh").read_text() == "sbatch –N 2 b.sh\n"


@pytest.mark.parametrize(
    "content,says", [(None, "No such file"), (b"\xff\xfe\n", "line 1 is not UTF-8"), (b"a\0b", "is not text")]
)
def test_bad_input(tmp_path, content, says):
    if content is not None:
        (tmp_path / "a.sh").write_bytes(content)
    done = drumbeat("a.sh", folder=tmp_path)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_fix_of_standard_input_is_refused():
    done = drumbeat("--fix", "-", text="ls\n")
    assert done.returncode == 2 and "--fix needs a file" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("notes.txt", "hello world this is prose\nand it doesn't end\n", "nothing to check"),
        ("a.sh", "", "a.sh: is empty"),
        ("a.sh", "#!/bin/bash\n# later\n", "only comments"),
        ("a.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\n", "nothing to check"),
        (
            "a.yaml",
            "summary: x\nbackend: slurm\n",
            "this is a site profile; use drumbeat site check a.yaml",
        ),
    ],
)
def test_what_lint_cannot_read_is_said(drumbeat, name, text, says):
    (drumbeat.folder / name).write_text(text)
    done = drumbeat.here("lint", name)
    assert done.returncode == 2 and says in done.stderr and not done.stdout
    (drumbeat.folder / "b.sh").write_text("pkill -f x\n")
    both = drumbeat.here("lint", "--json", name, "b.sh")
    unread, other = json.loads(both.stdout)["files"]
    assert both.returncode == 2 and unread["looked_at"] is None and other["findings"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run", "cd x\npython train.py --lr 1\n", "looked at: 2 commands"),
        ("run.sbatch", "#SBATCH -N 2\n#SBATCH -t 5\nmytool\n", "looked at: 1 command and 2 #SBATCH lines"),
        ("a.py", "import os\n\nprint(os.name)\n", "looked at: 2 lines of Python"),
        ("train", '"""Words."""\nimport os\n\nprint(os.name)\n', "looked at: 3 lines of Python"),
        ("a.py", "import os\nprint(\n", "looked at: 2 lines of Python, each by itself, because Python"),
        ("a.md", "# Words\n", "looked at: a page without shell or Python code"),
        ("a.md", "```bash\nls\n```\n", "looked at: 1 piece of code in a page"),
        ("job.yaml", "nodes: 2\ncommand: python train.py\n", "looked at: the keys and values of a job file"),
        ("job.txt", "nodes: 2\ncommand: python train.py\n", "looked at: the keys and values of a job file"),
    ],
)
def test_nothing_found_says_in_what(drumbeat, name, text, says):
    (drumbeat.folder / name).write_text(text)
    done = drumbeat.here("lint", name)
    assert done.returncode == 0 and done.stdout.startswith(f"{name}: nothing found ({says}"), done.stdout + done.stderr


def test_a_job_file_is_checked_by_its_own_reader(drumbeat):
    (drumbeat.folder / "a.yaml").write_text("nodez: 2\nranks-per-nod: 2\ncommand: python train.py\n")
    done = drumbeat.here("lint", "a.yaml")
    assert done.returncode == 1 and "a.yaml: 2 errors" in done.stdout
    assert (
        "a.yaml:1: error: unknown key 'nodez' in the job; did you mean 'nodes'?  [job-file]\n    nodez: 2\n"
        in done.stdout
    )
    (drumbeat.folder / "a.yaml").write_text("nodez: 2\ncommand: [python, train.py\n")
    done = drumbeat.here("lint", "a.yaml")
    assert done.returncode == 1 and "not YAML" in done.stdout


def test_shell_in_a_job_file_is_read_as_in_a_script(tmp_path):
    block = "command:\n- bash\n- -c\n- |-\n  echo $$HOME\n  python train.py --a $$B | tee log\n"
    setup = "setup: python a.py | tee log\ncommand: x\n"
    for job, line in ((block, 6), ("command: bash -c 'python train.py | tee log'\n", 1), (setup, 1)):
        (tmp_path / "job.yaml").write_text(job)
        done = drumbeat("job.yaml", folder=tmp_path)
        assert f"job.yaml:{line}: error: the exit code of python is lost" in done.stdout, done.stdout
    (tmp_path / "job.yaml").write_text("command: torchrun --nnodes=2 train.py\nnodes: 2\n")
    assert drumbeat("job.yaml", folder=tmp_path).returncode == 0, "drumbeat fills in the rendezvous"


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (
            "ranks-per-node: 8\ngpus: 4\ncommand: python train.py\n",
            "job.yaml:2: error: 4 of 8 ranks have no GPU of their own",
        ),
        (
            "gpus: 4\ncommand: torchrun --nproc-per-node=8 train.py\n",
            "job.yaml:1: error: 4 of 8 ranks have no GPU of their own",
        ),
        ("ranks-per-node: 8\ngpus: 4\nranks-per-gpu: 2\ncommand: python train.py\n", "nothing found"),
        ("ranks-per-node: 8\ncommand: python train.py\n", "nothing found"),
        ("ranks-per-node: 8\ngpus: 0\ncommand: python train.py\n", "nothing found"),
    ],
)
def test_more_ranks_than_gpus_in_a_job_file(tmp_path, job, says):
    (tmp_path / "job.yaml").write_text(job)
    assert says in drumbeat("job.yaml", folder=tmp_path).stdout


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("srun torchrun --nproc_per_node=8 train.py", True),
        ("srun bash -c 'torchrun --nproc_per_node=8 train.py'", True),
        ("N=8\nsrun apptainer exec --nv x.sif torchrun --nproc_per_node=$N train.py", True),
        ("srun accelerate launch --num_processes 16 --num_machines 2 train.py", True),
        ("srun accelerate launch --num_processes 8 train.py", False),  # on both nodes together
        ("srun torchrun --nproc_per_node=4 train.py", False),
        ("N=8\nN=4\nsrun torchrun --nproc_per_node=$N train.py", False),
        ("nvidia-cuda-mps-control -d\nsrun torchrun --nproc_per_node=8 train.py", False),
        ("echo torchrun --nproc_per_node=8 train.py", False),
    ],
)
def test_more_ranks_of_a_launcher_than_gpus(tmp_path, lines, found):
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\n"
    (tmp_path / "run.sbatch").write_text(head + lines + "\n")
    assert ("error: 8 ranks on a node share 4 GPUs" in drumbeat("run.sbatch", folder=tmp_path).stdout) is found


def test_the_variables_of_a_job_file_are_linted_and_compared_with_what_it_expects(tmp_path):
    job = tmp_path / "job.yaml"
    text = "command: python train.py\nnodes: 2\nenv:\n  A_TOKEN: pass\n  NCCL_IB_DISABLE: '1'\n"
    job.write_text(text)
    done = drumbeat("job.yaml", folder=tmp_path)
    assert done.returncode == 0 and "job.yaml:5: info: NCCL_IB_DISABLE=1 on 2 nodes" in done.stdout, done.stdout
    job.write_text(text + "expect: {transport: ib}\n")
    done = drumbeat("job.yaml", folder=tmp_path)
    assert (
        done.returncode == 1 and "job.yaml:5: warning: NCCL_IB_DISABLE=1 turns off what is expected (ib)" in done.stdout
    )

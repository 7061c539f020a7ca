"""Every line of a script is carried over, or named with its reason."""

import re
from pathlib import Path

import pytest

from drumbeat.commands.syntax import parse
from drumbeat.convert.convert import convert
from drumbeat.convert.draft import job_file
from tests.convert.test_convert import script

SCRIPTS = sorted((Path(__file__).parent / "styles").glob("*.sh")) + sorted(
    (Path(__file__).parents[1] / "lint" / "good").glob("*.sbatch")
)
_BETWEEN = re.compile(
    r"\s*(?:#.*|\S*\(\)\s*\{|[{}]|(?:(?:for|while|until|if|elif)\b.*)?(?:then|do)|else|fi|done|esac|;;|\S+\)|EOF)?\s*"
)


def statements(text):
    """Return the lines that begin a statement, by a reading of their own that knows only continued lines and heredocs."""
    found, inside, before = [], "", ""
    for number, line in enumerate(text.split("\n"), 1):
        if inside:
            inside = "" if line.strip() == inside else inside
            continue
        opened = re.search(r"<<-?\s*['\"]?(\w+)", line)
        quotes = len(re.findall(r'(?<!\\)"', before)) % 2
        if not _BETWEEN.fullmatch(line) and not before.endswith("\\") and not quotes:
            found.append(number)
        before = f"{before}\n{line}" if quotes or before.endswith("\\") else line
        inside = opened[1] if opened else ""
    return found


def named(draft):
    notes = [*draft.left_out, *draft.to_check, *draft.to_export]
    return {note.line for note in notes} | {line for lines in draft.read.values() for line in lines}


def assert_complete(text):
    draft = convert(text)
    lines = draft.carried | set(draft.lines.values()) | named(draft)
    if "\n" in draft.keys["command"][-1]:  # all from there on
        lines |= set(range(draft.lines["command"], text.count("\n") + 2))
    for node in parse(text):  # a note on a loop stands for all of it
        if node.kind in ("for", "while", "if", "case") and node.line in named(draft):
            lines |= set(range(node.line, node.line + text[node.start : node.end].count("\n") + 1))
    missing = [line for line in statements(text) if line not in lines]
    assert not missing, f"{missing} of\n{text}\n{job_file(draft, 'x')}"
    return draft


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_line_vanishes(path):
    assert_complete(path.read_text())


def test_reasons_of_lines_that_are_not_copied():
    draft = assert_complete(
        script(
            "set -e", "echo start", "HOSTFILE=hosts.txt", "rm -f $HOSTFILE",
            'for h in $(scontrol show hostnames); do echo "$h slots=4" >> $HOSTFILE; done',
            "nodes=($(scontrol show hostnames))", "head=${nodes[0]}", "ip=$(srun -N1 -n1 -w $head hostname -i)", "echo $ip",
            "LR=1e-3", "NEVER=1", "if [ 1 = 2 ]; then", "  python other.py", "fi", "unused() {", "  rm -rf x", "}",
            "srun torchrun --nnodes 2 --nproc-per-node 4 --rdzv_id $RANDOM --rdzv_endpoint $ip:1 train.py --lr $LR",
            sbatch=("--nodes=2", "--gpus-per-node=4"),
        )
    )  # fmt: skip
    first = 4
    assert draft.on_start[1].startswith("rm") and draft.on_start[2].startswith("for h in")
    reasons = {line - first: why for why, lines in draft.read.items() for line in lines}
    assert reasons[1] == reasons[8] == "only prints or waits" and "nodes" in reasons[5] and "nodes" in reasons[7]
    assert reasons[9] != reasons[10] == "nothing that is carried over reads it"
    assert reasons[12] == reasons[15] == "not reached"
    assert any("--rdzv_id ${RANDOM}" in note.text for note in draft.left_out)
    assert "# Read, and not copied:" in job_file(draft, "x")


def test_statements_before_set_e_run_without_it():
    draft = convert(script("source ~/.bashrc", "set -e", "mkdir out", "python prepare.py", "srun python train.py"))
    assert draft.on_start == ["set +e  # as in the script", "source ~/.bashrc", "set -e  # as in the script",
                              "mkdir out", "python prepare.py"]  # fmt: skip


def test_each_thing_is_written_once():
    draft = convert(script("cd $SLURM_SUBMIT_DIR", "export A=1", "mkdir -p out", "cd .", "srun python train.py"))
    assert draft.on_start[1:] == ["mkdir -p out"] and draft.env == {"A": "1"} and not draft.setup


def test_each_option_is_carried_over_or_named():
    """sbatch adds up events of mail and takes the last of everything else; short names are names too."""
    options = (
        "-L scratch",
        "--mail-type=begin",
        "-C gpu",
        "--mail-type=end",
        "-C gpu80",
        "-b now+1hour",
        "--time=1:00:00",
    )
    draft = convert(script("srun python train.py", sbatch=options))
    assert draft.options == ["--licenses=scratch", "--begin=now+1hour", "--mail-type=BEGIN,END"]
    assert [note.text for note in draft.left_out] == ["#SBATCH -C gpu"] and draft.keys["constraint"] == "gpu80"
    draft = convert(script("srun python train.py", sbatch=("--mail-user=me@x.org", "--mail-type=END,FAIL")))
    assert draft.keys["mail"] == "me@x.org" and not draft.options


def test_what_a_substitution_starts_is_not_lost():
    lines = ('echo "next: $(sbatch --dependency=singleton $0)"', "TAG=$(./register.sh)", 'echo "on $(hostname)"')
    draft = convert(script(*lines, "srun python train.py"))
    assert draft.keys["array"] == "1-20%1" and "without end" in draft.advice[0].why and not draft.to_check
    for line in ("sbatch --dependency=singleton $0 more", "[ -f more ] && sbatch -d singleton $0", "sbatch $0"):
        once = convert(script(line, "srun python train.py"))
        assert "submits itself" in once.to_check[0].why and "array" not in once.keys
    assert "TAG=$(./register.sh)" in draft.on_start and not any("hostname" in line for line in draft.on_start)
    lines = (
        "srun hostname > nodes",
        "readarray -t all < nodes",
        'for n in "${all[@]}"; do',
        '  c="ssh $n true"',
        "  $c",
        "done",
    )
    assert any("  $c" in each for each in convert(script(*lines, "srun python train.py")).on_start)
    draft = convert(script("srun python train.py || scontrol requeue $SLURM_JOB_ID"))
    assert "scontrol requeue" in str(draft.keys["on-end"])


def test_variables_of_the_tasks_are_those_of_the_script():
    line = 'G=$(echo "$SLURM_TRES_PER_TASK" | grep -o "[0-9]*$")'
    sbatch = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-task=4", "--cpus-per-task=32")
    draft = convert(script(line, "srun python train.py $G $SLURM_NPROCS", sbatch=sbatch))
    assert draft.on_start[0].startswith("SLURM_TRES_PER_TASK=cpu=32,gres/gpu=4 ")

"""What the small shell reader understands: comments, strings, heredocs, substitutions, where a command runs."""

import sys

import pytest

from drumbeat.commands.script import read
from drumbeat.lint.engine import lint
from drumbeat.lint.pages import blocks


def texts(text):
    return [command.text for command in read(text).commands]


def test_comments_quotes_and_continuations():
    assert texts("a 'b # c' \\\n  \"d\" # e\nf#g") == ["a b # c d", "f#g"]


def test_pipelines_and_their_ends():
    script = read("a | b |\n c && d &\ne")
    assert [pipeline.text for pipeline in script.pipelines] == ["a | b | c", "d", "e"]
    assert [command.background for command in script.commands] == [False, False, False, True, False]


def test_substitutions_and_inner_shells_are_commands_too():
    found = {command.text: command.within for command in read("srun apptainer exec i bash -c 'x $(y)'; z=`w`").commands}
    assert found["x _"] == ("task", "container")
    assert found["y"] == ("task", "container", "substitution")
    assert found["w"] == ("substitution",)


def test_what_double_quotes_replace_runs_outside():
    """The batch shell runs scontrol here, before the container starts."""
    assert not lint('srun apptainer exec i bash -c "M=$(scontrol show hostnames | head -n1) ./a"').findings


def test_a_heredoc_is_text_unless_it_becomes_a_script():
    assert "pkill" not in str(texts("cat > note.txt <<EOF\npkill -f x\nEOF\nls"))
    assert "pkill -f x" in texts("cat > run.sh <<EOF\npkill -f x\nEOF\nls")
    assert "pkill -f x" in texts("bash <<'EOF'\npkill -f x\nEOF")


def test_assignments_and_how_they_travel():
    found = [(each.name, each.text, each.how) for each in read(
        "A=1\nexport B=2 C='3 4'\nD=5 cmd\ndocker run -e E=6 i\nexport APPTAINERENV_F=$7\nG=( a $(b) )"
    ).assignments]  # fmt: skip
    assert found == [
        ("A", "1", "plain"), ("B", "2", "export"), ("C", "3 4", "export"), ("D", "5", "prefix"),
        ("E", "6", "option"), ("F", "$7", "export"), ("G", "( a $(b) )", "plain"),
    ]  # fmt: skip


def test_sbatch_options():
    script = read("#!/bin/bash\n#SBATCH -N 2 --time=1:00 # short\n#SBATCH --gres gpu:a100:4\nls\n#SBATCH -n 3\n")
    assert [(each.name, each.value) for each in script.directives] == [
        ("nodes", "2"), ("time", "1:00"), ("gres", "gpu:a100:4"),
    ]  # fmt: skip
    assert script.late == [5]


@pytest.mark.parametrize(
    "text",
    [
        "# sbatch –N 2, pkill -f x, $(SLURM_NODEID)",
        "echo 'pkill -f x' \"docker stop all\"",
        'echo "${A:-"x y"}" ${B%%"}"} $((1 << 2))',
        'case "$1" in a|b) ls ;; *) exit 1 ;; esac',
        "x=${y:-$(hostname)}; [[ $x =~ ^a|b$ ]] && ls",
        "for i; do ls; done; for i do ls; done",
        "awk '{print $1}' < in > out 2>&1",
        "srun train.sh > >(tee log) 2> >(tee err >&2)",
        "#!/bin/sh\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n#SBATCH --cpus-per-gpu=16\nsrun ./a",
        "export WANDB_API_KEY=disabled HF_TOKEN=your_token_here HF_TOKEN_PATH=/home/me/token",
        "export A=1 HOME USER PATH",
        "cat > a.sh <<EOF\nexport NCCL_IB_HCA=$NCCL_IB_HCA\nEOF",
        "export A=$(GET_PORT)\nGET_PORT() { echo 1; }",
    ],
)
def test_no_false_alarm(text):
    assert lint(text + "\n").findings == ()


def test_blocks_of_a_page_have_its_lines():
    page = "text\n\n```bash\nls\n```\n\n~~~\n$ pwd\n/home\n~~~\n\n```yaml\na: b\n```\n\n    srun x\n\n    just prose\n"
    assert [(block.kind, block.line, block.text) for block in blocks(page, "a.md")] == [
        ("shell", 4, "ls\n\n\n\npwd\n"),
        ("shell", 16, "srun x\n\njust prose"),
    ]


def test_restructured_text():
    page = "Do\n==\n\n.. code-block:: shell\n   :linenos:\n\n   sbatch –N 2 x\n\nText –N.\n\n.. code-block:: c\n\n   pkill -f x\n"
    assert [(finding.code, finding.evidence[0].line) for finding in lint(page, "a.rst").findings] == [
        ("typographic-character", 7)
    ]


def test_a_secret_is_never_repeated():
    text = "export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345\nexport WANDB_API_KEY='0123456789abcdef0123' RANK=$SLURM_PROCID\n"
    findings = lint(text).findings
    assert {finding.code for finding in findings} >= {"secret-in-script"}
    assert "qrstuv" not in str(findings) and "456789ab" not in str(findings)


@pytest.mark.parametrize(
    "piece",
    [
        "if true; then\n",
        "if x; then ",
        "case x in\n",
        "(",
        "{ ",
        "for x in a\n",
        "f() ",
        "a && ",
        "a | ",
        "while ",
        "! ",
    ],
)
def test_what_never_ends_is_read_once(piece):
    """Twice the text takes twice the steps, however deep it is nested; counted, not timed."""

    def steps(times):
        counted = []
        sys.setprofile(lambda frame, event, arg: counted.append(1))
        try:
            assert len(read(piece * times).commands) <= times + 1
        finally:
            sys.setprofile(None)
        return len(counted)

    assert steps(1600) < 2.5 * steps(800)

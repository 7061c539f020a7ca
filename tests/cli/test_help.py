"""Short help by default, every option on request, and hints where fingers slip."""

import pytest

from drumbeat.cli import COMMANDS, parser_for


def words(capsys, name, *given):
    with pytest.raises(SystemExit) as end:
        parser_for(name)[0].parse_args(list(given))
    shown = capsys.readouterr()
    return end.value.code, shown.out + shown.err


@pytest.mark.parametrize("name", COMMANDS)
def test_short_help_fits_a_screen(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    code, text = words(capsys, name, "--help")
    assert code == 0 and len(text.splitlines()) <= 60 and max(map(len, text.splitlines())) <= 80


def test_every_option_is_one_question_away(capsys):
    short, whole = words(capsys, "run", "--help")[1], words(capsys, "run", "--help-all")[1]
    assert "--help-all" in short and "--stop-grace" not in short and len(short.splitlines()) <= 30
    assert all(option in whole for option in ("--stop-grace", "--nodes", "--container-runtime"))


def test_flags_of_torchrun_are_understood():
    args = parser_for("run")[0].parse_args(["--nnodes", "2", "--nproc_per_node=4"])
    assert (args.job_nodes, args.job_ranks_per_node) == ("2", "4")


@pytest.mark.parametrize(
    "given", [["batch", "--dry-run", "a.yaml"], ["batch", "a.yaml"], ["--dry-run", "batch", "a.yaml"]]
)
def test_a_job_file_may_come_after_the_options(given):
    args = parser_for("tune")[0].parse_args(given)
    assert args.job == "a.yaml" and args.dry_run == ("--dry-run" in given)


def test_the_command_of_tune_goes_after_its_part(capsys):
    assert "'--': drumbeat tune batch -- train.py" in words(capsys, "tune", "batch", "--dry-run", "train.py")[1]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["--node", "2"], "unknown option --node (did you mean --nodes?)"),
        (["--ranks_per_node=2"], "did you mean --ranks-per-node?"),
        (["--ranks", "2"], "did you mean --ranks-per-node?"),
        (["--doubtful", "ok"], "doubtful is a key of the job file, and not an option"),
        (["python", "train.py"], "put the command after '--': drumbeat run -- python train.py"),
        (["job.yaml", "train.py"], "put the command after '--': drumbeat run -- train.py"),
        (["a.yaml", "b.yaml"], "unexpected b.yaml: a.yaml is the job file already"),
    ],
)
def test_slips_get_the_right_words(capsys, given, hint):
    code, text = words(capsys, "run", *given)
    assert code == 2 and hint in text

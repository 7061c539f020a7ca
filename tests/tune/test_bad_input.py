"""One wrong input of each kind: one clear message, exit code 2, and nothing is started or left behind."""

import sys

import pytest

PY = sys.executable
RECIPE = (PY, "-m", "drumbeat", "train", "llama")
TWO = ("--ranks-per-node", 2)


@pytest.mark.parametrize(
    "words, says",
    [
        (("batch", "missing.yaml"), "missing.yaml"),
        (("batch", "--", PY, "t.py"), "write {batch} where the batch goes"),
        (("hooks", "--", PY, "t.py", "{batch}"), "write {hook} where the hook goes"),
        (("layout", "--", PY, "t.py", "{batch}"), "write {layout} where the layout goes"),
        (("batch", "--", PY, "t.py", "{batch}", "{hook}"), "add --with hook=VALUE"),
        (("batch", "--with", "speed=3", "--", PY, "t.py", "{batch}"), "known: batch, accumulate, hook, layout"),
        (("batch", "--with", "hook=bf16", "--", PY, "t.py", "{batch}"), "the command has no {hook}"),
        (("batch", "--", PY, "t.py", "{batch}", "{accumulate}"), "add --global-batch N"),
        (("batch", "--global-batch", 8, "--", PY, "t.py", "{batch}"), "no {accumulate} in the command"),
        (
            ("batch", *TWO, "--global-batch", 9, "--", PY, "{batch}", "{accumulate}"),
            "9 samples per step cannot be split",
        ),
        (("batch", *TWO, "--data-ranks", 3, "--", PY, "t.py", "{batch}"), "--data-ranks 3 does not divide 2 ranks"),
        (("batch", "--start", 9, "--largest", 8, "--", PY, "t.py", "{batch}"), "--start 9 is above --largest 8"),
        (("batch", "--seconds", 0, "--", PY, "t.py", "{batch}"), "--seconds 0: it must be above 0"),
        (("batch", "--rate", "([0-9]+", "--", PY, "t.py", "{batch}"), "is not a regular expression"),
        (("batch", "--rate", "[0-9]+", "--", PY, "t.py", "{batch}"), "has 0 groups"),
        (("batch", "--", *RECIPE[:-1], "finetune", "--set", "lora=16"), "add --global-batch N, or --set batch=N"),
        (("batch", "--", *RECIPE, "--set", "batch=many"), "batch=many, which is not a whole number"),
        (("batch", *TWO, "--", *RECIPE, "--layout", "tp=3", "--set", "batch=8"), "but there are 2 ranks"),
        (("batch", "--", *RECIPE, "--set", "batch={batch}"), "by its own settings"),
        (("hooks", "--hooks", ",", "--", PY, "t.py", "{hook}"), "--hooks names none"),
        (("layout", "--parameters", "many", "--", PY, "t.py", "{layout}"), "such as 300e9, 8b or 350m"),
        (("layout", "--", PY, "t.py", "{layout}", "{batch}"), "add --global-batch N, or --with batch=N"),
        (("layout", *TWO, "--global-batch", 1, "--candidates", 0, "--", PY, "{layout}"), "--candidates 0"),
        (
            ("batch", "--global-batch", 8, "--", "accelerate", "launch", "t.py", "{batch}", "{accumulate}"),
            "add --data-ranks N",
        ),
    ],
)
def test_wrong_input(drumbeat, words, says):
    done = drumbeat.here("tune", *words)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not list(drumbeat.folder.glob("runs/*"))


def test_a_program_that_is_not_there(drumbeat):
    done = drumbeat("tune", "batch", "--", "no-such-program", "{batch}")
    assert done.returncode == 2 and "command not found: no-such-program" in done.stderr
    assert "Traceback" not in done.stderr and not list(drumbeat.folder.glob("runs/*"))


def test_inside_a_task_of_a_job(drumbeat, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    done = drumbeat.here("tune", "batch", "--", PY, "t.py", "{batch}")
    assert done.returncode == 2 and "a tuning starts its trials on all nodes itself" in done.stderr


@pytest.mark.parametrize("command", ["run", "submit", "plan"])
def test_a_place_that_is_still_open_is_no_command(drumbeat, command):
    (drumbeat.folder / "job.yaml").write_text(f"command: {PY} t.py --tp {{tp}} --b {{batch}}\n")
    site = ("--site", "slurm") if command == "submit" else ()
    done = drumbeat.here(command, "job.yaml", "--nodes", 1, *site)
    assert done.returncode == 2 and "job.yaml:1" in done.stderr and "{tp} is a placeholder" in done.stderr
    assert "drumbeat tune layout" in done.stderr


def test_other_braces_and_variables_stay_the_commands_own(drumbeat, monkeypatch):
    monkeypatch.setenv("batch", "7")
    (drumbeat.folder / "job.yaml").write_text(
        f"command: {PY} -c 'import sys; print(sys.argv[1:])' ${{batch}} {{rank}} {{x}}\n"
    )
    done = drumbeat("run", "job.yaml")
    assert done.stdout == "['7', '{rank}', '{x}']\n", done.stderr


def test_the_cost_comes_first_and_may_be_all(drumbeat):
    words = ("--ranks-per-node", 2, "--global-batch", 64, "--seconds", 100, "--dry-run", "--", PY, "t.py", "{batch}")
    done = drumbeat("tune", "batch", *words, "{accumulate}")
    # 1 2 4 8 16 32 and 32 once more: 7 trials, the last twice as long
    assert done.returncode == 0 and "at most 7 trials, 1010 s; 1 node, 2 ranks" in done.stderr
    assert not list(drumbeat.folder.glob("runs/*"))

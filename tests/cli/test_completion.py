"""Completion in a real bash; zsh and fish only where they are installed."""

import shutil
import subprocess
import sys

import pytest

from drumbeat.cli import COMMANDS
from drumbeat.cli.completion import Offer, bash, fish, offers, zsh
from drumbeat.cli.train import RECIPES

MADE_UP = {
    "run": Offer("run it", {"--nodes": "How many. And more.", "--launcher": "who's that", "--trace": ""},
                 {"--nodes": [], "--launcher": ["auto", "ranks"]}, [], {}),
    "site": Offer("sites", {"--json": ""}, {}, ["list", "show"], {}),
}  # fmt: skip


def complete(script, *words):
    """What bash puts into COMPREPLY with the cursor at the end of the last word."""
    code = f'{script}\nCOMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _drumbeat; printf \'%s\\n\' "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-uc", code, "bash", *words], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    "words, offered",
    [
        (["drumbeat", ""], ["run", "site"]),
        (["drumbeat", "r"], ["run"]),
        (["drumbeat", "--"], ["--help", "--version"]),
        (["drumbeat", "run", "--"], ["--nodes", "--launcher", "--trace"]),
        (["drumbeat", "run", "--l"], ["--launcher"]),
        (["drumbeat", "run", "--launcher", ""], ["auto", "ranks"]),
        (["drumbeat", "run", "--launcher", "r"], ["ranks"]),
        (["drumbeat", "run", "--nodes", ""], []),
        (["drumbeat", "run", "j"], []),
        (["drumbeat", "run", "--", "--n"], []),
        (["drumbeat", "site", "s"], ["show"]),
        (["drumbeat", "nonsense", "--"], []),
    ],
)
def test_bash(words, offered):
    assert complete(bash(MADE_UP), *words) == offered


def test_bash_with_the_real_commands():
    done = subprocess.run(
        [sys.executable, "-m", "drumbeat", "completion", "bash"], capture_output=True, text=True, check=True
    )
    assert complete(done.stdout, "drumbeat", "") == list(COMMANDS)
    assert complete(done.stdout, "drumbeat", "completion", "") == ["bash", "zsh", "fish"]
    assert complete(done.stdout, "drumbeat", "train", "") == [*RECIPES, "export"]
    assert complete(done.stdout, "drumbeat", "nodes", "e") == ["exclude"]
    for name, offer in offers().items():
        assert complete(done.stdout, "drumbeat", name, "--") == list(offer.options)
    registered = subprocess.run(
        ["bash", "-c", f"{done.stdout}\ncomplete -p drumbeat"], capture_output=True, text=True, check=True
    )
    assert registered.stdout == "complete -o default -F _drumbeat drumbeat\n"


def test_runs_sites_and_presets_are_looked_up(tmp_path, monkeypatch):
    """Bash asks the drumbeat of the PATH; this one knows two runs and the real sites."""
    tool = tmp_path / "drumbeat"
    tool.write_text(f'#!/bin/sh\n[ "$3" = runs ] && echo llama-1 resnet-2 || exec {sys.executable} -m drumbeat "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    script = bash(offers())
    assert complete(script, "drumbeat", "status", "") == ["llama-1", "resnet-2"]
    assert complete(script, "drumbeat", "status", "r") == ["resnet-2"]
    assert complete(script, "drumbeat", "run", "--site", "lu") == ["lumi"]
    assert complete(script, "drumbeat", "plan", "--preset", "acc") == ["accelerate"]
    assert complete(script, "drumbeat", "site", "sho") == ["show"]


# What each shell offers for a line: fish says it itself, and zsh's compadd gets the words.
ASKED = {
    "fish": "source {script}; complete -C (string join ' ' -- {words})",
    "zsh": "compadd() {{ shift; print -l -- $@ }}; _files() {{ : }}; compdef() {{ : }}; source {script}\n"
    "words=({words}); CURRENT=${{#words}}; _drumbeat",
}


@pytest.mark.parametrize("shell, script", [("zsh", zsh), ("fish", fish)])
def test_other_shells_offer_runs_sites_and_presets(shell, script, tmp_path, monkeypatch):
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    tool, file = tmp_path / "drumbeat", tmp_path / "completion"
    tool.write_text("#!/bin/sh\nprintf '%s-1\\n%s-2\\n' $3 $3\n")
    tool.chmod(0o755)
    file.write_text(script(offers()))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    for line, kind in (
        ("status", "runs"),
        ("run --site", "sites"),
        ("plan --preset", "presets"),
        ("site show", "sites"),
    ):
        code = ASKED[shell].format(script=file, words=f"drumbeat {line} ''")
        done = subprocess.run([shell, "-c", code], capture_output=True, text=True, timeout=60)
        offered = {word.partition("\t")[0] for word in done.stdout.splitlines()}
        assert {f"{kind}-1", f"{kind}-2"} <= offered, (line, done)


@pytest.mark.parametrize("shell, script", [("zsh", zsh), ("fish", fish)])
def test_other_shells_read_it(shell, script):
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    for commands in (MADE_UP, offers()):
        subprocess.run([shell, "-n", "/dev/stdin"], input=script(commands), text=True, check=True)


def test_fish_quotes():
    assert "-l launcher -x -a 'auto ranks' -d 'who\\'s that'" in fish(MADE_UP)


def test_a_command_that_takes_none_after_the_dashes_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "drumbeat", "completion", "bash", "--", "x"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.endswith("drumbeat completion: error: takes no command after '--'\n")

"""With --json, standard output is JSON or nothing; an error is text on standard error, and the exit code tells."""

import pytest

from drumbeat.cli import COMMANDS, parser_for

WRONG = {
    "compare": ["nosuch", "nosuch-2"],
    "convert": ["nosuch.sbatch"],
    "diagnose": ["nosuch.log"],
    "doctor": ["--root", "nosuch"],
    "facts": ["--root", "nosuch"],
    "lint": ["nosuch.sh"],
    "list": ["--clean", "--older-than", "soon"],
    "logs": ["nosuch"],
    "nodes": ["exclude"],
    "plan": ["nosuch.yaml"],
    "predict": ["--model", "nosuch"],
    "report": ["nosuch"],
    "site": ["show", "nosuch"],
    "status": ["nosuch"],
    "submit": ["nosuch.yaml"],
    "train": ["nosuch"],
    "tune": ["batch", "nosuch.yaml"],
    "verify": ["nosuch.yaml"],
    "watch": ["nosuch"],
}
TAKES = [name for name in COMMANDS if any("--json" in each.option_strings for each in parser_for(name)[0]._actions)]


@pytest.mark.parametrize("name", TAKES)
def test_an_error_is_text_beside_the_json(drumbeat, name):
    done = drumbeat.here(name, *WRONG[name], "--json")
    assert done.returncode == 2 and done.stderr.startswith(f"drumbeat {name}: ") and not done.stdout

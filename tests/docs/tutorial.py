"""Runs the commands of the laptop tutorial as typed, in a copy of examples/, and compares the lines that drumbeat prints with the
page's by their labels. `make tutorial`: four ranks of torch twice, so it is no part of the suite."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/tutorials/first-run.md"
LABEL = re.compile(r"^([a-z]+) {2,}\S")
EXTRA = {"waiting", "progress", "warning"}  # that only a busy machine prints


def blocks():
    """Command and the output that the page shows."""
    for text in re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def labels(output):
    found = (LABEL.match(line) for line in output.splitlines())
    return {match.group(1) for match in found if match} - EXTRA


def main():
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(ROOT / "examples", Path(place) / "examples")
        env = {**os.environ, "HOME": place, "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"}
        for command, output in blocks():
            print(f"$ {command}", flush=True)
            argv = ["bash", "-c", command]
            done = subprocess.run(argv, cwd=place, env=env, capture_output=True, text=True, timeout=900)
            missing = labels(output) - labels(done.stdout + done.stderr)
            code = int(re.search(r"exit code (\d+)", output).group(1)) if command.startswith("drumbeat run") else 0
            whole = "\n...\n" not in f"\n{output}"  # else the page leaves lines out
            more = labels(done.stdout + done.stderr) - labels(output) if whole else set()
            if missing or more or done.returncode != code:
                wrong += 1
                lists = (("not printed", missing), ("not on the page", more))
                print(
                    f"exit code {done.returncode}, expected {code}",
                    *(f"{what}: {sorted(these)}" for what, these in lists),
                )
                print(done.stdout + done.stderr)
    print("all as the page says" if not wrong else f"{wrong} commands differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Whatever drumbeat adds to a rank's environment is in docs/environment.md, and what a node's ranks share in environment.json."""

import json
import os
import re
import sys

from tools.reference.environment import page as environment_page

# Made by Python itself (LC_CTYPE), and by what stands before it in a test.
OTHERS = {"LC_CTYPE", "PYTHONPATH", "OLDPWD"}  # the last as `cd` sets it


def test_a_ranks_variables_are_all_described(drumbeat):
    code = "import json, os; json.dump(dict(os.environ), open('seen-' + os.environ['RANK'], 'w'))"
    words = ("--ranks-per-node", 2, "--trace", "--", sys.executable, "-c", code)
    # os.environ alone: readline, which pytest loads, puts LINES and COLUMNS into the process's environment behind it.
    done = drumbeat("run", "--site", "localhost", *words, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    page = environment_page()
    described = set(re.findall(r"^## `(\w+)`$|^\| `(\w+)` \| ", page, re.M))
    described = {name for pair in described for name in pair if name}
    kept = json.loads((drumbeat.run_folder() / "nodes/0/environment.json").read_text())["variables"]
    shown = drumbeat.here("plan", "--site", "localhost", "--ranks-per-node", 2, "--json", "--", "x")
    plan = json.loads(shown.stdout)
    planned = {each["name"] for each in plan["nodes"][0]["variables"]} | set(plan["set at the start"])
    for rank in ("0", "1"):
        environ = json.loads((drumbeat.folder / f"seen-{rank}").read_text())
        added = {name for name, value in environ.items() if os.environ.get(name) != value} - OTHERS
        assert {"RANK", "TORCH_FR_BUFFER_SIZE", "JAX_PROCESS_ID", "NCCL_DEBUG"} <= added
        assert added <= described, added - described
        assert all(environ[each["name"]] == each["value"] for each in kept if not each["name"].startswith("NCCL_DEBUG"))
        assert added - planned == {"MIOPEN_ENABLE_LOGGING", "FI_LOG_LEVEL"}, "only what --trace adds"

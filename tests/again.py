"""Repeat, alone, the few tests that failed beside all the others, and name them: `python tests/again.py FOLDER`.

FOLDER holds the outcome of each part of the suite (`write_outcome`). The suite fails if a test fails again, if there are more
than `MOST` failures, or if a part did not run all its tests."""

import json
import subprocess
import sys
from pathlib import Path

PARTS = ("test-others", "test-train", "test-short")
MOST = 3


def write_outcome(path, session, exit_code):
    """Write which tests failed, and how many have no result."""
    stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
    reports = {kind: stats.get(kind, []) for kind in ("passed", "failed", "error", "skipped")}
    ran = {report.nodeid for each in reports.values() for report in each}
    failed = {report.nodeid for report in reports["failed"] + reports["error"]}
    if session.config.getoption("dist", "no") == "loadgroup":  # xdist adds the group's name
        failed = {name.rpartition("@")[0] or name for name in failed}
    missing = max(0, session.testscollected - len(ran))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"exit": int(exit_code), "missing": missing, "failed": sorted(failed)}))


def to_repeat(folder):
    """Return the failed tests and the reason why they are not worth repeating, if there is one."""
    failed = []
    for part in PARTS:
        path = Path(folder) / f"{part}.json"
        if not path.exists():
            return failed, f"{part} did not end"
        outcome = json.loads(path.read_text())
        if outcome["exit"] not in (0, 1) or outcome["missing"]:  # 1: some tests failed
            return (
                failed,
                f"{part} ended early: exit code {outcome['exit']}, {outcome['missing']} tests without a result",
            )
        failed += outcome["failed"]
    if not failed:
        return failed, "no test failed"
    return failed, f"{len(failed)} tests failed, more than {MOST}" if len(failed) > MOST else ""


def main(folder):
    failed, why_not = to_repeat(folder)
    if why_not:
        print(f"Tests are not repeated: {why_not}.")
        return 1
    print("Failed beside the others, repeated alone:", *failed, sep="\n  ", flush=True)
    code = subprocess.run([sys.executable, "-m", "pytest", "--", *failed]).returncode
    if code == 0:
        print("UNSTEADY, passed only alone:", *failed, sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

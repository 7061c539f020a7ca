"""A machine's clock that is set back or forward by a day while a run goes on: no duration notices."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from drumbeat.agent.member.progress import in_our_time
from drumbeat.base import clock
from tests.conftest import wait_for

# libfaketime makes Python's sleep fail where it leaves the monotonic clock alone, so: a clock of our own, the same idea.
SHIM = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    const char *path = getenv("CLOCK_OFFSET");
    if (result == 0 && clock == CLOCK_REALTIME && path) {
        char text[32] = {0};
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            if (read(fd, text, sizeof text - 1) > 0) now->tv_sec += atol(text);
            close(fd);
        }
    }
    return result;
}
"""

STEPS = """
import json, os, time
def report(step):
    with open(os.environ["DRUMBEAT_METRICS"], "a") as file:
        file.write(json.dumps({"t": time.time(), "rank": int(os.environ["RANK"]), "kind": "step", "step": step}) + "\\n")
for step in range(10):
    report(step)
    time.sleep(0.1)
before = time.time()
open("up-" + os.environ["RANK"], "w").close()
while abs(time.time() - before) < 3600:
    time.sleep(0.1)
for step in range(10, 20):
    report(step)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(SHIM)
    argv = ["gcc", "-shared", "-fPIC", "-o", str(folder / "clock.so"), str(folder / "clock.c")]
    if not shutil.which("gcc") or subprocess.run(argv, check=False, capture_output=True).returncode:
        pytest.skip("needs a C compiler (apt install gcc libc6-dev)")
    return folder / "clock.so"


@pytest.mark.parametrize("step", [-86400, 86400])
def test_the_clock_is_set_while_a_run_goes_on(drumbeat, tmp_path, shim, step):
    offset = tmp_path / "offset"
    offset.write_text("0\n")
    env = {**os.environ, "LD_PRELOAD": str(shim), "CLOCK_OFFSET": str(offset)}
    process = drumbeat.start("run", "--nodes", 2, "--ranks-per-node", 1, "--", sys.executable, "-c", STEPS, env=env)
    wait_for(lambda: len(list(drumbeat.folder.glob("up-*"))) == 2, 180, "the first steps")
    (tmp_path / "new").write_text(f"{step}\n")
    (tmp_path / "new").replace(offset)
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 0, text
    summary = json.loads((drumbeat.run_folder() / "summary.json").read_text())
    assert 0 < summary["seconds"] < 600 and all(0 <= part < 600 for part in summary["ledger"].values()), summary
    assert summary["progress"]["step"] == 19, summary
    times = [json.loads(line)["t"] for line in (drumbeat.run_folder() / "events.jsonl").read_text().splitlines()]
    assert times == sorted(times) and times[-1] - times[0] < 600
    assert "-8" not in text.partition("finished in")[2][:10], text


def test_reports_get_the_time_that_the_agent_goes_on_with(monkeypatch):
    now = clock.now()
    line = json.dumps({"t": now - 86400 + 1, "step": 3})
    assert in_our_time([line]) == [line]  # nothing was set: a report with a wrong time stays as it is
    monkeypatch.setattr(clock.time, "time", lambda: now - 86400)
    shifted, other = in_our_time([line, "torn {"])
    assert abs(json.loads(shifted)["t"] - now) < 5 and other == "torn {"

"""A host that is lost in the middle of a run, with a spare beside it: `make everywhere` runs it, on machines of its own."""

import json
import os
import re
import tempfile

import pytest

from tests.bench.hosts import Machines, why_not
from tests.conftest import wait_for
from tests.ssh.conftest import Desk

pytestmark = pytest.mark.skipif("DRUMBEAT_EVERYWHERE" not in os.environ, reason="make everywhere")

GOES_ON = """
import os, socket, time
attempt = int(os.environ["DRUMBEAT_ATTEMPT"])
print("attempt", attempt, "rank", os.environ["RANK"], "on", socket.gethostname(), flush=True)
time.sleep(600 if attempt == 0 else 1)
"""


@pytest.fixture
def three(cache):
    if why_not():
        pytest.skip(why_not())
    with tempfile.TemporaryDirectory(prefix="dbl-", dir="/var/tmp", ignore_cleanup_errors=True) as base:
        os.chmod(base, 0o755)
        machines = Machines(base, ["oar1", "oar2", "oar3"])
        try:
            machines.up()
            yield Desk(machines, cache)
        finally:
            machines.down()


@pytest.mark.parametrize("how", ["power", "cable"])
@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_spare_takes_the_place_of_a_lost_host(three, command, how):
    """The spare is the last host. Without power its connections end at once; without a cable nobody is told."""
    script = three.ranks("goes_on", GOES_ON)
    flags = (
        "--hosts",
        "oar1,oar2,oar3",
        "--nodes",
        "2",
        "--spares",
        "1",
        "--ranks-per-node",
        "1",
        "--stop-grace",
        "5s",
    )
    started = three.start(command, *flags, "--name", "lost", "--runs", three.shared / "runs", "--", "python3", script)
    folder = three.shared / "runs"

    def printed():
        return "".join(path.read_text() for path in folder.glob("*/nodes/*/attempt-*/rank-*.out"))

    wait_for(lambda: printed().count("attempt 0 rank") == 2, 600, "both ranks")
    if how == "power":
        os.kill(three.machines.pids["oar2"], 9)
    else:
        three.machines.cut("oar2")
    wait_for(lambda: list(folder.glob("*/summary.json")), 900, "the end of the run")
    out, err = started.communicate(timeout=900)
    summary = json.loads(next(folder.glob("*/summary.json")).read_text())
    assert summary["outcome"] == "finished" and summary["exit_code"] == 0, summary
    assert len(summary["attempts"]) == 2
    assert re.search(r"attempt 1 rank 1 on oar3", printed()), printed()
    assert started.returncode == 0, out + err
    if command == "run":
        assert "oar2" in err and "lost" in err, err
    run = next(folder.iterdir()).name
    told = three("status", run).stdout
    assert "finished" in told and "oar3" in told and "oar2" in told, told
    wait_for(lambda: not three.machines.processes("oar1") and not three.machines.processes("oar3"), 600, "nobody left")

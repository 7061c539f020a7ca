"""`on-start` runs once before all ranks, and what it exports reaches them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_for

TEXT = """
echo x >> times
export GIVEN="two words $(wc -l < times)"
NOT_GIVEN=1
sleep 30 &
export LEFT=$!
"""
SHOW = "import os; open('rank-' + os.environ['RANK'], 'w').write(repr([os.environ.get(n) for n in ('GIVEN', 'NOT_GIVEN')]))"


def write(drumbeat, text, **more):
    job = drumbeat.folder / "job.yaml"
    job.write_text(json.dumps({"on-start": text, "command": [sys.executable, "-c", SHOW], **more}))
    return str(job)


def test_it_runs_once_and_its_exports_reach_every_rank(drumbeat):
    done = drumbeat("run", write(drumbeat, TEXT, **{"nodes": 2, "ranks-per-node": 1, "restarts": 1}))
    assert done.returncode == 0, done.stderr
    assert [(drumbeat.folder / f"rank-{rank}").read_text() for rank in range(2)] == [repr(["two words 1", None])] * 2
    assert (drumbeat.folder / "times").read_text() == "x\n"


@pytest.mark.parametrize(("text", "code"), [("false\ntouch more", 1), ("exit 7", 7), ("set +e; false\nexit 0", 0)])
def test_no_rank_starts_if_it_does_not_reach_its_end(text, code, drumbeat):
    done = drumbeat("run", write(drumbeat, text))
    assert done.returncode == code and f"on-start ended the job (exit {code})" in done.stderr
    assert not list(drumbeat.folder.glob("rank-*")) and not (drumbeat.folder / "more").exists()


def test_the_batch_script_runs_it_before_the_agents(drumbeat, tmp_path):
    job = write(drumbeat, "export GIVEN='a\"b'\nexport BASE=elsewhere\nfalse || true", time="1h")
    text = drumbeat.here("plan", "--render", "--site", "slurm", job).stdout
    part = text[text.index("# The job's on-start") : text.index("# by this token")]
    done = subprocess.run(
        ["bash", "-c", f'RUN=/r\n{part}\nprintf "%s|%s|%s" "$GIVEN" "$BASE" "$(env | grep -c ^GIVEN=)"'],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    given, base, exported = done.stdout.split("|")
    assert (given, exported) == ('a"b', "1") and base.startswith("/") and not done.stderr
    ends = subprocess.run(["bash", "-c", part.replace("false || true", "exit 5") + "\necho on"], capture_output=True)
    assert ends.returncode == 5 and b"on-start ended the job (exit 5)" in ends.stderr and not ends.stdout


def test_it_is_refused_where_each_node_starts_by_itself(drumbeat):
    done = drumbeat.here("plan", "--render", "--site", "kubernetes", write(drumbeat, "true", container="a/b:1"))
    assert done.returncode == 2 and "on-start: Kubernetes runs nothing before all nodes" in done.stderr


def pid_in(path):
    return int(path.read_text()) if path.exists() and path.read_text().strip() else 0


def alive(pid):
    try:
        return bool(pid) and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_it_leaves_in_the_background_ends_with_the_run(drumbeat):
    done = drumbeat("run", write(drumbeat, "sleep 300 & echo $! > left"))
    assert done.returncode == 0 and (drumbeat.folder / "rank-0").exists()
    assert not alive(pid_in(drumbeat.folder / "left"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_ends_it_and_everything_that_it_started(number, drumbeat):
    command = ("run", write(drumbeat, "bash -c 'echo $$ > deep; sleep 300; true'; touch more"))
    run = drumbeat.start(*command, prefix=("env", "--default-signal=HUP"))  # the tests may run below nohup
    deep = drumbeat.folder / "deep"
    wait_for(lambda: pid_in(deep), what="on-start")
    run.send_signal(number)
    assert run.wait(60) == 128 + number
    assert f"on-start was stopped by {number.name}; no rank was started" in run.stdout.read()
    assert not alive(pid_in(deep)) and not (drumbeat.folder / "more").exists()


def test_a_signal_of_its_own_and_a_path_without_programs(drumbeat):
    assert drumbeat("run", write(drumbeat, "kill -9 $$")).returncode == 137
    assert (
        drumbeat("run", write(drumbeat, f"export PATH={drumbeat.folder}:{os.path.dirname(sys.executable)}")).returncode
        == 0
    )


def test_in_the_queue_of_this_machine_its_end_is_explained(drumbeat):
    assert drumbeat("submit", "--name", "ends", write(drumbeat, "echo printed; exit 3")).returncode == 0
    wait_for(lambda: "failed" in drumbeat.here("status", "ends").stdout, what="its end")
    assert "on-start ended the job (exit 3); no rank was started" in drumbeat.here("status", "ends").stdout
    assert "printed" in (drumbeat.run_folder() / "desk.log").read_text()


def test_in_the_queue_of_this_machine_it_can_be_cancelled(drumbeat):
    assert drumbeat("submit", "--name", "sleeps", write(drumbeat, "echo $$ > deep; sleep 300")).returncode == 0
    deep = drumbeat.folder / "deep"
    wait_for(lambda: pid_in(deep), what="on-start")
    assert drumbeat("cancel", "sleeps").returncode == 0
    assert not alive(pid_in(deep)) and "cancelled" in drumbeat.here("status", "sleeps").stdout


TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"


def test_no_log_of_the_run_folder_holds_a_secret_that_its_scripts_print(drumbeat):
    """In the queue of this machine nobody reads what on-start prints: it is kept in the run folder, as what on-end prints is."""
    (drumbeat.folder / "secrets.sh").write_text(f"export HF_TOKEN={TOKEN}\n")
    job = write(drumbeat, "set -x; . ./secrets.sh; curl=$HF_TOKEN", name="quiet", **{"on-end": ["cat", "secrets.sh"]})
    done = drumbeat("submit", "--site", "localhost", job)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: list(drumbeat.folder.glob("runs/quiet-*/summary.json")), 120, "the end of the run")
    folder = drumbeat.run_folder()
    for path in (folder / "on-end.log", folder / "desk.log"):
        wait_for(lambda path=path: path.exists() and "HF_TOKEN=" in path.read_text(), what=path.name)
    assert not [path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]

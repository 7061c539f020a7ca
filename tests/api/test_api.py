"""Jobs and functions from Python, on the toy scheduler: one program drives all of it, as a user's script would."""

import dataclasses
import json
import os
import pickle
import re
import signal
import subprocess
import sys

import pytest

from drumbeat import api, inrank
from drumbeat import api as functions
from drumbeat.backends.slurm import Slurm
from drumbeat.backends.ssh import Ssh
from drumbeat.base.problem import Problem
from drumbeat.findings.model import Finding
from drumbeat.inrank.call import read_own, write_own
from drumbeat.jobfile.job import Job
from drumbeat.report.figures import Figures, Speed
from drumbeat.report.scaling import Comparison
from tests.backends.test_toy import Toys
from tests.conftest import ROOT
from tests.runfolder.folders import make_run

WORK = """
import os, time

def add(a, b=0):
    print("adding", a, b, flush=True)
    return a + b, int(os.environ["RANK"])

def bad(number):
    raise ValueError(f"bad {number}")

class Resumes:
    # Counts until it is stopped, and then goes on from there: submitit's checkpoint.
    def __init__(self, start=0):
        self.start = start
    def __call__(self, limit):
        while self.start < limit:
            self.start += 1
            print("at", self.start, flush=True)
            time.sleep(0.01 if self.start != 5 else 600)
        return self.start
    def checkpoint(self, limit):
        return Resumes(100), (limit,), {}
"""
SCRIPT = """
import json, sys
import work
from drumbeat import api, inrank

one = api.submit(work.add, 2, b=3, job={"nodes": 2, "ranks_per_node": 2})
failed = api.submit(work.bad, 7, job={"ranks_per_node": 1})
several = api.map_array(work.add, [1, 2], [10, 20], job={"ranks_per_node": 1})
after = api.submit({"command": "true", "name": "second", "ranks-per-node": 1}, after=[one])
said = {"result": one.result(240), "results": one.results(), "state": one.state,
        "lines": [line.text for line in api.logs(one.handle, rank=1)],
        "error": repr(failed.exception(240)), "failed": failed.wait().status.exit_code,
        "mapped": [each.result(240) for each in several],
        "after": after.run.order().resources.specific["dependency"], "one": one.handle,
        "script": api.plan({"command": "true"}).script.splitlines()[0]}
after.wait(240)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    base = tmp_path_factory.mktemp("api")
    made = Toys(base, tmp_path_factory.getbasetemp() / "cache")
    (base / "work.py").write_text(WORK)
    return made


def test_a_mistake_in_a_mapping_is_named_as_it_was_written_and_a_speed_reads_well():
    with pytest.raises(api.Problem) as refused:
        api.as_job({"command": "true", "ranks_per_nod": 2})
    assert str(refused.value) == "unknown key 'ranks_per_nod' in the job; did you mean 'ranks-per-node'?"
    assert str(Speed(3557.2, "samples/s", "reported steps")) == "3,557 samples/s (reported steps)"


def test_the_page_names_the_fields_of_what_is_returned():
    """Every field that docs/api.md names is one."""
    page = (ROOT / "docs" / "api.md").read_text()
    for made in (Figures, Comparison, Finding):
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{made.__name__}` |")]
        top = re.sub(r" \([^)]*\)", "", line.split("|")[2])
        known = {field.name for field in dataclasses.fields(made)} | {"fair"}
        assert set(re.findall(r"`(\w+)`", top)) <= known, made


def test_a_script_that_submits_jobs_and_functions(toys):
    environ = {**toys.environ, "PYTHONPATH": f"{toys.environ['PYTHONPATH']}:{toys.base}"}
    argv = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(argv, cwd=toys.base, env=environ, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["result"] == [5, 0] and said["results"] == [[5, rank] for rank in range(4)]
    assert said["state"] == "finished" and said["lines"] == ["adding 2 3"]
    assert said["error"] == "ValueError('bad 7')" and said["failed"] == 1
    assert said["mapped"] == [[11, 0], [22, 0]]
    assert said["after"] == said["one"].rpartition("/")[2] and said["script"] == "#!/bin/sh"


def test_submit_waits_follows_and_ends_as_the_job_does(toys):
    job = toys.base / "waits.yaml"
    job.write_text("ranks-per-node: 1\ncommand: [sh, -c, 'echo worked; exit 5']\n")
    done = toys("submit", job, "--follow")
    assert done.returncode == 5, done.stderr
    assert "worked" in done.stdout and "exit code 5" in done.stderr
    assert toys("submit", job, "--wait").returncode == 5


def test_after_a_run_where_the_scheduler_cannot_wait_the_desk_does(toys):
    done = toys("submit", "--after", "nothing", "--", "true")
    assert done.returncode == 2 and "no run nothing" in done.stderr
    environ = {"TOY_AFTER": "no"}  # a scheduler without dependencies
    go = toys.base / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
    first = toys.submit(toys.job("first", waits, nodes=1))[0]
    argv = [sys.executable, "-m", "drumbeat", "submit", "--json", "--after", first, toys.job("second", "pass", nodes=1)]
    with subprocess.Popen(
        argv, env={**toys.environ, **environ}, cwd=toys.home, stdout=-1, stderr=-1, text=True
    ) as after:
        said = after.stderr.readline()
        go.touch()
        said += after.communicate(timeout=180)[1]
    assert after.returncode == 0, said
    assert "this waits here for its end" in said and "has succeeded" in said
    assert toys.state(first)["state"] == "finished", "it was submitted only then"
    bad = toys.submit(toys.job("bad", "raise SystemExit(3)", nodes=1))[0]
    known = set(os.listdir(toys.queue))
    done = toys("submit", "--after", bad, toys.job("third", "pass"), **environ)
    assert done.returncode == 2 and "is failed, so nothing was submitted after it" in done.stderr, done.stderr
    assert set(os.listdir(toys.queue)) == known
    assert Ssh().after(["ssh://a/1f"]) == "" and Slurm().after(["slurm://c/12", "slurm://c/13_4"]) == "afterok:12:13_4"


def test_the_rank_goes_on_from_a_checkpoint(tmp_path):
    """The part that runs in a rank: stopped by the stop signal it asks to be started again, and then ends where it should."""
    run = tmp_path / "run"
    attempt = run / "nodes" / "0" / "attempt-0"
    attempt.mkdir(parents=True)
    (tmp_path / "work.py").write_text(WORK)
    (run / "call").mkdir(mode=0o700)
    environ = {**os.environ, "DRUMBEAT_FOLDER": str(attempt), "RANK": "0", "PYTHONPATH": str(tmp_path)}
    environ["CALL"] = str(run / "call" / "call.pkl")
    # as cloudpickle would send an object: by value
    sends = (
        "import os, pickle, work\n"
        "call = {'function': pickle.dumps(work.Resumes()), 'calls': [pickle.dumps(((7,), {}))], 'path': []}\n"
        "pickle.dump(call, open(os.environ['CALL'], 'wb'))\n"
    )
    subprocess.run([sys.executable, "-c", sends], env=environ, check=True)
    program = os.path.join(os.path.dirname(inrank.__file__), "call.py")
    process = subprocess.Popen([sys.executable, program], env=environ, stdout=subprocess.PIPE)
    assert any(line.strip() == b"at 5" for line in process.stdout)
    process.terminate()
    assert process.wait(120) == 75
    process.stdout.close()
    del environ["PYTHONPATH"]  # a module in the work folder is found without it
    done = subprocess.run(
        [sys.executable, program], env=environ, cwd=tmp_path, capture_output=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert read_own(str(attempt / "result-0.pkl")) == {"value": 100}
    assert (attempt / "result-0.pkl").stat().st_mode & 0o777 == 0o600


def test_nothing_is_written_through_a_link_that_others_have_planted(tmp_path, monkeypatch):
    """In a folder that a group shares, a name that can be guessed may already be a link to a file of ours."""
    mine, path = tmp_path / "mine", tmp_path / "result-0.pkl"
    mine.write_text("precious")
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / f"result-0.pkl.{bytes(8).hex()}.tmp").symlink_to(mine)
    (tmp_path / f"result-0.pkl.{os.getpid()}.tmp").symlink_to(mine)
    with pytest.raises(FileExistsError):
        write_own(str(path), {"value": 1})
    assert mine.read_text() == "precious" and not path.exists()


def test_a_result_that_cannot_be_read_is_one_clear_error(tmp_path):
    run = make_run(tmp_path / "run")
    attempt = tmp_path / "run/nodes/0/attempt-0"
    attempt.mkdir()
    for name in ("result-\u00b2.pkl", "result-\u0663.pkl", "result-x.pkl", "result-.pkl"):
        (attempt / name).write_bytes(b"")
    assert functions.ranks_of(run) == []
    path = attempt / "result-0.pkl"
    for data in (b"", b"garbage", b"(lp0\nI99x\na.", b"cos\nnope\n.", b"K\x01.", b"]q\x00.", b"\x80\x04K", b"}."):
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(Problem, match="the result of rank 0 cannot be read"):
            functions.result_of(run, 0, None)
    assert functions.ranks_of(run) == [0]


def test_nothing_is_unpickled_from_a_file_that_others_can_write(tmp_path):
    path = tmp_path / "result-0.pkl"
    path.write_bytes(pickle.dumps({"value": 1}))
    path.chmod(0o666)
    with pytest.raises(PermissionError):
        read_own(str(path))
    path.chmod(0o600)
    assert read_own(str(path)) == {"value": 1}
    link = tmp_path / "link.pkl"
    link.symlink_to(path)
    with pytest.raises(OSError):
        read_own(str(link))


@pytest.mark.parametrize("job", [{"nods": 2}, {"nodes": 0}, {"command": {1, 2}}, {"command": object()}])
def test_a_job_that_is_none(job):
    with pytest.raises(Problem):
        api.plan(job)


def test_what_cannot_be_sent(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # as where it is not installed
    with pytest.raises(Problem, match="cloudpickle"):
        functions.with_call(Job(), lambda: 0, [((), {})])
    with pytest.raises(Problem, match="arguments cannot be sent"):
        functions.with_call(Job(), os.getcwd, [((open(os.devnull),), {})])  # noqa: SIM115
    with pytest.raises(Problem, match="command too"):
        functions.with_call(Job(command=("true",)), os.getcwd, [((), {})])
    with pytest.raises(Problem, match="arguments are for a function"):
        api.submit({"command": "true"}, 3)
    with pytest.raises(Problem, match="values of different lengths .2 and 1.: some would be left out"):
        api.map_array(os.path.join, ["a", "b"], ["c"], job={})
    with pytest.raises(Problem, match="a command goes into a mapping"):
        api.submit("python train.py")


HERE = """
import json, os
from drumbeat import api

lines = []
before = api.submit({"command": "sleep 60", "ranks_per_node": 1})  # fills the queue
good = api.run({"command": ["sh", "-c", "echo rank $$RANK"], "ranks_per_node": 2}, show=lines.append)
bad = api.run({"command": ["python3", "-c", "raise ValueError('no labels')"], "ranks_per_node": 1}, show=None)
value = api.run(os.path.join, "a", "b", job={"ranks_per_node": 1}, show=None).result()
beside = before.state
before.cancel()
figures, report = api.report(bad), api.diagnose(bad)
queued = api.submit({"command": "true", "ranks_per_node": 1})
state = queued.wait(240).status.state
try:
    api.run({"command": "true", "site": "lumi"})
except api.Problem as problem:
    refused = str(problem)
try:
    api.compare([good, bad])
except api.Problem as problem:
    unmeasured = str(problem)
print(json.dumps([lines, good.state, good.handle, value, figures.outcome, figures.exit_code,
                  report.failure.finding.title, state, refused, unmeasured, beside,
                  [api.status(good).ranks.started, len(api.status(good).ranks.ended)]]))
"""


def test_a_laptop_is_enough(home, tmp_path):
    argv = [sys.executable, "-c", HERE]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    lines, state, handle, value, outcome, code, title, queued, refused, unmeasured, beside, ranks = said
    assert sorted(line for line in lines if "rank " in line[:9]) == ["[1] rank 1", "rank 0"], lines
    words = [line.split()[0] for line in lines]
    assert lines.index("rank 0") < words.index("end") and ranks == [2, 2], lines
    assert words[:3] == ["drumbeat", "launcher", "folder"] and words[-1] == "folder" and "end" in words, lines
    assert state == "finished" and handle.startswith("local://")
    assert value == "a/b" and (outcome, code) == ("failed", 1) and "no labels" in title and queued == "finished"
    assert beside == "running", "run does not wait for what is in the queue"
    assert "this machine alone" in refused and "fewer than two runs" in unmeasured


def test_an_interrupt_cancels_the_run(home, tmp_path):
    script = "from drumbeat import api\napi.run({'command': ['sh', '-c', 'echo up; sleep 600'], 'ranks_per_node': 1})"
    argv = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-u",
        "-c",
        script,
    ]  # a shell's background commands ignore it
    child = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert "up\n" in iter(child.stdout.readline, "")
    child.send_signal(signal.SIGINT)
    assert child.wait(120) != 0
    child.stdout.close()
    assert api.wait(str(next((tmp_path / "runs").iterdir())), 120).status.state in ("cancelled", "failed")

"""What all tests share: how to call drumbeat the way a user does, and how to see that nobody is left."""

import contextlib
import ctypes
import fcntl
import importlib.util
import io
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from drumbeat.bundle.build import bundle_bytes, cached_bundle
from drumbeat.cli import main
from tests.again import write_outcome

ROOT = Path(__file__).parent.parent

# Tests start drumbeat many hundreds of times; without byte code each start would compile all that it imports (0.2 s).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Where this session's outcome is written (`make test`): not that of a pytest which a test starts.
OUTCOME = os.environ.pop("DRUMBEAT_OUTCOME", "")

# The same examples each time, and no word about a machine that is slow to make them; `make fuzz` draws anew.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize="DRUMBEAT_FUZZ_CASES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")

# Rooms whose tests share something that is expensive to set up: a Slurm, a world of torch processes.
TOGETHER = ("slurm", "ssh", "train", "verify")
# Tests on Slurm mostly wait for it: these files do so on a second one, beside the others.
SECOND_SLURM = ("test_comes_back.py", "test_stopped.py", "test_tune.py", "test_verify.py")
# Groups that take long, the longest first. They are begun first, in this order, so that no worker is left alone with one at
# the end: files that only compute come last. Needs --no-loadscope-reorder: xdist itself would begin with the groups of the most
# tests, however short.
LONG = (
    *("slurm", "ssh", "second slurm", "bundle/test_oldest_python.py"),
    *("tune/test_trials.py", "kubernetes/test_desk.py", "comeback/test_range.py", "tune/test_recipes.py", "verify"),
    *("comeback/test_snapshots.py", "runs/test_run.py", "runs/test_scripts.py", "runs/test_nobody_left.py"),
    *("backends/test_toy.py", "faults/test_rows.py", "runs/test_join.py", "runs/test_torchrun.py"),
    *("bundle/test_pyz.py", "watch/test_pictures.py", "runai/test_runai.py", "report/test_runs.py"),
    *("api/test_api.py", "gate/test_live.py", "kubernetes/test_other_desks.py", "runs/test_stopping.py"),
    *("watch/test_web.py", "watch/test_terminal.py", "runs/test_storage.py", "runs/test_checks.py"),
    *("runs/test_without_lead.py", "runs/test_hung_storage.py", "runs/test_mpi.py", "comeback/test_spare.py"),
)


def about_the_python(items):
    """Input that is drawn at random, or the second case of the same test, says nothing about a Python."""
    seen = set()
    for item in items:
        name = (item.path, getattr(item, "originalname", item.name))
        if name not in seen and not getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            yield item
        seen.add(name)


def pytest_make_parametrize_id(val):
    """Cases are named by their text, but not by 200 kB of it: every worker sends the names of all tests."""
    return f"{val[:60]!r}..." if isinstance(val, str) and len(val) > 200 else None


@pytest.hookimpl(hookwrapper=True)
def pytest_collection(session):
    """In a new clone every test file is compiled, with its assertions, by whoever reads it first: the other workers wait for
    that one, and find its byte code."""
    worker = getattr(session.config, "workerinput", {}).get("workerid", "")
    shared = Path(session.config._tmp_path_factory.getbasetemp()).parent
    begin = time.monotonic()
    while worker not in ("", "gw0") and not (shared / "collected").exists() and time.monotonic() - begin < 60:
        time.sleep(0.1)
    yield
    if worker == "gw0":
        (shared / "collected").touch()


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items):
    """Run in parallel, a file (or one of those rooms) stays in one process."""
    if "DRUMBEAT_OLDEST_PYTHON" in os.environ:
        items[:] = about_the_python(items)
    groups = {}
    for item in items:
        if item.get_closest_marker("proof") and "DRUMBEAT_PROOFS" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="a quicker test shows the same on fewer cases: make proofs"))
        place = item.path.relative_to(ROOT / "tests")
        group = place.parts[0] if place.parts[0] in TOGETHER else str(place)
        groups[item] = "second slurm" if group == "slurm" and place.name in SECOND_SLURM else group
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    place_of = {group: number for number, group in enumerate(LONG)}
    items.sort(key=lambda item: place_of.get(groups[item], len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """How a worker ended that should not have: xdist itself does not say whether it was a signal."""
    if error:
        code = node.gateway._io.popen.wait(30)
        print(f"\n{node.gateway.id} (pid {node.gateway._io.popen.pid}) ended with {code}", flush=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if OUTCOME and not hasattr(session.config, "workerinput"):
        write_outcome(OUTCOME, session, exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Open MPI starts a daemon for a single process and ends that process (exit code 195) when the daemon has ended: a test
    would take its whole worker along."""
    assert "mpi4py.MPI" not in sys.modules, f"{item.nodeid} or one before it started MPI inside pytest"


def is_subreaper():
    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(answer), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    return bool(answer.value)


def need_torch(who):
    """A test or a file that starts torch in other processes: in its own, every worker would import it to collect the tests."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip(f"{who}: pip install '.[cpu]'", allow_module_level=True)


SOURCE = str(ROOT / "src")

# Where everything can be installed (root on Debian), a skip hides a missing proof and counts as a failure. What may still
# be missing there: data that is not ours to ship, another Python, what no package of Debian 12 brings, a second core, what
# the kernel has or has not, what only a target of its own runs, and a Kubernetes of another version than is there.
CAN_INSTALL = (
    os.geteuid() == 0 and os.path.exists("/etc/debian_version") and "DRUMBEAT_OLDEST_PYTHON" not in os.environ
)  # the oldest Python has only what the node side needs: tests/oldest-python.sh
MAY_BE_MISSING = (
    *("DRUMBEAT_CORPUS", "DRUMBEAT_CRDS", "DRUMBEAT_SEEDS", "Python 3.", "apptainer", "one core", "make dashboard"),
    *(
        "cgroup v1",
        "no IPv6",
        "make everywhere",
        "make fuzz",
        "make cluster",
        "make proofs",
        "make docs-search",
        "make dashboard",
    ),
)


def refuse_a_skip(report):
    if not (CAN_INSTALL and report.skipped and isinstance(report.longrepr, tuple)) or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2]
    if not any(word in reason for word in MAY_BE_MISSING):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be missing: {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    refuse_a_skip(outcome.get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    """A whole file that skips itself while it is imported."""
    outcome = yield
    refuse_a_skip(outcome.get_result())


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Where drumbeat keeps its bundle and the payload of pods: all workers share one, as each takes two seconds of CPU time."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp("cache")
    folder = tmp_path_factory.getbasetemp().parent / "cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # they begin at the same moment: one builds, the others wait
        cached_bundle({"XDG_CACHE_HOME": str(folder)})
    return folder


@pytest.fixture(scope="session")
def pyz(cache):
    """drumbeat.pyz as people download it; all workers share it."""
    path = cache / "drumbeat.pyz"
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(bundle_bytes())
    return path


@pytest.fixture
def home(tmp_path, monkeypatch, cache):
    """A home of its own: no test touches the user's runs, token or cache."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "DRUMBEAT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    for name in ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    return folder


class Drumbeat:
    """Calls the command line in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.started = []

    def __call__(self, *words, timeout=330, env=None, **options):
        argv = [sys.executable, "-m", "drumbeat", *map(str, words)]
        return subprocess.run(
            argv, cwd=self.folder, timeout=timeout, capture_output=True, text=True, env=env, **options
        )

    def here(self, *words):
        """The same in this very process, for commands that only read, or refuse: a start costs 0.3 s of CPU time."""
        out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main([*map(str, words)])
        except SystemExit as end:
            code = end.code
        finally:
            os.chdir(before)
        assert not is_subreaper(), (
            "this command kills every child of its process when it ends: start it as a process of its own"
        )
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def start(self, *words, env=None, prefix=()):
        argv = [*prefix, sys.executable, "-m", "drumbeat", *map(str, words)]
        process = subprocess.Popen(
            argv, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        self.started.append(process)
        return process

    def runs(self):
        return sorted((self.folder / "runs").glob("*")) if (self.folder / "runs").is_dir() else []

    def run_folder(self):
        (folder,) = self.runs()
        return folder


@pytest.fixture
def drumbeat(home, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    caller = Drumbeat(folder)
    yield caller
    for process in caller.started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def marked(run_id: str):
    """Live processes of a run, by the mark in their environment; zombies have none left."""
    mark = f"DRUMBEAT_RUN={run_id}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark in environ:
                found.append(int(name))
    return found


def free_port():
    """Return a port for somebody who listens later: below those that the kernel gives to whoever asks for any."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def wait_for(condition, seconds=120.0, what="it"):
    """Wait until it holds; how long that took. One that starts a process is checked less often."""
    begin = looked = time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now - begin < seconds, f"waited {seconds} s for {what}"
        time.sleep(min(max(0.05, 3 * (now - looked)), 5.0))
        looked = time.monotonic()
    return time.monotonic() - begin

"""A desk that is no Linux machine: nothing that only Linux has is used to submit, ask and read."""

import json
import os

import pytest

from tests.kubernetes.test_desk import WHO, Desk

# What Python has on Linux alone, and the files that only Linux has.
MAC = """
import builtins, ctypes, fcntl, os, resource, select, signal, socket, sys, time
GONE = {
    os: "sched_getaffinity sched_setaffinity sched_getparam pidfd_open memfd_create eventfd copy_file_range posix_fadvise "
        "posix_fallocate fdatasync getrandom waitid setns unshare splice getxattr setxattr listxattr setresuid O_PATH O_TMPFILE",
    select: "epoll EPOLLIN", signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGPOLL SIGPWR",
    socket: "AF_NETLINK SO_PEERCRED SO_BINDTODEVICE", resource: "prlimit", time: "CLOCK_BOOTTIME",
    fcntl: "F_ADD_SEALS F_SETPIPE_SZ F_OFD_SETLK",
}
for module, names in GONE.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "unshare", "setns", "mount", "sched_setaffinity"):
            raise AttributeError(name)
        return super().__getattr__(name)
ctypes.CDLL = Library
sys.platform = "darwin"
_open, _os_open = builtins.open, os.open
def refuse(path):
    if isinstance(path, str) and path.startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", path)
def plain(path, *rest, **more):
    refuse(path)
    return _open(path, *rest, **more)
def low(path, *rest, **more):
    refuse(path)
    return _os_open(path, *rest, **more)
builtins.open, os.open = plain, low
"""


@pytest.fixture
def mac(tmp_path, cache):
    made = Desk(tmp_path, cache)
    (tmp_path / "mac").mkdir()
    (tmp_path / "mac" / "sitecustomize.py").write_text(MAC)
    made.linux = dict(made.environ)
    made.environ["PYTHONPATH"] = f"{tmp_path / 'mac'}:{made.environ['PYTHONPATH']}"
    # the stand-in for kubectl plays the cluster, which is a Linux machine
    path = tmp_path / "bin" / "kubectl"
    path.write_text(path.read_text().replace("exec ", f"PYTHONPATH={made.linux['PYTHONPATH']} exec ", 1))
    yield made
    made.environ = made.linux
    made.end()


def test_submit_status_logs_watch_and_cancel(mac):
    run = mac.submit(mac.job("who", WHO))
    followed = mac("logs", "--follow", run["run_id"])
    assert sorted(followed.stdout.splitlines()) == ["[0] rank 0 of 2 None", "[1] rank 1 of 2 None"], followed.stderr
    status = mac("status", "--json")
    assert json.loads(status.stdout)["status"]["state"] == "finished", status.stderr
    assert "who-" in mac("list").stdout and os.path.exists(run["folder"])
    watched = mac("watch", "--once", run["run_id"])
    assert watched.returncode == 0 and "who-" in watched.stdout and "Traceback" not in watched.stderr, watched.stderr
    after = ("submit", "--json", "--after", run["run_id"], mac.job("held", WHO))
    held = mac(*after, STAND_IN_HOLDS="1")
    assert held.returncode == 0 and "has succeeded" in held.stderr, held.stderr
    assert "queued" in mac("status").stdout
    cancelled = mac("cancel", "held")
    assert cancelled.returncode == 0 and "has ended" in cancelled.stdout and mac.objects() == [], cancelled.stderr

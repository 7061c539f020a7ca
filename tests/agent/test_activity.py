"""Looks at real processes: whether they rest, what they wait for, and whose work counts as theirs."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from drumbeat.agent.ranks.handles import install_adapters
from drumbeat.agent.watchers.hang_verdict import class_of, doing
from drumbeat.base import proc
from drumbeat.base.record import from_plain, to_plain
from drumbeat.inspector.activity import Earlier, read_ranks, read_usage, waits_for
from tests.conftest import need_torch, wait_for


def test_a_look_at_real_processes_tells_a_long_sleep_from_a_poll(tmp_path):
    """Also where /proc shows no system call, only the kernel's function."""
    names = {"sleeps": "time.sleep(600)", "polls": "[time.sleep(0.01) for _ in range(60000)]"}
    made = []
    try:
        for name, text in names.items():
            code = f"import time; open({name!r}, 'w').close(); {text}"
            made.append(subprocess.Popen([sys.executable, "-S", "-c", code], cwd=tmp_path))
        wait_for(lambda: all((tmp_path / name).exists() for name in names), what="both")
        looks = read_ranks("r", 0, {each.pid: rank for rank, each in enumerate(made)}, False, str(tmp_path), []).looks
    finally:
        for each in made:
            each.kill()
            each.wait()
    assert looks[0].wakes < 1.5 < looks[1].wakes


ANSWERS = {
    "socket.create_connection(address).recv(1)": "rank 1",
    "i, out = os.pipe(); subprocess.Popen(['sleep', '600'], pass_fds=[out]); os.close(out); os.read(i, 1)": "its own process",
    "a, b = socket.socketpair(); subprocess.Popen(['sleep', '600'], pass_fds=[b.fileno()]); b.close(); a.recv(1)": (
        "its own process"
    ),
    "socket.create_connection(server).recv(1)": "process ",
    "socket.create_connection(elsewhere).recv(1)": "rank 7",
    "threading.Event().wait()": "",
}


@pytest.mark.parametrize("text", ANSWERS)
def test_whose_answer_a_rank_waits_for(tmp_path, text):
    """Another rank, also of another node on this machine, a process of its own, or one that is no rank: whoever holds the
    other end."""
    serve = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
    serve += "c, _ = s.accept(); time.sleep(600)"
    started = partial(subprocess.Popen, [sys.executable, "-S", "-c", serve], stdout=subprocess.PIPE)
    others = [started(), started(), started(env={**os.environ, "DRUMBEAT_RUN": "r", "NODE_RANK": "1", "RANK": "7"})]
    places = [("127.0.0.1", int(other.stdout.readline())) for other in others]
    code = f"import os, socket, subprocess, threading; address, server, elsewhere = {places}; open('up', 'w').close(); {text}"
    rank = subprocess.Popen([sys.executable, "-S", "-c", code], cwd=tmp_path, start_new_session=True)
    try:
        wait_for((tmp_path / "up").exists, what="the process")
        about = ("r", 0, {rank.pid: 0, others[0].pid: 1}, False, str(tmp_path))
        wait_for(lambda: is_still(about), what="rest")
        looks = read_ranks(*about, []).looks
        if not proc.word(rank.pid, "syscall"):
            pytest.skip("the kernel does not show system calls here")
        assert looks[0].waits_for.startswith(ANSWERS[text]) and bool(looks[0].waits_for) == bool(ANSWERS[text]), looks[
            0
        ]
        assert looks[0].waits_for in doing(looks[0])
    finally:
        os.killpg(rank.pid, 9)
        for each in (rank, *others):
            each.kill()
            each.wait()


SPAWNS = """
import sys, time, torch.distributed as dist, torch.multiprocessing as mp
def work(rank):
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
    dist.barrier()
    open(f"up-{rank}", "w").close()
    time.sleep(600)
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


def test_the_rank_that_a_framework_gave_is_known_also_of_a_process_that_has_stopped(tmp_path):
    """Workers of mp.spawn have no number in their environment: they tell it, and that is remembered."""
    need_torch("its mp.spawn starts the workers")
    (tmp_path / "spawns.py").write_text(SPAWNS)
    adapters = {each.name: each.value for each in install_adapters(str(tmp_path), {}, "")}
    environ = {**os.environ, **adapters, "DRUMBEAT_METRICS": str(tmp_path / "metrics")}
    argv = [sys.executable, "spawns.py", str(tmp_path / "store")]
    program = subprocess.Popen(argv, cwd=tmp_path, env=environ, start_new_session=True)
    try:
        wait_for(lambda: len(list(tmp_path.glob("up-*"))) == 2, 120, "the workers")
        about = ("r", 0, {program.pid: 0}, True, str(tmp_path), [])
        looks = read_ranks(*about).looks
        assert sorted((look.rank, look.unnumbered) for look in looks) == [(0, False), (1, False)], looks
        os.killpg(program.pid, signal.SIGSTOP)
        wait_for(lambda: all(proc.stat(look.pid).state == "T" for look in looks), what="the stop")
        numbers = {look.pid: look.rank for look in looks}
        looks = read_ranks(*about, Earlier(time.monotonic(), numbers=numbers)).looks
        assert {look.pid: look.rank for look in looks if doing(look).startswith("stopped")} == numbers, looks
        looks = read_ranks(*about).looks
        assert all(look.unnumbered for look in looks), "nobody has told"
    finally:
        os.killpg(program.pid, 9)
        program.wait()


CONNECTS = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"


ASKS = [sys.executable, "-S", "-c", CONNECTS]


RESTING = {
    "time.sleep(600)": "",
    "lock = threading.Lock(); lock.acquire(); lock.acquire()": "",
    "into, out = os.pipe(); os.read(into, 1)": "",
    "subprocess.run(['sleep', '600'])": "",
    "[time.sleep(0.5) for _ in range(6000)]": "it woke ",
    "lock = threading.Lock(); lock.acquire(); [lock.acquire(timeout=0.9) for _ in range(6000)]": "it woke ",
    "s = socket.create_server(('', 0)); a = socket.create_connection(s.getsockname()); b, _ = s.accept(); "
    "threading.Thread(target=lambda: [(time.sleep(0.5), b.send(b'x')) for _ in range(6000)]).start(); "
    "a.recv(9999, socket.MSG_WAITALL)": "it has sent or received ",
    "a, b = socket.socketpair(); a.recv(1)": "it waits for an answer over the network",
    "subprocess.run([sys.executable, '-S', '-c', 'import time\\nwhile True: time.sleep(0.5)'])": "it waits for a process of",
    f"s = socket.create_server(('', 0)); subprocess.run([*{ASKS!r}, str(s.getsockname()[1])])": (
        "the process that it waits for may wait for an answer"
    ),
    "[(open('grows', 'a').write('x'), time.sleep(0.5)) for _ in range(6000)]": "it has read or written ",
}


def is_still(about):
    before = read_usage(*about)
    time.sleep(0.5)
    return read_usage(*about) == before


@pytest.mark.parametrize("text", RESTING)
def test_signs_of_work_of_real_processes(tmp_path, text):
    """Read over the time since an earlier reading, so that what happens now and then is seen."""
    code = f"import os, socket, subprocess, sys, threading, time; open('up', 'w').close(); {text}"
    rank = subprocess.Popen([sys.executable, "-S", "-c", code], cwd=tmp_path, start_new_session=True)
    try:
        wait_for((tmp_path / "up").exists, what="the process")
        about = ("r", 0, {rank.pid: 0}, False, str(tmp_path))
        if not RESTING[text] or "answer" in RESTING[text]:
            wait_for(lambda: is_still(about), what="rest")
        earlier = Earlier(time.monotonic(), read_usage(*about))
        time.sleep(2.0)
        reading = read_ranks(*about, [], earlier)
        (seen,) = reading.looks
    finally:
        os.killpg(rank.pid, 9)
        rank.wait()
    assert seen.signs.startswith(RESTING[text]) and bool(seen.signs) == bool(RESTING[text]), seen
    in_vain = "lock" in text and proc.word(os.getpid(), "syscall") != ""  # a wait with a time limit, again and again
    assert (seen.still >= 2.0) == (not seen.signs or "answer" in seen.signs or in_vain), seen
    assert reading.last.ranks[0].still == seen.still


def test_a_late_answer_is_no_silence_while_the_rank_stands_where_it_stood(tmp_path, monkeypatch):
    code = "import os, time; open('up', 'w').close(); os.read(os.pipe()[0], 1)"
    rank = subprocess.Popen([sys.executable, "-S", "-c", code], cwd=tmp_path)
    answers = [{"stack": [["a.py", 1, "f", False, 0]]}]
    monkeypatch.setattr("drumbeat.inrank.stacks.ask", lambda *about: answers[0] if answers else None)
    try:
        wait_for((tmp_path / "up").exists, what="the process")
        (tmp_path / f"rank-0.{rank.pid}.sock").touch()
        about = ("r", 0, {rank.pid: 0}, False, str(tmp_path))
        wait_for(lambda: is_still(about), what="rest")
        earlier = from_plain(Earlier, to_plain(Earlier(time.monotonic(), read_usage(*about))))
        answers.clear()
        for _ in range(2):
            reading = read_ranks(*about, [], earlier)
            assert doing(reading.looks[0]).endswith("at a.py:1 f") and reading.looks[0].asked
            earlier = reading.last
        unknown = read_ranks(*about, [], Earlier(time.monotonic()))
        assert "not answering" in doing(unknown.looks[0])
    finally:
        rank.kill()
        rank.wait()


def test_the_work_of_short_lived_processes_is_counted(tmp_path):
    """Each is gone before a second reading: its parent has its time, also where the child has no environment."""
    code = (
        "import subprocess, sys\nfor number in range(10_000):\n  open(str(number), 'w').close()\n"
        "  subprocess.run([sys.executable, '-S', '-c', 'sum(range(3_000_000))'], env={})"
    )
    rank = subprocess.Popen([sys.executable, "-S", "-c", code], cwd=tmp_path, start_new_session=True)
    try:
        wait_for((tmp_path / "1").exists, what="the process")
        about = ("r", 0, {rank.pid: 0}, False, str(tmp_path))
        before, own = read_usage(*about)[0].usage, proc.stat(rank.pid).cpu
        wait_for((tmp_path / "8").exists, what="some work")
        used, own = read_usage(*about)[0].usage.since(before), proc.stat(rank.pid).cpu - own
    finally:
        os.killpg(rank.pid, 9)
        rank.wait()
    assert used.cpu > 0.05 and used.cpu > 2 * own, (used, own)


@pytest.mark.parametrize("who", ["child", "thread"])
def test_what_computes_on_a_machine_that_gives_it_no_core_is_at_work(tmp_path, who):
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}]); open('up', 'w').close()\nwhile True: pass"
    least = f"import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); {spin}".replace("'up'", "'rank'")
    rank = {
        "child": f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {least!r}])",
        "thread": f"import threading; t = threading.Thread(target=exec, args=({least!r},)); t.start(); t.join()",
    }
    others = [subprocess.Popen([sys.executable, "-S", "-c", spin], cwd=tmp_path) for _ in range(2)]
    waits = subprocess.Popen([sys.executable, "-S", "-c", rank[who]], cwd=tmp_path, start_new_session=True)
    try:
        wait_for((tmp_path / "rank").exists, what="the work")
        about = ("r", 0, {waits.pid: 0}, False, str(tmp_path))
        earlier = Earlier(time.monotonic(), read_usage(*about))
        time.sleep(2.0)
        (seen,) = read_ranks(*about, [], earlier).looks
    finally:
        os.killpg(waits.pid, 9)
        for process in (waits, *others):
            process.kill()
            process.wait()
    assert who == "thread" or seen.signs.startswith("it waits for a process of its own"), seen
    assert (who == "child" or class_of(seen) == "busy") and seen.still <= 0.1, seen


VFORKS = "import ctypes, time; libc = ctypes.CDLL(None); print('go', flush=True); libc.vfork() or time.sleep(600)"


def test_what_an_uninterruptible_rank_waits_for():
    """The parent of a vfork stands in state D until its child goes on."""
    process = subprocess.Popen([sys.executable, "-c", VFORKS], start_new_session=True)
    try:
        wait_for(lambda: (proc.stat(process.pid) or proc.Stat("", 0, 0, 0, "")).state == "D", what="state D")
        (found,) = read_ranks("run", 0, {process.pid: 3}, False, "", ()).looks
        assert class_of(found) == "kernel"
        expected = "a child that has not begun its own program (vfork)" if found.waits_in else ""
        assert found.waits_for == expected, found
        assert doing(replace(found, waits_in="nfs_wait", waits_for="an NFS server, /home/me/x")) == (
            "waiting in the kernel for an NFS server, /home/me/x (nfs_wait)"
        )
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_file_of_a_call_is_named(tmp_path):
    with open(tmp_path / "saved.pt", "w") as file:
        number = {"x86_64": "1", "aarch64": "64"}.get(os.uname().machine, "")
        call = [number, hex(file.fileno()), "0x0"]
        words = waits_for("rpc_wait_bit_killable", call, os.getpid())
        assert words == f"an NFS server, {file.name}" if number else words == "an NFS server"
    assert waits_for("", [], os.getpid()) == ""


def test_a_rank_that_ends_during_a_look_is_not_judged():
    rank = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    end = threading.Timer(0.7, rank.kill)
    end.start()
    try:
        assert read_ranks("r", 0, {rank.pid: 0}, False, "", []).looks == ()
    finally:
        end.join()
        rank.wait()

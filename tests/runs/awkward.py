"""A rank with every kind of child that is hard to get rid of. Writes its children's pids to $AWKWARD/RANK.pids."""

import ctypes
import os
import signal
import sys
import time


def forever():
    while True:
        time.sleep(60)


def child(prepare):
    pid = os.fork()
    if pid == 0:
        prepare()
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")
        forever()
    return pid


def double_forked():
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def term_ignoring():
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def nested_subreaper():
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    os.setsid()
    for _ in range(2):
        if os.fork() == 0:
            double_forked()
            with open(path, "a") as file:
                file.write(f"{os.getpid()}\n")
            forever()


rank = os.environ["RANK"]
path = os.path.join(os.environ["AWKWARD"], f"{rank}.pids")
open(path, "w").close()
child(double_forked)
child(os.setsid)
child(term_ignoring)
child(nested_subreaper)
stopped = child(lambda: None)
time.sleep(0.3)
os.kill(stopped, signal.SIGSTOP)
with open(os.path.join(os.environ["AWKWARD"], f"{rank}.ready"), "w") as file:
    file.write(str(os.getpid()))
if len(sys.argv) > 1 and sys.argv[1] == "fail" and rank == "1":
    time.sleep(0.5)
    sys.exit(7)
if len(sys.argv) > 1 and sys.argv[1] == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
forever()

"""Runs on hosts that are reached by a real ssh: attached and detached, with and without shared storage, and every way to fail."""

import json
import re
import subprocess

from tests.conftest import wait_for

WHO = """
import os, socket, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", socket.gethostname(), flush=True)
print("secret", os.environ.get("HF_TOKEN"), "token", os.environ.get("DRUMBEAT_TOKEN"), flush=True)
sys.exit(int(os.environ["RANK"] == "3") * int(sys.argv[1]))
"""
SAVES = """
import os, signal, sys, time
def save(*_):
    print("saved", os.environ["RANK"], flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", os.environ["RANK"], flush=True)
time.sleep(300)
"""


def nobody(desk):
    wait_for(lambda: not desk.left(), 120, "all processes on the hosts to end")


def test_two_hosts_two_ranks_without_shared_storage(desk):
    script = desk.ranks("who", WHO)
    flags = ("--hosts", "oar1,oar2", "--ranks-per-node", "2", "--runs", desk.own / "runs", "--workdir", desk.shared)
    done = desk("run", *flags, "--env", "HF_TOKEN", "--", "python3", script, "3", env={"HF_TOKEN": "hf_0123456789"})
    assert done.returncode == 3, done.stderr
    for rank, host in enumerate(("oar1", "oar1", "oar2", "oar2")):
        assert f"rank {rank} of 4 on {host}" in done.stdout
    assert done.stdout.count("secret hf_0123456789 token None") == 4
    folder = re.search(r"folder +(\S+)", done.stderr).group(1)
    summary = json.loads(desk.read(f"{folder}/summary.json"))
    assert (summary["exit_code"], summary["failure"]["rank"], summary["failure"]["host"]) == (3, 3, "oar2")
    # what the lead gathered has come to the desk, which shares no storage with it
    assert "rank 2 of 4 on oar2" in desk.read(f"{folder}/nodes/1/attempt-0/rank-2.out")
    everything = desk.machines.run(["sh", "-c", f"cat $(find {folder} -type f ! -name '*.pyz')"]).stdout
    assert "hf_0123456789" not in everything.replace(
        "secret hf_0123456789", ""
    )  # only where ranks printed it themselves
    nobody(desk)


def test_the_file_travels_once_and_a_damaged_one_is_replaced(desk):
    def kept(host):
        found = desk.machines.run(["sh", "-c", f"cd {desk.own}/cache/drumbeat; stat -c '%i %a %s' *.pyz"], on=host)
        return found.stdout.split()

    flags = ("--hosts", "oar1", "--ranks-per-node", "1", "--runs", desk.own / "runs", "--workdir", "/")
    if not kept("oar1"):  # no other test has used these machines yet
        assert desk("run", *flags, "--", "true").returncode == 0
    first = kept("oar1")
    assert first[1:] == ["600", str(desk.pyz.stat().st_size)]
    assert desk("run", *flags, "--", "true").returncode == 0
    assert kept("oar1") == first
    damage = f"cd {desk.own}/cache/drumbeat; echo x >> $(ls *.pyz)"
    desk.machines.run(["sh", "-c", damage], on="oar1")
    assert desk("run", *flags, "--", "true").returncode == 0
    assert kept("oar1")[1:] == first[1:] and kept("oar1") != first


def test_every_host_that_cannot_take_part_is_named_with_its_reason(desk):
    machines = desk.machines
    machines.also("refused", "HostName oar2;Port 23")
    machines.also("gone", "HostName 10.78.0.77")
    machines.also("changed", "HostName oar2;HostKeyAlias changed")
    machines.know("changed", "other")
    machines.also("unknown", "HostName oar2;HostKeyAlias unknown")
    machines.also("denied", "HostName oar2;HostKeyAlias oar2;User nobody;PubkeyAuthentication no")
    machines.also("silent", f"HostName {machines.address('desk')};Port 24;ConnectTimeout 2")
    listener = machines.start(
        ["python3", "-c", "import socket,time\ns=socket.create_server(('',24))\ntime.sleep(300)"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    hosts = "oar1,refused,gone,changed,unknown,denied,silent,nowhere"
    try:
        done = desk("run", "--hosts", hosts, "--runs", desk.own / "refused", "--", "true")
    finally:
        listener.kill()
        listener.wait()
    assert done.returncode == 2
    said = {line.split(":")[0].strip(): line for line in done.stderr.splitlines()}
    assert "7 hosts cannot take part; nothing was started" in done.stderr, done.stderr
    assert "connection refused" in said["refused"]
    assert "no route" in said["gone"] or "timed out" in said["gone"]
    assert "host key has changed" in said["changed"]
    assert "host key is not known" in said["unknown"]
    assert "without a password" in said["denied"]
    assert "timed out" in said["silent"]
    assert "name is not known" in said["nowhere"]
    nobody(desk)
    assert desk.machines.run(["ls", str(desk.own / "refused")]).stdout == ""  # no folder of a run that never was


def test_no_python_there_is_said(desk):
    job = desk.shared / "old.yaml"
    job.write_text("python: python3.4\nhosts: [oar1, oar2]\ncommand: 'true'\n")
    done = desk("run", job, "--runs", desk.own / "runs")
    assert done.returncode == 2 and "oar1: it has no python3.4" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_slow_host_is_waited_for(desk):
    desk.machines.also("slow", "HostName oar2;HostKeyAlias oar2;Port 2222")
    flags = ("--hosts", "oar1,slow", "--ranks-per-node", "1", "--runs", desk.own / "runs", "--workdir", desk.shared)
    done = desk("run", *flags, "--", "python3", desk.ranks("who", WHO), "0")
    assert done.returncode == 0, done.stderr
    assert "1 of 2 hosts have answered; waiting for slow" in done.stderr
    assert "rank 1 of 2 on oar2" in done.stdout


def waits(desk, runs):
    """An attached run whose ranks are up."""
    script = desk.ranks("saves", SAVES)
    process = desk.start(
        "run", "--hosts", "oar1,oar2", "--ranks-per-node", "2", "--runs", runs, "--", "python3", script
    )
    ready = 0
    while ready < 4:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        ready += "ready" in line
    return process


def desk_pid(desk, command="run"):
    """The desk itself, behind nsenter."""
    out = desk.machines.run(["ps", "-eo", "pid=,args="]).stdout
    return next(int(line.split()[0]) for line in out.splitlines() if f"{desk.pyz} {command}" in line)


def test_ctrl_c_lets_the_ranks_save_and_leaves_nobody(desk):
    process = waits(desk, desk.own / "runs")
    desk.machines.run(["kill", "-INT", str(desk_pid(desk))])
    out, err = process.communicate(timeout=180)
    assert process.returncode == 130, err
    assert out.count("saved") == 4
    nobody(desk)


def test_a_killed_desk_leaves_nobody(desk):
    process = waits(desk, desk.shared / "runs")
    argv = [line for name in ("oar1", "oar2") for line in desk.machines.processes(name)]
    assert argv and not any(re.search("[0-9a-f]{64}", line) for line in argv)  # no token in any command line
    desk.machines.run(["kill", "-KILL", str(desk_pid(desk))])
    process.communicate(timeout=180)
    nobody(desk)


def test_submit_survives_its_desk_and_is_reached_by_its_handle(desk):
    script = desk.ranks("saves", SAVES)
    flags = ("--hosts", "oar1,oar2", "--ranks-per-node", "2", "--runs", desk.own / "runs", "--stop-grace", "5s")
    done = desk("submit", *flags, "--json", "--", "python3", script)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    handle, folder = told["handle"], told["folder"]
    assert re.fullmatch("ssh://oar1/[0-9a-f]{12}", handle)
    wait_for(lambda: desk("logs", handle).stdout.count("ready") == 4, 180)
    state = json.loads(desk("status", handle, "--json").stdout)
    assert state["status"]["state"] == "running" and state["ranks"]["started"] == 4
    shell = desk.machines.start(desk.argv("shell", handle, "--node", "1"), stdin=subprocess.PIPE)
    assert shell.communicate("hostname; exit\n", timeout=150)[0].strip() == "oar2"
    done = desk("cancel", handle)
    assert done.returncode == 0, done.stderr
    nobody(desk)
    assert json.loads(desk("status", handle, "--json").stdout)["status"]["state"] == "cancelled"
    assert desk("logs", handle).stdout.count("saved") == 4
    assert json.loads(desk.read(f"{folder}/summary.json"))["outcome"] == "cancelled"


def test_a_submit_that_was_killed_can_be_told_and_cleared(desk):
    """kill -9 while one host is still missing: nothing was started, and status and cancel say so."""
    desk.machines.also("slow", "HostName oar2;HostKeyAlias oar2;Port 2222")
    runs = desk.shared / "killed"
    process = desk.start("submit", "--hosts", "oar1,slow", "--runs", runs, "--name", "killed", "--", "sleep", "300")
    wait_for(lambda: any("_host" in line for line in desk.machines.processes("oar1")))
    desk.machines.run(["kill", "-KILL", str(desk_pid(desk, "submit"))])
    process.communicate(timeout=180)
    (run,) = [path.name for path in runs.iterdir()]
    told = desk("status", run).stdout
    assert "its desk was killed while it submitted" in told and f"drumbeat cancel {run}" in told, told
    done = desk("cancel", run, timeout=180)
    assert done.returncode == 0 and "has ended" in done.stdout, done.stderr
    assert "cancelled" in desk("status", run).stdout
    nobody(desk)


def test_a_home_without_room_is_named(desk):
    """drumbeat.pyz and the record of what runs go to the host's home: without room for them nothing is started."""
    for name in ("cache", "state"):
        place = f"{desk.machines.base}/own/{name}"
        small = f"mkdir -p {place} && mount -t tmpfs -o size=4k,mode=700 small {place} && mkdir {place}/drumbeat && "
        desk.machines.run(["sh", "-c", f"{small} head -c 4096 /dev/zero > {place}/full"], on="oar2")
        try:
            done = desk("submit", "--hosts", "oar1,oar2", "--runs", desk.own / "full", "--", "sleep", "300")
        finally:
            desk.machines.run(["umount", place], on="oar2")
        assert done.returncode == 2 and "oar2: " in done.stderr and "No space left on device" in done.stderr, (
            done.stderr
        )
        assert "nothing was started" in done.stderr and "Traceback" not in done.stderr
    nobody(desk)


def test_an_interrupt_before_anything_started(desk):
    desk.machines.also("slow", "HostName oar2;HostKeyAlias oar2;Port 2222")
    process = desk.start("run", "--hosts", "oar1,slow", "--runs", desk.own / "runs", "--", "true")
    wait_for(lambda: any("_host" in line for line in desk.machines.processes("oar1")), 120)
    desk.machines.run(["kill", "-INT", str(desk_pid(desk))])
    process.communicate(timeout=180)
    assert process.returncode == 130
    nobody(desk)


def test_code_that_only_the_desk_has_is_sent(desk):
    project = desk.own / "project"
    make = (
        f"mkdir -p {project} && cd {project} && git init -q && echo runs > .gitignore && git add -A && "
        "echo 'import helper; print(helper.WORD, flush=True)' > train.py && echo 'WORD = \"sent\"' > helper.py"
    )
    assert desk.machines.run(["sh", "-c", make]).returncode == 0
    flags = ("--hosts", "oar1,oar2", "--ranks-per-node", "1", "--runs", project / "runs", "--workdir", project)
    done = desk("run", *flags, "--code", "sync", "--", "python3", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sent") == 2


def test_a_host_that_does_not_answer_is_left_out_of_a_range(desk):
    flags = ("--ranks-per-node", "1", "--runs", desk.shared / "runs")
    words = ("run", "--hosts", "oar1,oar9,oar2", "--nodes", "2-3", *flags, "--", "sh", "-c", "echo world $WORLD_SIZE")
    done = desk(*words)
    assert done.returncode == 0 and done.stdout.count("world 2") == 2, done
    assert "left out   oar9" in done.stderr and "2 of 3 nodes" in done.stderr + done.stdout, done
    refused = desk("run", "--hosts", "oar1,oar9,oar2", "--nodes", "3", *flags, "--", "true")
    assert refused.returncode == 2 and "nothing was started" in refused.stderr, refused

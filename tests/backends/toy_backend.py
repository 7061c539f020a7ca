"""A scheduler of one machine, as a package of its own: what a backend outside drumbeat has to write, and nothing more.

Its queue is a folder, $TOY_QUEUE: one folder per job with `script`, `state`, `starts` and the pid of the process that runs
it. A machine with that variable is a login node of the toy cluster; every node of a job is this machine.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time

from drumbeat.backends.contract import Backend, Launch, Request, Status, overall, parse_handle
from drumbeat.base.order import dump_order
from drumbeat.base.problem import Problem
from drumbeat.bundle.pinned import start_argv
from drumbeat.desk.status import array_tasks

STATES = ("queued", "running", "finished", "failed", "cancelled")


class Toy(Backend):
    name = "toy"
    title = "Toy"
    default_site = ""
    specific = ("qos", "dependency")
    exported = {"account": "TOY_ACCOUNT"}
    interactive = "toy-alloc"

    def submits_here(self, environ):
        return bool(environ.get("TOY_QUEUE"))

    def cluster(self, environ):
        return "toys"

    def notes(self, order):
        return ["toys break"] if order.resources.account == "careless" else []

    def after(self, handles):
        if os.environ.get("TOY_AFTER") == "no":
            return ""
        return ":".join(parse_handle(handle).job for handle in handles)

    def render(self, order):
        node = shlex.join(_node_argv(order))
        agents = [f"DRUMBEAT_NODE={number} {node} &" for number in range(order.nodes)]
        return self._request(order, [*agents, "trap '' TERM", "wait"])

    def render_command(self, order, word, request, text, why):
        # without -I -S, and so without the check: in the job, too, drumbeat must find this package
        return self._request(
            order, [f"# {why}", f'exec {sys.executable} "$BASE/drumbeat.pyz" {word} "$BASE/{request}"']
        )

    def _request(self, order, lines):
        hosts = ",".join([socket.gethostname()] * order.nodes)
        held = any(option.text == "--hold" for option in order.resources.options)
        head = ["#!/bin/sh", f"# toy job, array={order.resources.array} hold={'yes' if held else 'no'}"]
        return Request(
            "toy", order, "\n".join([*head, f"BASE={order.folder}", f"export DRUMBEAT_HOSTS={hosts}", *lines])
        )

    def submit(self, request, environ):
        if request.order.resources.account == "broke":
            raise Problem("Toy refuses this job: no credit")
        queue = environ["TOY_QUEUE"]
        number = str(1 + len(os.listdir(queue)))
        tasks = [str(number) for number in array_tasks(request.order.resources.array)] or [""]
        os.mkdir(os.path.join(queue, number))
        for task in tasks:
            folder = os.path.join(queue, number, task or "only")
            os.mkdir(folder)
            put(folder, "script", request.text)
            put(folder, "run", os.path.join(request.order.folder, "array", task) if task else request.order.folder)
            put(folder, "state", "queued")
            if "hold=yes" not in request.text:
                with open(os.path.join(request.order.folder, f"toy-{number}-{task}.out"), "ab") as out:
                    job = [sys.executable, "-m", "toy_backend", folder, number, task]
                    subprocess.Popen(job, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        return f"toy://toys/{number}"

    def status(self, handle, environ):
        parsed = parse_handle(handle)
        job = os.path.join(environ["TOY_QUEUE"], parsed.job)
        if parsed.task or os.path.isdir(os.path.join(job, "only")):
            return self._one(os.path.join(job, parsed.task or "only"), handle)
        tasks = sorted(os.listdir(job), key=int)
        return overall(handle, [self._one(os.path.join(job, task), f"{handle}_{task}") for task in tasks])

    def _one(self, folder, handle):
        state = get(folder, "state")
        assert state in STATES, state
        return Status(handle, state, "as Toy says", starts=int(get(folder, "starts") or 0))

    def cancel(self, handle, environ):
        parsed = parse_handle(handle)
        job = os.path.join(environ["TOY_QUEUE"], parsed.job)
        for task in (
            [parsed.task or "only"] if parsed.task or os.path.isdir(os.path.join(job, "only")) else os.listdir(job)
        ):
            folder = os.path.join(job, task)
            if get(folder, "state") == "queued":
                put(folder, "state", "cancelled")
            elif get(folder, "pid"):
                os.killpg(int(get(folder, "pid")), signal.SIGTERM)

    def shell(self, handle, host, environ, command=()):
        if command:
            return ["env", f"ON={host}", *command]
        return ["echo", f"a shell of {handle} on {host}"]

    def fan_out(self, order, environ):
        node = shlex.join(_node_argv(order))
        agents = [f'DRUMBEAT_NODE={number} {node} & pids="$pids $!"' for number in range(order.nodes)]
        lines = ["trap '' TERM", *agents, "for pid in $pids; do wait $pid || code=$?; done", "exit ${code:-0}"]
        return Launch(("sh", "-c", "\n".join(lines)), dict(environ))

    def finish(self, handle, environ):
        with open(os.path.join(environ["TOY_QUEUE"], "..", "finished"), "a") as file:
            file.write(f"{handle}\n")


def _node_argv(order):
    return start_argv(sys.executable, os.path.join(order.folder, "order.json"), dump_order(order))


def put(folder, name, text):
    path = os.path.join(folder, name)
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


def get(folder, name):
    try:
        with open(os.path.join(folder, name)) as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def run(folder, number, task):
    """The job: its script again and again, as long as the lead's verdict asks for it."""
    put(folder, "pid", str(os.getpgrp()))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a cancel reaches the script's agents, and is waited for
    starts, put_back = 0, True
    while put_back:
        put(folder, "starts", str(starts))
        put(folder, "state", "running")
        token = os.urandom(16).hex()
        env = {**os.environ, "DRUMBEAT_SCHEDULER": "toy", "DRUMBEAT_JOB": number, "DRUMBEAT_STARTS": str(starts)}
        env.update({"DRUMBEAT_TOKEN": token, **({"DRUMBEAT_ARRAY": number, "DRUMBEAT_TASK": task} if task else {})})
        code = subprocess.call(["sh", os.path.join(folder, "script")], env=env)
        verdict = get(get(folder, "run"), "verdict").splitlines()
        put_back = "next=requeue" in verdict
        starts += 1
        if put_back:
            put(folder, "starts", str(starts))
            put(folder, "state", "queued")
            while os.path.exists(os.path.join(folder, "..", "..", "..", "busy")):
                time.sleep(0.05)
    said = [line[5:] for line in verdict if line.startswith("code=")]
    code = int(said[0]) if said else code
    put(folder, "state", "finished" if code == 0 else "failed")


if __name__ == "__main__":
    run(*sys.argv[1:])

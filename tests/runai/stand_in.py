"""Stand-ins for `runai` and `kubectl`: the documented grammar of both generations of the one, the few calls that drumbeat
makes of the other. An option that is not documented is refused, as the real command does. All is kept in $STAND_IN, a folder.
"""

import argparse
import json
import os
import sys

FOLDER = os.environ["STAND_IN"]
GENERATION = int(os.environ.get("RUNAI_GENERATION", "1"))
HELP = {
    1: "runai is a command line interface to a Run:ai cluster\n\nAvailable Commands:\n  bash  \n  delete  \n  describe  \n"
    "  exec  \n  list  \n  logs  \n  submit  \n  submit-dist  Submit a new distributed job\n  version  \n",
    2: "Run:ai Command-line Interface\n\nAvailable Commands:\n  login  \n  mpi  \n  project  \n  pytorch  \n"
    "  training  training management\n  version  \n  workspace  \n",
}
VERSION = {1: "Version: 2.18.94\nBuildDate: 2025\n", 2: "CLI Version: 2.23.0\n"}
BOTH = (
    "annotation", "extended-resource", "label", "node-pools", "toleration", "backoff-limit", "environment", "image", "project",
    "workers", "existing-pvc", "run-as-uid", "run-as-gid", "image-pull-policy", "working-dir", "clean-pod-policy", "node-type",
)  # fmt: skip
VALUES = {
    1: (*BOTH, "name", "gpu", "cpu", "memory", "cpu-limit", "memory-limit", "add-capability", "pvc"),
    2: (*BOTH, "gpu-devices-request", "master-gpu-devices-request", "cpu-core-request", "cpu-memory-request", "capability",
        "preemptibility", "env-secret"),
}  # fmt: skip
SWITCHES = {1: ("large-shm", "command", "preemptible", "host-ipc"), 2: ("large-shm", "command", "host-ipc")}
SHORT = {
    "environment": "-e",
    "image": "-i",
    "project": "-p",
    "gpu": "-g",
    "gpu-devices-request": "-g",
    "annotation": "-a",
}


def parser(generation, command):
    made = argparse.ArgumentParser(prog=f"runai {' '.join(command)}", allow_abbrev=False)
    if command == SUBMIT[generation]:
        if generation == 2:
            made.add_argument("name")
        for name in VALUES[generation]:
            short = [SHORT[name]] if name in SHORT and not (name == "annotation" and generation == 2) else []
            made.add_argument(f"--{name}", *short, action="append", default=[])
        for name in SWITCHES[generation]:
            made.add_argument(f"--{name}", action="store_true")
        return made
    made.add_argument("name")
    for words in (("--project", "-p"), ("--output", "-o"), ("--pod",)):
        made.add_argument(*words)
    for words in (("--stdin", "-i"), ("--tty", "-t"), ("--follow", "-f")):
        made.add_argument(*words, action="store_true")
    return made


SUBMIT = {1: ("submit-dist", "pytorch"), 2: ("training", "pytorch", "submit")}
COMMANDS = {
    1: (SUBMIT[1], ("describe", "job"), ("delete", "job"), ("logs",), ("exec",), ("bash",)),
    2: (SUBMIT[2], *(("training", "pytorch", word) for word in ("describe", "delete", "logs", "exec", "bash"))),
}


def parse(generation, words):
    """The command, its options and what stands after `--`; SystemExit for a word that is not documented."""
    for command in COMMANDS[generation]:
        if tuple(words[: len(command)]) == command:
            rest = words[len(command) :]
            at = rest.index("--") if "--" in rest else len(rest)
            return command, parser(generation, command).parse_args(rest[:at]), rest[at + 1 :]
    raise SystemExit(f'Error: unknown command "{words[0]}" for "runai"')


def runai(words):
    if words == ["version"]:
        return print(VERSION[GENERATION], end="")
    if words == ["--help"]:
        return print(HELP[GENERATION], end="")
    command, options, tail = parse(GENERATION, words)
    keep("runai", words)
    state = os.path.join(FOLDER, "state")
    if command == SUBMIT[GENERATION]:
        project = (options.project or ["default"])[0]
        if project == "unknown":
            raise SystemExit("Error: project unknown was not found")
        put(state, "Pending")
        return print(f"The job has been submitted successfully to project {project}")
    if not os.path.exists(state):
        raise SystemExit(f"Error: workload {options.name} not found")
    if command[-1] in ("job", "describe") and command[0] != "delete":
        return print(json.dumps({"metadata": {"name": options.name}, "status": get(state)}))
    if "delete" in command:
        os.unlink(state)
    elif "exec" in command:
        raise SystemExit("Error: pod is not running")
    return None


def kubectl(words):
    keep("kubectl", words)
    path = os.path.join(FOLDER, "secret.json")
    if "create" in words:
        put(path, sys.stdin.read())
    elif "delete" in words and os.path.exists(path):
        os.unlink(path)


def keep(program, words):
    with open(os.path.join(FOLDER, "calls.jsonl"), "a") as file:
        file.write(json.dumps([program, *words]) + "\n")


def put(path, text):
    with open(path, "w") as file:
        file.write(text)


def get(path):
    with open(path) as file:
        return file.read()


if __name__ == "__main__":
    {"runai": runai, "kubectl": kubectl}[sys.argv[1]](sys.argv[2:])

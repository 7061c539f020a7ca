"""Stand-ins for `runai` and `kubectl`: the documented grammar of both generations of the one, the few calls that drumbeat
makes of the other. An option that is not documented is refused, as the real command does. All is kept in $STAND_IN, a folder.
"""

import argparse
import json
import os
import sys

FOLDER = os.environ["STAND_IN"]
GENERATION = int(os.environ.get("RUNAI_GENERATION", "1"))  # 1: CLI 1 (2.18); 2: CLI 2 (2.18 to 2.20); 3: CLI 2 (3.0)
HELP_1 = (
    "runai is a command line interface to a Run:ai cluster\n\nAvailable Commands:\n  bash  \n  delete  \n  describe  \n"
    "  exec  \n  list  \n  logs  \n  submit  \n  submit-dist  Submit a new distributed job\n  version  \n"
)
HELP_2 = (
    "Run:ai Command-line Interface\n\nAvailable Commands:\n  login  \n  mpi  \n  project  \n  pytorch  \n"
    "  training  training management\n  version  \n  workspace  \n"
)
HELP = {1: HELP_1, 2: HELP_2, 3: HELP_2}
VERSION = {1: "Version: 2.18.94\nBuildDate: 2025\n", 2: "CLI Version: 2.20.7\n", 3: "CLI Version: 3.0.1\n"}

# The options of `submit`, as the reference pages list them (docs.run.ai for 1 and 2, docs.nvidia.com/run-ai for 3).
BOTH = """annotation backoff-limit clean-pod-policy extended-resource git-sync image image-pull-policy label
    master-args master-extended-resource node-pools node-type port preferred-pod-topology-key project
    required-pod-topology-key s3 toleration workers working-dir"""
CLI_1 = """add-capability address configmap-volume cpu cpu-limit environment gpu gpu-memory job-name-prefix loglevel
    master-environment master-gpu max-replicas memory memory-limit mig-profile min-replicas name nfs-server pvc pvc-exists
    pvc-new service-type template ttl-after-finish volume"""
USED_BY_EPFL = "existing-pvc run-as-uid run-as-gid"  # with CLI 1; not on its reference page
CLI_2 = """auto-deletion-time-after-completion capability configmap-map-volume cpu-core-limit cpu-core-request
    cpu-memory-limit cpu-memory-request existing-pvc external-url gpu-devices-request gpu-memory-limit gpu-memory-request
    gpu-portion-limit gpu-portion-request gpu-request-type host-path master-command master-gpu-devices-request
    master-gpu-portion-limit master-gpu-portion-request name-prefix new-pvc nfs pod-running-timeout run-as-gid run-as-uid
    seccomp-profile supplemental-groups user-group-source wait-for-submit"""
EARLY_2 = "environment master-environment max-replicas min-replicas"
LATE_2 = """compute datasource datavolume empty-dir-volume env-my-credentials env-pod-field-ref env-secret environment
    environment-variable exclude-node image-pull-my-credentials master-cpu-core-limit master-cpu-core-request
    master-cpu-memory-limit master-cpu-memory-request master-environment-variable master-restart-policy preemptibility
    priority restart-policy secret-volume template termination-grace-period"""
VALUES = {
    1: f"{BOTH} {CLI_1} {USED_BY_EPFL}".split(),
    2: f"{BOTH} {CLI_2} {EARLY_2}".split(),
    3: f"{BOTH} {CLI_2} {LATE_2}".split(),
}
SWITCHES = (
    "allow-privilege-escalation attach command create-home-dir host-ipc host-network large-shm master-no-pvcs stdin tty"
)
SWITCHES = {
    1: f"{SWITCHES} mount-propagation no-master run-as-user".split(),
    2: f"{SWITCHES} no-master run-as-user".split(),
    3: f"{SWITCHES} privileged run-as-non-root run-as-user".split(),
}
COMMON = {"image": "-i", "project": "-p", "tty": "-t"}
SHORT = {
    1: {**COMMON, "environment": "-e", "gpu": "-g", "annotation": "-a", "label": "-l", "volume": "-v"},
    2: {**COMMON, "environment": "-e", "gpu-devices-request": "-g", "command": "-c"},
    3: {**COMMON, "environment-variable": "-e", "gpu-devices-request": "-g", "command": "-c"},
}


def parser(generation, command):
    made = argparse.ArgumentParser(prog=f"runai {' '.join(command)}", allow_abbrev=False)
    if command == SUBMIT[generation]:
        if generation > 1:
            made.add_argument("name")
        for name in VALUES[generation]:
            short = [SHORT[generation][name]] if name in SHORT[generation] else []
            made.add_argument(f"--{name}", *short, action="append", default=[])
        for name in SWITCHES[generation]:
            short = [SHORT[generation][name]] if name in SHORT[generation] else []
            made.add_argument(f"--{name}", *short, action="store_true")
        return made
    made.add_argument("name")
    made.add_argument("--project", "-p")
    what = command[-1] if generation > 1 else command[0]
    if what == "describe":
        made.add_argument("--output", "-o", choices=("json", "yaml", "wide" if generation == 1 else "table"))
    if what in ("logs", "exec", "bash"):  # exec of CLI 1: used in public, not on its reference page
        made.add_argument("--pod")
    if what == "logs":
        made.add_argument("--follow", "-f", action="store_true")
    if what == "exec" or (what == "bash" and generation > 1):
        made.add_argument("--stdin", "-i", action="store_true")
        made.add_argument("--tty", "-t", action="store_true")
    return made


def submit_help(generation):
    """As cobra prints it."""
    lines = [f"Usage:\n  runai {' '.join(SUBMIT[generation])} [flags]\n\nFlags:"]
    for name in sorted((*VALUES[generation], *SWITCHES[generation])):
        short = SHORT[generation].get(name)
        kind = "" if name in SWITCHES[generation] else " stringArray"
        lines.append(f"  {short + ',' if short else '   '} --{name}{kind}   what it does, or --not-an-option")
    return "\n".join(lines)


SUBMIT = {1: ("submit-dist", "pytorch"), 2: ("training", "pytorch", "submit"), 3: ("training", "pytorch", "submit")}
COMMANDS_2 = (SUBMIT[2], *(("training", "pytorch", word) for word in ("describe", "delete", "logs", "exec", "bash")))
COMMANDS = {
    1: (SUBMIT[1], ("describe", "job"), ("delete", "job"), ("logs",), ("exec",), ("bash",)),
    2: COMMANDS_2,
    3: COMMANDS_2,
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
    if words == [*SUBMIT[GENERATION], "--help"]:
        return print(submit_help(GENERATION))
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
        print(f"secret/{words[words.index('secret') + 1]}")


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

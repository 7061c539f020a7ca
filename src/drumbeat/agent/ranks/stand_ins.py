"""Stand-ins for the launchers that a script starts itself.

A private folder with small programs named like the launchers is the first on the script's PATH, and bash gets functions of the
same names, which still work after `source activate` or `bash -l`. A file that bash reads first (BASH_ENV) defines functions
for launchers called by an absolute path. Each stand-in starts the launcher as drumbeat would have: with the run's own nodes
and rendezvous, a log for every rank, and true exit codes. Each launcher is a stage; two at once are refused. Launchers that
bypass them all (a computed path, `exec` after a change of PATH) are reported by the census.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from dataclasses import replace
from typing import List, Mapping, Sequence, Tuple

from drumbeat.agent.ranks.shim import USERS_BASH_ENV, without_stand_ins
from drumbeat.agent.ranks.stages import Stages
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar
from drumbeat.base.problem import Problem
from drumbeat.base.record import from_plain, to_plain
from drumbeat.base.signals import EXIT_NOT_FOUND, EXIT_USAGE, code_of_start
from drumbeat.commands import launchers
from drumbeat.commands.launch import find_launcher, refusal
from drumbeat.commands.program import Script, interpreter_of
from drumbeat.machine.model import Facts, Peers
from drumbeat.plan.argv import STAND_INS, WITH_DRIVER, Tools, launcher_argv

LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "fabric", "composer")
OUTSIDE = ("mpirun", "mpiexec", "horovodrun")  # never replaced
_ASKS = {"--help", "--version"}  # a script may call a launcher with these to see if it exists
_MODULES = ("-m torch.distributed.", "-mtorch.distributed.", "-m accelerate", "-m deepspeed")


@dataclass(frozen=True)
class StandInSettings:
    """Settings of the stand-ins of one node and attempt."""

    folder: str  # the stand-ins' folder
    node: int
    peers: Peers  # without facts
    ports: Tuple[int, ...]  # where the ranks of the first launcher meet, of the second, and so on
    once: bool  # the command was started once per node; else once per rank
    asked: bool  # the job itself sets the ranks per node, which overrides a launcher's own number
    tools: Tools

    @property
    def nodes(self) -> int:
        return len(self.peers.nodes)


def settings_of(
    folder: str, node: int, peers: Peers, ports: Sequence[int], once: bool, asked: bool, tools: Tools
) -> StandInSettings:
    later = tuple(port for port in ports if port != peers.master_port)
    peers = replace(peers, nodes=tuple(replace(peer, facts=Facts(peer.host)) for peer in peers.nodes))
    return StandInSettings(folder, node, peers, (peers.master_port, *later), once, asked, tools)


def install(settings: StandInSettings, script: Script, bundle: str, environ: Mapping[str, str]) -> List[EnvVar]:
    """Write the folder; return the variables that activate it."""
    os.mkdir(settings.folder, 0o700)
    place = os.path.join(settings.folder, ".settings.json")
    with open(place, "w", encoding="utf-8") as file:
        json.dump(to_plain(settings), file)
    call = shlex.join([sys.executable, "-I", "-S", bundle, "_stand_in", place])
    names = list(LAUNCHERS + OUTSIDE)
    for name in names:
        _program(settings.folder, name, f'exec {call} {name} "$@"\n')
    for name in script.pythons(environ):
        _program(settings.folder, name, _python(settings.folder, name, call))
        names.append(name)
    path = os.pathsep.join([settings.folder, environ.get("PATH", os.defpath)])
    why = "a launcher that the script starts gets this run's nodes, logs and cores"
    variables = {STAND_INS: settings.folder, "PATH": path}
    # Red Hat's `which` prints a function's text; a script that asks it for a program must get a path.
    if "BASH_FUNC_which%%" not in environ:
        variables.update({f"BASH_FUNC_{name}%%": _function(name) for name in names if name.isidentifier()})
    if script.shell:
        variables["BASH_ENV"] = _bash_env(settings.folder, *script.paths(environ), call)
        if environ.get("BASH_ENV"):
            variables[USERS_BASH_ENV] = os.path.expanduser(os.path.expandvars(environ["BASH_ENV"]))  # as bash does
    return [EnvVar(name, value, why, "default") for name, value in variables.items()]


def _function(name: str) -> str:
    """Return functions for bash. If the script passes its environment to another node, that node has no such folder."""
    stand_in = f"${STAND_INS}/{name}"
    return f'() {{ if [ -x "{stand_in}" ]; then "{stand_in}" "$@"; else command {name} "$@"; fi; }}'


def _bash_env(folder: str, launchers: Sequence[str], pythons: Sequence[str], call: str) -> str:
    """Write a file for bash that defines functions named like these paths; return its path. It reads the user's own BASH_ENV
    first, and sets no trap or option that a script could notice."""
    lines = [f'[ ! -r "${{{USERS_BASH_ENV}-}}" ] || . "${USERS_BASH_ENV}"']
    lines += [f'{path}() {{ {call} {path} "$@"; }}' for path in launchers]
    cases = "|".join(f'*" {each}"*' for each in _MODULES)
    call = f"command {call}"  # our own interpreter may be one of these paths
    lines += [
        f'{path}() {{ case " $* " in {cases}) {call} {path} "$@" ;; *) command {path} "$@" ;; esac; }}'
        for path in pythons
    ]
    place = os.path.join(folder, ".bash_env")
    with open(place, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return place


def _program(folder: str, name: str, text: str) -> None:
    fd = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
    with open(fd, "w", encoding="utf-8") as file:
        file.write("#!/bin/sh\n" + text)


def _python(folder: str, name: str, call: str) -> str:
    """Return a stand-in for an interpreter: it handles starts of a launcher's module, and passes all else to the real one by
    its path."""
    cases = "|".join(f'*" {each}"*' for each in _MODULES)
    return f"""case " $* " in
{cases}) exec {call} {name} "$@" ;;
esac
IFS=:
for place in $PATH; do
  [ "$place" = {shlex.quote(folder)} ] || [ ! -x "$place/{name}" ] || exec "$place/{name}" "$@"
done
echo "drumbeat: {name}: command not found" >&2
exit 127
"""


def run_stand_in(arguments: List[str]) -> int:
    """Replace this process by the launcher that a script calls, started the way drumbeat does. `arguments`: the file of
    settings, the launcher's name, and the script's arguments."""
    with open(arguments[0], encoding="utf-8") as file:
        settings = from_plain(StandInSettings, json.load(file))
    name, rest = arguments[1], arguments[2:]
    environ = without_stand_ins({**os.environ, STAND_INS: settings.folder})  # a script may have unset it
    real = shutil.which(name, path=environ.get("PATH", os.defpath))
    stages = Stages(settings.folder)
    if real is None:
        if not _ASKS & set(rest):
            stages.miss([name, *rest])
        print(f"drumbeat: {name}: command not found", file=sys.stderr)  # in words that `diagnose` knows from shells
        return EXIT_NOT_FOUND
    try:
        argv = _argv(settings, stages, [name, *rest], real, environ)
        os.execvpe(argv[0], argv, environ)
    except Problem as problem:
        stages.refuse([name, *rest], str(problem))
        print(f"drumbeat: {problem}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"drumbeat: cannot start: {argv[0]}: {error.strerror}", file=sys.stderr)
        return code_of_start(error)


def _argv(
    settings: StandInSettings, stages: Stages, command: List[str], real: str, environ: Mapping[str, str]
) -> List[str]:
    if command[0] in OUTSIDE:
        return _outside(settings, command, real)
    found = find_launcher(command)
    if found is None or _ASKS & set(found.flags):
        return [real, *command[1:]]
    if found.kind == "accelerate":
        config = launchers.read_config(launchers.config_path(found.flags, environ))
        found = replace(found, config=launchers.from_config(config))
    if not settings.once:
        raise Problem(
            f"the command was started once for each rank, and starts {found.words} itself: every rank would become "
            "a training of its own",
            "add --launcher once: the command is then started once per node",
        )
    if found.kind == "composer":
        raise Problem(f"{found.words} inside a script", "write it as the command: drumbeat run -- composer ...")
    ranks = sum(peer.ranks for peer in settings.peers.nodes)
    of_pod = found.nodes == ranks  # --nnodes $WORLD_SIZE, where a pod's operator counts pods
    if (found.nodes or 1) > settings.nodes and not of_pod:
        raise Problem(
            f"the script's {found.words} is for {found.nodes} nodes, but this run has {settings.nodes}",
            f"say --nodes {found.nodes}; a script that starts other nodes itself belongs behind no launcher",
        )
    # The ranks of each node: from the job, else from the launcher's actual arguments, else as planned.
    peers = settings.peers
    if found.ranks_per_node and not settings.asked:
        peers = replace(peers, nodes=tuple(replace(peer, ranks=found.ranks_per_node) for peer in peers.nodes))
    if found.kind == "accelerate":
        launchers.refuse_cpu_ranks(found.flags, found.script, settings.nodes, peers.nodes[0].ranks)
    number = stages.begin(command)
    found = replace(found, program=real)
    if not found.python:
        python = interpreter_of(real, os.getcwd(), environ.get("PATH", os.defpath))
        python = python or (os.path.join(os.path.dirname(real), "python"),)
    else:
        python = ()
        found = replace(found, python=(real, *found.python[1:]))
    files = {"report": stages.report(number), "ended": stages.ended(number)}
    driver = {**json.loads(settings.tools.settings or "{}"), **files, "stage": True}
    tools = replace(settings.tools, settings=json.dumps(driver), python=python)
    peers = replace(peers, master_port=settings.ports[number % len(settings.ports)])
    said = " ".join(f"{flag}={value}" if value else flag for flag, value in found.replaced.items())
    if settings.node == 0 and said and found.kind in WITH_DRIVER:
        print(f"drumbeat: {found.words}: {said} (drumbeat sets these itself)", file=sys.stderr, flush=True)
    return list(launcher_argv(found, peers, settings.node, tools))


def _outside(settings: StandInSettings, command: List[str], real: str) -> List[str]:
    """Handle MPI, which starts its tasks on all nodes by itself: one call is right only on a single node."""
    if settings.nodes == 1 and settings.once:
        return [real, *command[1:]]
    wrong = refusal(command)
    assert wrong is not None
    raise Problem(wrong[0].replace("the command", "the script"), wrong[1])

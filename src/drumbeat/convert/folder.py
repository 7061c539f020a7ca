"""A job file from a folder: its batch script, launch script or training program, and the environment beside it.

Reads nothing itself: names come from `files_below`, texts from the reader that the commands share.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from drumbeat.base.problem import Problem
from drumbeat.base.redact import printable
from drumbeat.base.regex import regex
from drumbeat.commands.program import read_script
from drumbeat.findings.model import ERROR, WARNING

Read = Callable[[str], str]
BATCH, LAUNCH, PROGRAM = "batch script", "launch script", "training program"
MOST_FILES = 500
_PLAIN_NAME = regex(r"[\w./+@%=,-]+")
_OTHERS = ("runs", "node_modules", "build", "dist", "wandb", "mlruns", "tests", "test", "docs", "site-packages")
_SHELL = (".sh", ".bash", ".sbatch", ".slurm")
_NOTEBOOK = ".ipynb"
_USUAL = ("train.py", "main.py", "pretrain.py", "finetune.py", "run.py")  # the first that is there
_TRAINS = regex(r"\.backward\(|\bTrainer\(|\.fit\(|value_and_grad\(|GradientTape\(")
_RUNS = regex(r"__main__|^(?:for|while|with)\b|^[\w.]+\(", re.M)
_REQUIRED = regex(r"add_argument\(\s*[\"'](--?[\w-]+)[\"'][^)]{0,400}?required\s*=\s*True")
# How a program makes one world of its ranks. The first that is found; the last has none.
_WORLDS = (
    ("DeepSpeed", regex(r"^\s*(?:import|from)\s+deepspeed\b", re.M)),
    ("accelerate", regex(r"\bAccelerator\(")),
    ("Lightning", regex(r"^\s*(?:import|from)\s+(?:lightning|pytorch_lightning)\b", re.M)),
    ("HF Trainer", regex(r"^\s*from\s+(?:transformers|trl)\s+import[\s\S]{0,400}?Trainer\b", re.M)),
    ("torch.distributed", regex(r"init_process_group\(|fully_shard\(|init_device_mesh\(")),
    ("jax.distributed", regex(r"jax\.distributed\.initialize\(")),
    ("Horovod", regex(r"\bhvd\.init\(")),
)


class Look(NamedTuple):
    """Impression of a training program, before it runs."""

    world: str  # how its ranks become one training; empty: they do not
    advice: str  # the one change that helps most; empty: none


def files_below(folder: str) -> List[str]:
    """Return the paths of the folder and of those directly below it that may hold a job, environments left out. More than
    MOST_FILES: these are not all."""
    found: List[str] = []
    for name in _listed(folder):
        path = os.path.join(folder, name)
        if not os.path.isdir(path):
            found.append(name)
        elif not name.startswith(".") and name not in _OTHERS and not os.path.exists(os.path.join(path, "pyvenv.cfg")):
            found += [os.path.join(name, each) for each in _listed(path)]
        if len(found) > MOST_FILES:
            break
    found += [f"{name}/bin/activate" for name in (".venv", "venv") if os.path.exists(f"{folder}/{name}/bin/activate")]
    return found


def _listed(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []  # another user's: nothing of this job is there


def first_look(text: str) -> Look:
    """Look at the text of a Python program."""
    from drumbeat.lint.engine import (
        lint,  # `drumbeat run` asks kind_of first: most commands need neither lint nor convert
    )

    script = read_script(("python", "-c", text), lambda name: "")
    world = script.spawns or next((name for name, pattern in _WORLDS if pattern.search(text)), "")
    review = lint(text, "program.py")
    worst = next((each for kind in (ERROR, WARNING) for each in review.findings if each.severity == kind), None)
    advice = f"line {worst.evidence[0].line}: {worst.title}; {worst.fix}" if worst and worst.evidence else ""
    if not world:
        advice = "not distributed: each rank trains a copy of its own (docs page howto/one-gpu-to-many)"
    return Look(world, advice)


def kind_of(name: str, text: str) -> str:
    """Return the role of a file in a job; '' if it has none."""
    if name.endswith(_SHELL):
        if re.search(r"^#SBATCH\s", text, re.M):
            return BATCH
        return LAUNCH if read_script(("bash", name), lambda _: text).launcher({}) else ""
    own = os.path.basename(name)
    if not name.endswith(".py") or own.startswith(("test_", "conftest", "setup.")):
        return ""
    return PROGRAM if _TRAINS.search(text) and _RUNS.search(text) else ""


def choose(names: Sequence[str], read: Read) -> Tuple[str, str, List[str]]:
    """Return kind and name of the file that a job is made from, and what else could be meant; Problem if there is none,
    or if none of several has a usual name."""
    found: Dict[str, List[str]] = {}
    for name in names:
        if name.endswith((*_SHELL, ".py")):
            found.setdefault(kind_of(name, read(name)), []).append(name)
    for kind in (BATCH, LAUNCH, PROGRAM):
        here = [name for name in found.get(kind, []) if os.sep not in name] or found.get(kind, [])
        usual = [name for known in _USUAL for name in here if os.path.basename(name) == known]
        if len(here) == 1 or usual:
            chosen = (usual or here)[0]
            return kind, chosen, [name for name in here if name != chosen]
        if here:
            shown = ", ".join(map(printable, here[:6])) + (", ..." if len(here) > 6 else "")
            raise Problem(
                f"{len(here)} files could be the job: {shown}", f"name one: drumbeat init {printable(here[0])}"
            )
    notebooks = [name for name in names if name.endswith(_NOTEBOOK) and _TRAINS.search(read(name))]
    if notebooks:
        raise _no_script(notebooks[0])
    raise Problem(
        "nothing here trains: no batch script, no script that starts a launcher, no Python program with a training loop",
        "name the script: drumbeat init SCRIPT; or put its command after --: drumbeat run -- COMMAND",
    )


def _no_script(notebook: str) -> Problem:
    name = printable(notebook)
    return Problem(
        f"{name} trains, but ranks cannot be started from a notebook",
        f"make it a script: jupyter nbconvert --to script {shlex.quote(name)}; or move the training into a function: "
        "docs page api",
    )


def job_of(name: str, names: Sequence[str], read: Read, kind: Optional[str] = None) -> str:
    """Return the job file for a script, with comments. `names`: what lies beside it."""
    if name.endswith(_NOTEBOOK):
        raise _no_script(name)
    text = read(name)
    if not text.strip():
        raise Problem(f"{printable(name)} is empty, or cannot be read as text", "name the script: drumbeat init SCRIPT")
    kind = kind or kind_of(name, text)
    if kind == BATCH:
        from drumbeat.convert.convert import draft_of
        from drumbeat.convert.draft import job_file

        return job_file(draft_of(text, name, None, read), name)
    if kind == LAUNCH:
        inside = read_script(("bash", name), lambda _: text)
        trained, ranks = inside.trained({}), inside.ranks_per_node({})
        what = f"{inside.launcher({})} {trained}".strip()
        notes = [f"# ranks-per-node: {ranks}  # {name} says so, and wins"] if ranks else []
        return _written(name, f"bash {_word(name)}", f"starts {what}", notes, names, read, trained)
    if not name.endswith(".py"):
        raise Problem(
            f"{printable(name)}: starts no training that is known", "write its job file by hand: docs page job"
        )
    look = first_look(text)
    required = list(dict.fromkeys(_REQUIRED.findall(text)))
    notes = [f"# It requires {', '.join(required)}: add them to the command."] if required else []
    if not look.world:
        notes.append(f"ranks-per-node: 1  # {look.advice}")
    elif look.advice:
        notes.append(f"# {look.advice}")
    if look.world == "HF Trainer":
        notes.append('# env: {ACCELERATE_USE_CPU: "true"}  # without GPUs: else each rank trains a copy of its own')
    uv = "uv run " if "uv.lock" in names else ""
    return _written(name, f"{uv}python {_word(name)}", look.world or "one process", notes, names, read)


def _word(name: str) -> str:
    """Return the name as a word of a command, which splits at blanks and fills in variables; Problem if it cannot be one."""
    if not _PLAIN_NAME.fullmatch(name):
        raise Problem(
            f"{printable(name)}: its name has characters that mean something in a command line", "give it another name"
        )
    return f"./{name}" if name.startswith("-") else name


def _written(
    name: str, command: str, what: str, notes: Sequence[str], names: Sequence[str], read: Read, trained: str = ""
) -> str:
    stem = re.sub(r"[^A-Za-z0-9-]+", "-", os.path.splitext(os.path.basename(trained or name))[0]).strip("-") or "job"
    lines = [
        f"# From {printable(name)} by drumbeat init: {printable(what)}. docs page job lists every key.",
        f"name: {stem}",
    ]
    lines += [f"command: {command}", *map(printable, notes), *_environment(names, read), "nodes: 1"]
    if not any("ranks-per-node" in note for note in notes):
        lines.append("# ranks-per-node: 4  # default: one per GPU; without GPUs, one")
    lines += [
        "# gpus: 4  # per node; a scheduler gives none unless this or the site profile names a number",
        "# time: 1h  # most schedulers want one",
        "# restarts: 2  # if it resumes from its checkpoint: docs page howto/resume",
    ]
    return "\n".join(lines) + "\n"


def _environment(names: Sequence[str], read: Read) -> List[str]:
    """Return how the job gets its packages, as far as the folder shows it."""
    active = next((name for name in names if name.endswith("bin/activate")), "")
    if active:
        return [f"setup: source {_word(active)}"]
    conda = next((name for name in ("environment.yml", "environment.yaml") if name in names), "")
    if conda:
        named = re.search(r"^name:\s*(\S+)", read(conda), re.M)
        return [
            f"# {conda}: conda activate {named[1] if named else 'NAME'} goes into setup (docs page howto/environments)"
        ]
    if "requirements.txt" in names and "uv.lock" not in names:
        return ["# requirements.txt: install it where the job runs, and name that environment in setup"]
    return []

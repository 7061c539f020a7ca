"""Only a backend knows its scheduler. Every file of src/ that names one is listed here, with the reason why it may."""

import functools
import re
from pathlib import Path

SRC = Path(__file__).parent.parent.parent / "src" / "drumbeat"

WORDS = re.compile(
    r"slurm|sbatch|\bsrun\b|scontrol|squeue|scancel|sacct|salloc|run:?ai\b|runai_|kubernetes|kubectl|kubepods|\bPET_",
    re.IGNORECASE,
)

# A folder (ending in /) or a file.
ALLOWED = {
    "backends/slurm/": "the backend itself",
    "backends/kubernetes/": "the backend itself",
    "backends/runai/": "the backend itself",
    "backends/__init__.py": "the table of built-in backends",
    "machine/identity.py": "one reader per scheduler: its own variables",
    "machine/gather.py": "which variables of a job are worth keeping among the facts; a pod is a kind of container",
    "base/ranges.py": "host lists as a scheduler writes them",
    "logs/": "logs that a scheduler had a part in",
    "lint/": "scripts that people wrote for a scheduler",
    "convert/": "job scripts that people wrote for a scheduler",
    "commands/": "launch commands and scripts that people write, srun among them",
    "cli/convert.py": "its help",
    "plan/binding.py": "reads SLURM_CPU_BIND, which a user may have exported, and writes the form that srun takes",
    "plan/placement.py": "the fix in the words of the scheduler; who bound the tasks",
    "plan/show.py": "shows that form",
    "plan/exported.py": "questions what a scheduler or user exported",
    "jobfile/site.py": "the example of the key `backend`, and a link to docs/slurm.md",
}


@functools.lru_cache(maxsize=1)
def naming():
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        match = WORDS.search(path.read_text())
        if match:
            found[path.relative_to(SRC).as_posix()] = match.group()
    return found


def test_only_these_files_name_a_scheduler():
    others = {
        name: word
        for name, word in naming().items()
        if not any(name == allowed or (allowed.endswith("/") and name.startswith(allowed)) for allowed in ALLOWED)
    }
    assert others == {}, "a scheduler's name outside of its backend: ask the backend instead (backends/contract.py)"


def test_the_list_is_no_longer_than_it_must_be():
    unused = [allowed for allowed in ALLOWED if not any(name.startswith(allowed) for name in naming())]
    assert unused == []


def test_rooms_on_the_line_name_none():
    rooms = (
        "agent/",
        "bundle/",
        "containers/",
        "desk/",
        "runfolder/",
        "tune/",
        "verify/",
        "train/",
        "watch/",
        "report/",
        "metrics/",
        "inrank/",
        "causes/",
        "api/",
        "jobfile/job",
        "base/order.py",
        "base/processes.py",
    )
    assert [name for name in naming() if name.startswith(rooms)] == []

"""A batch script under bash on an emulated cluster, and the job file that convert makes of it as drumbeat starts it: what each
of them starts is recorded and compared.

`python -m tests.convert.differential FOLDER...` judges all scripts in folders, `--generate 200 --seed 1` scripts of a grammar.
They run in a namespace of their own (emulated/sandbox.sh), as nobody, with stubs and coreutils alone on PATH.
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import io
import posixpath
import random
import re
import shlex
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.commands.launch import find_launcher
from drumbeat.convert.convert import draft_of
from drumbeat.convert.draft import Draft, job_file
from drumbeat.convert.launch import OURS
from drumbeat.jobfile.check import expand
from drumbeat.jobfile.job import Job, job_from_text
from drumbeat.plan.argv import after_setup, choose_launcher, rank_argv

EMULATED = Path(__file__).parent / "emulated"
OUTSIDE = {"PATH": "/stubs:/tools", "HOME": "/home", "USER": "me"}
# Programs whose starts change nothing.
_LOOK = {
    "whoami",
    "printenv",
    "bc",
    "awk",
    "jq",
    "module",
    "ml",
    "conda",
    "mamba",
    "which",
    "free",
    "ip",
    "squeue",
    "sinfo",
    "sacct",
    "scontrol",
}
_NOISE = re.compile(
    r"SLURM\w*|STUB_\w+|DRUMBEAT_\w+|_drumbeat_\w+|AS_TEXT_\w+|APPTAINER\w*|SINGULARITY\w*|BASH_FUNC_\S*|_|PWD|OLDPWD|SHLVL|SEEN|HOSTNAME|"
    r"FAILING|MASTER_\w+|ARG_\d+"
)
_MOST_RANKS = 64
_EACH_TIME = re.compile(
    r"(?<=/tmp/tmp\.)\w+|(?<=/cases/)[^/\x1f]+|20\d{6}[-_]?\d{4,6}|20\d\d[-_]\d\d[-_]\d\d[-_T]\d\d[-_:]?\d\d[-_:]?\d\d"
)
_HANDLE = 'command_not_found_handle() { STUB_AS=$1 /stubs/stub "${@:2}"; }; export -f command_not_found_handle'
_LONG = {
    "-N": "nodes",
    "-n": "ntasks",
    "-c": "cpus-per-task",
    "-J": "job-name",
    "-D": "chdir",
    "-p": "partition",
    "-A": "account",
}


class Start(NamedTuple):
    """One start of a program."""

    name: str
    argv: Tuple[str, ...]
    cwd: str
    node: str
    image: str
    world: str
    background: bool
    phase: str  # of a job file: start, rank or end
    environment: Tuple[Tuple[str, str], ...]

    def __str__(self) -> str:
        behind = " &" if self.background else ""
        return f"{self.name} {' '.join(map(shlex.quote, self.argv))}{behind} in {self.cwd} on node {self.node}"


class Seen(NamedTuple):
    """All that a script or a job file did."""

    starts: List[Start]
    code: int
    output: str

    @property
    def ended_badly(self) -> bool:
        return "\non-end ends with" in self.output

    def of(self, *phases: str) -> List[Start]:
        return [each for each in self.starts if each.phase in phases and not _only_looks(each)]


def _only_looks(each: Start) -> bool:
    return each.name in _LOOK or each.name.startswith("python") and "-c" in each.argv[:2]


class Verdict(NamedTuple):
    differences: List[str]
    silent: List[str]  # differences that no note of the draft is about
    asked: bool  # convert asks about something, or lists what differs
    refused: str
    job: str


# The two sides as texts that bash runs inside the sandbox.


def batch_variables(text: str) -> Dict[str, str]:
    """Return what Slurm sets in a batch script, by its own rules."""
    given: Dict[str, str] = {}
    for words in re.findall(r"^#SBATCH[ \t]+(.*)", text, re.M):
        found = re.match(r"--([\w-]+)(?:[= ]\s*(\S+))?|(-\w)\s*(\S*)", words)
        if found:
            given[found[1] or _LONG.get(found[3], found[3])] = (found[2] if found[1] else found[4]) or ""
    nodes, total, each = given.get("nodes", ""), given.get("ntasks", ""), given.get("ntasks-per-node", "")
    nodes = (
        nodes.split("-")[0]
        if nodes.split("-")[0].isdigit()
        else (str(-(-int(total) // int(each or 64))) if total.isdigit() else "1")
    )  # of 64 cores each
    total = total or (str(int(nodes) * int(each)) if each else "")
    gpus = re.findall(r"#SBATCH\s+(?:--gpus-per-node|--gres)[= ](?:gpu:)?(?:[a-zA-Z]\w*:)?(\d+)", text)
    found_all = {
        "SLURM_JOB_ID": "77", "SLURM_JOBID": "77", "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": total,
        "SLURM_NPROCS": total, "SLURM_NTASKS_PER_NODE": each, "SLURM_CPUS_PER_TASK": given.get("cpus-per-task", ""),
        "SLURM_JOB_NAME": given.get("job-name", "x"), "SLURM_JOB_NODELIST": f"node[0-{int(nodes) - 1}]" if nodes != "1" else "node0",
        "SLURM_SUBMIT_DIR": "/submit", "SLURM_GPUS_ON_NODE": gpus[-1] if gpus else "", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0", "SLURMD_NODENAME": "node0", "HOSTNAME": "node0", "SLURM_JOB_ACCOUNT": given.get("account", ""),
        "SLURM_JOB_PARTITION": given.get("partition", ""), "SLURM_GPUS_PER_NODE": given.get("gpus-per-node", ""),
    }  # fmt: skip
    return {name: value for name, value in found_all.items() if value}


def _exports(environ: Mapping[str, str]) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environ.items())


def of_script(text: str, arguments: Sequence[str], outside: Mapping[str, str], failing: str, case: str) -> str:
    chdir = re.search(r"^#SBATCH\s+(?:--chdir[= ]|-D\s*)(\S+)", text, re.M)
    return "\n".join(
        [
            _exports({**OUTSIDE, **outside, **batch_variables(text), "FAILING": failing, "SEEN": f"/seen/{case}"}),
            f"cd {shlex.quote(chdir[1] if chdir else '/submit')} 2> /dev/null || cd /submit",
            _HANDLE,
            f"exec bash /cases/{case}/slurm_script {' '.join(map(shlex.quote, arguments))}",
        ]
    )


def of_job(job: Job, outside: Mapping[str, str], failing: str, case: str) -> str:
    """Return what drumbeat does with a job file: modules and on-start once, then each rank, then on-end."""
    here = {**OUTSIDE, **outside, "PWD": "/submit"}
    command = tuple(expand(word, here, "command") for word in job.command)
    workdir = posixpath.join("/submit", expand(job.workdir or "", here, "workdir"))
    nodes = int(job.nodes or 1)
    launcher = choose_launcher(command, job.launcher)[0]
    order = Order("r", "r", 0.0, command, nodes, 1, launcher, "", workdir, "/r", "s", "slurm", setup=job.setup)
    own = find_launcher(command)
    each = 1 if launcher == "once" and not own else job.ranks_per_node or job.gpus or 1
    if nodes * each > _MOST_RANKS:
        raise Problem(f"{nodes * each} ranks", "too many to emulate")
    argv = after_setup(order, rank_argv(own, "python") if own else command)
    cpus = str(job.cpus // (job.ranks_per_node or 1)) if job.cpus else ""
    batch = {
        "SLURM_JOB_ID": "77", "SLURM_JOBID": "77", "SLURM_NNODES": str(nodes), "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(nodes), "SLURM_NTASKS_PER_NODE": "1", "SLURM_SUBMIT_DIR": "/submit", "SLURM_JOB_NAME": job.name or "r",
        "SLURM_JOB_NODELIST": f"node[0-{nodes - 1}]" if nodes > 1 else "node0", "HOSTNAME": "node0", "SLURMD_NODENAME": "node0",
        "SLURM_GPUS_ON_NODE": str(job.gpus or ""), "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        "SLURM_JOB_ACCOUNT": job.account or "", "SLURM_JOB_PARTITION": job.partition or "",
    }  # fmt: skip
    lines = [
        _exports({**OUTSIDE, **outside, **batch, "FAILING": failing, "SEEN": f"/seen/{case}", "STUB_PHASE": "start"}),
        _HANDLE,
        f"cd {shlex.quote(workdir)} 2> /dev/null || {{ echo no workdir {shlex.quote(workdir)}; exit 78; }}",
        *(
            f"module {each}" if each in ("purge", "reset") else f"module load {shlex.quote(each)}"
            for each in job.modules
        ),
        f"on_start={shlex.quote(job.on_start)}",
        'left=$(mktemp); bash -c "set -e; $on_start"$\'\\nexport -p >&9\' "$0" 9> "$left"; code=$?',
        '[ -s "$left" ] || { echo on-start ended the job; exit $code; }',
        f'. "$left"; cd {shlex.quote(workdir)}; code=0',
        "unset SLURM_CPUS_PER_TASK SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE",
        *(f'{each}() {{ /stubs/{each} "$@"; }}; export -f {each}' for each in ("torchrun", "accelerate", "deepspeed")),
    ]
    given = {name: expand(value, here, name) for name, value in job.env.items() if value is not None}
    for rank in range(nodes * each):
        tasks = {
            "STUB_PHASE": "rank", "STUB_IMAGE": expand(job.container, here, "container") if job.container else "",
            "STUB_WORLD": str(nodes * each), "STUB_STAND_IN": "1", "RANK": str(rank), "WORLD_SIZE": str(nodes * each),
            "LOCAL_RANK": str(rank % each), "NODE_RANK": str(rank // each), "SLURM_NODEID": str(rank // each), "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % each), "SLURMD_NODENAME": f"node{rank // each}", "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
            "SLURM_NTASKS": str(nodes * each), **given, **({"SLURM_CPUS_PER_TASK": cpus} if cpus else {}),
        }  # fmt: skip
        image = "mkdir -p /image/code; " if job.container else ""
        lines.append(f"({image}{_exports(tasks)}\n/stubs/run {shlex.join(argv)}) || code=$?")
    if job.on_end:
        filled = [re.sub(r"\{(run_id|outcome|exit_code|seconds|folder)\}", "x", word) for word in job.on_end]
        outcome = "DRUMBEAT_OUTCOME=$([ $code = 0 ] && echo finished || echo failed)"
        words = shlex.join(expand(word, here, "on-end") for word in filled)
        lines.append(
            f"(export STUB_PHASE=end DRUMBEAT_EXIT_CODE=$code {outcome}\n{words}) || printf '\\non-end ends with %d\\n' $?"
        )
    return "\n".join([*lines, "exit $code"])


# Running many cases in one sandbox.


def run(cases: Mapping[str, Mapping[str, str]], programs: Sequence[str] = ()) -> Dict[str, Seen]:
    """Run cases: name -> path in its folder -> text. `start` is what bash runs; `files/` is copied to where it begins."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        texts = {"stubs/stub": (EMULATED / "stub.sh").read_text(), "stubs/names": " ".join(programs)}
        texts |= {f"cases/{case}/{path}": text for case, files in cases.items() for path, text in files.items()}
        for path, text in texts.items():
            info, data = tarfile.TarInfo(path), text.encode("utf-8", "surrogateescape")
            info.size, info.mode = len(data), 0o755
            archive.addfile(info, io.BytesIO(data))
    command = [
        "unshare",
        "--mount",
        "--net",
        "--pid",
        "--ipc",
        "--uts",
        "--fork",
        "--kill-child",
        str(EMULATED / "sandbox.sh"),
    ]
    done = subprocess.run(
        command, input=packed.getvalue(), stdout=subprocess.PIPE, check=True, timeout=60 + 12 * len(cases)
    )
    seen: Dict[str, Dict[str, bytes]] = {case: {} for case in cases}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            if member.isfile():
                case, _, name = member.name.lstrip("./").partition("/")
                seen[case][name] = archive.extractfile(member).read()  # type: ignore[union-attr]
    return {case: _seen(files) for case, files in seen.items()}


def _seen(files: Mapping[str, bytes]) -> Seen:
    starts = []
    for name in sorted(each for each in files if each not in ("out", "code")):
        fields = _EACH_TIME.sub("each-time", files[name].decode("utf-8", "replace")).split("\x1f")
        if len(fields) < 8:
            continue
        program, node, image, world, background, cwd, phase, count = fields[:8]
        words, pairs = fields[8 : 8 + int(count)], fields[8 + int(count) : -1]
        environment = sorted(each.partition("=")[::2] for each in pairs)
        kept = tuple((name, value) for name, value in environment if not _NOISE.fullmatch(name) and name not in OURS)
        kept = tuple((key, value.replace("./pt/bin:", "")) for key, value in kept)  # where bash looks for a launcher
        starts.append(Start(program, tuple(words), cwd, node, image, world, background == "yes", phase, kept))
    return Seen(starts, int(files["code"]), files["out"].decode("utf-8", "replace"))


# The comparison.


def compare(script: Seen, job: Seen) -> Iterator[str]:
    """Yield each difference in one line."""
    there, ranks = script.of(""), job.of("rank")
    missing = any(each.code in (126, 127) and "No such file or directory" in each.output for each in (script, job))
    if missing or re.search(r"no workdir /(?!image)|setup failed|on-start ended the job", job.output):
        return  # a program that is not here, or the job fails and says why; the script goes on where it begins
    alike = {(each.name, each.argv) for each in ranks}
    steps = Counter((each.name, each.argv) for each in job.of("start"))  # equal ones that on-start runs before
    trained = []
    for each in there:
        if (each.name, each.argv) in alike:
            steps[each.name, each.argv] -= 1
            trained += [each] if steps[each.name, each.argv] < 0 else []
    if ranks and not trained:
        yield f"trains: {'; '.join(sorted({f'{each}' for each in there})) or 'nothing'} there, {ranks[0]} here"
        return
    for what in ("argv", "node", "world"):
        counts = [Counter(getattr(each, what) for each in some) for some in (trained, ranks)]
        joined = what == "world" and set(counts[0]) == {"1"}  # steps that the script starts one by one
        if counts[0] != counts[1] and not joined:
            yield f"ranks, {what}: {dict(counts[0])} there, {dict(counts[1])} here"
    names = {name for each in (*trained, *ranks) for name, _ in each.environment}
    for what in ("cwd", "image", *sorted(names)):
        values = [
            {dict(each.environment).get(what, "unset") if what in names else getattr(each, what) for each in some}
            for some in (trained, ranks)
        ]
        if ranks and values[0] != values[1]:
            yield f"ranks, {'env ' * (what in names)}{what}: {values[0]} there, {values[1]} here"
    first = next((at for at, each in enumerate(there) if trained and each is trained[0]), len(there))
    ids = set(map(id, trained))
    before, after = ([each for each in some if id(each) not in ids] for some in (there[:first], there[first:]))
    started, ended = job.of("start"), job.of("end")
    sides = (
        ("before", *([str(each) for each in some if not each.background] for some in (before, started))),
        ("after", *([str(each) for each in some if not each.background] for some in (after, ended))),
        # beside all else, so in no order
        (
            "behind",
            *(sorted(str(each) for each in some if each.background) for some in (before + after, started + ended)),
        ),
    )
    for where, one, other in sides:
        if one != other:
            yield f"{where}: {one} there, {other} here"
    if job.ended_badly and not script.code:
        yield "after: on-end fails"
    if bool(script.code) != bool(job.code):
        yield f"exit code: {script.code} there, {job.code} here"


class Case(NamedTuple):
    """A script with what it finds when it starts."""

    text: str
    arguments: Tuple[str, ...] = ()
    files: Tuple[Tuple[str, str], ...] = ()
    failing: Tuple[str, ...] = ("",)  # programs that fail, one run for each


def judge(cases: Mapping[str, Case], programs: Sequence[str] = ()) -> Dict[str, Verdict]:
    """Convert scripts, run both sides of each, and compare them."""
    verdicts: Dict[str, Verdict] = {}
    drafts: Dict[str, Draft] = {}
    runs: Dict[str, Dict[str, str]] = {}
    for name, case in cases.items():
        contents = dict(case.files)
        try:
            draft = draft_of(
                case.text, name, case.arguments or None, lambda path, found=contents: found.get(path.lstrip("./"), "")
            )
            text = job_file(draft, name)
            job = job_from_text(text)
            outside = {note.text: f"given-{note.text}" for note in draft.to_export if re.fullmatch(r"\w+", note.text)}
            files = {f"files/{path}": content for path, content in case.files}
            for number, failing in enumerate(case.failing):
                one, other = f"{name}.{number}.script", f"{name}.{number}.job"
                given = case.arguments or tuple(
                    f"given-ARG_{place}" for place in range(1, 10) if f"ARG_{place}" in outside
                )
                runs[one] = {
                    **files,
                    "slurm_script": case.text,
                    "start": of_script(case.text, given, outside, failing, one),
                }
                runs[other] = {**files, "start": of_job(job, outside, failing, other)}
        except Problem as problem:
            verdicts[name] = Verdict([], [], True, f"{problem.what}: {problem.fix}", "")
            continue
        except Exception as error:
            crash = f"convert crashes: {error!r}"
            verdicts[name] = Verdict([crash], [crash], False, "", "")
            continue
        drafts[name] = draft
    scripts = {name: files for name, files in runs.items() if name.endswith(".script")}
    seen = run(scripts, programs) if runs else {}
    called = {each.name for some in seen.values() for each in some.starts if re.fullmatch(r"[\w.+-]+", each.name)}
    seen |= (
        run({name: runs[name] for name in runs.keys() - scripts.keys()}, sorted({*programs, *called})) if runs else {}
    )
    for name, draft in drafts.items():
        found: List[str] = []
        for number, failing in enumerate(cases[name].failing):
            for each in compare(seen[f"{name}.{number}.script"], seen[f"{name}.{number}.job"]):
                found.append(f"{each}{f' where {failing} fails' if failing else ''}")
        text = job_file(draft, name)
        if found:
            text += "".join(f"# {line}\n" for line in seen[f"{name}.0.job"].output.split("\n")[-6:])
        silent = [each for each in found if not _said(each, draft)]
        verdicts[name] = Verdict(found, silent, bool(draft.to_check or draft.differences), "", text)
    return verdicts


def _said(difference: str, draft: Draft) -> bool:
    """Return true if a note of the draft is about a difference, by the words of both."""
    notes = [f"{each.text} {each.why}" for each in (*draft.to_check, *draft.to_export)]
    notes += [" ".join(each) for each in draft.differences]
    if difference.startswith("exit code") and any("exit code is" in each.why for each in draft.left_out):
        return True
    if difference.startswith(("exit code", "trains", "ranks, argv", "ranks, world", "ranks, node")):
        return bool(notes)
    if difference.startswith("ranks, "):
        name = difference[7:].partition(":")[0].rpartition(" ")[2]
        return any(re.search(rf"\b{name}\b|working directory|--export=", each) for each in notes)
    changed = set(re.findall(r"'([^']+) in \S+ on node \d+'", difference))
    words = changed | {word for each in changed for word in each.split() if re.search(r"\w{3}", word)}
    return any(word in each for word in words for each in notes)


# Scripts of a grammar: what public scripts are made of, in few words.

PROGRAMS = ("prep", "server", "monitor", "after", "pw.x")  # names of the grammar's own programs
FILES = (
    ("env.sh", "export FROM_FILE=sourced\n"),
    ("fails.sh", "HALF=1\nreturn 1\n"),
    ("reads.sh", "prep of-file ${A:-none} $B\n"),
    ("config", "mode: fast\n"),
)
_BEFORE = (
    "set -e", "set -eo pipefail", "set -u", "set +e", "prep one", "prep two || exit 1", "prep three || true", "prep four && B=done",
    "A=1", "B=$A-x", "export A=2", "export C=${C:-c}", ': "${D:=d}"', "B=$(echo b)", "export E=$SLURM_NNODES",
    "source ./env.sh", "source ./missing.sh", "source ./fails.sh", "[ -f missing.sh ] && source ./missing.sh", "source ./reads.sh",
    "source $HOME/.none || true", "mkdir -p work/deep", "cd work", "mkdir -p work && cd work", 'cd "$NOWHERE"', "cd missing",
    "cd missing || exit 1", "cd /tmp", "(cd /tmp; prep sub)", "(exit 1)", "( prep grouped; A=lost )", "{ prep grouped; A=kept; }",
    "if [ -f config ]; then A=file; fi", "if grep -q fast config; then prep fast; else prep slow; fi", "if [ $SLURM_NNODES -gt 1 ]; then A=many; fi",
    "if ! [ -f config ]; then exit 1; fi", "if [ -z \"$A\" ]; then exit 1; fi", "case $A in 1) B=one ;; *) B=other ;; esac",
    "for i in 1 2; do prep $i; done", "for i in 1 2; do prep $i & done; wait", "for ((i = 0; i < 2; i++)); do B=$B$i; done",
    "while read -r line; do prep $line; done < config", "f() { prep in-$1; }", "f x", "f y &", "g() { A=$1; prep \"$@\"; }", "g 1 2", "g 3 | cat",
    "monitor &", "monitor > log 2>&1 &", "(prep later; monitor) &", "{ prep later; } &", "server --port 1 & SERVER=$!", "wait", "wait $SERVER",
    "LIST=(one 'two three')", "LIST+=($A)", 'prep "${LIST[@]}"', "cat > made.txt <<END\n$A\nEND", "prep <<< $A", "read -r X < made.txt",
    "NODES=($(scontrol show hostnames $SLURM_JOB_NODELIST))", "HEAD=${NODES[0]}", "export MASTER_ADDR=$HEAD", "N=$((SLURM_NNODES - 1))",
    "trap 'after trapped' EXIT", "trap 'prep err' ERR", "shift", "set -- a b", "while getopts 'a:' o; do case $o in a) A=$OPTARG ;; esac; done",
    "srun -N1 -n1 prep on-one", "srun prep on-all", "srun --ntasks-per-node=1 prep on-each", "srun -N1 -n1 prep behind &", "mpirun -np 2 prep mpi",
    "prep piped | tee log", "prep a; prep b", "prep a && prep b", "false", "! prep inverted", "true && prep then || prep else",
    "export PATH=$PWD/bin:$PATH", "export PYTHONPATH=$PWD:$PYTHONPATH", "unset A", "export -n A", "eval \"A=evaluated\"", "prep $(prep inner)",
    "umask 022", "ulimit -n 64", "shopt -s nullglob", "IFS=,", "until prep ready; do break; done", "[ -n \"$A\" ] && export F=$A", "local x=1 2> /dev/null",
    "if prep asked; then A=yes; else A=no; fi", "prep x || { prep y; exit 2; }", "for i in 1 2; do f $i & done", "declare -x G=g", "readonly H=h", "exec 3> log",
)  # fmt: skip
_LAUNCHES = (
    "srun python train.py --a $A", "srun python train.py --a $A", 'srun python train.py "$B" ${C:-none}', "srun -u python -u train.py", "python train.py --a $A",
    "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=2 --rdzv-endpoint=$(hostname):1 train.py --a $A", "torchrun --standalone --nproc-per-node 2 train.py",
    "srun ./pt/bin/torchrun --nnodes=2 --nproc_per_node=1 --rdzv_endpoint=$HEAD train.py", "./pt/bin/python train.py",
    "exec srun python train.py", 'srun bash -c "cd work; python train.py --a $A"', "srun bash -c 'export R=$SLURM_PROCID; python train.py $A'",
    "srun apptainer exec --nv a.sif python train.py --a $A", 'srun apptainer exec a.sif bash -c "cd /image/code && python train.py"',
    "srun apptainer exec --pwd /image/code a.sif python train.py", 'srun --container-image=a.sqsh bash -c "cd /image/code; python train.py"',
    "mpirun -np $SLURM_NTASKS python train.py", "srun --export=ALL,Z=1 python train.py", "srun --export=A,Z=1 python train.py", "srun -n 1 -N 1 python train.py",
    "run() { srun python train.py --a $1; }\nrun $A", "main() { srun python train.py; after in-main; }\nmain \"$@\"", "(srun python train.py)", "{ srun python train.py; }",
    "if srun python train.py; then after good; else after bad; fi", "srun python train.py || exit 5", "srun python train.py &\nwait", "srun python train.py & wait $!",
    "CMD=\"python train.py --a $A\"\nsrun $CMD", "ARGS=(--a $A --b \"x y\")\nsrun python train.py \"${ARGS[@]}\"", "for s in 1 2; do srun python train.py --seed $s; done",
    "NODES=($(scontrol show hostnames $SLURM_JOB_NODELIST))\nstep() { srun -N1 -n1 -w ${NODES[$1]} python train.py --rank $1; }\nfor ((i = 1; i < SLURM_NNODES; i++)); do step $i & done\nstep 0\nwait",
    "NODES=($(scontrol show hostnames))\nfor ((i = 0; i < SLURM_NNODES; i++)); do srun -N1 -n1 -w ${NODES[$i]} python train.py --rank $i & done\nwait", "srun pw.x -in a.in", "time srun python train.py",
    "srun python train.py 2>&1 | tee log", "timeout 60 srun python train.py", "srun -n $((SLURM_NNODES * 2)) python train.py --n $SLURM_NNODES",
)  # fmt: skip
_AFTER = (
    "after one", "after two || true", "kill $SERVER", "kill %1", "wait", "exit 0", "exit $?", "code=$?\nafter $code\nexit $code", "if [ $? -ne 0 ]; then exit 7; fi",
    "after a; after b", "after sub &\nwait", "echo done", "rm -rf work", "cp made.txt kept.txt", "[ -f config ] && after found",
)  # fmt: skip
_HEADS = (
    "--nodes=2\n--ntasks-per-node=1", "--nodes=2\n--ntasks-per-node=1", "--nodes=1\n--ntasks-per-node=2", "--nodes=2\n--ntasks-per-node=2",
    "--nodes=1", "--nodes=2", "-N 2\n-n 2", "--ntasks=2\n--ntasks-per-node=1", "--nodes=2\n--ntasks-per-node=1\n--cpus-per-task=2",
)  # fmt: skip


def generated(seed: int) -> List[str]:
    """Return a script of the grammar as a list of statements; the first is its head."""
    dice = random.Random(seed)
    head = "#!/bin/bash\n" + "".join(f"#SBATCH {each}\n" for each in dice.choice(_HEADS).split("\n"))
    before = [dice.choice(_BEFORE) for _ in range(dice.randrange(1, 6))]
    after = [dice.choice(_AFTER) for _ in range(dice.choice((0, 0, 1, 2)))]
    return [head.rstrip("\n"), *before, dice.choice(_LAUNCHES), *after]


def case_of(statements: Sequence[str]) -> Case:
    return Case("\n".join([*statements, ""]), (), FILES, ("", "prep", "train.py"))


def smallest(statements: List[str], silent: Verdict) -> Tuple[List[str], Verdict]:
    """Leave out statements of a script for as long as it still changes silently."""
    while True:
        shorter = [statements[:at] + statements[at + 1 :] for at in range(1, len(statements))]
        found = judge({str(at): case_of(each) for at, each in enumerate(shorter)}, PROGRAMS) if shorter else {}
        kind = silent.silent[0].partition(":")[0]
        wrong = [
            (shorter[int(name)], each)
            for name, each in found.items()
            if any(one.startswith(kind) for one in each.silent)
        ]
        if not wrong:
            return statements, silent
        statements, silent = wrong[0]


# The command line.


def _on_few_nodes(text: str) -> str:
    """Ask for 2 nodes where a script asks for more."""
    return re.sub(r"(#SBATCH\s+(?:--nodes[= ]|-N\s*))(?:[3-9]\b|\d{2,})", r"\g<1>2", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--generate", type=int, default=0, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--shrink", action="store_true", help="leave out statements of generated scripts that change nothing"
    )
    parser.add_argument("--show", action="store_true", help="print the scripts and job files of silent changes")
    options = parser.parse_args()
    made = {f"g{seed}": generated(seed) for seed in range(options.seed, options.seed + options.generate)}
    cases = {name: case_of(statements) for name, statements in made.items()}
    for folder in options.folders:
        paths = [each for each in sorted(folder.rglob("*")) if each.is_file()] if folder.is_dir() else [folder]
        cases |= {
            re.sub(r"[^\w.-]", "_", each.name): Case(_on_few_nodes(each.read_text("utf-8", "replace")))
            for each in paths
        }
    verdicts: Dict[str, Verdict] = {}
    names = list(cases)
    for start in range(0, len(names), 40):
        verdicts |= judge({name: cases[name] for name in names[start : start + 40]}, PROGRAMS)
    for name, verdict in verdicts.items():
        if verdict.silent:
            statements, shown = (
                smallest(made[name], verdict) if options.shrink and name in made else (made.get(name, []), verdict)
            )
            print(f"==== {name}", *(f"  {each[:400]}" for each in shown.silent), sep="\n")
            if options.show:
                print("\n".join(statements) if statements else cases[name].text, shown.job, sep="\n----\n")
    all_of = list(verdicts.values())
    counts = {
        "scripts": len(all_of), "refused": sum(bool(each.refused) for each in all_of),
        "asked": sum(each.asked and not each.refused for each in all_of), "different": sum(bool(each.differences) for each in all_of),
        "silent": sum(bool(each.silent) for each in all_of),
    }  # fmt: skip
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    return int(counts["silent"] > 0)


if __name__ == "__main__":
    sys.exit(main())

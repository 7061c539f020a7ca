"""Stops at random moments, on a real Slurm: of every kind, each checked for its outcome, its words and what it leaves.

    make stops                    100 stops      (STOPS="--count 20 --seed 7" chooses others)
    python -m tests.slurm.stops --first 40 --count 20      those of one part, of the same 100

A stop is given by its number and the seed alone. Results are kept in build/stops-SEED.jsonl: a call that was cut short goes on
where it was, and `--only N` runs one again. Ranks write what happens to them into a journal; it decides what was right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Set

from drumbeat.bundle.build import cached_bundle
from drumbeat.runfolder.files import replace as write_whole
from tests.bench.cluster import Cluster, why_not
from tests.slurm.conftest import Oar

KILL_WAIT = 8  # seconds, of the test cluster
GRACE = 20  # stop-grace, and the GraceTime of its partitions
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")

RANK = """
import os, signal, sys, time
journal, save, mode = sys.argv[1], float(sys.argv[2]), sys.argv[3]
rank, attempt = os.environ["RANK"], os.environ["DRUMBEAT_ATTEMPT"]

def note(word):
    with open(f"{journal}-{rank}", "a") as file:
        file.write(f"{attempt} {word}\\n")

def told(*_):
    asked.append(1)
    note("told")

asked = []
if mode == "saves":
    signal.signal(signal.SIGTERM, told)
note("begins")
if attempt != "0":
    time.sleep(0.5)
    note("done")
    sys.exit(0)
end = time.monotonic() + 300
while not asked and time.monotonic() < end:
    time.sleep(0.05)
end = time.monotonic() + save
while time.monotonic() < end:
    time.sleep(0.05)
note("saved")
sys.exit(75)
"""


@dataclass(frozen=True)
class Stop:
    number: int
    kind: str
    mode: str  # saves, or plain: a program without a handler
    save: float  # seconds
    moment: float  # seconds after the submission
    second: float  # seconds between two acts
    nodes: int

    def __str__(self) -> str:
        program = f"saves in {self.save:.1f} s" if self.mode == "saves" else "no handler"
        return f"{self.number:3} {self.kind:<16} {program:<15} {self.nodes} node(s), {self.moment:5.1f} s"


# Whether the job comes back by itself.
KINDS = {
    "scancel": False, "cancel": False, "cancel twice": False, "requeue": True, "requeue, cancel": False,
    "requeuehold": True, "held": False, "released": True, "preempted": True, "preempted, grace": True, "time limit": True,
}  # fmt: skip


def stop_of(number: int, seed: int) -> Stop:
    chance = random.Random(f"{seed}-{number}")
    kind = list(KINDS)[number % len(KINDS)]
    mode = chance.choice(["saves", "saves", "plain"])
    save = chance.choice([0.0, 1.0, 3.0, 12.0])  # the last is longer than Slurm waits
    return Stop(number, kind, mode, save, chance.uniform(0.0, 9.0), chance.uniform(0.2, 5.0), chance.choice([1, 2]))


class Wrong(Exception):
    pass


class Lane:
    """Two nodes and the partitions on them, for one stop at a time."""

    def __init__(self, oar: Oar, name: str, nodes: List[str]) -> None:
        self.oar, self.cluster, self.name, self.nodes = oar, oar.cluster, name, nodes
        self.script = oar.ranks(f"stopped_rank_{name}", RANK)  # written once: a rank may be reading it

    def run(self, stop: Stop) -> str:
        """Do it, and return what was seen; Wrong says what is not right."""
        name = f"stop-{stop.number}-{int(time.time())}"
        journal = self.oar.home / f"{name}.journal"
        keys = {"nodes": stop.nodes, "ranks_per_node": 1, "stop_grace": f"{GRACE}s", "partition": self.name}
        if stop.kind == "time limit":
            keys["time"] = "2m"
        elif stop.kind == "preempted":
            keys["partition"] += "-at-once"
        elif stop.kind in ("held", "released"):
            keys["submit_options"] = '["--hold"]'
        job = self.oar.job(name, command=f"python3 {self.script} {journal} {stop.save} {stop.mode}", **keys)
        before = self.temporary()
        number, folder = self.oar.submit(job)
        time.sleep(stop.moment)
        self.act(stop, number)
        shown = self.until(number, ENDED)
        told = {
            path.name.rpartition("-")[2]: path.read_text().splitlines()
            for path in journal.parent.glob(f"{journal.name}-*")
        }
        seen = f"{shown['JobState']}, {shown['Restarts']} restarts, journal {told}"
        try:
            self.check(stop, number, shown, told)
            left = self.nothing_left(before, stop.save > KILL_WAIT - 4)
        except Wrong as wrong:
            raise Wrong(f"{wrong}\n    {seen}\n    {folder}") from None
        return seen + left

    def temporary(self) -> Set[str]:
        """Files in the nodes' own /tmp."""
        return {name for node in self.nodes for name in self.cluster.run(node, ["ls", "-A", "/tmp"]).stdout.split()}

    def act(self, stop: Stop, number: int) -> None:
        out = self.cluster.out
        if stop.kind == "scancel":
            out("scancel", str(number))
        elif stop.kind in ("cancel", "cancel twice", "held"):
            if stop.kind == "held":
                self.expect_word(number, "held by its owner")
            cancels = [self.cancelling(number)]
            if stop.kind == "cancel twice":
                time.sleep(stop.second)
                cancels.append(self.cancelling(number))
            for each in cancels:
                _, err = each.communicate(timeout=200)
                if each.returncode and not ("is not running" in err and len(cancels) > 1):
                    raise Wrong(f"drumbeat cancel ended with {each.returncode}: {err}")
        elif stop.kind in ("requeue", "requeue, cancel", "requeuehold"):
            self.until(number, ("RUNNING",))
            out("scontrol", "requeuehold" if stop.kind == "requeuehold" else "requeue", str(number))
            if stop.kind == "requeue, cancel":
                time.sleep(stop.second)
                done = self.oar("cancel", number)
                if done.returncode:
                    raise Wrong(f"drumbeat cancel ended with {done.returncode}: {done.stderr}")
            elif stop.kind == "requeuehold":
                self.until(number, ("PENDING", "REQUEUE_HOLD"))
                self.expect_word(number, "held")
                out("scontrol", "release", str(number))
        elif stop.kind == "released":
            out("scontrol", "release", str(number))
            self.until(number, ("RUNNING",))
            time.sleep(stop.second)
            out("scontrol", "requeue", str(number))
        elif stop.kind.startswith("preempted"):
            self.until(number, ("RUNNING",))
            urgent = out("sbatch", "--parsable", "-p", f"{self.name}-urgent", f"-N{len(self.nodes)}", "--exclusive",
                         "-o", "/dev/null", "--wrap", "sleep 1").strip()  # fmt: skip
            self.until(int(urgent), ("COMPLETED",))

    def cancelling(self, number: int):
        return self.cluster.start("head", [sys.executable, str(self.oar.pyz), "cancel", str(number)])

    def expect_word(self, number: int, word: str) -> None:
        text = self.oar("status", number).stdout
        if word not in text or "queued" not in text:
            raise Wrong(f"status does not say {word!r}:\n{text}")

    def until(self, number: int, states, seconds: float = 240) -> Dict[str, str]:
        deadline = time.monotonic() + seconds
        while True:
            job = self.cluster.job(number)
            if job["JobState"] in states or (job["JobState"] in ENDED and job["JobState"] != "COMPLETED"):
                return job
            if time.monotonic() > deadline:
                raise Wrong(f"job {number} is {job['JobState']} ({job['Reason']}) after {seconds:g} s, not {states}")
            time.sleep(0.5)

    def check(self, stop: Stop, number: int, shown: Dict[str, str], told: Dict[str, List[str]]) -> None:
        words = self.oar("status", number).stdout
        state = json.loads(self.oar("status", "--json", number).stdout)["status"]["state"]
        asked = [rank for rank, lines in told.items() if "0 told" in lines]
        saved = [rank for rank, lines in told.items() if "0 saved" in lines]
        comes_back = KINDS[stop.kind] or (stop.kind == "time limit" and stop.mode == "saves")
        expected = {"COMPLETED"} if comes_back else {"CANCELLED"}
        if stop.kind == "time limit" and stop.mode == "plain":
            expected, state_wanted = {"TIMEOUT", "FAILED"}, {"failed"}
        else:
            state_wanted = {"finished"} if comes_back else {"cancelled"}
        if shown["JobState"] not in expected:
            raise Wrong(f"Slurm says {shown['JobState']}, not {expected}\n{words}")
        if state not in state_wanted:
            raise Wrong(f"status says {state}, not {state_wanted}\n{words}")
        if any(lines.count("0 told") > 1 for lines in told.values()):
            raise Wrong("a rank was told twice")
        slurm_kills = stop.kind not in ("cancel", "time limit", "held", "preempted, grace")
        cut = bool(asked) and len(saved) < len(asked)
        if cut and not (slurm_kills and stop.save > KILL_WAIT - 4) and stop.kind != "cancel twice":
            raise Wrong(f"a save was cut: {told}")
        if cut and not any(
            each in words
            for each in ("is cut", "had to be killed", "may be missing or incomplete", "not saved by then is lost")
        ):
            raise Wrong(f"a save was cut, and status does not say so\n{words}")

    def nothing_left(self, before: Set[str], killed: bool) -> str:
        """Nodes are idle again, without processes and files. `killed`: Slurm may have killed all processes at once; then the
        next start on the node removes the copy of drumbeat.pyz that they used."""
        deadline = time.monotonic() + 60
        while True:
            left = {node: self.cluster.processes(node) for node in self.nodes}
            states = {self.cluster.out("sinfo", "-h", "-n", node, "-o", "%T").split()[0] for node in self.nodes}
            files = self.temporary() - before
            copies = killed and all(name.startswith("drumbeat-node-") for name in files)
            if not any(left.values()) and states == {"idle"} and (not files or copies):
                return f", a copy of drumbeat.pyz left: {sorted(files)}" if files else ""
            if time.monotonic() > deadline:
                raise Wrong(f"left behind: {left}, nodes {states}, files {files}")
            time.sleep(0.5)


def kill_as_cgroups(base: str, over: threading.Event) -> None:
    """What cgroups do on a real cluster, and groups of processes here do not: when the tasks of a step are gone, so is all that
    they have started. That is how Slurm's kill ends the agents and a save."""
    while not over.wait(0.5):
        keepers, parents, found = {}, set(), []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                environ = (place / "environ").read_bytes()
                if f"SLURM_CONF={base}/etc/slurm.conf".encode() not in environ:
                    continue
                words = dict(each.partition(b"=")[::2] for each in environ.split(b"\0"))
                step = re.match(rb"slurmstepd: \[(\d+)\.(\d+)\]", (place / "cmdline").read_bytes())
                node = os.readlink(place / "ns/pid")
                parents.add(int((place / "stat").read_text().rpartition(")")[2].split()[1]))
            except OSError:
                continue
            if step:
                keepers[(node, *step.groups())] = int(place.name)
            elif b"SLURM_PROCID" in words:
                found.append(((node, words.get(b"SLURM_JOB_ID"), words.get(b"SLURM_STEP_ID")), int(place.name)))
        for key, pid in found:
            if key in keepers and keepers[key] not in parents:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def run_all(stops: List[Stop], lanes: List[Lane], keep: Callable[[Stop, str, str], None]) -> None:
    todo, lock = list(stops), threading.Lock()

    def work(lane: Lane) -> None:
        while True:
            with lock:
                if not todo:
                    return
                stop = todo.pop(0)
            begin = time.monotonic()
            try:
                seen, wrong = lane.run(stop), ""
            except (Wrong, AssertionError) as error:
                seen, wrong = "", str(error)
            with lock:
                keep(stop, seen, wrong)
                print(
                    f"{stop}  {'WRONG: ' + wrong if wrong else 'right'}  ({time.monotonic() - begin:.0f} s)", flush=True
                )
            if wrong:
                lane.cluster.run("head", ["scancel", "-p", f"{lane.name},{lane.name}-at-once,{lane.name}-urgent"])

    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=3)
    args = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    numbers = args.only or list(range(args.first, args.first + args.count))
    out = Path("build") / f"stops-{args.seed}.jsonl"
    out.parent.mkdir(exist_ok=True)
    rows = {row["number"]: row for row in map(json.loads, out.read_text().splitlines())} if out.exists() else {}
    stops = [stop_of(number, args.seed) for number in numbers if number in args.only or number not in rows]

    def keep(stop: Stop, seen: str, wrong: str) -> None:
        rows[stop.number] = {"number": stop.number, "stop": str(stop), "kind": stop.kind, "seen": seen, "wrong": wrong}
        write_whole(str(out), "".join(json.dumps(row) + "\n" for _, row in sorted(rows.items())))

    names = [f"lane{number}" for number in range(args.lanes)]
    pairs = {name: {f"{name}{end}": f"{10 * (number + 1) + place}" for place, end in enumerate("ab")}
             for number, name in enumerate(names)}  # fmt: skip
    parts = {f"{name}{more}": pairs[name] for name in names for more in ("", "-at-once", "-urgent")}
    base = tempfile.mkdtemp(prefix="drumbeat-stops-", dir="/var/tmp")
    os.chmod(base, 0o755)
    cluster = Cluster(base, {node: last for pair in pairs.values() for node, last in pair.items()}, partitions=parts)
    over = threading.Event()
    try:
        cluster.up()
        oar = Oar(cluster, cached_bundle(dict(os.environ)))
        half = len(stops) // 2
        lanes = [Lane(oar, name, list(pairs[name])) for name in names]
        threading.Thread(target=kill_as_cgroups, args=(base, over), daemon=True).start()
        run_all(stops[:half], lanes, keep)
        # Slurm's grace begins with the job's own signal to its script, or with TERM to all of its processes
        path = f"{base}/etc/slurm.conf"
        write_whole(path, Path(path).read_text().replace("SlurmctldParameters=preempt_send_user_signal", ""))
        cluster.out("scontrol", "reconfigure")
        run_all(stops[half:], lanes, keep)
    finally:
        over.set()
        cluster.down()
        if all(not rows[number]["wrong"] for number in numbers if number in rows):
            shutil.rmtree(base, ignore_errors=True)
        else:
            print(f"kept: {base}")
    chosen = [rows[number] for number in numbers if number in rows]
    right = Counter(row["kind"] for row in chosen if not row["wrong"])
    for kind, count in Counter(row["kind"] for row in chosen).items():
        print(f"{kind:<18} {right[kind]} of {count} right")
    print(f"{sum(right.values())} of {len(chosen)} stops right (seed {args.seed})")
    return 0 if sum(right.values()) == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())

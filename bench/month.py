"""A simulated month: published failure rates against the real `decide`, on a false clock, and against plain requeue.

    python bench/month.py                    Llama 3's 54 days on 16,384 GPUs
    python bench/month.py --system opt       OPT-175B's two months on 992 GPUs
    python bench/month.py --between 1200     the same kinds of failures, one every 20 minutes, with snapshots in memory

Each interruption has a cause by its published count, a node, and a moment. *drumbeat* hands the finding to `decide` and does
what it says: restart in place, a spare for the bad node, or the queue without it. *Plain requeue* is what a batch script with
`--requeue` does: every interruption goes through the queue, and a node with a bad GPU comes back until an operator drains it.

How long it takes to notice a fault and to restart in place is read from what make faults measured (measured/comeback.md and
measured/reliability.md); with `--between`, the start and the cost of a snapshot from what bench/gpu_comeback.py measured.
Steps that are made again count as lost. Everything that belongs to a large model or to a site is an assumption, is the same
for both policies, and can be changed by an option.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from drumbeat.agent.lead.decide import Requeue, Restart, decide
from drumbeat.agent.lead.model import FAILED, Member, Outcome
from drumbeat.findings.model import ERROR, Finding
from drumbeat.predict.forecast import goodput

HOUR, DAY = 3600.0, 86400.0
MEASURED = Path(__file__).parent.parent / "measured"
PAGES = ("comeback.md", "reliability.md")
ON_GPU = "3b on one H200, a rank is killed: from a snapshot"


@dataclass(frozen=True)
class Kind:
    """One line of a published table of causes."""

    name: str
    count: int
    code: str  # of the finding that drumbeat makes of it
    sign: str  # crash, lost, hang: how it shows
    breaks: bool = False  # the node stays bad until it is repaired
    drained: bool = False  # the scheduler sees it too, and takes the node out by itself


@dataclass(frozen=True)
class System:
    name: str
    source: str
    nodes: int
    days: float
    kinds: Tuple[Kind, ...]
    same_bug: int  # bugs that come back at the same step until somebody fixes them

    @property
    def interruptions(self) -> int:
        return sum(kind.count for kind in self.kinds)


LLAMA3 = System(
    "llama3",
    "The Llama 3 Herd of Models, table 5 and section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 H100",
    2048,
    54,
    (
        Kind("faulty GPU", 148, "gpu-lost", "crash", breaks=True),
        Kind("GPU HBM3 memory", 72, "gpu-ecc", "crash", breaks=True),
        Kind("software bug", 54, "exception", "crash"),
        Kind("network switch or cable", 35, "ib-retry-exceeded", "crash"),
        Kind("host maintenance", 32, "node-lost", "lost", breaks=True, drained=True),
        Kind("GPU SRAM memory", 19, "gpu-ecc", "crash", breaks=True),
        Kind("GPU system processor", 17, "gpu-xid", "hang", breaks=True),
        Kind("NIC", 7, "ib-device-fatal", "crash", breaks=True),
        Kind("NCCL watchdog time-out", 7, "hang-waits", "hang"),
        Kind("silent data corruption", 6, "nan-loss", "crash", breaks=True),
        Kind("GPU thermal interface and sensor", 6, "gpu-xid", "crash", breaks=True),
        Kind("SSD", 3, "node-lost", "lost", breaks=True, drained=True),
        Kind("power supply", 3, "node-lost", "lost", breaks=True, drained=True),
        Kind("chassis, IO board, CPU, memory", 8, "node-lost", "lost", breaks=True, drained=True),
        Kind("dependency", 2, "exception", "crash"),
    ),
    same_bug=3,
)
OPT = System(
    "opt",
    "OPT-175B's logbook: 992 A100, 7.5 h between interruptions, about 2 machines per day; the split of the rest is assumed",
    124,
    60,
    (
        Kind("machine taken out", 120, "node-lost", "lost", breaks=True, drained=True),
        Kind("GPU or ECC", 30, "gpu-ecc", "crash", breaks=True),
        Kind("hang", 20, "hang-waits", "hang"),
        Kind("software", 22, "exception", "crash"),
    ),
    same_bug=3,
)
SYSTEMS = {system.name: system for system in (LLAMA3, OPT)}


@dataclass(frozen=True)
class Times:
    """Seconds."""

    notice: Dict[str, float]  # how it shows -> until the attempt has ended, with drumbeat
    notice_requeue: Dict[str, float]  # the same without it
    restart: float  # in place: from the end of an attempt to the start of its ranks
    init: float  # from the start of the ranks to the first step: imports, NCCL, loading the checkpoint
    queue: float  # from a requeue to the start of the job
    every: float  # between two checkpoints
    stall: float  # that a checkpoint costs
    drain: float  # until an operator has taken a bad node out that the scheduler takes for good
    human: float  # until somebody has fixed a bug
    repair: float  # until a bad node is good again, and a spare of the same job; 0: not while the job runs
    fetch: float  # to bring the state of a lost node from its neighbour's memory


@dataclass
class Result:
    training: float = 0.0
    total: float = 0.0
    counts: Dict[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.training / self.total

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


@dataclass(frozen=True)
class Failure:
    kind: Kind
    at: float  # seconds of training after the start of the attempt
    same_bug: bool = False


def failures(system: System, chance: random.Random) -> List[Failure]:
    """As many as were published, at random moments; each `at` is the time since the one before."""
    kinds = [kind for kind in system.kinds for _ in range(kind.count)]
    chance.shuffle(kinds)
    mean = system.days * DAY / system.interruptions
    bugs = {index for index, kind in enumerate(kinds) if kind.code == "exception"}
    repeated = set(chance.sample(sorted(bugs), system.same_bug))
    return [Failure(kind, chance.expovariate(1 / mean), index in repeated) for index, kind in enumerate(kinds)]


def kept(training: float, times: Times) -> float:
    """Of so many seconds of training after a start, those that a later attempt need not repeat."""
    return training // (times.every + times.stall) * times.every


def ours(system: System, times: Times, spares: int, chance: random.Random, found: Sequence[Failure]) -> Result:
    """Played with `decide`: the job holds `nodes + spares` machines of a larger cluster."""
    result, clock, step = Result(), times.queue + times.init, 0
    members = _members(system.nodes + spares)
    assignment, history = tuple(range(system.nodes)), []
    repaired: Dict[int, float] = {}
    for failure in found:
        clock += failure.at
        for number in [number for number, when in repaired.items() if when <= clock]:
            members[number] = Member(number, f"n{number}")
            del repaired[number]
        result.training += kept(failure.at, times)
        step += int(failure.at)
        for _ in range(2 if failure.same_bug else 1):  # a bug comes back at the same step
            role = chance.randrange(system.nodes)
            member = assignment[role]
            clock += times.notice[failure.kind.sign]
            if failure.kind.sign == "lost":
                members[member] = replace(members[member], lost=True)
            finding = Finding(failure.kind.code, ERROR, failure.kind.name, node=role)
            history.append(Outcome(FAILED, 1, finding, assignment, member=member, step=step, t=clock))
            decision = decide(history, members, restarts=100_000, can_requeue=True)
            result.count(decision.action)
            if isinstance(decision, Restart):
                moved = decision.assignment != assignment
                result.count("replaced" if moved else "in place")
                clock += decision.wait + times.restart + times.init + times.fetch * moved
                assignment = decision.assignment
                for number, why in decision.excluded.items():
                    members[number] = replace(members[number], bad=why)
                if times.repair:
                    gone = [number for number, each in members.items() if not each.fit and number not in repaired]
                    repaired.update(dict.fromkeys(gone, clock + times.repair))
                continue
            if not isinstance(decision, Requeue):
                clock += times.human
            clock += times.queue + times.init
            members, assignment, history = _members(system.nodes + spares), tuple(range(system.nodes)), []
            repaired.clear()
            break
    result.total = clock
    return result


def requeue(system: System, times: Times, chance: random.Random, found: Sequence[Failure]) -> Result:
    """Every interruption goes through the queue. A bad node that the scheduler takes for a good one is used again, and ends the
    next attempt too, until an operator has drained it."""
    result, clock = Result(), times.queue + times.init
    for failure in found:
        clock += failure.at
        result.training += kept(failure.at, times)
        result.count("requeue")
        clock += times.notice_requeue[failure.kind.sign]
        if failure.same_bug:
            clock += times.human
        elif failure.kind.breaks and not failure.kind.drained:
            drained = clock + chance.expovariate(1 / times.drain)
            while clock < drained:  # back in the queue, on the same node, which fails again as soon as it is used
                clock += times.queue + times.init + times.notice_requeue[failure.kind.sign]
                result.count("requeue")
        clock += times.queue + times.init
    result.total = clock
    return result


def closed_form(system: System, times: Times) -> float:
    """Return the effective training time if every interruption were restarted in place."""
    total = system.interruptions
    noticed = sum(kind.count * times.notice[kind.sign] for kind in system.kinds) / total
    each = noticed + times.restart + times.init
    trained = system.days * DAY  # the published failures belong to this much training and saving
    failures = total / (trained + total * each)
    return goodput(times.stall, times.every, each, failures).share


def _members(count: int) -> Dict[int, Member]:
    return {number: Member(number, f"n{number}") for number in range(count)}


def main() -> None:
    args = _arguments()
    system = SYSTEMS[args.system]
    if args.between:  # a bug that comes back waits for a person: of no use to a figure of one failure every so often
        system = replace(system, days=system.interruptions * args.between / DAY, same_bug=0)
    times = Times(
        {"crash": args.notice_crash, "lost": args.notice_lost, "hang": args.notice_hang},
        {"crash": args.notice_crash, "lost": args.notice_lost_requeue, "hang": args.timeout},
        args.restart, args.init, args.queue, args.every, args.stall, args.drain, args.human, args.repair, args.fetch,
    )  # fmt: skip
    shares: Dict[str, List[float]] = {}
    last: Dict[str, Result] = {}
    for seed in range(args.seeds):
        found = failures(system, random.Random(seed))
        for name, result in (
            ("plain requeue", requeue(system, times, random.Random(seed), found)),
            ("drumbeat, no spare", ours(system, times, 0, random.Random(seed), found)),
            (f"drumbeat, {args.spares} spares", ours(system, times, args.spares, random.Random(seed), found)),
        ):
            shares.setdefault(name, []).append(result.share)
            last[name] = result
    print(
        f"{system.name}: {system.interruptions} interruptions, {system.days:.3g} days of training, {system.nodes} nodes"
    )
    print(f"source: {system.source}")
    print(f"{'policy':<24} {'effective training time':>24}  {'least':>7} {'most':>7}  decisions of the last seed")
    for name, each in shares.items():
        counts = ", ".join(f"{what} {count}" for what, count in sorted(last[name].counts.items()))
        print(f"{name:<24} {statistics.mean(each):>23.1%}   {min(each):>6.1%} {max(each):>7.1%}  {counts}")
    print(f"{'closed form, in place':<24} {closed_form(system, times):>23.1%}   (drumbeat.predict.forecast)")
    print(
        "assumed: "
        + ", ".join(f"{key} {value:g} s" for key, value in sorted(vars(args).items()) if isinstance(value, float))
    )


def measured(folder: Path = MEASURED) -> Dict[str, float]:
    """Seconds, from the tables that `make faults` writes: until a rank's death, a silent node and a hang have ended the attempt,
    and from there to the start of the ranks."""
    rows = [line.strip("| ").split(" | ") for name in PAGES for line in (folder / name).read_text().splitlines()]
    cells = {row[0]: row[1:] for row in rows if len(row) > 2}
    ended, started = (_seconds(text) for text in cells["a rank is killed: all ranks start again in place"][:2])
    hangs = [_seconds(row[1]) for row in rows if len(row) > 4 and row[3].startswith("no step for") and row[1]]
    return {
        "crash": ended,
        "lost": _seconds(cells["link to node 1 half open: no word, no end"][0]) + ended,
        "hang": statistics.median(hangs) + ended,
        "restart": started - ended,
        "gpu crash": _seconds(cells[ON_GPU][0]),
        "init": _seconds(cells[ON_GPU][2]) - _seconds(cells[ON_GPU][1]),
        "stall": _seconds(cells[ON_GPU][4]),
    }


def _seconds(cell: str) -> float:
    return float(cell.split()[0])


def _arguments() -> argparse.Namespace:
    found = measured()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=SYSTEMS, default="llama3")
    parser.add_argument("--spares", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--between", type=float, default=0.0, metavar="SECONDS", help="mean time between failures")
    often = parser.parse_known_args()[0].between
    for name, value, words in (
        (
            "notice-crash",
            found["gpu crash" if often else "crash"],
            "measured: from a rank's death to the end of the attempt",
        ),
        ("notice-lost", found["lost"], "measured: the same for a node that falls silent"),
        ("notice-hang", found["hang"], "measured: the same for a hang, with checks: {hang: stop}"),
        ("notice-lost-requeue", 60.0, "until the scheduler ends a job that lost a node (SlurmdTimeout is often 300 s)"),
        ("timeout", 600.0, "NCCL's own time-out, after which a hang ends the job without drumbeat"),
        ("restart", found["restart"], "measured: in place, from the end of an attempt to the start of its ranks"),
        ("init", found["init"] if often else 180.0, "from the start of the ranks to the first step; the same for both"),
        ("queue", 300.0, "from a requeue to the start of the job"),
        (
            "every",
            float(round((2 * found["stall"] * often) ** 0.5)) if often else 600.0,
            "between two checkpoints or snapshots, with --between the best by Young's formula; the same for both",
        ),
        ("stall", found["stall"] if often else 10.0, "that a checkpoint or snapshot costs; the same for both"),
        ("drain", 1800.0, "until an operator has drained a bad node, on average"),
        ("human", 7200.0, "until somebody has fixed a bug; the same for both"),
        ("repair", 3600.0 if often else 0.0, "until a bad node is a good spare again; 0: not while the job runs"),
        ("fetch", 4.0 if often else 0.0, "to bring a lost node's state from its neighbour: 42 GiB at 100 Gb/s"),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, metavar="SECONDS", help=f"{words} ({value:g})")
    return parser.parse_args()


if __name__ == "__main__":
    main()

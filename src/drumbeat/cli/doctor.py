"""drumbeat doctor: check this node and say what is wrong and how to fix it."""

from __future__ import annotations

import shlex
from itertools import chain
from typing import Any, Dict, List, Tuple

from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError, from_json
from drumbeat.cli import add_json
from drumbeat.cli.output import print_json
from drumbeat.doctor.case import find as find_of
from drumbeat.doctor.case import make_case, worst_first
from drumbeat.doctor.dumps import judge, passed_over
from drumbeat.doctor.examine import compare, examine
from drumbeat.doctor.network import compare_with_host
from drumbeat.doctor.software import examine_framework
from drumbeat.findings.model import ERROR, OK, worst
from drumbeat.logs.read.pasted_jobs import read_pasted_jobs
from drumbeat.machine.dumps import KERNEL_LOG, by_node, read
from drumbeat.machine.gather import gather
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Facts, Peer, Peers
from drumbeat.machine.replay import open_host
from drumbeat.machine.software import FRAMEWORKS, ask_framework
from drumbeat.plan.network import with_reach
from drumbeat.plan.show import finding_lines

Judged = List[Tuple[str, Any]]  # what was judged, and its findings


def add_arguments(parser: Any) -> None:
    words = "check another node, given as a folder or a capture; several are compared with each other"
    parser.add_argument("--root", action="append", default=[], metavar="DIR", help=words)
    words = "check a node by saved output of nvidia-smi, rocm-smi, ibstat, ip addr, ..."
    parser.add_argument("--from", dest="dumps", nargs="+", default=[], metavar="FILE", help=words)
    parser.add_argument(
        "--host-facts",
        metavar="FILE",
        help="inside a container: the output of drumbeat facts --json outside it, to compare the RDMA libraries",
    )

    parser.add_argument(
        "--framework",
        choices=FRAMEWORKS,
        metavar="NAME",
        help="check instead how this framework was built, by its own report (ds_report, horovodrun --check-build, ompi_info); "
        f"one of {', '.join(FRAMEWORKS)}",
    )
    words = "the Python whose packages --framework checks; default: python3"
    parser.add_argument("--python", metavar="PATH", default="python3", help=words)
    add_json(parser)
    parser.epilog = "Exit code: 0 when nothing is worse than a warning, 1 when something would break a job."


def run(args: Any) -> int:
    look = _framework if args.framework else _dumps if args.dumps else _nodes
    findings = look(args)
    _print(args, findings)
    return 1 if worst(finding for _, found in findings for finding in found) == ERROR else 0


def _nodes(args: Any) -> Judged:
    facts = [gather(open_host(root)) for root in args.root or [None]]
    peers = with_reach(Peers(tuple(Peer(node, each.host, "", each) for node, each in enumerate(facts)), "", 0))
    findings = [(each.host, examine(each, None, peers)) for each in facts]
    if args.host_facts:
        outside = _read(args.host_facts, Facts)
        compared = list(compare_with_host(make_case(outside, None), make_case(facts[0], None)))
        findings[0] = (findings[0][0], worst_first([*findings[0][1], *compared]))
    return findings + ([("all nodes", worst_first(compare(peers)))] if len(facts) > 1 else [])


def _dumps(args: Any) -> Judged:
    from drumbeat.desk.log_sources import find, read_one, short_text  # imported here: it loads the log reader

    found: List[Any] = []
    jobs: List[Any] = []
    unread: List[Any] = []
    kinds: List[str] = []
    sources = find(args.dumps)
    for source in sources.files:
        text = short_text(source)
        (dumps, rest), job = read(text, source.name), read_pasted_jobs(text, source.name)
        found += dumps
        jobs += [job] if job else []
        logs = rest or not dumps or any(dump.kind == KERNEL_LOG for dump in dumps)
        judged = read_one(source).failure if logs else None
        failure = judged.finding if judged and judged.rule else None
        kinds += [dump.kind for dump in (*dumps, job) if dump] + [f"the log {source.name}"] * (failure is not None)
        unread += passed_over(source.name, rest, bool(dumps), bool(job), failure)
    if not found and not jobs and all(finding.code == "dump-unread" for finding in unread):
        raise Problem(
            "nothing in these files is known",
            f"docs page diagnose lists the commands whose output is read; a log: drumbeat diagnose {shlex.join(args.dumps)}",
        )
    of = ", ".join(dict.fromkeys(kinds))
    limits: Tuple[str, ...] = ("whatever these lines do not show: drumbeat doctor on the node looks at all of it",)
    notes = tuple(f"{dump.kind}: {note}" for dump in found for note in dump.notes)
    lacking = tuple(f"{dump.kind}: {words.partition(': ')[2]}" for dump in found for words in dump.facts.unknown)
    groups = [" and ".join(dump.kind for dump in group) for group in by_node(found)]
    if len(groups) > 1:
        limits = (f"judged apart (other nodes or times, or GPUs that no address matches): {'; '.join(groups)}", *limits)
    about = find_of("looked-at", count=len(kinds), seen=(of, *notes), unseen=(*lacking, *limits))
    by_host: Dict[str, List[Any]] = {}
    for dump, finding in judge(found):
        by_host.setdefault(dump.facts.host, []).append(finding)
    cited = {line for group in by_host.values() for finding in group for line in finding.evidence}
    unread = [each for each in unread if each.code != "dump-log" or not set(each.evidence) <= cited]
    others = [*(each for job in jobs for each in job.findings), *unread]
    if len({dump.facts.host for dump in found}) < 2:
        return [(of, [*worst_first([*chain.from_iterable(by_host.values()), *others]), about])]
    return [*((host or "no host named", worst_first(some)) for host, some in by_host.items()), (of, [*others, about])]


def _framework(args: Any) -> Judged:
    host = LiveHost()
    gpus = tuple(gpu.vendor for gpu in gather(host).gpus if not gpu.integrated)
    return [(args.framework, examine_framework(ask_framework(host, args.framework, args.python, gpus)))]


def _read(path: str, record: Any) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return from_json(record, file.read(), path)
    except (OSError, RecordError, UnicodeDecodeError) as error:
        raise Problem(
            f"{path} cannot be read: {error}", "run it outside the container: drumbeat facts --json"
        ) from None


def _print(args: Any, findings: Judged) -> None:
    if args.json:
        print_json([{"of": name, "findings": found} for name, found in findings])
        return

    for name, found in findings:
        about = [finding for finding in found if finding.code == "looked-at"]
        fine = [finding for finding in found if finding.severity == OK and finding.code != "looked-at"]
        rest = [finding for finding in found if finding.severity != OK]
        words = (("error", "error"), ("warning", "warning"), ("info", "info"))
        numbers = [(sum(one.severity == severity for one in rest), word) for severity, word in words]
        counts = ", ".join(f"{number} {word}{'s' * (number != 1 and word != 'info')}" for number, word in numbers)
        print(f"{name}: {counts}, {len(fine)} fine")
        print("\n".join(finding_lines(rest)))
        for finding in fine:
            evidence = f" ({finding.evidence[0].text})" if finding.evidence and finding.evidence[0].text else ""
            print(f"ok: {finding.title}{evidence}")
        lines = [f"looked at {line}" for finding in about for line in finding.seen]
        lines += [f"not looked at {line}" for finding in about for line in finding.unseen]
        print(*lines, "", sep="\n")

"""drumbeat diagnose: read logs of any run and say which transport carried it, what failed first, why, and the fix."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, List

from drumbeat.base.problem import Problem
from drumbeat.cli import add_json

if TYPE_CHECKING:
    from drumbeat.desk.log_sources import Source
    from drumbeat.logs.reader import Reader
    from drumbeat.runfolder.run import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="log file, folder, run folder, run id, or - for stdin; .gz too"
    )
    add_json(parser)
    parser.add_argument("--rules", action="store_true", help="list the rules and stop")


def run(args: argparse.Namespace) -> int:
    if args.rules:
        return _rules(args.json)
    if not args.paths:
        raise Problem("no log given", "drumbeat diagnose slurm-123.out, a folder, or - for stdin")
    reader = read(args.paths)
    if reader.is_empty:
        raise Problem(
            f"{', '.join(args.paths)}: nothing to read: empty, or not text", "give the run's log files, or its folder"
        )
    report = reader.report()
    if args.json:
        from drumbeat.base.record import to_json

        print(to_json(report))
        return 0
    from drumbeat.logs.show import render

    width = min(max(shutil.get_terminal_size((110, 24)).columns, 60), 140)
    print(render(report, width))
    return 0


def read(paths: List[str]) -> Reader:
    """Read everything below these paths; of a single run folder, also what the run itself recorded."""
    from drumbeat.desk.log_sources import Progress, find
    from drumbeat.logs.reader import Reader

    sources = find(paths)
    reader, progress = Reader(), Progress()
    for source in sources.files:
        _read(reader, source, progress)
    progress.end()
    if len(sources.runs) == 1:
        _add_record(reader, sources.runs[0])
    return reader


def _read(reader: Reader, source: Source, progress: Any) -> None:
    from drumbeat.desk.log_sources import encoding_of, lines, open_binary, start_of, with_tail
    from drumbeat.logs.read import flight

    start = start_of(source)
    if flight.looks_like_dump(os.path.basename(source.path), start):
        with open_binary(source.path) as file:
            try:
                reader.add_dump(flight.parse(source.name, file.read(flight.MAX_BYTES + 1)))
            except flight.DumpError as error:
                print(f"drumbeat diagnose: {source.name}: {error}; skipped", file=sys.stderr)
        return
    encoding = encoding_of(start)
    if not encoding and b"\0" in start and start.count(b"\0") * 10 > len(start):
        print(f"drumbeat diagnose: {source.name}: not text; skipped", file=sys.stderr)
        return
    _read_dumps(reader, source, start)
    if source.rank is not None or source.host:
        reader.name_file(source.name, source.rank, source.host)
    for number, some, last in with_tail(lines(source)):
        reader.feed_lines(source.name, number, some, last)
        progress.tick(source.name, number)
    reader.not_whole(source.name, source.cut)


def _read_dumps(reader: Reader, source: Source, start: bytes) -> None:
    """Read topology, ports, GIDs and jobs that people paste beside a log. Standard input is read once, as a log."""
    from drumbeat.desk.log_sources import encoding_of
    from drumbeat.doctor.dumps import judged
    from drumbeat.logs.read.scontrol import read_scontrol
    from drumbeat.machine.dumps import MAX_BYTES, read_dumps

    if source.path == "-" or start.startswith(b"\x1f\x8b") or os.path.getsize(source.path) > MAX_BYTES:
        return
    with open(source.path, encoding=encoding_of(start) or "utf-8-sig", errors="replace") as file:
        text = file.read(MAX_BYTES)
    reader.pasted.extend(judged(dump) for dump in read_dumps(text, source.name))
    jobs = read_scontrol(text, source.name)
    if jobs is not None:
        reader.pasted.append(jobs)


def _add_record(reader: Reader, run: Run) -> None:
    """Add what the run itself recorded: its end, what its checks found, and which rank ended first, by the lead's clock."""
    from drumbeat.desk.state import recorded_end, with_paths
    from drumbeat.findings.model import Evidence
    from drumbeat.logs.read.launchers import FirstFailure
    from drumbeat.runfolder.lines import near

    reader.of_a_run = True
    reader.recorded = with_paths(run, recorded_end(run))
    facts = [run.facts(node) for node in run.nodes()]
    reader.communicators.no_gpus = bool(facts) and all(each is not None and each.has_no_gpu for each in facts)
    hosts = {member.node: member.host for member in run.members()}
    first = next((end for end in run.ranks().ended if end.failed), None)
    if first is not None and reader.elastic.first is None:
        where = Evidence(f"rank {first.rank} {first.words}", near(run.folder.node(first.node).events))
        host = hosts.get(first.node, "")
        reader.elastic.first = FirstFailure(first.rank, host, first.exit_code, where, "drumbeat")


def _rules(as_json: bool) -> int:
    from drumbeat.logs.meaning.rules import rulebook

    if as_json:
        from drumbeat.base.record import to_json

        print(to_json(rulebook().rules))
    else:
        from drumbeat.logs.show import render_rules

        print(render_rules(rulebook()))
    return 0

"""Tracebacks whose end is not in the log: read by what their last frame was about to raise, where that is shown."""

from __future__ import annotations

from dataclasses import replace

from drumbeat.findings.model import Evidence
from drumbeat.logs.events import Events
from drumbeat.logs.meaning.rulebook import CAUSE, SYMPTOM, Rulebook
from drumbeat.logs.read.prefixes import Line
from drumbeat.logs.read.tracebacks import CUT_OFF, HEADER, Tracebacks


def add_cut_tracebacks(events: Events, rules: Rulebook, sequence: int, file: str, tracebacks: Tracebacks) -> None:
    """What a rule says about it is likely at best: the message was never seen."""
    for rank, number, raised in tracebacks.unfinished():
        frame, _, at = raised.frame.rpartition(":")
        place = f'File "{frame}", line {at}' if frame else HEADER
        evidence = Evidence(place if CUT_OFF in raised.text else raised.text, file, number)
        line = Line("", rank)
        matches = [match for match in rules.match(raised.text) if match.rule.role in (CAUSE, SYMPTOM)]
        for match in matches:
            events.add_match(sequence, replace(match, mention=True), line, evidence)
        if not matches:
            events.add_exception(sequence, raised, line, evidence, bare=True)

"""Checks of the shell's own grammar: what was typed is not what will be run."""

from __future__ import annotations

import bisect
import re
from typing import Dict, Iterator, List, Tuple

from drumbeat.commands.script import SUBSTITUTION
from drumbeat.commands.shell import Fault
from drumbeat.lint.context import LONGEST_FIXED, Context, Edit, Hit

_DASHES = "‐‑‒–—―−"
_DOUBLE, _SINGLE = "“”„‟", "‘’‚‛"
_VARIABLE = re.compile(r"\s*([A-Z][A-Z0-9_]*_[A-Z0-9_]*|[A-Z]{3,}[A-Z0-9]*)\s*")
_PLACEHOLDER = re.compile(r"<[A-Za-z/][\w /.-]{1,40}>")


def typographic(context: Context) -> Iterator[Hit]:
    by_line: Dict[int, List[Fault]] = {}
    for fault in context.script.faults:
        if fault.kind == "typographic":
            by_line.setdefault(fault.line, []).append(fault)
    lines = context.lines
    for line, faults in by_line.items():
        shown = ", ".join(sorted({f"U+{ord(fault.text):04X} {fault.text.strip()}".strip() for fault in faults}))
        edits = [edit for fault in faults for edit in _plain(fault, lines.get(line, ""))]
        yield Hit(line, {"shown": shown}, tuple(edits))


def _plain(fault: Fault, line: str) -> List[Edit]:
    """Return the edit to the intended key, if that is certain."""
    new = None
    if len(line) > LONGEST_FIXED:
        return []
    if fault.text in _DASHES:
        start = max(fault.column - (2 if line[: fault.column].endswith("-") else 1), 0)
        found = re.match(rf"\s(-?)[{_DASHES}](-?)(\w[\w-]*)", line[start:])
        if found:
            before, after, name = found.groups()
            # One letter, perhaps with its number: -N, -n16. A long name had two dashes that an editor drew together.
            long = len(name) > 3 and not name[1:].isdigit()
            short = len(name) == 1 or name[1:].isdigit()
            new = "-" if before or after or short else "--" if long else None
    elif fault.text in _DOUBLE and sum(line.count(mark) for mark in _DOUBLE) % 2 == 0 and '"' not in line:
        new = '"'
    elif fault.text in _SINGLE and sum(line.count(mark) for mark in _SINGLE) % 2 == 0 and "'" not in line:
        new = "'"
    elif fault.text == "\u00a0":
        new = " "
    elif fault.text in "\u200b\u200c\u200d\u2060\ufeff":
        new = ""
    return [] if new is None else [Edit(fault.line, fault.column, fault.text, new)]


def continuation(context: Context) -> Iterator[Hit]:
    starts = sorted(pipeline.line for pipeline in context.script.pipelines)
    for fault in context.script.faults:
        if fault.kind != "continuation":
            continue
        comment = fault.text[1:].strip()
        before = bisect.bisect_right(starts, fault.line)
        first = starts[before - 1] if before else fault.line
        above = (first, comment) if comment else None
        words = {"what": f"'{comment[:40]}'" if comment else "a space"}
        yield Hit(fault.line, words, (Edit(fault.line, fault.column, fault.text, "\\", above),))


def joined_lines(context: Context) -> Iterator[Hit]:
    return (Hit(fault.line) for fault in context.script.faults if fault.kind == "joined")


def quote_unclosed(context: Context) -> Iterator[Hit]:
    for fault in context.script.faults:
        if fault.kind == "quote":
            yield Hit(fault.line, {"quote": fault.text})
            return  # the rest follows from the first


def script_cut(context: Context) -> Iterator[Hit]:
    if context.script.cut:
        yield Hit(context.script.cut)


def carriage_returns(context: Context) -> Iterator[Hit]:
    if context.returns:
        yield Hit(1)


def variable_as_command(context: Context) -> Iterator[Hit]:
    functions = set(re.findall(r"^\s*(?:function\s+)?([A-Z]\w*)\s*\(\)", context.script.text, re.MULTILINE))
    seen = set()
    for command in context.script.commands:
        words = [*(each.value for each in command.assignments if each.how in ("plain", "prefix")), *command.words]
        for word in words:
            for part in word.parts:
                found = _VARIABLE.fullmatch(part.text) if part.raw.startswith("$(") else None
                place = (part.line, part.column)
                if found and found.group(1) not in functions and place not in seen:
                    seen.add(place)
                    name = found.group(1)
                    yield Hit(
                        part.line, {"name": name}, (Edit(part.line, part.column - 2, part.raw, "${" + name + "}"),)
                    )


def missing_semicolon(context: Context) -> Iterator[Hit]:
    for command in context.script.commands:
        texts = [word.raw for word in command.words]
        for place, text in enumerate(texts[1:], 1):
            tested = texts[0] in ("[", "[[", "test") and texts[place - 1] in ("]", "]]")
            if (text == "then" and tested) or (
                text == "do" and place == len(texts) - 1 and (tested or texts[2:3] == ["in"])
            ):
                word, before = command.words[place], command.words[place - 1]
                edits: Tuple[Edit, ...] = ()
                if before.line == word.line:
                    edits = (Edit(before.line, before.column + len(before.raw), "", ";"),)
                yield Hit(word.line, {"word": text}, edits)


def exit_code_lost(context: Context) -> Iterator[Hit]:
    script = context.script
    harmless = set(context.settings.get("harmless", ()))
    kept = max(
        (line for line, text in context.lines.items() if "PIPESTATUS" in text or "pipestatus" in text), default=0
    )
    safe = {command.within for command in script.commands if command.name == "set" and "pipefail" in command.text}
    if re.match(r"#![^\n]*pipefail", script.text):
        safe.add(())
    fixes = _pipefail_edit(context)
    ends = {pipeline.commands[0].within: place for place, pipeline in enumerate(script.pipelines)}
    for place, pipeline in enumerate(script.pipelines):
        last, first = pipeline.commands[-1], pipeline.commands[0]
        if len(pipeline.commands) < 2 or last.name != "tee" or first.name in harmless or SUBSTITUTION in last.within:
            continue
        if last.within in safe or pipeline.line <= kept:
            continue
        after = [command for other in script.pipelines[place + 1 : place + 2] for command in other.commands]
        asked = any("$?" in text for each in after for text in [each.text, *(set_.text for set_ in each.assignments)])
        severity = "error" if asked or ends[last.within] == place else "warning"
        yield Hit(last.line, {"name": first.name or "the command"}, () if last.within else fixes, severity)


def _pipefail_edit(context: Context) -> Tuple[Edit, ...]:
    """Set pipefail only in a whole bash script that does not stop at errors: there it changes exit codes and nothing else."""
    script = context.script
    first_line = script.text.split("\n", 1)[0]
    stops = any(command.name == "set" and re.search(r" -\w*e|errexit", command.text) for command in script.commands)
    if (
        not script.pipelines
        or not context.whole
        or stops
        or not re.match(r"#!.*\b(bash|zsh)\b", first_line)
        or "-e" in first_line
    ):
        return ()
    first = min(pipeline.line for pipeline in script.pipelines)
    return (Edit(first, 0, "", "", (first, "set -o pipefail")),)


def dollar_escaped(context: Context) -> Iterator[Hit]:
    for command in context.script.commands:
        words = list(command.words)
        if not words or "file" in command.within:
            continue
        tested = words if command.name in ("[", "[[", "test", "taskset", "export") else words[:1]
        for word in tested:
            found = re.match(r"[^'\"]*\\\$\{?(\w+)", word.raw)
            if found:
                yield Hit(word.line, {"name": found.group(1)})
                break


def placeholder(context: Context) -> Iterator[Hit]:
    for fault in context.script.faults:
        if fault.kind == "placeholder":
            yield Hit(fault.line, {"shown": fault.text})
    for directive in context.script.directives:
        found = _PLACEHOLDER.search(directive.value)
        if found:
            yield Hit(directive.line, {"shown": found.group()})


def clone_then_cd(context: Context) -> Iterator[Hit]:
    commands = list(context.script.commands)
    for before, after in zip(commands, commands[1:]):
        clone = re.match(r"git clone (?:-\S+ )*\S*?([\w.-]+?)(?:\.git)?/?$", before.text)
        into = re.match(r"cd ([\w.-]+)/", after.text)
        if clone and into and into.group(1) != clone.group(1):
            yield Hit(after.line, {"name": clone.group(1), "shown": after.text[3:]})


def export_of_itself(context: Context) -> Iterator[Hit]:
    assigned = {each.name for each in context.script.assignments if each.how == "plain"}
    # In a file written by a heredoc, or a script in quotes, the outer shell has already put the value there.
    here = [each for command in context.script.commands if not command.within for each in command.assignments]
    for each in here:
        itself = each.text in (f"${each.name}", f"${{{each.name}}}") and each.name == each.spelt
        # `export X=$X` after a plain X=... does export it.
        if itself and (each.how == "plain" or (each.how == "export" and each.name not in assigned)):
            yield Hit(each.line, {"name": each.name})


def export_of_prose(context: Context) -> Iterator[Hit]:
    for command in context.script.commands:
        if command.name != "export" or not command.assignments:
            continue
        texts = [word.raw for word in command.words[2:]]
        bare = [text for text in texts if re.fullmatch(r"[A-Za-z]+", text)]
        if sum(text.islower() for text in bare) > 1:
            yield Hit(command.line, {"shown": " ".join(bare)})


def stops_all_containers(context: Context) -> Iterator[Hit]:
    listing = re.compile(r"\s*(?:docker|podman) (?:ps|container ls)\b")
    ending = re.compile(r"(?:.* )?(?:docker|podman) (?:container )?(?:stop|kill|rm)\b")
    for pipeline in context.script.pipelines:
        listed = False
        for command in pipeline.commands:
            if ending.match(command.text) and (
                listed or any(listing.match(part.text) for word in command.words for part in word.parts)
            ):
                yield Hit(command.line)
            listed = listed or bool(listing.match(command.text))


def appended_to(context: Context) -> Iterator[Hit]:
    for command in context.script.commands:
        for token in command.redirects:
            if token.text == ">>" and token.word and token.word.text in context.settings["files"]:
                yield Hit(token.line, {"file": token.word.text})


CHECKS = {
    "typographic": typographic,
    "continuation": continuation,
    "joined-lines": joined_lines,
    "quote-unclosed": quote_unclosed,
    "script-cut": script_cut,
    "carriage-returns": carriage_returns,
    "variable-as-command": variable_as_command,
    "missing-semicolon": missing_semicolon,
    "exit-code-lost": exit_code_lost,
    "dollar-escaped": dollar_escaped,
    "placeholder": placeholder,
    "clone-then-cd": clone_then_cd,
    "export-of-itself": export_of_itself,
    "export-of-prose": export_of_prose,
    "stops-all-containers": stops_all_containers,
    "appended-to": appended_to,
}

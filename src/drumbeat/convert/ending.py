"""The end of a training as the script treats it: traps, retries, the exit code, and the statements behind it."""

from __future__ import annotations

import re
import signal
from typing import Dict, FrozenSet, List, Sequence, Tuple

from drumbeat.commands.events import Event, Started, Trap, options_at
from drumbeat.commands.interpret import Shell
from drumbeat.commands.programs import CONTROL, PRINTS, QUICK_WITH_FILES, QUICK_WITH_OTHERS, WAIT
from drumbeat.commands.syntax import arguments_read, names_read, parse, program_of
from drumbeat.commands.values import SUBMIT, at_submission
from drumbeat.convert.directives import stop_with
from drumbeat.convert.draft import Draft
from drumbeat.convert.job_shell import by_own_name
from drumbeat.convert.launch import AS_TEXT, Launch
from drumbeat.convert.residue import OF_TASKS, changed

MOST_RESTARTS = 100  # for a loop that starts the training until it succeeds
_AFTER = "runs after the training, and nothing here does it: let the program do it, or a script that is the command"


def acts(event: Event) -> bool:
    """Return true for a statement that does something besides printing and changing the shell."""
    return event.kind in ("once", "each") or event.kind == "shell" and not event.soft and not event.writes


def exit_code(draft: Draft, chosen: Started, failed: Shell) -> None:
    """Say where the script hides a failure of the training. `failed` is the script, interpreted with a training that fails."""
    last = next((each for each in failed.events[::-1] if each.line), None)
    later = last is not None and last.line >= chosen.line and last.text != chosen.text
    if failed.last is False or (failed.last is None and not later):
        return
    line, text = (last.line, last.text) if last and later else (chosen.line, chosen.text)
    ends = "0" if failed.last else "that of this statement"
    draft.drop(line, text, f"the script's exit code is {ends} where the training fails; here the job fails with it")


def retries(draft: Draft, chosen: Started, failed: Shell, done: Shell) -> bool:
    """Write `restarts` if the script starts the training once where it succeeds, and again where it fails. `failed` and `done`
    are the script, interpreted with either."""
    once, again = ([each for each in shell.started if same(each, chosen)] for shell in (done, failed))
    if len(once) != 1 or not once[0].certain or len(again) < 2 and (not again or again[0].certain):
        return False
    endless = len(again) < 2
    marks = draft.marks
    words = {tuple(map(marks.resolved, each.words)) for each in (*again, *once)}
    if len(words) > 1:
        for other in sorted(words)[1:]:
            draft.differs(f"line {chosen.line}", f"{' '.join(other)} if it fails", "not started", "a retry")
    else:
        draft.set("restarts", MOST_RESTARTS if endless else len(again) - 1, chosen.line)
        if endless:
            why = f"the script tries without end; restarts: {MOST_RESTARTS} here"
            draft.question(chosen.line, chosen.text, why, advice=True)
    kept = next((each for each in failed.events if any(start is again[0] for start in each.starts)), None)
    failed.steps = [0]
    between = failed.effects(kept.text, kept.line) if endless and kept else []
    between += [] if endless else failed.events[again[0].before : again[-1].before]
    for event in between:
        if acts(event) and not event.starts:
            draft.question(event.line, event.text, "runs before each retry, and nothing here does it")
    return True


def same(one: Started, other: Started) -> bool:
    return (one.line, one.text) == (other.line, other.text)


_FORWARDS = re.compile(
    r"(?:pkill|kill|scancel)\b(?!.*(?:\s-b\b|--batch|\s-0\b))"
    r"(?:.*?(?:\s-s\s+|\s--signal[= ]|\s-)(?:SIG)?(?P<name>[A-Z]+\d?|\d+)(?=\s|$))?"
)
_REQUEUE = re.compile(r"scontrol\s+(?:-\S+\s+)*requeue(?:hold)?\b")


def traps(draft: Draft, batch: Shell) -> List[Trap]:
    """Read what the script does on a signal: what it forwards to the ranks is `stop-signal`; all else is asked about. Return
    what it does when it ends."""
    handled, at_end = False, []
    for trap in dict.fromkeys(batch.traps):
        told = draft.notice is not None and draft.notice.batch and draft.notice.signal in trap.signals
        done = [each for each in batch.effects(trap.body, trap.line) if each.kind in ("once", "shell", "cd", "started")]
        requeues = [each for each in done if _REQUEUE.match(each.text)]
        others = [each for each in done if each not in requeues]
        # Slurm sends the ranks TERM then.
        handled = handled or (told and bool(requeues) and all(_FORWARDS.match(each.text) for each in others))
        if told:
            found = next((match for match in (_FORWARDS.match(each.text) for each in done) if match), None)
            handled = handled or found is not None
            if found:
                number = found["name"] or "TERM"
                stop_with(draft, signal.Signals(int(number)).name[3:] if number.isdigit() else number)
        if trap.signals == ("EXIT",) and done:
            at_end.append(trap)
            continue
        for each in done:
            if _REQUEUE.match(each.text) or re.search(r"\bsbatch\b", each.text):
                why = "the script queues itself again, and here a job comes back only if its ranks save and end with 75"
                why += ": let the program do that (docs/howto/resume.md)"
                draft.question(each.line, each.text, why)
            elif not _FORWARDS.match(each.text):
                draft.question(each.line, each.text, f"done on {', '.join(trap.signals)}, and nothing here does it")
        why = "what it does is in stop-signal, or asked about" if done else "only prints or waits"
        draft.drop(trap.line, trap.text, why)
    if draft.notice and draft.notice.batch and not any(draft.notice.signal in trap.signals for trap in batch.traps):
        why = "ends the script, and Slurm then sends the ranks TERM: here they get it at once (stop-signal, stop-grace)"
        draft.drop(draft.notice.line, f"--signal=B:{draft.notice.signal}, without a trap", why)
    elif draft.notice and draft.notice.batch and not handled:
        given = f"{draft.notice.signal} for the batch script, nothing for the ranks"
        draft.differs("before the time limit", given, draft.keys.get("stop-signal", "TERM"))
    return at_end


_REPORTS = re.compile(r"[\w./-]+(?: (?:-[\w=-]+|/[\w./-]+|\"?\$\{?SLURM_\w+\}?\"?))*")
# What is over within the 15 s that `on-end` has.
_QUICK = (QUICK_WITH_FILES | QUICK_WITH_OTHERS | CONTROL | PRINTS) - WAIT
_OF_THE_SCRIPT = re.compile(
    r"\$\{?0(?!\w)|\bsrun\b|\bjobs\b|\s%(?=[\d%+-])"
)  # its name, its steps, its background jobs
_FILLED_IN = re.compile(r"\$\{(run_id|outcome|exit_code|seconds|folder)\}")  # by on-end itself
_STOPPED = 'case "$DRUMBEAT_OUTCOME" in cancelled | time-limit) exit ;; esac'  # the batch script does not go on then
_CODE = '(exit "$DRUMBEAT_EXIT_CODE")'


def at_the_end(
    draft: Draft, launch: Launch, batch: Shell, chosen: Started, on_exit: Sequence[Trap], exported: FrozenSet[str]
) -> None:
    """Write `on-end` for the statements behind the training and what the script does when it ends; ask about them if they need
    more than it has. `exported`: variables that on-start exports anyway."""
    after = batch.events[chosen.before + 1 :] if chosen.certain and not chosen.whole else []
    doing = [each for each in after if acts(each)]
    options = options_at(batch.options, chosen.before + 1)
    text, reads = _text(batch, chosen, after if doing else [], on_exit, "e" in options)
    fits = (doing or on_exit) and not {"container", "on-end"} & set(draft.keys) and _fits(draft, batch, chosen, text)
    given: Dict[str, str] = {}
    if fits:
        given, launch.for_end = _variables(launch, chosen, reads)
        launch.as_text |= {
            name
            for name in launch.for_end - exported
            if not chosen.variables[name].exported or chosen.variables[name].maybe
        }
        functions = functions_in(text, batch.events)
        lines = [f"set {changed(frozenset(), options)}"] if options else []
        lines += [f'eval "${AS_TEXT}{name}"' for name in sorted(launch.for_end & launch.as_text)]
        lines += [f"{name}={value}" for name, value in sorted(given.items())]
        lines += [f"{name}={batch.known[name]}" for name in OF_TASKS if name in reads and batch.known.get(name)]
        lines += [f"set -- {' '.join(map(draft.marks.quoted, launch.arguments))}"] if arguments_read(text) else []
        place = draft.marks.quoted(chosen.cwd, lambda each: "${SLURM_SUBMIT_DIR}" if at_submission(each) else each.text)
        moved = [f"cd {place} || exit"] if chosen.cwd else []
        whole = "\n".join([*moved, *lines, *functions, text])
        line = doing[0].line if doing else on_exit[0].line
        draft.set("on-end", ["bash", "-c", draft.marks.shown(_FILLED_IN.sub(r"$\1", whole))], line)
        for start, said in [*((each.line, each.text) for each in doing), *((each.line, each.text) for each in on_exit)]:
            draft.carried |= set(range(start, start + 1 + said.count("\n")))
            draft.question(start, said, "on-end does it on the first node, and has 15 s", advice=True)
    for trap in () if fits else on_exit:
        for each in batch.effects(trap.body, trap.line):
            if acts(each):
                draft.question(each.line, each.text, f"done on {', '.join(trap.signals)}, and nothing here does it")
        draft.drop(trap.line, trap.text, "asked about")
    for event in after:
        if acts(event) and not fits:
            draft.question(event.line, event.text, _AFTER)
        elif event.kind == "shell" and not acts(event):
            draft.drop(event.line, event.text, "after the training, and only of the shell")


def _text(
    batch: Shell, chosen: Started, after: Sequence[Event], on_exit: Sequence[Trap], strict: bool
) -> Tuple[str, FrozenSet[str]]:
    """Return the statements from the training's own on, with the job's exit code in its place."""
    around = next((each.around for each in after if chosen.text in each.around), "")
    lines = [around.replace(chosen.text, _CODE) if around else _CODE] if after else []
    lines += [each.text for each in after if not around or each.around != around]
    while lines and lines[-1].startswith("exit"):  # it changes no exit code
        lines.pop()
    if lines:
        lines[:0] = [*(each.text for each in on_exit), _STOPPED]
    else:
        lines = [_CODE] * any("$?" in each.body for each in on_exit) + [each.body for each in on_exit]
    text = "\n".join(lines)
    if "$?" not in text and not strict:
        text = text.replace(f"{_CODE}\n", "", 1)
    text = by_own_name(text)
    return text, names_read("\n".join([batch.marks.shown(text), *functions_in(text, batch.events)]))


def functions_in(text: str, events: Sequence[Event]) -> List[str]:
    """Return the definitions of the functions that a text calls, and of those that they call."""
    found: List[str] = []
    for event in [each for each in events[::-1] if any(name.endswith("()") for name in each.writes)]:
        name = next(iter(event.writes))[:-2]
        if re.search(rf"(?<![\w$-]){re.escape(name)}(?![\w=-])", "\n".join([text, *found])) and event.text not in found:
            found.insert(0, event.text)
    return found


def _fits(draft: Draft, batch: Shell, chosen: Started, text: str) -> bool:
    """Return true if `on-end` can do it: programs that are quick, in a folder that is known, without what only sbatch has."""
    whole = "\n".join([text, *functions_in(text, batch.events)])
    nodes = [each for top in parse(whole) for each in top.walk()]
    called = {program_of(each) for each in nodes if each.kind == "simple" and each.words}
    quick = called <= _QUICK | set(batch.functions)
    loops = any(each.kind in ("while", "unknown") or each.background for each in nodes)
    reports = all(_REPORTS.fullmatch(line) for line in text.split("\n")) and not called & set(batch.functions)
    own = _OF_THE_SCRIPT.search(whole) or arguments_read(text) and not draft.arguments
    folder = draft.marks.kind(chosen.cwd) in ("", SUBMIT)
    relative = _FILLED_IN.search(whole) and re.search(_FILLED_IN.pattern + r"\w", whole)
    return (reports or quick and not loops) and not own and folder and not relative


def _variables(launch: Launch, chosen: Started, reads: FrozenSet[str]) -> Tuple[Dict[str, str], FrozenSet[str]]:
    """Return what the script gave the variables: as shell text if that is decided, else their names."""
    marks, given, late = launch.shell.marks, {}, set()
    for name in reads:
        variable = chosen.variables.get(name)
        if variable is None or variable.event < 0:
            continue
        value = variable.value
        if isinstance(value, str) and marks.kind(value) in ("", SUBMIT) and marks.stable(value):
            given[name] = marks.quoted(value)
        else:
            late.add(name)
    return given, frozenset(late)

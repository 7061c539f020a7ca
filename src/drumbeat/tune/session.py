"""A tuning from its first trial to its last: tune.json always holds the results so far."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from dataclasses import field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat import backends
from drumbeat.backends.contract import Request
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.processes import become_subreaper
from drumbeat.base.record import RecordError, from_plain, to_plain
from drumbeat.base.text import columns
from drumbeat.bundle.build import cached_bundle
from drumbeat.desk.start.create import enlist, no_place
from drumbeat.jobfile.check import literal
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.resources import NAMES, fill
from drumbeat.runfolder.files import read_json, replace, replace_json
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import RunRecord, write_run_record
from drumbeat.tune.judge import Judgement, Observed, classify, judge
from drumbeat.tune.search import FAILED, HANG, NAN, OK, OOM, REFUSED, STOPPED, Cost, Done, Result
from drumbeat.tune.trial import GRACE, Interruption, run_trial
from drumbeat.tune.trial_list import VARIED, WARM_UP, Asked, Place, Plan, Trial, Tunable, make_plan, own_batch, tunable

SCHEMA = "1.0"
_BROKEN = {"batch": (FAILED, HANG, NAN, REFUSED), "hooks": (FAILED, HANG, NAN, REFUSED, OOM), "layout": (FAILED, NAN)}


@dataclass
class Tuning:
    """Everything settled before the first trial, and the results of the trials."""

    asked: Asked
    job: Job
    place: Place
    tunable: Tunable
    plan: Plan
    cost: Cost
    folder: str
    name: str
    results: List[Result] = field(default_factory=list)
    ended: str = ""  # why no trial follows; empty while it goes on
    broken: bool = False
    judgement: Judgement = field(default_factory=Judgement)

    @property
    def words(self) -> str:
        """Return the text to put into the job."""
        best = self.judgement.recommended
        return self.tunable.words(best.point, self.plan.global_batch) if best else ""

    def to_plain(self) -> Dict[str, Any]:
        order = self.place.order
        plain: Dict[str, Any] = to_plain({
            "schema": SCHEMA, "kind": self.asked.kind, "name": self.name, "folder": self.folder,
            "nodes": order.nodes, "ranks": order.world_size, "data_ranks": self.plan.data_ranks,
            "global_batch": self.plan.global_batch, "cost": {**vars(self.cost), "gpu_hours": self.cost.gpu_hours},
            "trials": self.results, "refused": self.plan.refused, "ended": self.ended, "largest": self.judgement.largest,
            "fastest": self.judgement.fastest, "recommended": self.judgement.recommended, "why": self.judgement.why,
            "changes": self.plan.changes(self.judgement.recommended), "words": self.words,
        })  # fmt: skip
        return plain


def sized(job: Job, given: Dict[str, str]) -> Job:
    """Return the job with all its placeholders filled, so that its size and folders are known."""
    return dataclasses.replace(job, command=fill(job.command, {**dict.fromkeys(NAMES, "1"), **given}))


def settle(asked: Asked, job: Job, place: Place) -> Tuning:
    asked.check()
    order = place.order
    takes = tunable(job.command, order.command, VARIED[asked.kind], asked.given, order.world_size, order.ranks_per_node)
    own = own_batch(job.command, order.command) if asked.kind == "batch" and takes.recipe is None else None
    plan = make_plan(asked, takes, order, place.gpu_gib, own)
    stamp = order.run_id[len(order.name) :]
    name = f"{order.name}-tune-{asked.kind}"
    folder = os.path.join(os.path.dirname(order.folder), name + stamp)
    return Tuning(asked, job, place, takes, plan, plan.cost(asked, order, place.gpus), folder, name)


def run_tuning(tuning: Tuning, shown: Shown, interruption: Interruption) -> None:
    """Run trial after trial, until the plan is done, somebody ends it, or the first one shows that the job is broken."""
    become_subreaper()
    interruption.listen()
    make_folder(tuning.folder)
    _write(tuning, shown)
    while not tuning.ended:
        answer = tuning.plan.next(tuning.results)
        if isinstance(answer, Done):
            tuning.ended = answer.why
        elif interruption:
            tuning.ended = "interrupted before all were tried"
        else:
            _try(tuning, answer, shown, interruption)
        tuning.judgement = judge(tuning.asked.kind, tuning.results, tuning.place.gpu_gib or _gpu_gib(tuning.results))
        _write(tuning, shown)


def _write(tuning: Tuning, shown: Shown) -> None:
    try:
        replace_json(os.path.join(tuning.folder, "tune.json"), tuning.to_plain())
    except OSError as error:
        shown.say("warning", f"tune.json cannot be written: {error.strerror}")


def _try(tuning: Tuning, trial: Trial, shown: Shown, interruption: Interruption) -> None:
    try:
        result = _one(tuning, trial, shown, interruption)
    except Problem as problem:
        if not tuning.results:
            shutil.rmtree(tuning.folder, ignore_errors=True)  # bad input leaves nothing behind
            raise
        tuning.ended = f"{trial.point.says()} could not be started: {problem.what}"
        return
    tuning.results.append(result)
    shown.result(result)
    if result.outcome == STOPPED:
        tuning.ended = "interrupted before all were tried"
    elif len(tuning.results) == 1 and result.outcome in _BROKEN[tuning.asked.kind]:
        tuning.ended, tuning.broken = f"the first trial ended with {result.outcome}: fix the job first", True


def make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)  # a submitted one has its folder already
    except OSError as error:
        raise no_place(path, error) from None


def _one(tuning: Tuning, trial: Trial, shown: Shown, interruption: Interruption) -> Result:
    asked, recipe = tuning.asked, tuning.tunable.recipe is not None
    limits = asked.limits(trial.long, recipe)
    job = trial_job(tuning, trial)
    shown.begin(trial, len(tuning.results) + 1, tuning.plan.most)
    begun = time.monotonic()
    output = os.path.join(tuning.folder, f"{job.name}.log")
    ended, watched = run_trial(job, limits, asked.pattern(), output, interruption, shown.progress)
    seen = watched.seen
    must = recipe or bool(asked.rate) or any(each.steps for each in tuning.results)
    outcome, why = classify(ended, seen, must, asked.silence)
    plan, samples = tuning.plan, None
    if (
        plan.kind == "batch" and plan.global_batch is None
    ):  # a step's samples grow with the batch: steps compare nothing
        samples = float((trial.point.batch or 0) * (plan.data_ranks or 0))
    speed, unit = seen.speed(samples) or (None, "")
    return Result(
        trial.point, outcome, why, round(time.monotonic() - begun, 1), seen.steps, seen.measured, speed, unit,
        seen.loss_after(limits.steps), seen.memory_gib or _used_gib(watched.run), watched.run.path if watched.run else "",
        trial.long, seen.spread(),
    )  # fmt: skip


def trial_job(tuning: Tuning, trial: Trial) -> Job:
    """Return the job of a short run: it saves nothing, is started once, and runs without a profiler."""
    asked, recipe = tuning.asked, tuning.tunable.recipe is not None
    limits = asked.limits(trial.long, recipe)
    ending = f"-{tuning.asked.kind}-{trial.point.label()}" + ("-long" if trial.long else "")
    name = f"{tuning.place.order.name[: 64 - len(ending) - 5]}-tune{ending}"[-64:].lstrip("-._")
    steps = WARM_UP + limits.steps
    return dataclasses.replace(
        tuning.job,
        name=name,
        command=tuning.tunable.filled(trial.point, steps, WARM_UP, tuning.plan.global_batch),
        runs=literal(tuning.folder),
        restarts=0,
        wrap=None,
        trace=False,
        array=None,
        time=None,
        stop_grace=min(tuning.job.stop_grace, GRACE),
    )


def _used_gib(run: Optional[Run]) -> Optional[float]:
    """Return the most memory that a GPU of node 0 held in a run that does not report it itself."""
    samples = run.telemetry(0) if run else ()
    used = [gpu.memory_used / 2**30 for sample in samples for gpu in sample.gpus if gpu.memory_used]
    return max(used, default=None)


def _gpu_gib(results: List[Result]) -> Optional[float]:
    """Return the memory of a GPU of node 0, as its agent saw it."""
    for each in results:
        facts = Run.open(each.run).facts(0) if each.run else None
        sizes = [gpu.memory_bytes for gpu in facts.gpus if gpu.memory_bytes is not None] if facts else []
        if sizes:
            return min(sizes) / 2**30
    return None


def outcome_code(tuning: Tuning, interruption: Interruption) -> int:
    if interruption:
        return 128 + interruption.signals[0]
    usable = tuning.judgement.recommended or tuning.judgement.largest
    return 0 if usable and not tuning.broken else 1


# `--submit`: one job that runs all trials in its allocation. What is shown is what is sent.


REQUEST = "request.json"  # what was requested, for the process that runs it in the allocation
_MARGIN = 180  # seconds beside the trials' own: the allocation's start, and the scheduler's notice before its end


def make_request(tuning: Tuning) -> Request:
    order = tuning.place.order
    asked_for = order.time_limit if tuning.job.where("time") == "--time" else None  # the file's is that of a training
    needed = float(-(-(tuning.cost.seconds + _MARGIN) // 60) * 60)
    resources = dataclasses.replace(order.resources, array="")
    order = dataclasses.replace(
        order, name=tuning.name, folder=tuning.folder, time_limit=asked_for or needed, stop_grace=float(GRACE),
        resources=resources,
    )  # fmt: skip
    why = "`drumbeat tune --submit` sends exactly this file."
    return backends.get(order.backend).render_command(order, "_tune", REQUEST, _request_text(tuning), why)


def submit(tuning: Tuning, request: Request, environ: Mapping[str, str]) -> str:
    """Submit the tuning and return the handle of its job. One that is refused leaves nothing behind."""
    make_folder(tuning.folder)
    try:
        replace(os.path.join(tuning.folder, REQUEST), _request_text(tuning))
        shutil.copyfile(cached_bundle(environ), os.path.join(tuning.folder, "drumbeat.pyz"))
        backend = backends.get(request.backend)
        handle = backend.submit(request, environ)
    except (Problem, OSError) as error:
        shutil.rmtree(tuning.folder, ignore_errors=True)
        raise no_place(tuning.folder, error) if isinstance(error, OSError) else error from None
    run_id = os.path.basename(tuning.folder)  # listed as a run is, and found by its name
    record = RunRecord(run_id, name=tuning.name, created=time.time(), handle=handle, desk=backend.desk(handle))
    write_run_record(RunFolder(tuning.folder), record)
    enlist(tuning.folder, run_id, environ)
    return handle


def _request_text(tuning: Tuning) -> str:
    order = tuning.place.order  # the job gets the size that its cost was worked out for
    job = dataclasses.replace(tuning.job, nodes=order.nodes, ranks_per_node=order.ranks_per_node or None)
    request = {"asked": tuning.asked, "job": job, "folder": tuning.folder, "program": order.program}
    return json.dumps(to_plain(request), indent=2) + "\n"


def read_request(path: str) -> Tuple[Asked, Job, str]:
    """Read the request, the job, and the folder of the tuning."""
    plain = read_json(path)
    if plain is None:
        raise Problem(f"{path} is missing or incomplete")
    try:
        return from_plain(Asked, plain.get("asked"), path), from_plain(Job, plain.get("job"), path), plain["folder"]
    except (RecordError, TypeError, KeyError) as error:
        raise Problem(f"{path}: {error}") from None


# Console output of a tuning: the cost first, one line per trial, at the end a table and what to put into the job.

_REDRAW = 0.5  # seconds
_MOST_REASONS = 16  # lines


class Shown:
    """Output on standard error, so that `--json` has standard output to itself."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self._says, self._drawn = "", 0.0

    def say(self, label: str, text: str) -> None:
        clear = "\r\x1b[K" if self.live else ""
        print(f"{clear}{label:<10} {text}", file=sys.stderr, flush=True)

    def begin(self, trial: Trial, number: int, most: int) -> None:
        self._says = f"trial {number} of at most {most}: {trial.point.says()}" + (", longer" if trial.long else "")
        self._drawn = 0.0

    def progress(self, seen: Observed, seconds: float) -> None:
        if self.live and time.monotonic() - self._drawn > _REDRAW:
            self._drawn = time.monotonic()
            sys.stderr.write(f"\r\x1b[K{self._says}: {seconds:.0f} s, {seen.steps} steps")
            sys.stderr.flush()

    def result(self, result: Result) -> None:
        self.say("trial", f"{result.point.says()}{', longer' if result.long else ''}: {_words(result)}")


def _words(result: Result) -> str:
    speed = f", {speed_text(result)}" if result.outcome == OK else ""
    why = f" ({result.why})" if result.why else ""
    return f"{result.outcome}{speed}, {result.seconds:.0f} s{why}"


def speed_text(result: Result) -> str:
    if result.speed is None:
        return "speed unknown"
    digits = 0 if result.speed >= 100 else 2
    return f"{result.speed:,.{digits}f} {result.unit}"


def table(kind: str, results: Sequence[Result], refused: Sequence[Result]) -> List[str]:
    """Return rows for a person; for trials that were refused, the reason."""
    first = {"batch": ("batch", "accumulate"), "hooks": ("hook",), "layout": ("layout",)}[kind]
    loss = ("loss", "against " + (results[0].point.hook or "")) if kind == "hooks" and results else ()
    head = (*first, "outcome", "speed", "memory", *loss, "seconds", "run")
    rows: List[Tuple[str, ...]] = [head]
    for each in results:
        said = tuple(str(getattr(each.point, name) or "-") for name in first)
        memory = f"{each.memory_gib:.1f} GiB" if each.memory_gib is not None else "-"
        outcome = each.outcome + (", longer" if each.long else "")
        speed = speed_text(each).replace("speed ", "") if each.outcome == OK else "-"
        known, first_loss = each.loss, results[0].loss
        differs = "-" if known is None or first_loss is None else f"{known - first_loss:+.4f}"
        losses = ("-" if known is None else f"{known:.4f}", differs) if loss else ()
        rows.append((*said, outcome, speed, memory, *losses, f"{each.seconds:.0f}", os.path.basename(each.run) or "-"))
    filled = [column for column in zip(*rows) if set(column[1:]) != {"-"}]
    return columns(list(zip(*filled))) + _reasons([*results, *refused])


def _reasons(results: Sequence[Result]) -> List[str]:
    said = [f"{each.point.says()}: {each.outcome}: {each.why}" for each in results if each.why]
    more = [f"and {len(said) - _MOST_REASONS} more: tune.json has them"] if len(said) > _MOST_REASONS else []
    return ["", *said[:_MOST_REASONS], *more] if said else []


def closing(
    judgement: Judgement, words: str, changes: str, ended: str, folder: str, recipe: bool, broken: Optional[Result]
) -> List[Tuple[str, str]]:
    if broken:
        return [("broken", ended), ("why", broken.why), ("look", f"drumbeat diagnose {broken.run}")]
    largest = judgement.largest
    lines = [("largest", f"{largest.point.says()}: {ended}") if largest else ("ended", ended)]
    fastest = judgement.fastest
    lines.append(("fastest", f"{fastest.point.says()}, {speed_text(fastest)}" if fastest else "unknown"))
    if judgement.recommended:
        why = judgement.why.replace("the fastest", "fastest", 1) if judgement.why.startswith("the ") else judgement.why
        lines.append(("recommended", f"{judgement.recommended.point.says()} ({why}). {changes}".rstrip()))
        lines.append(("in the job", words if recipe else f"in the command, {words}"))
    else:
        lines.append(("why", judgement.why))
    return [*lines, ("folder", folder)]

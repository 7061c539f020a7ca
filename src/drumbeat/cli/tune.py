"""drumbeat tune: the batch, hook or layout that fits and is fastest, found by short runs of the job."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from drumbeat.base.problem import Problem
from drumbeat.cli import add_json
from drumbeat.cli.output import print_json, quantity

_NOT_OURS = ("array", "restarts")
_HELP = {
    "batch": "the largest batch per rank that fits, and the fastest",
    "hooks": "the fastest way for DDP to send gradients, with the loss of each",
    "layout": "the fastest degrees of parallelism",
}
_COUNTS = {
    "--steps": "steps to measure, after 5 of warm-up. Default: 10 for batch, else 20",
    "--start": "batch: first to try, per rank. Default: the command's own, else 1",
    "--largest": "batch: largest to try. Default: 65,536",
    "--global-batch": "samples per step on all ranks together. Default: as now",
    "--data-ranks": "ranks that share a step's samples. Default: by the layout, else all",
}


def add_arguments(parser: Any) -> None:
    from drumbeat.jobfile.flags import add_job_flags

    parser.add_argument(
        "what", metavar="PART", choices=tuple(_HELP), help="; ".join(f"{name}: {text}" for name, text in _HELP.items())
    )
    add_job_flags(parser, leave_out=_NOT_OURS)
    group = parser.add_argument_group("the trials")
    group.add_argument("--seconds", type=float, default=120, metavar="S", help="time limit of one trial. Default: 120")
    group.add_argument(
        "--silence", type=float, default=60, metavar="S", help="no step for this long counts as a hang. Default: 60"
    )
    group.add_argument(
        "--rate", default="", metavar="REGEX", help="pattern of the speed that rank 0 prints, with one group"
    )
    group.add_argument(
        "--with",
        dest="given",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a {NAME} that is not tuned",
    )
    group.add_argument("--hooks", metavar="A,B", help="hooks to try. Default: all of them")
    group.add_argument("--candidates", type=int, default=6, metavar="N", help="layouts to try. Default: 6")
    for flag, words in _COUNTS.items():
        group.add_argument(flag, type=int, metavar="N", help=words)
    group.add_argument(
        "--parameters", metavar="N", help="layout: the model's parameters, as 8e9, 8b or 350m; skips what cannot fit"
    )
    group.add_argument("--dry-run", action="store_true", help="show the cost and stop")
    group.add_argument("--submit", action="store_true", help="submit one job for all trials; with --dry-run: show it")
    add_json(group)
    parser.epilog = (
        "Other values, such as learning rates: drumbeat submit --sweep lr=1e-3,1e-4 -- python train.py --lr {lr}"
    )
    parser.usage = f"{parser.prog} {{{','.join(_HELP)}}} [JOB.yaml] [options] [-- COMMAND...]"


def run(args: Any) -> int:
    from drumbeat.jobfile.flags import load_job
    from drumbeat.tune.session import settle, sized
    from drumbeat.tune.trial_list import place_here

    job, asked = load_job(args.job, args), _asked(args)
    asked.check()
    if args.submit:
        return _submit(args, job, asked)
    return tune(settle(asked, job, place_here(sized(job, asked.given), os.environ)), args.json, args.dry_run)


def _submit(args: Any, job: Any, asked: Any) -> int:
    from drumbeat import backends
    from drumbeat.desk.start.submit import queued_order
    from drumbeat.tune.session import make_request, settle, sized, submit
    from drumbeat.tune.trial_list import place_in_queue

    order = queued_order(sized(job, asked.given), os.environ)
    tuning = settle(asked, job, place_in_queue(order))
    request = make_request(tuning)
    for label, text in (
        ("cost", tuning.cost.says()),
        *(("warning", note) for note in backends.get(order.backend).notes(order)),
    ):
        print(f"{label:<10} {text}", file=sys.stderr)
    if args.dry_run:
        print(request.text, end="")
        return 0
    handle = submit(tuning, request, os.environ)
    if args.json:
        print_json({"handle": handle, "job": handle.rpartition("/")[2], "folder": tuning.folder}, None)
        return 0
    print(f"{'submitted':<10} {handle}")
    print(
        f"{'folder':<10} {tuning.folder}: tune.json holds the results so far, the job's output (desk.log here) the details"
    )
    print(f"{'cancel':<10} drumbeat cancel {handle}")
    return 0


def run_submitted(request: str) -> int:
    """Run a submitted tuning in its allocation: `_tune REQUEST`, called by the batch script."""
    from drumbeat.backends.contract import CANCELLED, FAILED, FINISHED
    from drumbeat.base.record import RecordError
    from drumbeat.runfolder.summary import keep_last_word
    from drumbeat.tune.session import read_request, settle, sized
    from drumbeat.tune.trial_list import place_here

    folder, why = os.path.dirname(os.path.abspath(request)), ""
    try:
        asked, job, folder = read_request(request)
        tuning = settle(asked, job, place_here(sized(job, asked.given), os.environ))
        tuning.folder = folder
        code = tune(tuning, as_json=False, dry=False)
    except Problem as problem:
        why, code = str(problem), problem.exit_code
        print(f"drumbeat tune: {problem}", file=sys.stderr)
    with contextlib.suppress(RecordError, OSError):  # one that was sent by hand, or a full disk
        keep_last_word(folder, CANCELLED if code > 128 else FAILED if code else FINISHED, why)
    return code


def tune(tuning: Any, as_json: bool, dry: bool) -> int:
    from drumbeat.tune.session import Shown, closing, outcome_code, run_tuning, table
    from drumbeat.tune.trial import Interruption
    from drumbeat.tune.trial_list import seconds_left

    shown, interruption = Shown(), Interruption()
    what = "batch per rank" if tuning.asked.kind == "batch" else tuning.asked.kind
    shown.say("tune", f"{what} of {tuning.place.order.name} (site {tuning.place.order.site})")
    shown.say("cost", tuning.cost.says())
    left = seconds_left()
    if left is not None and left < tuning.cost.seconds:
        shown.say("warning", f"this allocation ends in {left:.0f} s; what is known by then is kept")
    if not dry:
        shown.say("folder", tuning.folder)
        run_tuning(tuning, shown, interruption)
    if as_json:
        print_json(tuning.to_plain())
    elif not dry:
        print("\n".join(table(tuning.asked.kind, tuning.results, tuning.plan.refused)))
        changes = tuning.plan.changes(tuning.judgement.recommended)
        recipe, broken = tuning.tunable.recipe is not None, tuning.results[0] if tuning.broken else None
        for label, text in closing(
            tuning.judgement, tuning.words, changes, tuning.ended, tuning.folder, recipe, broken
        ):
            print(f"{label:<12} {text}")
    return 0 if dry else outcome_code(tuning, interruption)


def _asked(args: Any) -> Any:
    from drumbeat.jobfile.resources import NAMES
    from drumbeat.tune.search import HOOKS
    from drumbeat.tune.trial_list import Asked

    given = {}
    for each in args.given:
        name, equals, value = each.partition("=")
        if not equals or name not in NAMES:
            raise Problem(f"--with {each}: NAME=VALUE is needed", f"known: {', '.join(NAMES)}")
        given[name] = value
    hooks = tuple(name for name in args.hooks.split(",") if name) if args.hooks is not None else HOOKS
    if not hooks:
        raise Problem("--hooks names none", f"known: {', '.join(HOOKS)}")
    parameters = quantity(args.parameters, "--parameters") if args.parameters is not None else None
    plain = ("seconds", "silence", "steps", "start", "largest", "global_batch", "data_ranks", "rate", "candidates")
    said = {name: getattr(args, name) for name in plain}
    return Asked(args.what, hooks=hooks, parameters=parameters, given=given, **said)

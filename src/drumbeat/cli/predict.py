"""drumbeat predict: does it fit, how fast on N nodes, which layout, what does it cost."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any, List, Optional, Sequence, Tuple

from drumbeat.base.problem import Problem
from drumbeat.cli import add_json
from drumbeat.cli.output import print_json, quantity, write_file
from drumbeat.predict import show
from drumbeat.predict.forecast import forecast


def add_arguments(parser: Any) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB.yaml", help="job file; its command says model and layout")
    group = parser.add_argument_group("the model, where the command does not say it")
    group.add_argument(
        "--model", metavar="WHAT", help="config.json, or a name: llama3-8b, mixtral-8x7b, resnet-50, ..."
    )
    group.add_argument("--framework", metavar="NAME", help="drumbeat, megatron, torchtitan, fsdp, deepspeed, ...")
    group.add_argument("--layout", metavar="L", help="ddp, fsdp, or degrees: dp_shard=8,tp=2,pp=2; -1 is the rest")
    group.add_argument("--batch", type=int, metavar="N", help="samples per step, on all GPUs together")
    group.add_argument("--micro-batch", type=int, metavar="N", help="samples per pass. Default: the fastest that fits")
    group.add_argument("--seq", type=int, metavar="N", help="tokens per sequence")
    group.add_argument("--precision", metavar="P", help="bf16, fp16, fp8, tf32, fp32; drumbeat's own: bf16-master")
    group.add_argument(
        "--recompute", metavar="R", help="recomputation: none, selective or full. Default: the fastest that fits"
    )
    group.add_argument(
        "--schedule",
        metavar="S",
        help="pipeline schedule: 1f1b, interleaved, gpipe, zb-h1, zb-2p, zero-bubble, zbv, dualpipe-v",
    )
    group.add_argument("--zero", metavar="Z", help="sharding of the states: 0, 1, 2, 3, fsdp or hsdp")
    group = parser.add_argument_group("the cluster. Default: the GPUs of this node")
    group.add_argument("--gpu", metavar="NAME", help="h100, h200, b200, a100, mi250x, mi300x, ...")
    group.add_argument("--nodes", metavar="N", help="node count, or several: 1,2,4,...,256. Default: the job's, else 1")
    group.add_argument("--gpus", type=int, help=argparse.SUPPRESS)
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="default: the job's, else usual for this GPU")
    group.add_argument("--fabric", metavar="NAME", help="slingshot-11, hdr, ndr, xdr, roce-400, efa, ethernet-25, ...")
    group.add_argument("--nics", type=int, metavar="N", help="adapters per node")
    group.add_argument("--memory", type=float, metavar="GIB", help="memory of one GPU. Default: its data sheet's")
    group = parser.add_argument_group("what to answer")
    group.add_argument(
        "--search", action="store_true", help="the ten best layouts, and why the usual ones are not (numpy)"
    )
    group.add_argument("--write", metavar="FILE", help="with --search: the job with the layout to use, as a job file")
    group.add_argument("--verify", action="store_true", help="with --search: run the best three for 20 steps (tune)")
    group.add_argument("--tokens", metavar="N", help="time and cost of N tokens (or images), such as 300e9")
    group.add_argument("--budget", metavar="H", help="tokens that H GPU-hours pay for: 20000gpuh")
    group.add_argument("--price", type=float, metavar="P", help="price of one GPU-hour, in your currency")
    group.add_argument(
        "--calibrate",
        nargs="+",
        default=[],
        metavar="RUN",
        help="training or verify runs of this cluster to learn from. Default: your newest on such GPUs. "
        "here: measure the model's matrix products on this GPU",
    )
    group.add_argument("--html", metavar="FILE", help="write one self-contained page with plots")
    add_json(group)
    parser.set_defaults(takes_command=True, after=None)
    parser.usage = f"{parser.prog} [JOB.yaml] [options] [-- COMMAND...]"
    parser.epilog = "Exit code: 0; 1 if nothing that was asked about fits; 2 for bad input."


def run(args: Any) -> int:
    from drumbeat.predict.forecast import reliability_of
    from drumbeat.predict.job import Question, Wishes, node_counts
    from drumbeat.predict.past import error_words
    from drumbeat.report.prediction import failure_rate

    odd = [name for name, value in vars(args).items() if value == [] and name not in ("calibrate", "after")]
    if odd:  # what argparse makes of --seq=--
        raise Problem(f"--{odd[0].replace('_', '-')}: a value is needed")
    if args.search:
        unused = [name for name in ("html", "tokens", "budget", "price") if getattr(args, name, None) is not None]
        if unused:
            raise Problem(f"--search compares layouts of one step; --{unused[0]} has no effect with it", "leave it out")
    elif args.write or args.verify:
        raise Problem("--write and --verify belong to --search", "add --search")
    described, job = _described(args)
    cluster = _cluster(args, job)
    if args.gpus is not None:
        nodes = max(1, -(-args.gpus // cluster.gpus_per_node))
        whole = f"--nodes {nodes}: nodes of {cluster.gpus_per_node} GPUs (--gpus-per-node changes that)"
        raise Problem(f"--gpus {args.gpus}: give the number of nodes instead", whole)
    counts = node_counts(args.nodes) if args.nodes else [job.nodes or 1 if job else 1]
    wishes = Wishes(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Wishes)})
    constants, basis, seen = _learned(args, cluster, described, wishes, os.environ)
    question = Question(described, wishes, cluster, constants, basis)
    cases, problems = question.cases(counts)
    if not cases:
        raise problems[counts[0]]
    for nodes, why in problems.items():
        print(f"drumbeat predict: {nodes} nodes left out: {why.what}", file=sys.stderr)
    most = max(set(counts) - set(problems))
    if "here" in args.calibrate:
        cases = [_measured(case) for case in cases]
    if args.search:
        return _search(args, [*(_other_sizes(question, most) if len(cases) == 1 else ()), *cases], job)
    found = [forecast(case) for case in cases]
    naive = [_naive(each, question) for each in found]
    last = found[-1]
    reliability = reliability_of(last.case.gpus, *failure_rate(os.environ))
    whole = _whole(args, last, described, reliability)
    if args.html:
        from drumbeat.report.prediction import page_of

        around = {max(1, most // 8), max(1, most // 4), max(1, most // 2), most, most * 2, most * 4}
        many = found if len(found) > 1 else _possible(question.cases(around)[0])
        lines = show.whole_lines(whole, last.unit, reliability) if whole else ()
        write_file(args.html, page_of(last, many, [_naive(each, question) for each in many], seen, lines))
    if args.json:
        print_json([show.plain_of(each, simple, whole if each is last else None) for each, simple in zip(found, naive)])
    elif not args.html:
        if len(found) > 1:
            print("\n".join(show.scaling_lines(found, naive)) + "\n")
        simple = naive[-1] if last.case.gpus > cluster.gpus_per_node else None
        known = args.batch or described.batch or described.per_replica
        assumed = [
            described.assumed,
            "" if known else f"a batch of {int(last.case.work.batch)}, as none is given (--batch)",
        ]
        words = "; ".join(filter(None, assumed))
        print("\n".join(show.lines_of(last, simple, whole, reliability, error_words(seen), words)))
    return 0 if any(each.verdict != "does not fit" for each in found) else 1


def _described(args: Any) -> Tuple[Any, Any]:
    """Return the model, and the job if there is one."""
    from drumbeat.predict.arguments import from_command
    from drumbeat.predict.models import Described, describe

    job = None
    found: Optional[Described] = None
    if args.job or args.after:
        from drumbeat.jobfile.flags import load_job

        job = load_job(args.job, args)
        found = from_command([str(word) for word in job.command]) if job.command else None
    if args.model:
        named = describe(args.model)
        found = dataclasses.replace(found, model=named.model, seq=named.seq) if found else named
    if found is None:
        if job is None:
            raise Problem("no model", "give a job file, -- COMMAND, or --model config.json (or a name)")
        raise Problem(
            "this command's model is not known (Megatron-LM, torchtitan, MaxText and drumbeat train are read)",
            "add --model config.json, and --framework and --layout where they matter",
        )
    return found, job


def _cluster(args: Any, job: Any) -> Any:
    from drumbeat.predict.machine import find_cluster

    for name in ("gpus_per_node", "nics", "memory", "batch", "micro_batch", "seq"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e9:
            raise Problem(f"--{name.replace('_', '-')} {value}: a number above 0 is needed")
    gpu, memory = args.gpu, args.memory
    per_node = args.gpus_per_node or (job.gpus if job else None) or 0
    if not gpu:
        from drumbeat.machine.gather import gather
        from drumbeat.machine.host import LiveHost

        here = [each for each in gather(LiveHost()).gpus if not each.integrated and each.name]
        if not here:
            raise Problem("no GPU here, so the machine is not known", "name one: --gpu h100")
        gpu = here[0].name
        per_node = per_node or len(here)
        memory = memory or (here[0].memory_bytes or 0) / 2**30
    return find_cluster(str(gpu), per_node, args.fabric or "", args.nics or 0, memory or 0.0)


def _learned(args: Any, cluster: Any, described: Any, wishes: Any, environ: Any) -> Tuple[Any, Any, List[Any]]:
    """Return the constants, their basis, and the runs that they were learned from: --calibrate, else the ledger of
    earlier runs."""
    from drumbeat.predict.machine import UNCALIBRATED, framework_named
    from drumbeat.predict.past import calibrated, recall, with_verify
    from drumbeat.predict.shapes import ConvNet

    usual = "drumbeat" if isinstance(described.model, ConvNet) else "fsdp"
    name = wishes.framework or described.framework or usual
    constants, basis = framework_named(name).constants, UNCALIBRATED
    seen = recall(cluster.gpu, environ)
    from drumbeat.report.prediction import evidence, own_runs

    if not args.calibrate:
        found = own_runs(cluster.gpu, {each.run for each in seen}, environ)
    else:
        found = evidence([name for name in args.calibrate if name != "here"], environ)
    for run in found.verified:
        constants, basis, _ = with_verify(cluster, constants, *run)
    seen = [each for each in seen if each.run not in {one.run for one in found.seen}] + found.seen
    learned, from_runs = calibrated(constants, seen, name)
    return (learned, from_runs, seen) if from_runs is not UNCALIBRATED else (constants, basis, seen)


def _measured(case: Any) -> Any:
    """Return the case with constants measured on this machine's GPU, from the products of its own shapes."""
    from drumbeat.predict.machine import MEASURED
    from drumbeat.predict.past import measured_rate, share_of

    print("measuring this model's matrix products on this GPU, some 15 s", file=sys.stderr)
    rate = measured_rate(case)
    constants = dataclasses.replace(case.constants, product=share_of(case, rate))
    words = f"this model's matrix products reach {rate / 1e12:.0f} TFLOP/s on this GPU, and {case.basis.words}"
    return dataclasses.replace(case, constants=constants, basis=dataclasses.replace(MEASURED, words=words))


def _possible(cases: Sequence[Any]) -> List[Any]:
    """Return the predictions of those cases whose layout divides."""
    found = []
    for case in cases:
        try:
            found.append(forecast(case))
        except Problem:
            continue
    return found


def _naive(found: Any, question: Any) -> float:
    """Return the seconds of a step at the speed per GPU of one node."""
    case = found.case
    per_node = case.cluster.gpus_per_node
    smallest = max(1, -(-int(case.layout.tp * case.layout.pp * case.layout.cp) // per_node))
    if max(1, case.gpus // per_node) <= smallest:
        return float(found.seconds)
    wishes = dataclasses.replace(question.wishes, batch=None)
    try:
        small = dataclasses.replace(question, wishes=wishes).case(smallest)
        share = int(case.work.batch // case.layout.dp)
        small = dataclasses.replace(
            small,
            work=dataclasses.replace(case.work, batch=share * small.layout.dp),
            layout=dataclasses.replace(case.layout, dp=small.layout.dp, shard=0),
        )
        first = forecast(small, look_for_fix=False)
    except Problem:
        return float(found.seconds)
    return float(found.per_step / (first.rate / first.case.gpus * case.gpus))


def _whole(args: Any, found: Any, described: Any, reliability: Any) -> Any:
    from drumbeat.predict.forecast import affordable, whole_run

    units = quantity(args.tokens, "--tokens") if args.tokens else None
    if args.budget:
        hours = quantity(args.budget, "--budget", "gpuh")
        paid, low, high = (
            affordable(hours, each, found, reliability) for each in (found.seconds, found.high, found.low)
        )
        if not args.json and not args.html:
            enough = "enough" if units and paid >= units else f"{paid / (units or paid):.0%} of them"
            asked = f"; {show.amount(units)} were asked for: {enough}" if units else ""
            span = f"90 %: {show.amount(low)} to {show.amount(high)}"
            print(f"{'budget':<13}{hours:,.0f} GPU-hours pay for {show.amount(paid)} {found.unit} ({span}){asked}")
        units = units or paid
    if units is None and described.steps:
        units = described.steps * found.per_step
    if units is None:
        return None
    if args.price is not None and not 0 <= args.price < 1e6:
        raise Problem(f"--price {args.price}: a price above 0 is needed")
    return whole_run(units, found, reliability, args.price)


def _search(args: Any, cases: Sequence[Any], job: Any) -> int:
    from drumbeat.predict.search import best, pareto, simplest, usual

    case = cases[-1]
    chosen, ranking = best(case)
    if not chosen:
        raise Problem(
            f"none of {ranking.tried:,} layouts of {case.model.name} fits {case.gpus} x {case.cluster.gpu}",
            "use more nodes or a larger GPU",
            exit_code=1,
        )
    found = [forecast(each) for each in chosen]
    use = found[simplest([each.layout for each in chosen], [each.seconds for each in found])]
    curve = [forecast(each) for size in cases[:-1] for each in best(size, 1)[0]] + [use]
    good = pareto([(each.seconds / each.per_step, each.case.gpus * each.seconds / each.per_step) for each in curve])
    if args.json:
        rows = [{**show.plain_of(each, None, None), "use": each is use} for each in found]
        print_json(rows)
    else:
        print(f"{'model':<13}{show.model_words(case)}")
        print(
            f"{'on':<13}{case.gpus} x {case.cluster.gpu}; batch {int(case.work.batch)} x {int(case.work.seq)}; "
            f"{case.precision}, {case.framework.name}"
        )
        print("\n".join(show.search_lines(found, ranking, usual(case, found[0].seconds, found[0].case.layout))))
        if len(curve) > 1:
            print("\n" + "\n".join(show.pareto_lines(curve, good)))
        print(f"\n{'use':<13}{show.arguments_words(use.case)}")
        print(f"{'basis':<13}{case.basis.name}: {case.basis.words}")
        if not args.verify:
            print(f"{'check it':<13}--verify runs the best three for 20 steps each")
    if args.write:
        write_file(args.write, _job_text(args, job, use.case))
    return _verify(args, job, found) if args.verify else 0


def _job_text(args: Any, job: Any, case: Any) -> str:
    """Return the job with the layout to use, as a job file."""
    import yaml

    from drumbeat.predict.arguments import with_arguments

    if job is None or not job.command:
        raise Problem("--write needs the job's command", "give a job file, or -- COMMAND")
    values: Any = {}
    if args.job:
        with open(args.job, encoding="utf-8") as stream:
            values = yaml.safe_load(stream) or {}
    values["nodes"] = max(1, case.gpus // case.cluster.gpus_per_node)
    values["command"] = with_arguments([str(word) for word in job.command], case)
    head = f"# Layout by drumbeat predict --search for {case.gpus} x {case.cluster.gpu}.\n"
    return head + str(yaml.safe_dump(values, sort_keys=False, width=120))


def _verify(args: Any, job: Any, found: Sequence[Any]) -> int:
    """Run the best three layouts for 20 steps each, through tune."""
    from drumbeat.cli.tune import tune
    from drumbeat.predict.arguments import arguments_of
    from drumbeat.tune.session import settle, sized
    from drumbeat.tune.trial_list import Asked, place_here

    words = [(arguments_of(each.case) or "").split() for each in found]
    layouts = list(dict.fromkeys(line[1] for line in words if line[:1] == ["--layout"]))[:3]
    if job is None or not job.command or not layouts:
        raise Problem(
            "--verify runs commands of drumbeat train, or with {layout} in them", "give such a job file, or -- COMMAND"
        )
    asked = Asked("layout", steps=20, candidates=len(layouts), layouts=tuple(layouts))
    return tune(settle(asked, job, place_here(sized(job, asked.given), os.environ)), args.json, False)


def _other_sizes(question: Any, nodes: int) -> List[Any]:
    """Return cases of the same step on fewer and on more nodes, for the table of time against GPU-hours."""
    batch = int(question.case(nodes).work.batch)
    wishes = dataclasses.replace(question.wishes, batch=batch, layout=None, micro_batch=None)
    counts = {max(1, nodes // 4), max(1, nodes // 2), nodes * 2} - {nodes}
    cases: List[Any] = dataclasses.replace(question, wishes=wishes).cases(counts)[0]
    return cases

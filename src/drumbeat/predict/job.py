"""From a user's input (a command, a model, degrees, a cluster) to the predicted case; rules fill the gaps."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.predict.arguments import from_command, parse_layout, scheduled
from drumbeat.predict.cost import Constants, Layout, Work
from drumbeat.predict.forecast import Case, forecast
from drumbeat.predict.machine import OWN, UNCALIBRATED, Basis, Cluster, find_cluster, framework_named, precision_named
from drumbeat.predict.models import Described
from drumbeat.predict.shapes import ConvNet
from drumbeat.predict.show import one_line


@dataclass(frozen=True)
class Wishes:
    """Options of the command line; None: not given."""

    layout: Optional[str] = None
    batch: Optional[int] = None
    micro_batch: Optional[int] = None
    seq: Optional[int] = None
    precision: Optional[str] = None
    recompute: Optional[str] = None
    zero: Optional[str] = None
    framework: Optional[str] = None
    schedule: Optional[str] = None


_MOST_AT_ONCE, _MOST_TOKENS = 8, 16384  # samples of a micro-batch chosen here; more for short ones


def recompute_named(words: str) -> int:
    """Return the recomputation level of none, selective, full, or of frameworks' and papers' names for them."""
    spelled = words.lower()
    if any(name in spelled for name in ("full", "all", "uniform", "block")):
        return 2
    if any(name in spelled for name in ("selective", "sac", "minimal", "attn", "core", "op")):
        return 1
    if spelled in ("none", "no", "off", "0", "false"):
        return 0
    raise Problem(f"recompute {words[:40]!r} is unknown", "none, selective or full")


def sharding_named(words: str) -> Tuple[int, int]:
    """Return ZeRO's stage and the number of ranks that share the states (0: all) for 1(dist-opt), fsdp-full(zero3), hsdp,
    fsdp-128, ..."""
    spelled = words.lower()
    if spelled in ("", "0", "none", "ddp", "no"):
        return 0, 0
    digits = re.search(r"(?:fsdp|hsdp)\D*?(\d+)(?!\d*\))", spelled.replace("fsdp2", "fsdp"))
    shard = int(digits.group(1)) if digits and int(digits.group(1)) > 3 else (8 if spelled == "hsdp" else 0)
    stage = re.search(r"(?:zero|stage|^)[ -]?([0-3])", spelled)
    if "grad_op" in spelled or "zero2" in spelled:
        return 2, shard
    if "fsdp" in spelled or "hsdp" in spelled:
        return 3, shard
    if "dist" in spelled and "opt" in spelled:
        return 1, 0
    if stage:
        return int(stage.group(1)), shard
    raise Problem(f"sharding {words[:40]!r} is unknown", "0, 1, 2 or 3 (ZeRO's stage), fsdp or hsdp")


def make_case(
    described: Described,
    wishes: Wishes,
    cluster: Cluster,
    nodes: int,
    constants: Optional[Constants] = None,
    basis: Basis = UNCALIBRATED,
) -> Case:
    """Determine every value of a case: from the command line, else from the job's command, else by a rule."""
    gpus = nodes * cluster.gpus_per_node
    conv = isinstance(described.model, ConvNet)
    framework = framework_named(wishes.framework or described.framework or ("fsdp" if not conv else "drumbeat"))
    usual = "fp16" if cluster.gpu == "V100" else "bf16"
    precision = precision_named(wishes.precision or described.precision or usual)
    said = described.layout or Layout(dp=0, zero=-1, recompute=-1, micro=0)
    degrees = _degrees(said, parse_layout(wishes.layout, cluster.gpus_per_node) if wishes.layout else {}, gpus)
    _sensible(described, wishes, degrees["ep"])
    zero, shard = sharding_named(wishes.zero) if wishes.zero else (degrees.pop("zero_said", None), 0)
    dp = degrees["dp"]
    batch = wishes.batch or described.batch or _usual_batch(described, wishes, dp)
    if batch < 1 or batch % dp:
        raise Problem(
            f"a batch of {batch} does not divide by {dp} replicas "
            f"({gpus} GPUs = {dp} x tp {degrees['tp']} x pp {degrees['pp']} x cp {degrees['cp']})",
            "choose another batch, layout or number of nodes",
        )
    if zero is None:
        usual_zero = 0 if dp == 1 else 3 if framework.states.gathered else 1
        zero = int(said.zero) if said.zero >= 0 else usual_zero
    share = batch // dp
    work = Work(wishes.seq or described.seq, batch)
    level = recompute_named(wishes.recompute) if wishes.recompute else int(said.recompute)
    micro = wishes.micro_batch or int(max(0, said.micro))
    if not micro and said.micro < 0:  # as a number of micro-batches
        if share % -said.micro:
            words = f"{share} samples per replica do not divide by {-said.micro} micro-batches"
            raise Problem(words, "choose another number")
        micro = share // -int(said.micro)
    layout = Layout(
        tp=degrees["tp"], pp=degrees["pp"], cp=degrees["cp"], ep=degrees["ep"], dp=dp, vp=degrees["vp"], zero=zero,
        shard=shard or degrees["shard"], micro=micro or 1, recompute=max(0, level),
        sp=int(degrees["tp"] > 1 and framework.name != "megatron-classic"),
    )  # fmt: skip
    if described.layout is not None:
        layout = dataclasses.replace(layout, bubble=said.bubble, flight=said.flight)
    if described.layout is not None and framework.name.startswith("megatron"):
        layout = dataclasses.replace(layout, sp=int(said.sp and degrees["tp"] > 1))
    if wishes.schedule:
        layout = scheduled(layout, wishes.schedule)
    if basis is UNCALIBRATED and framework.name == "drumbeat" and cluster.gpu == "H200":
        basis = OWN
    case = Case(described.model, work, layout, framework, cluster, precision, constants or framework.constants, basis)
    if micro and level >= 0:
        return case
    return _chosen(case, share, bool(micro), level >= 0)


@dataclass(frozen=True)
class Question:
    """A requested prediction, for any number of nodes."""

    described: Described
    wishes: Wishes
    cluster: Cluster
    constants: Optional[Constants] = None
    basis: Basis = UNCALIBRATED

    def case(self, nodes: int) -> Case:
        return make_case(self.described, self.wishes, self.cluster, nodes, self.constants, self.basis)

    def cases(self, counts: Iterable[int]) -> Tuple[List[Case], Dict[int, Problem]]:
        """Return the cases for these numbers of nodes, and the reason why others are impossible."""
        cases, problems = [], {}
        for nodes in sorted(set(counts)):
            try:
                cases.append(self.case(nodes))
            except Problem as problem:
                problems[nodes] = problem
        return cases, problems


def _sensible(described: Described, wishes: Wishes, ep: int) -> None:
    """Refuse settings that the model does not support."""
    model = described.model
    if isinstance(model, ConvNet):
        return
    if ep > 1 and not model.experts:
        raise Problem(f"{model.name} has no experts to spread over ep {ep}", "leave ep out")
    if wishes.seq and 0 < model.positions < wishes.seq:
        words = f"{model.name} has learned positions for {model.positions} tokens, not {wishes.seq}"
        raise Problem(words, "give a shorter --seq")


def _chosen(case: Case, share: int, keep_micro: bool, keep_recompute: bool) -> Case:
    """Choose micro-batch and recomputation: the fastest that fits, else the smallest."""
    conv = isinstance(case.model, ConvNet)
    most = share if conv else min(share, max(_MOST_AT_ONCE, _MOST_TOKENS // int(case.work.seq)))
    sizes = [int(case.layout.micro)] if keep_micro else [n for n in range(most, 0, -1) if share % n == 0]
    levels = [int(case.layout.recompute)] if keep_recompute or conv else [0, 1, 2]
    best: Optional[Case] = None
    fastest = 0.0
    tried = case
    for level, micro in itertools.product(levels, sizes):
        tried = dataclasses.replace(case, layout=dataclasses.replace(case.layout, micro=micro, recompute=level))
        found = forecast(tried, look_for_fix=False)
        if found.verdict == "fits" and (best is None or found.seconds < fastest):
            best, fastest = tried, found.seconds
    return best or tried


def _usual_batch(described: Described, wishes: Wishes, dp: int) -> int:
    """Return a batch of one micro-batch per replica; without a micro-batch, of 32,768 tokens (256 images) per replica."""
    if isinstance(described.model, ConvNet):
        return 256 * dp
    if described.per_replica:
        return described.per_replica * dp
    if described.layout is not None and described.layout.micro > 0:
        return int(described.layout.micro) * dp
    seq = wishes.seq or described.seq
    return (1 << (max(1, 32768 // seq).bit_length() - 1)) * dp


def _degrees(said: Layout, wished: Dict[str, int], gpus: int) -> Dict[str, int]:
    """Return all degrees, with -1 replaced by what is left of the GPUs."""
    found = {name: int(wished.get(name, getattr(said, name))) for name in ("tp", "pp", "cp", "ep", "vp")}
    shard = wished.get("dp_shard", int(said.shard) if said.zero >= 3 else 0)
    replicate = wished.get("dp_replicate", 0)
    rest = [name for name in ("tp", "pp", "cp") if found[name] == -1]
    if len(rest) > 1:
        raise Problem("layout: only one degree may be -1", "give the others as numbers")
    given = {**found, "dp": wished.get("dp", -1), "dp_shard": shard or -1, "dp_replicate": replicate or -1}
    for name, value in given.items():
        if value == 0 or value < (1 if name in ("ep", "vp") else -1) or wished.get(name) == 0:
            raise Problem(f"layout: {name}={wished.get(name, value)}", "a degree is a whole number above 0")
    if rest:
        others = math.prod(found[name] for name in ("tp", "pp", "cp") if name not in rest)
        others *= max(1, wished.get("dp", 0), max(1, replicate) * max(1, shard))
        if gpus % others:
            raise Problem(f"layout: {gpus} GPUs do not divide by {others}", "choose other degrees")
        found[rest[0]] = gpus // others
    model = found["tp"] * found["pp"] * found["cp"]
    if gpus % model:
        what = f"{gpus} GPUs do not divide by tp {found['tp']} x pp {found['pp']} x cp {found['cp']} = {model}"
        raise Problem(what, "choose other degrees or another number of nodes")
    found["dp"] = gpus // model
    if wished.get("dp", -1) not in (-1, found["dp"]):
        raise Problem(
            f"{gpus} GPUs = dp {found['dp']} x tp {found['tp']} x pp {found['pp']} x cp {found['cp']}, not dp {wished['dp']}",
            "leave dp out: it is the rest",
        )
    replicas = found["dp"] * found["cp"]
    if (shard > 0 and replicas % shard) or (replicate > 0 and found["dp"] % replicate):
        what = f"{found['dp']} replicas do not divide by dp_replicate {max(1, replicate)} x dp_shard {max(1, shard)}"
        raise Problem(what, "choose other degrees or another number of nodes")
    found["shard"] = min(max(0, shard), found["dp"] * found["cp"])
    if wished.get("dp_shard", 1) != 1:
        found["zero_said"] = 3
    elif "dp_replicate" in wished:
        found["zero_said"] = 0
    return found


def node_counts(text: str) -> List[int]:
    """Parse 4, 1,2,4 or 1,2,4,...,256 (doubling if the first two do, else by their difference)."""
    words = [word.strip() for word in text.split(",")]
    try:
        if "..." in words:
            at = words.index("...")
            first, last = [int(word) for word in words[:at]], int(words[at + 1])
            if not first or len(words) != at + 2 or min(first) < 1 or last < first[-1]:
                raise ValueError
            doubling = len(first) < 2 or first[-1] == 2 * first[-2]
            step = first[-1] - first[-2] if len(first) > 1 else 0
            if last > 200_000 or not (doubling or step > 0):
                raise ValueError
            while first[-1] < last and len(first) <= 500:
                first.append(first[-1] * 2 if doubling else first[-1] + step)
            counts = [*(n for n in first if n < last), last]
        else:
            counts = [int(word) for word in words]
    except (ValueError, IndexError):
        raise Problem(f"--nodes {text}: not a list of node counts", "write 4, 1,2,4 or 1,2,4,...,256") from None
    if not counts or min(counts) < 1 or max(counts) > 200_000 or len(counts) > 500:
        raise Problem(f"--nodes {text}: a number of nodes must be at least 1", "write 4, 1,2,4 or 1,2,4,...,256")
    return sorted(set(counts))


def case_of_command(
    command: Sequence[str], gpu: str, nodes: int, gpus_per_node: int, memory_gib: float = 0.0
) -> Optional[Case]:
    """Return the case of a job's command on known GPUs; None if model or GPU is unknown. A Problem: it cannot run so."""
    try:
        described = from_command(list(command))
        if described is None:
            return None
        cluster = find_cluster(gpu, gpus_per_node, memory_gib=memory_gib)
    except Problem:
        return None
    return make_case(described, Wishes(), cluster, nodes)


def line_of_command(command: Sequence[str], gpus: Sequence[Any], nodes: int, gpus_per_node: int) -> str:
    """Return a one-line prediction for a job on these GPUs (of one node, as its facts name them); empty if unknown."""
    names = {each.name for each in gpus if not each.integrated}
    if len(names) != 1 or not gpus_per_node:
        return ""
    memory = next((each.memory_bytes for each in gpus if not each.integrated), None)
    try:
        case = case_of_command(command, str(names.pop()), nodes, gpus_per_node, (memory or 0) / 2**30)
        return one_line(forecast(case)) if case else ""
    except Problem as problem:
        return f"not possible: {problem.what}"

"""The list of trials from the request and the place: the settings to try, the highest number of trials and their cost. Pure."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shlex
import time
from bisect import bisect_right
from dataclasses import field, replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.desk.start.make_order import make_order, site_of
from drumbeat.desk.start.place import ALLOCATION, HERE, INSIDE, check_not_login, find_place
from drumbeat.desk.start.run import check_inside
from drumbeat.jobfile.check import literal
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.resources import DEGREES, fill, places
from drumbeat.machine import identity as identities
from drumbeat.machine.host import LiveHost
from drumbeat.machine.vendors import detect
from drumbeat.train.parallel import Layout
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import BATCHES
from drumbeat.tune import search
from drumbeat.tune.trial import Limits

# The ways in which a command takes a trial's values: our recipes by `--set` and `--layout`, any other by `{batch}` and the
# like.
#
# Words are added to a recipe's command, never cut out: what stands last counts there.


# Settings that a trial does not need: it neither saves, nor resumes, nor measures quality.
_OFF = ("checkpoint=", "save_every=0", "validate_every=0", "stop_after=0", "profile=", "figures=")


@dataclass(frozen=True)
class Recipe:
    """`drumbeat train NAME ...` as parsed from a command."""

    name: str
    settings: Dict[str, str] = field(default_factory=dict)

    @property
    def batch(self) -> Optional[int]:
        """Return the samples per step: the command's, else the recipe's; None if they follow from its data."""
        return self.number("batch") or BATCHES.get(self.name)

    def number(self, key: str) -> Optional[int]:
        text = self.settings.get(key)
        if text is None:
            return None
        if not text.replace("_", "").isdigit() or not int(text.replace("_", "")):
            raise Problem(f"the command says {key}={text}, which is not a whole number above 0")
        return int(text.replace("_", ""))


def find_recipe(command: Sequence[str]) -> Optional[Recipe]:
    """Find `drumbeat train llama ...`, however it is started: by its name, by `python -m drumbeat`, behind torchrun."""
    for index, word in enumerate(command[:-2]):
        if os.path.basename(word) == "drumbeat" and command[index + 1] == "train":
            return Recipe(command[index + 2], _settings(command[index + 3 :]))
    return None


def _settings(words: Sequence[str]) -> Dict[str, str]:
    """Return the settings as the recipe would read them: the last one counts, and `--layout` over `layout=`."""
    found: Dict[str, str] = {}
    layout: Optional[str] = None
    taking = False
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            taking = name == "--set" and not equals
            if name == "--layout":
                layout = value if equals else words[index + 1] if index + 1 < len(words) else layout
            word = value if name == "--set" and equals else ""
        elif not taking:
            continue
        key, equals, value = word.partition("=")
        if equals:
            found[key.replace("-", "_")] = value
    return {**found, "layout": layout} if layout is not None else found


@dataclass(frozen=True)
class Tunable:
    """A command and the places where it takes a point. `command` is the job's own text; `recipe` was read from its
    expanded words."""

    command: Tuple[str, ...]
    recipe: Optional[Recipe]
    places: Tuple[str, ...]
    given: Mapping[str, str]  # values for the places that are not varied
    world: int
    ranks_per_node: int

    def filled(
        self, point: search.Point, steps: int, report_every: int, global_batch: Optional[int]
    ) -> Tuple[str, ...]:
        if self.recipe:
            hook = point.hook or ""
            if hook.startswith("powersgd") and hook.count(":") == 1:
                # By default it sends plain gradients for longer than a trial lasts. It needs at least 2 steps.
                hook += ":2"
            tried = replace(point, hook=hook or None)
            words = ["--set", *_OFF, f"steps={steps}", f"report_every={report_every}", *self._sets(tried, global_batch)]
            return (*self.command, *map(literal, words), *(("--layout", point.layout) if point.layout else ()))
        return fill(self.command, {name: literal(value) for name, value in self.values(point).items()})

    def values(self, point: search.Point) -> Dict[str, str]:
        """Map every placeholder of the command to its value in this trial."""
        values = dict(self.given)
        values.update((name, str(value)) for name, value in vars(point).items() if value is not None)
        if "layout" in values:
            layout = read_layout(values["layout"], self.world, self.ranks_per_node)
            values.update({name: str(getattr(layout, name)) for name in DEGREES})
        return {name: values[name] for name in self.places if name in values}

    def _sets(self, point: search.Point, global_batch: Optional[int]) -> List[str]:
        """Return the recipe's settings. Its `batch` is that of all ranks together, so a rank's batch is set by
        `accumulate`."""
        assert self.recipe
        said = self.recipe.settings.get("batch") == str(global_batch) and point.accumulate is None
        sets = [f"batch={global_batch}"] if global_batch is not None and not said else []
        sets += [f"accumulate={point.accumulate}"] if point.accumulate is not None else []
        return sets + ([f"hook={point.hook}"] if point.hook is not None else [])

    def words(self, point: search.Point, global_batch: Optional[int]) -> str:
        """Return the command's text for the job."""
        if self.recipe:
            sets = self._sets(point, global_batch)
            words = [*(["--set", *sets] if sets else []), *(["--layout", point.layout] if point.layout else [])]
            return " ".join(words)
        return ", ".join(f"{{{name}}} -> {value}" for name, value in self.values(point).items())


def tunable(
    command: Tuple[str, ...], expanded: Sequence[str], kind: str, given: Mapping[str, str], world: int, ranks_per_node: int
) -> Tunable:  # fmt: skip
    """Return the command as something to tune `kind` of (batch, hook, layout); a Problem if it takes no such thing."""
    recipe = find_recipe(expanded)
    found = places(command)
    if recipe:
        if found or given:
            named = ", ".join(f"{{{name}}}" for name in found) or "--with"
            raise Problem(f"{named}: a recipe takes these values by its own settings", "leave it out")
        if "--verify-resume" in expanded or "--settings" in expanded:
            raise Problem("the command does not train: it has --verify-resume or --settings", "leave that out")
        return Tunable(command, recipe, (), {}, world, ranks_per_node)
    wanted = f"{{{kind}}}"
    if kind not in found and not (kind == "layout" and set(DEGREES) & set(found)):
        own = shlex.join(expanded[:8])
        script = next((place for place, word in enumerate(expanded[:2]) if word.endswith((".sh", ".bash"))), None)
        example = f"{own} --{kind} {wanted}"
        if script is not None:
            example = f"{own} {wanted}, and in {expanded[script]} ${{{len(expanded) - script}}} in its place"
        raise Problem(
            f"no {wanted} in the command",
            f"write {wanted} where the {kind} goes, such as: {example}; recipes need none",
        )
    unknown = [name for name in given if name not in found and not (name == "layout" and set(DEGREES) & set(found))]
    if unknown:
        raise Problem(f"--with {unknown[0]}=...: the command has no {{{unknown[0]}}}")
    varied = {"batch": {"batch", "accumulate"}, "hook": {"hook"}, "layout": {"layout", *DEGREES}}[kind]
    filled = {*given, *(DEGREES if "layout" in given else ())}
    missing = [name for name in found if name not in varied and name not in filled]
    missing = [name for name in missing if not (kind == "layout" and name in ("batch", "accumulate"))]
    if missing:
        raise Problem(f"{{{missing[0]}}} is not what is tuned here, and has no value", f"add --with {missing[0]}=VALUE")
    return Tunable(command, None, found, given, world, ranks_per_node)


def read_layout(text: str, world: int, ranks_per_node: int) -> Layout:
    try:
        return Layout.parse(text, ranks_per_node).for_world(world)
    except Refusal as refusal:
        raise Problem(refusal.what, refusal.fix) from None


def layout_text(layout: Layout) -> str:
    """Return the degrees above 1; `dp_replicate=1` for a single rank."""
    said = [f"{name}={getattr(layout, name)}" for name in DEGREES if getattr(layout, name) > 1]
    return ",".join(said) or "dp_replicate=1"


# A script's own batch: the default of the option that `{batch}` replaces.


_LARGEST_SCRIPT = 4 << 20  # bytes
_DECLARES = ("add_argument", "option", "Option")  # argparse; click; typer


def own_batch(command: Sequence[str], expanded: Sequence[str]) -> Optional[int]:
    """Return the default of --batch-size in train.py, if it is written there: `python train.py --batch-size {batch}`.

    `expanded`: the same command with its variables filled in, for the path of the script."""
    option = _option(command)
    script = next((word for word in expanded if word.endswith(".py") and os.path.isfile(word)), None)
    if option is None or script is None or os.path.getsize(script) > _LARGEST_SCRIPT:
        return None
    try:
        with open(script, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", getattr(node.func, "id", "")) not in _DECLARES:
            continue
        if any(isinstance(each, ast.Constant) and each.value == option for each in node.args):
            values = [keyword.value for keyword in node.keywords if keyword.arg == "default"]
            found = [value.value for value in values if isinstance(value, ast.Constant)]
            return found[0] if found and type(found[0]) is int and found[0] > 0 else None
    return None


def _option(command: Sequence[str]) -> Optional[str]:
    for before, word in zip(["", *command], command):
        if word == "{batch}":
            return before if before.startswith("-") else None
        name, equals, value = word.partition("=")
        if equals and value == "{batch}" and name.startswith("-"):
            return name
    return None


FREE_LARGEST = 1 << 16  # memory ends the search long before, but for toys


@dataclass(frozen=True)
class Trial:
    point: search.Point
    long: bool = False


@dataclass(frozen=True)
class Plan:
    """Plan of the trials: `next(results)` returns the next trial, or that it is done."""

    kind: str
    most: int  # trials
    data_ranks: Optional[int]  # none: they differ from trial to trial
    global_batch: Optional[int]  # samples per step, of all ranks; none: not held, or not known
    start: int = 0
    batches: Sequence[int] = ()
    points: Tuple[search.Point, ...] = ()
    wanted: int = 0  # trials that are not refused
    refused: Tuple[search.Result, ...] = field(default=())  # known to be impossible without a trial
    own_batch: Optional[int] = None  # that the script takes by itself, where it is known

    def changes(self, best: Optional[search.Result]) -> str:
        """Say what else changes with the recommended batch; empty if a step's samples stay the same."""
        if self.kind != "batch" or self.global_batch is not None or best is None or self.data_ranks is None:
            return ""
        if best.point.batch == self.own_batch:
            return "It is the script's own: nothing else changes."
        was = f" (it was {self.own_batch * self.data_ranks})" if self.own_batch else ""
        return f"Global batch becomes {(best.point.batch or 0) * self.data_ranks}{was}: retune the learning rate."

    def next(self, results: Sequence[search.Result]) -> Union[Trial, search.Done]:
        if self.kind == "batch":
            tried = [search.Tried(each.point.batch or 0, each.outcome, each.long) for each in results]
            answer = search.next_batch(self.batches, self.start, tried)
            if not isinstance(answer, search.Done):
                return self._cut(Trial(self.point(answer.batch), answer.long), results)
            # Smaller ones are compared with the largest, if there are speeds to compare.
            compares = answer.largest is not None and any(each.speed for each in results)
            below = (
                search.smaller(self.batches, answer.largest or 0, [each.batch for each in tried]) if compares else None
            )
            return self._cut(Trial(self.point(below)), results) if below else answer
        counted = sum(each.outcome != search.REFUSED for each in results)
        if counted >= self.wanted or len(results) >= len(self.points):
            return search.Done("all were tried" if len(results) >= len(self.points) else f"{counted} were tried")
        return self._cut(Trial(self.points[len(results)]), results)

    def _cut(self, trial: Trial, results: Sequence[search.Result]) -> Union[Trial, search.Done]:
        """Cut the plan so that the cost that was shown holds: a longer trial counts as two."""
        spent = sum(1 + each.long for each in results) + 1 + trial.long
        return trial if spent <= self.most + self.long else search.Done(f"{self.most} trials are spent")

    @property
    def long(self) -> int:
        """Count the longer trials in the estimate."""
        return 1 if self.kind == "batch" else 0

    def point(self, batch: int) -> search.Point:
        if self.global_batch is None or self.data_ranks is None:
            return search.Point(batch=batch)
        return search.Point(batch=batch, accumulate=self.global_batch // self.data_ranks // batch)

    def cost(self, asked: Asked, order: Order, gpus: Optional[int]) -> search.Cost:
        return search.cost(self.most, self.long, asked.seconds, order.nodes, order.world_size, gpus)


def make_plan(
    asked: Asked, tunable: Tunable, order: Order, gpu_gib: Optional[float] = None, own_batch: Optional[int] = None
) -> Plan:
    """Make the plan. `gpu_gib`: memory of a GPU, `own_batch`: the script's own batch, if known."""
    if not order.world_size:
        raise Problem("the number of ranks per node is not known", "add --ranks-per-node M")
    if asked.kind == "hooks":
        points = tuple(search.Point(hook=hook) for hook in asked.hooks)
        return Plan("hooks", len(points), None, None, points=points, wanted=len(points))
    if asked.kind == "batch":
        return _batches(asked, tunable, order, own_batch)
    return _layouts(asked, tunable, order, gpu_gib)


def _data_ranks(asked: Asked, tunable: Tunable, order: Order) -> int:
    """Return the number of ranks between which the samples of a step are split."""
    if order.launcher == "once" and not asked.data_ranks:
        words = "the command starts its ranks itself, so how many of them share a step's samples is not known"
        raise Problem(words, "add --data-ranks N")
    if asked.data_ranks:
        if order.launcher != "once" and order.world_size % asked.data_ranks:
            raise Problem(f"--data-ranks {asked.data_ranks} does not divide {order.world_size} ranks")
        return asked.data_ranks
    text = tunable.recipe.settings.get("layout", "ddp") if tunable.recipe else tunable.given.get("layout")
    if text is None:
        return order.world_size
    return read_layout(text, order.world_size, order.ranks_per_node).data_ranks


def _batches(asked: Asked, tunable: Tunable, order: Order, own: Optional[int]) -> Plan:
    ranks = _data_ranks(asked, tunable, order)
    total = _global_batch(asked, tunable)
    if total is None:
        largest = asked.largest or max(FREE_LARGEST, asked.start or own or 1)
        batches: Sequence[int] = range(1, largest + 1)
        start = asked.start or min(own or 1, largest)
    else:
        if total % ranks:
            words = f"{total} samples per step cannot be split evenly over {ranks} data ranks"
            raise Problem(words, f"try --global-batch {-(-total // ranks) * ranks}")
        batches = tuple(each for each in search.divisors(total // ranks) if each <= (asked.largest or total))
        start = _start(asked, tunable, batches, total // ranks, own)
    return Plan("batch", search.most_trials(batches, start), ranks, total, start, batches, own_batch=own)


def _start(asked: Asked, tunable: Tunable, batches: Sequence[int], share: int, own: Optional[int]) -> int:
    """Return the first batch: as requested, or as in the command; a smaller one if that does not divide a rank's share."""
    now = own or 1
    if tunable.recipe and not asked.start:
        now = max(1, share // (tunable.recipe.number("accumulate") or 1))
    return batches[max(0, bisect_right(batches, asked.start or now) - 1)]


def _global_batch(asked: Asked, tunable: Tunable) -> Optional[int]:
    """Return the global batch; None if the samples of a step are free to grow with the batch."""
    if tunable.recipe:
        found = asked.global_batch or tunable.recipe.batch
        if found is None:
            fix = "add --global-batch N, or --set batch=N to the command"
            raise Problem("the number of samples per step is not known", fix)
        return found
    takes = "accumulate" in tunable.places and "accumulate" not in tunable.given
    if takes and not asked.global_batch:
        words = "{accumulate} is filled in so that a step's samples stay the same, but their number is not known"
        raise Problem(words, "add --global-batch N")
    if asked.global_batch and not takes:
        raise Problem(
            f"--global-batch {asked.global_batch}: no {{accumulate}} in the command",
            "write {accumulate} where the number of batches per step goes, or leave --global-batch out: a step's "
            "samples then grow with the batch",
        )
    return asked.global_batch


def _layouts(asked: Asked, tunable: Tunable, order: Order, gpu_gib: Optional[float]) -> Plan:
    total = asked.global_batch
    if tunable.recipe:
        total = total or tunable.recipe.batch
    elif "batch" in tunable.places and "batch" not in tunable.given and not total:
        what = "{batch} depends on how many ranks share a step's samples, but the number of samples is not known"
        raise Problem(what, "add --global-batch N, or --with batch=N for a batch that stays as it is")
    if order.launcher == "once":
        raise Problem("the command starts its ranks itself, so which layouts they could have is not known")
    named = [read_layout(text, order.world_size, order.ranks_per_node) for text in asked.layouts]
    layouts = named or search.ranked(order.world_size, order.ranks_per_node)
    both = [(layout, _layout_point(layout, tunable, total)) for layout in layouts]
    judged = [(point, why or search.too_large(each, asked.parameters, gpu_gib)) for each, (point, why) in both]
    points = [point for point, why in judged if not why]
    refused = [search.Result(point, search.REFUSED, why, 0.0) for point, why in judged if why]
    if not points:
        raise Problem(f"none of {len(refused)} layouts is possible: {refused[0].point.says()}: {refused[0].why}")
    wanted = min(asked.candidates, len(points))
    most = min(2 * wanted, len(points))  # refused ones do not count, and yet must end somewhere
    return Plan("layout", most, None, total, points=tuple(points), wanted=wanted, refused=tuple(refused))


def _layout_point(layout: Layout, tunable: Tunable, total: Optional[int]) -> Tuple[search.Point, str]:
    """Return the point of a layout, and why it is impossible if a step's samples do not divide."""
    point, recipe = search.Point(layout=layout_text(layout)), tunable.recipe
    if total is None or not recipe and ("batch" not in tunable.places or "batch" in tunable.given):
        return point, ""
    accumulate = recipe.number("accumulate") or 1 if recipe else int(tunable.given.get("accumulate", "1"))
    pieces = layout.data_ranks * accumulate
    if total % pieces:
        return point, f"{total} samples per step do not divide by {pieces}"
    return point if recipe else replace(point, batch=total // pieces, accumulate=accumulate), ""


# The place of the trials and the job's size there: worked out once, before the first trial.


@dataclass(frozen=True)
class Place:
    order: Order  # of the job with any value in its places: only its size and its folders count
    gpus: Optional[int]  # of all nodes; none: not known
    gpu_gib: Optional[float] = None  # memory of one, where it is known


def place_here(job: Job, environ: Mapping[str, str]) -> Place:
    """Describe this machine, or the allocation whose shell or batch script this is."""
    place = find_place(LiveHost())
    if place.kind == INSIDE or environ.get("NODE_RANK"):
        fix = "type it once, in the batch script or the shell of the allocation; or drumbeat tune ... --submit"
        raise Problem("this is one task or one machine of several: a tuning starts its trials on all nodes itself", fix)
    site = site_of(job, place, environ)
    check_not_login(place, site, "tune")
    if place.kind == ALLOCATION:
        order = make_order(job, site, place, environ)
        given = place.identity.gpus
        return Place(order, None if given is None else given * order.nodes, _on_this_machine(order).gpu_gib)
    order = make_order(job, site, dataclasses.replace(place, kind=HERE), environ)
    check_inside(order)
    return _on_this_machine(order)


def _on_this_machine(order: Order) -> Place:
    own = [gpu for gpu in detect(LiveHost()) if not gpu.integrated]
    sizes = [gpu.memory_bytes for gpu in own if gpu.memory_bytes]
    gpus = order.gpus if order.gpus is not None else len(own)
    return Place(order, gpus if order.emulated else gpus * order.nodes, min(sizes) / 2**30 if sizes else None)


def seconds_left() -> Optional[float]:
    """Return the seconds until the end of the allocation, if the scheduler says when that is."""
    ends_at = identities.read(LiveHost(), []).ends_at
    return None if ends_at is None else max(0.0, ends_at - time.time())


def place_in_queue(order: Order) -> Place:
    """Describe a job that a scheduler will start: GPUs are those that are requested, or this machine's own in its queue."""
    if order.backend == "local":
        return _on_this_machine(order)
    gpus = order.resources.gpus
    return Place(order, None if gpus is None else gpus * order.nodes)


# Request for a tuning, apart from the job; it travels with a submitted one.

KINDS = ("batch", "hooks", "layout")
VARIED = {"batch": "batch", "hooks": "hook", "layout": "layout"}  # kind -> its place in a command
WARM_UP = 5  # steps
_STEPS = {"batch": 10, "hooks": 20, "layout": 20}  # after the warm-up


_POSITIVE = (
    "seconds", "silence", "steps", "start", "largest", "global_batch", "data_ranks", "candidates", "parameters",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    kind: str
    seconds: float = 120.0  # of a trial, at most
    silence: float = 60.0  # no step for this long counts as a hang
    steps: Optional[int] = None  # after the warm-up
    start: Optional[int] = None
    largest: Optional[int] = None
    global_batch: Optional[int] = None
    data_ranks: Optional[int] = None
    rate: str = ""
    hooks: Tuple[str, ...] = search.HOOKS
    candidates: int = 6
    layouts: Tuple[str, ...] = ()  # to try, in this order; none: the likeliest by rule
    parameters: Optional[float] = None  # of the model
    given: Dict[str, str] = field(default_factory=dict)  # --with NAME=VALUE

    def check(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < 10**15:
                raise Problem(f"--{name.replace('_', '-')} {value:g}: it must be above 0")
        if self.start and self.largest and self.start > self.largest:
            raise Problem(f"--start {self.start} is above --largest {self.largest}")
        self.pattern()

    def pattern(self) -> Optional[re.Pattern[str]]:
        if not self.rate:
            return None
        try:
            made = re.compile(self.rate)
        except re.error as error:
            raise Problem(f"--rate {self.rate!r} is not a regular expression: {error}") from None
        if made.groups != 1:
            what = f"--rate {self.rate!r} has {made.groups} groups, and one must hold the number"
            raise Problem(what, r"such as --rate '([0-9.]+) samples/s'")
        return made

    @property
    def counted(self) -> int:
        return self.steps or _STEPS[self.kind]

    def limits(self, long: bool, recipe: bool) -> Limits:
        """Return the limits of a trial. The longer trial has twice the steps and twice the time. A recipe reports once in
        a warm-up."""
        twice = 2 if long else 1
        return Limits(self.seconds * twice, self.counted * twice, 1 if recipe else WARM_UP, self.silence)

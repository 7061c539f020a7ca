"""The ways in which a command takes a trial's values: our recipes by `--set` and `--layout`, any other by `{batch}` and the
like.

Words are added to a recipe's command, never cut out: what stands last counts there.
"""

from __future__ import annotations

import ast
import os
import os.path
import shlex
from dataclasses import field, replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.jobfile.check import literal
from drumbeat.jobfile.resources import DEGREES, fill, places
from drumbeat.train.parallel import Layout
from drumbeat.train.refusal import Refusal
from drumbeat.train.settings import BATCHES
from drumbeat.tune.search import Point

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

    def filled(self, point: Point, steps: int, report_every: int, global_batch: Optional[int]) -> Tuple[str, ...]:
        if self.recipe:
            tried = replace(point, hook=_from_the_start(point.hook))
            words = ["--set", *_OFF, f"steps={steps}", f"report_every={report_every}", *self._sets(tried, global_batch)]
            return (*self.command, *map(literal, words), *(("--layout", point.layout) if point.layout else ()))
        return fill(self.command, {name: literal(value) for name, value in self.values(point).items()})

    def values(self, point: Point) -> Dict[str, str]:
        """Map every placeholder of the command to its value in this trial."""
        values = dict(self.given)
        values.update((name, str(value)) for name, value in vars(point).items() if value is not None)
        if "layout" in values:
            layout = read_layout(values["layout"], self.world, self.ranks_per_node)
            values.update({name: str(getattr(layout, name)) for name in DEGREES})
        return {name: values[name] for name in self.places if name in values}

    def _sets(self, point: Point, global_batch: Optional[int]) -> List[str]:
        """Return the recipe's settings. Its `batch` is that of all ranks together, so a rank's batch is set by
        `accumulate`."""
        assert self.recipe
        said = self.recipe.settings.get("batch") == str(global_batch) and point.accumulate is None
        sets = [f"batch={global_batch}"] if global_batch is not None and not said else []
        sets += [f"accumulate={point.accumulate}"] if point.accumulate is not None else []
        return sets + ([f"hook={point.hook}"] if point.hook is not None else [])

    def words(self, point: Point, global_batch: Optional[int]) -> str:
        """Return the command's text for the job."""
        if self.recipe:
            sets = self._sets(point, global_batch)
            words = [*(["--set", *sets] if sets else []), *(["--layout", point.layout] if point.layout else [])]
            return " ".join(words)
        return ", ".join(f"{{{name}}} -> {value}" for name, value in self.values(point).items())


def _from_the_start(hook: Optional[str]) -> Optional[str]:
    """Make PowerSGD start at once: by default it sends plain gradients for longer than a trial lasts. It needs at
    least 2 steps."""
    return f"{hook}:2" if hook and hook.startswith("powersgd") and hook.count(":") == 1 else hook


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

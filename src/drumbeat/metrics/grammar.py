"""Read a printed line as metrics, whatever program printed it.

Each level knows only the one below it: tokens.py turns a line into a row of numbers with keys and units, fields.py tells what
one number is, this module what they are together, and printed.py what several lines are together. A key is a metric if all its
words are known, in any of several languages (words.py): `train_loss` is the loss, `aux loss`, `loss scale` and `packet loss`
are not. Only later lines can show if a counter really counts.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

from drumbeat.base.regex import regex
from drumbeat.metrics import vocab
from drumbeat.metrics.fields import counter_name, counter_of, meaning_of, quality_of, strength_of
from drumbeat.metrics.shapes import Shapes, Slot
from drumbeat.metrics.tokens import BAR, MASK, TOO_LARGE, Item, items_of, masked, number, spelled, words_of

_TOTALS = {"step": "steps", "batch": "batches", "epoch": "epochs"}
_TOTAL_OF = {total: name for name, total in _TOTALS.items()}
Value = Union[int, float, bool]
_SIGNS_OF_BAR = ("%", "━", "╸", "╺", "|█", "|#", "|=", "|>")
_CLOCK_OF_BAR = regex(r"\d{1,3}:\d\d(?=[<,\] ])|<\d{1,3}:\d\d")
_DIGIT = regex(r"\d")
_ASIDE = regex(r"(?<![A-Za-z_])(?:[Bb]est|[Ll]owest|[Ss]av(?:e|ed|ing))(?![A-Za-z_]).*")  # words for past values
# Lines that mention a value without reporting it.
_TALK = regex(
    r"^wandb: |(?<![A-Za-z_])(?:[Rr]esum\w*|[Rr]estor\w*|[Ll]oad(?:ing|ed)?|[Pp]atience|[Pp]ackets?|[Jj]itter|[Pp]rofit"
    r"|[A-Z]\w*(?:Error|Warning)|[Ee]rror(?=: *[A-Za-z])|ERROR|[Cc]heckpoint shards|[Rr]educing)(?![A-Za-z_])"
    r"|(?i:(?<![a-z])(?:hyper-?param(?:eter)?s|params|hparams|config\w*|arg(?:ument)?s|namespace|settings|options|defaults)\s*[:=({])"
)
_TALKS = (  # text of each of these
    "wandb: ", "resum", "restor", "load", "patience", "packet", "jitter", "profit", "error", "warning", "checkpoint shards",
    "reducing", "params", "parameters", "config", "args", "arguments", "namespace", "settings", "options", "defaults",
)  # fmt: skip
_LONE = regex(r"(?i)\W*(?:step|iter(?:ation)?)\W{1,4}\d{1,12}(?:[:,] ?| (?:- )?)-?\d+\.\d+\s*$")  # `step 20: 2.5`
_OTHER_UNIT = regex(r"(?:\s?[kMGT]?(?:i?B|bits?|W|Hz)|\s?(?:ms|us|s|sec|seconds))\b")  # of a benchmark, not of training
_REWARDED = regex(r"(?i)reward|return|score|loss|kimg")
_DONE = regex(r"(?i)[\w\s:#/\[\]-]{0,40}\d\]?\s*:?\s*(?:completed|complete|done|finished)\W*$")
_IS = regex(r"(?:(?<![=<>!])[=:]| is)[\[( ]{0,8}$")


class Line(NamedTuple):
    """Meaning of a line. `values` has counters and metrics; `bare`: it has only a counter, like a heading or a bar."""

    values: Dict[str, Any]
    validation: bool = False
    whose: str = "unknown"  # rank, device or job that the rates are of
    bar: bool = False
    bare: bool = False
    label: str = ""  # the text before a bar
    samples: Tuple[int, int] = (0, 0)  # of the epoch, so far and in all: `Train Epoch: 1 [640/60000 (1%)]`
    batch: bool = False  # its step may be a batch of the epoch above it
    guessed: bool = False  # its step is a number in front of the loss
    improves: bool = False  # it has a loss or a reward of any kind
    member: bool = False  # inside an open bracket: one setting, unless it repeats
    unnamed: bool = False  # what it counts is not known: a simulation counts, too
    measures: Mapping[str, float] = MappingProxyType({})  # a validation's own, by the names that are printed


def parse(text: str, shapes: Optional[Shapes] = None, tabled: bool = False, validating: bool = False) -> Optional[Line]:
    """Return the metrics in a line; None if it has none. `shapes`: of the lines before it; `tabled`: it was a table row;
    `validating`: a heading of a validation stands above it."""
    small = text.lower()
    if not _DIGIT.search(text) and "nan" not in small and "inf" not in small:
        return None
    if any(word in small for word in _TALKS) and _TALK.search(text):
        return None
    line = masked(spelled(_ASIDE.sub("", text, 1) if "est" in text or "av" in text else text))
    if "," in line:
        line = _with_points(line, shapes)
    bar = BAR.search(line) if any(sign in line for sign in _SIGNS_OF_BAR) else None
    if bar:
        line = line[: bar.end()] + _CLOCK_OF_BAR.sub(MASK, line[bar.end() :])
        bar = BAR.search(line)
    items = _with_initials(items_of(line))
    if not items:
        return None
    if "learn" in line and any(item.words == ("learn",) for item in items):  # `learn: 0.5 test: 0.6`
        items = [_as_loss(item) if set(item.words) <= vocab.VALIDATION else item for item in items]
    small = line.lower()
    validates = any(word in small for word in _VALIDATES) or any("val" in item.words for item in items)
    if validates:
        items = _in_parts(items, line)
    if shapes is not None:
        items = _behaved(items, shapes, line, bool(bar))
        if not shapes.losses and all(vocab.LOSSES.isdisjoint(item.words) for item in items):
            items = [
                _as_loss(item) if _is_error({*item.words}) else item for item in items
            ]  # `train-rmse:0.5 eval-rmse:0.6`
    values: Dict[str, Any] = {}
    whose = "unknown"
    validation = False
    unkeyed: List[Item] = []
    strength: Dict[str, float] = {}
    places: Dict[str, int] = {}
    for item in items:
        words = set(item.words)
        if words <= vocab.NOISE:
            unkeyed.append(item)
        name, value = meaning_of(item, items)
        if name in ("step", "batch", "epoch"):
            validation = validation or bool(words & vocab.VALIDATION)
        strong = strength_of(name, words)
        if not name or (name in values and strong <= strength.get(name, 0)):
            continue
        if name == "step" and "total" in words and "steps" in values:  # `iteration 12/5000, total timesteps: 1277952`
            continue
        if name in ("step", "batch", "epoch"):
            total = _TOTALS[name]
            if name == "step" and "steps" in values and values["step"] != value:  # of the epoch, beside the global one
                values.update(batch=values["step"], batches=values.pop("steps"))
            if item.total:
                values[total] = number("steps", item.total)
        values[name], strength[name] = value, strong
        places.setdefault(name, item.start)
        if name in ("tokens_per_s", "samples_per_s") and (words | set(words_of(item.unit))) & vocab.DEVICE:
            whose = "device"
    if "loss" in values and not set(values) & {"step", "batch", "epoch"}:  # `SGD iteration 20 of 100: loss 0.5`
        for item in items:
            name, value = counter_of(item, set(item.words[-1:]), set())
            if name and item.text.isdigit() and not {*item.words} & vocab.VALIDATION:
                values.update({name: value, **({_TOTALS[name]: number("steps", item.total)} if item.total else {})})
                break
    if not {"loss", "validation"} & {*values} and shapes is not None:
        bare = _unnamed_loss(items, values, shapes.losses > 0)
        shapes.losses += bool(bare)
        values.update(bare)
    if set(values) == {"loss"} and all(item.text.isdigit() for item in items):
        return None  # `win 12 loss 3`
    metrics = [place for name, place in places.items() if name not in vocab.COUNTERS]
    guessed = _count(values, unkeyed, line, bool(bar), min(metrics, default=len(line)), places)
    summed = next((item for item in items if item.words == ("total",) and "." in item.text and not item.unit), None)
    if strength.get("loss") == 1 and summed:
        values["loss"] = number("loss", summed.text)
    elif (
        strength.get("loss") == 1
        and sum(bool(vocab.LOSSES & {*item.words} and not vocab.VALIDATION & {*item.words}) for item in items) > 1
    ):
        del values["loss"]  # one of several parts
    if any(item.total and not vocab.OF_TRIALS.isdisjoint(item.words) for item in items):
        for name in {"step", "batch"} - {
            _TOTAL_OF[name] for name in values if name in _TOTAL_OF
        }:  # `Trial 1/20: batch=32`
            values.pop(name, None)
            places.pop(name, None)
    batch = "batch" in places and "epoch" not in values and "step" not in values
    if batch:
        for name, other in (("batch", "step"), ("batches", "steps")):
            if name in values:
                values[other] = values.pop(name)
    if values.get("epochs") and "steps" not in values and strength.get("step", 1) < 1:
        del values["step"]  # `Epoch: 190/1500, Frames: 57300`
    before = places.get("epoch", -1) < places.get("step", len(line)) and strength.get("step", 0) < 3
    if "epoch" in values and "steps" in values and "batch" not in values and before:  # as far as a single line can tell
        values.update(batch=values.pop("step"), batches=values.pop("steps"))
    learnt = [place for name, place in places.items() if name in _LEARNT]
    label = line[: bar.start()].strip(" []").split(":")[0].rstrip("] ") if bar else ""
    if "epochs" in values and "•" in line and bar:  # rich, as Lightning uses it, names the last epoch's number
        values["epochs"] += 1
    validation = validation or bool(set(words_of(label)) & vocab.VALIDATION)
    trains = any(not {"train", "training"}.isdisjoint(item.words) for item in items if item.start in learnt)
    validation = validation or not trains and validates and _is_for_validation(line, min(learnt, default=0))
    if validating and not validation and not {"step", "batch", "epoch"} & {*values}:
        validation = all({"train", "training"}.isdisjoint(item.words) for item in items)
    measures = _measures(items, validation) if validates or validation else {}
    judged = _judged(values, validation, whose, "bar" if bar else "row" if tabled else "", label, line, items)
    if measures:
        judged = (judged or Line({}, True))._replace(bare=False, measures=measures)
    member = not bar and not tabled and not (shapes and shapes.changed) and bool(_MEMBER.fullmatch(text))
    improves = any(
        not vocab.IMPROVED.isdisjoint(item.words) or not {"train", "training"}.isdisjoint(item.words) for item in items
    )
    if judged and (batch or guessed or member or improves):
        judged = judged._replace(batch=batch, guessed=guessed, member=member, improves=improves)
    counted = next((item for item in unkeyed if item.opened == "[" and _PERCENT_BEHIND.match(line[item.end :])), None)
    if judged and counted and counted.total and counted.text.isdigit() and "epoch" in values:
        samples = (int(counted.text), int(number("steps", counted.total)))
        judged = judged._replace(samples=samples) if samples[0] <= samples[1] else judged
    return judged


def _unnamed_loss(items: List[Item], values: Dict[str, Any], trains: bool) -> Dict[str, float]:
    """Return the only value without a key beside a counter and a learning rate: `it 500 | 1.91 | lr 1e-5`; or the only one of a
    line that names nothing but a validation: `valid 1.90`."""
    floats = [item for item in items if "." in item.text and not item.unit and not item.total]
    if len(items) == 1 and floats and trains and items[0].words and {*items[0].words} <= vocab.VALIDATION:
        return {"validation": float(number("loss", items[0].text))}
    bare = [item for item in floats if not item.words]
    known = {"step", "batch"} & {*values} and {"lr", "grad_norm"} & {*values}
    return (
        {"loss": float(number("loss", bare[0].text))}
        if known and len(bare) == 1 and bare[0].opened in tuple("|:")
        else {}
    )


def _measures(items: List[Item], validation: bool) -> Dict[str, float]:
    """Return what a validation measures beside its loss and its accuracy, by name."""
    found: Dict[str, float] = {}
    for item in items:
        if (validation or vocab.VALIDATION & {*item.words}) and not meaning_of(item, items)[0]:
            name = quality_of(item)
            if name and len(found) < _MEASURES:
                found.setdefault(name, float(number("", item.text)))
    return found


_MEASURES = 16  # of one line


def _as_loss(item: Item) -> Item:
    part = ("val",) if vocab.VALIDATION & {*item.words} else ()
    return item._replace(words=(*part, "loss")) if "." in item.text and not item.unit else item


def _is_error(words: Set[str]) -> bool:
    """Return true for the error of one part of the data, `train-rmse` or `valid_0 l2`: what a program that prints no loss trains
    on."""
    split = words & (vocab.VALIDATION | {"train", "training"})
    error = {word for word in words - split if not word.isdigit()}
    return bool(split) and (len(error) == 1 and error <= vocab.ERRORS or error == {"l"} and not words.isdisjoint("12"))


_VALIDATES = ("val", "test", "dev", "cv", "holdout", "va_", "* ")
_SECTION = regex(
    r"(?i)(?:(?<=[\s|,;(])|(?<=['\"{\[]))(train(?:ing)?|val(?:id(?:ation)?)?|eval(?:uation)?|test|dev)"
    r"(?:[ _](?:metrics?|stats|results?))?(?:\]|['\"]?\s?[:=]?\s?[{(\[]|\s?[:|>]|\s-)\s*(?=['\"]?[A-Za-z])"
)


def _in_parts(items: List[Item], line: str) -> List[Item]:
    """Prefix items with the part of the data that a label or key before them names: `train: loss 2.0 | val: loss 2.1`,
    `"train": {"loss": 2.0}, "val": {"loss": 2.1}`, `train loss 2, acc 1, val loss 3`."""
    labels = [(match.end(), match[1].lower()) for match in _SECTION.finditer(line)]
    found: List[Item] = []
    seen: Set[str] = set()
    part, labelled = "", False
    for item in items:
        while labels and labels[0][0] <= item.start:
            part, labelled = labels.pop(0)[1], True
        own = [word for word in item.words if word in vocab.VALIDATION or word in ("train", "training")]
        name = meaning_of(item, items)[0]
        if own and name:
            part, labelled = own[0], False
        elif labelled and part[:5] == "train" and not name and item.words:
            item = item._replace(key="")  # no measure of a validation
        elif part in vocab.VALIDATION and (
            _LEARNT[name] not in seen and (labelled or name in (*seen, "accuracy"))
            if name in _LEARNT
            else labelled and not name and item.words
        ):
            item = item._replace(words=("val", *item.words))
        seen.add(name)
        found.append(item)
    return found


_LEARNT = {"loss": "validation", "accuracy": "val_accuracy"}


def _behaved(items: List[Item], shapes: Shapes, line: str, bar: bool) -> List[Item]:
    """Return the items with keys and totals that only their behaviour over several lines shows."""
    counts = [item.text.isdigit() for item in items]
    form = tuple([item.words for item in items])
    slots = shapes.seen(form, [number("", item.text) for item in items], counts)
    lossy = any(not vocab.LOSSES.isdisjoint(item.words) and "." in item.text and not item.unit for item in items)
    shapes.losses += lossy
    if not shapes.again:
        return items
    names = [
        counter_name(item.words) if count and (item.words[:1] in _TRIED or not slot.doubles) else ""
        for item, slot, count in zip(items, slots, counts)
    ]
    growing = [at for at, slot in enumerate(slots) if names[at] and slot.grows]
    totals = [item for item in items if item.total]
    changed: Dict[int, Dict[str, Any]] = {}
    for at, (item, slot) in enumerate(zip(items, slots)):
        new = ""
        if not counts[at]:
            if growing and not shapes.improving and _improves(item, slot):
                shapes.improving = all(vocab.PHYSICS.isdisjoint(each.words) for each in items)
        elif names[at]:  # a counter that stays or falls beside a growing one is a quantity
            beside = growing not in ([], [at])
            new = "quantity" if names[at] == "step" and not item.total and beside and (slot.still or slot.turns) else ""
        elif slot.doubles and not item.total:
            new = "quantity"  # sizes that are tried
        elif item.total and slot.grows and "epoch" in names and item.words and not meaning_of(item, items)[0]:
            new = "" if vocab.VALIDATION & {*item.words} else "batch"  # `Epoch: 1/400, Datapoint: 512/4096`
        elif (
            not any(names)
            and not (item.total and len(totals) > 1)
            and _grows_evenly(item, slot, lossy and _sole_loss(items), len(items) == 1, line, bar)
        ):
            new = names[at] = "step"
            growing.append(at)
        if counts[at] and slot.still and not item.total and not item.unit:  # a total: `it=380 of=5000`
            of = next((each for each in growing if _is_total({*item.words}, items[each], item)), None)
            if of is not None:
                changed.setdefault(of, {})["total"] = item.text
                new = "quantity"
        if new:
            changed.setdefault(at, {})["words"] = (new,)
    counting = growing or any(count and slot.grows for slot, count in zip(slots, counts))
    if counting and not any(not vocab.LOSSES.isdisjoint(item.words) for item in items if item.words != ("learn",)):
        changed.update(_falling(items, slots) or _in_no_known_words(items, slots, growing, line))
    return (
        [item._replace(**changed[at]) if at in changed else item for at, item in enumerate(items)] if changed else items
    )


NO_LOSS = vocab.NO_COUNTER | vocab.PHYSICS
_TRIED = (("epoch",), ("step",))  # counters that may double: epochs 1, 2, 4 are printed


def _sole_loss(items: List[Item]) -> bool:
    """Return true if one value is the loss; `mse_y mse_u mse_v` of a video are not."""
    kinds = [{*item.words} & vocab.LOSSES for item in items if not vocab.LOSSES.isdisjoint(item.words)]
    return (len(kinds) == 1 or {"loss"} in kinds) and any(meaning_of(item, items)[0] == "loss" for item in items)


def _improves(item: Item, slot: Slot) -> bool:
    """Return true if this value has fallen, unevenly, and is neither a time nor a quantity of physics."""
    return slot.learns and not slot.even and bool(item.words) and not item.unit and NO_LOSS.isdisjoint(item.words)


def _grows_evenly(item: Item, slot: Slot, lossy: bool, alone: bool, line: str, bar: bool) -> bool:
    """Return true for an evenly growing number that is the counter of a line without one: `update_t: 00016`, `{"i": 40, "mse":
    0.5}`, `25/300 | 0.5 loss`."""
    words = {*item.words}
    if not slot.grows or item.unit:
        return False
    foreign = words & vocab.NO_COUNTER or words & {*vocab.NOUNS}
    if item.total:
        counts = words <= vocab.NOISE or slot.ups > 1 and not foreign and vocab.OF_TRIALS.isdisjoint(words)
        return lossy and counts and not bar and not _KERAS.search(line) and not _EPOCH_BEFORE.search(line)
    if words & (vocab.STEP | vocab.EPOCH) and len(words) < 4 and (lossy or alone):
        return slot.even and slot.ups > 1
    return lossy and slot.even and slot.ups > 2 and not foreign and (bool(words) or slot.stride >= 10)


def _is_total(words: Set[str], counter: Item, item: Item) -> bool:
    """Return true if a constant number may be a counter's total: `it=380 of=5000`, `step 10 max_steps 500`."""
    own = {*counter.words} - vocab.COUNTED_WITH
    plural = any(word.strip("n") in (f"{each}s", f"{each}es") for word in words for each in own)
    known = words <= own | vocab.COUNTED_WITH | vocab.STEP | vocab.EPOCH | vocab.BATCH | {f"n{each}es" for each in own}
    told = bool(words & vocab.COUNTED_WITH) or plural
    return not counter.total and told and (known or plural) and float(item.text) >= float(number("", counter.text))


def _falling(items: List[Item], slots: List[Slot]) -> Dict[int, Dict[str, Any]]:
    """Return the losses among bare words, if they fall: `Epoch: 10 Train: 0.13 Test: 0.14`, `Score at iteration 10 is 2.1`."""
    floats = [at for at, item in enumerate(items) if item.words and "." in item.text and not item.unit.strip()]
    floats = [at for at in floats if not meaning_of(items[at], items)[0]]
    splits = [at for at in floats if {*items[at].words} <= vocab.VALIDATION | {"train", "training", "learn"}]
    single = len(floats) == 1 and (items[floats[0]].words == ("score",) or splits and slots[floats[0]].learns)
    if len(splits) == len(floats) > 1 or single:
        return {
            at: {"words": (*items[at].words[:1], "loss") if splits else ("loss",)} for at in floats if slots[at].falls
        }
    return {}


def _in_no_known_words(
    items: List[Item], slots: List[Slot], growing: List[int], line: str
) -> Dict[int, Dict[str, Any]]:
    """Return counter and loss of `चरण 100 हानि 2.31` and `(100, 2.31)`: a number that grows evenly, and the first one beside it
    that learns."""
    alone = bool(_TUPLE.fullmatch(line))
    strange = [alone or not "".join(item.words).isascii() for item in items]
    if True not in strange:
        return {}
    found: Dict[int, Dict[str, Any]] = {}
    if not growing:
        even = (at for at, slot in enumerate(slots) if slot.grows and slot.even and slot.ups > 1)
        even = (at for at in even if vocab.NO_COUNTER.isdisjoint(items[at].words))
        at = next((at for at in even if items[at].text.isdigit() and not items[at].unit), None)
        if at is None or at > 0 and alone:
            return {}
        found[at] = {"words": ("step",)}
    for at, (item, slot) in enumerate(zip(items, slots)):
        fine = len(item.text.partition(".")[2]) > 2  # as losses are printed; of a coarser value more has to be seen
        learns = slot.learns and (fine or slot.turns > 2 and slot.slows and not slot.even)
        if strange[at] and learns and "." in item.text and not item.unit and not meaning_of(item, items)[0]:
            return {**found, at: {"words": ("loss",)}}
    return {}


_TUPLE = regex(r"\s*\(\d{1,12}(?:, -?\d{1,9}\.\d[\d.e+-]*){1,6}\)\s*")
_KEYED_COMMA = regex(
    r"[^\W\d]\w*\s{0,2}[:=]?\s{0,2}-?(?:0,\d{1,9}|[1-9]\d{0,2},(?:\d{1,2}|\d{4,9}))(?=\s*(?:[%;|)-]|$|,?\s[^\W\d]))"
)
_POINT = regex(r"\d\.\d")
_COMMA = regex(r"(?<![\d.,])(\d{1,9}),(\d{1,9})(?!,?\d)")


def _with_points(line: str, shapes: Optional[Shapes]) -> str:
    """Replace decimal commas by points. Once a line has a comma that must be decimal, all later lines are converted."""
    if _POINT.search(line):
        return line
    if (shapes is None or not shapes.comma) and not _KEYED_COMMA.search(line):
        return line
    if shapes is not None:
        shapes.comma = True
    return _COMMA.sub(r"\1.\2", line)


_MEMBER = regex(r"""\s*['"]?[A-Za-z][\w.-]*['"]?\s*[:=]\s*[^,:={}()\[\]|]+(?:,|\s*[})\]]+,?)?\s*""")
_VALIDATING = r"(?:val(?:id(?:ation|at(?:e|ing))?)?|eval(?:uation|uat(?:e|ing))?|test(?:ing)?|dev)"
_OF_VALIDATION = regex(  # `"event": "eval"`, `split=val`, `phase: test |`
    rf"(?i)[\w'\"]\s?(?:=\s?['\"]?{_VALIDATING}(?![\w.-])|:\s?['\"]{_VALIDATING}['\"]|:\s?{_VALIDATING}(?=\s*(?:[,;}}\])|]|$)))"
)
_SUMMED_UP = regex(r"\s?\* +[A-Z]")  # ` * Acc@1 71.2 Acc@5 90.1`
_TOLD_VALIDATION = regex(
    rf"(?i)(?<![\w/.=-]){_VALIDATING}(?![\w/.=]|-\w)"
)  # `[val] loss`, `Epoch 1 test end, Accuracy=97.3`


def _is_for_validation(line: str, first: int) -> bool:
    """Return true if the line is about validation: it says so before its first metric, or as a value."""
    said = _TOLD_VALIDATION.search(line, 0, first or len(line)) or _OF_VALIDATION.search(line)
    return bool(said or _SUMMED_UP.match(line))


def _judged(
    values: Dict[str, Any],
    validation: bool,
    whose: str,
    form: str,
    label: str,
    line: str,
    items: List[Item],
) -> Optional[Line]:
    """Turn a line's values into a Line, or None. `form`: a progress bar, or a table row."""
    bar = form == "bar"
    for count, total in (("step", "steps"), ("batch", "batches"), ("epoch", "epochs")):
        if total in values and not _fits(values.get(count), values[total]):
            values.pop(count, None)  # no counter goes beyond its total
            values.pop(total)
    for name in vocab.WHOLE:
        if isinstance(values.get(name), float):  # a fractional counter is not one
            del values[name]
    epoch = values.get("epoch")
    if epoch is not None and not abs(epoch) < TOO_LARGE:  # nan, too
        del values["epoch"]
    if not values:
        return None
    if set(values) <= ({*vocab.COUNTERS, "step_time", "tokens_per_s", "samples_per_s"} if bar else set(vocab.COUNTERS)):
        meant = [meaning_of(item, items)[0] for item in items]
        first = next((place for place, name in enumerate(meant) if name in vocab.COUNTERS), -1)
        others = [
            item
            for item, name in zip(items[first + 1 :], meant[first + 1 :])
            if item.words and name not in vocab.COUNTERS and not _OTHER_UNIT.match(line, item.end - len(item.unit))
        ]
        if first < 0:  # `[0/25][50/1583] Loss_D: 0.43 Loss_G: 4.1`
            others = [item for item in others if "." in item.text]
        one = (
            first == 0
            and len(others) == 1
            and "." in others[0].text
            and bool(_IS.search(line[: others[0].start]) or {*others[0].words} & vocab.QUALITIES)
        )
        done = form == "row" or (
            not bar
            and any(item.words for item in items)
            and (bool(_DONE.match(line) or _LONE.match(line)) or len(others) > 1 or one)
        )
        if (
            not bar
            and "step" in values
            and "epoch" not in values
            and (len(items) > 1 or "steps" not in values)
            and {*items[first].words} & vocab.ROUNDS
            and not _REWARDED.search(line)
        ):
            return None
        if (
            not done
            and not bar
            and (
                sum(not word.isdigit() for word in words_of(line)) - sum(len(item.words) for item in items) > 11
                or any({"total", "max"} & {*item.words} for item in items)
            )
        ):
            return None
        return Line(
            values, validation, whose, bar, not done, label, unnamed=bool(others) and not _REWARDED.search(line)
        )
    if (
        form != "row"
        and set(values) <= {"step", "steps", "lr"}
        and any({"num", "max", "total"} & {*item.words} for item in items)
    ):
        return None  # settings
    return Line(values, validation, whose, bar, False, label)


def _fits(count: Any, total: Any) -> bool:
    return isinstance(count, (int, float)) and isinstance(total, int) and count <= total


def _with_initials(items: List[Item]) -> List[Item]:
    """Expand one-letter keys if one of them, or a word, is the loss: `[E 4][B 100/400][L 0.9]`, `i=10 loss=0.5`; and the `v` of
    keys that come in pairs: `kl 2.1 v_kl 2.2 loss 0.5 v_loss 0.6`."""
    keys = {item.words for item in items}
    if sum(key[:1] == ("v",) and key[1:] in keys for key in keys) > 1:
        items = [item._replace(words=("val", *item.words[1:])) if item.words[:1] == ("v",) else item for item in items]
    letters = {item.words[0] for item in items if len(item.words) == 1}
    counted = any(item.total or not vocab.COUNTING.isdisjoint(item.words) for item in items)
    known = vocab.INITIALS if "l" in letters and counted else {"i": "step", "e": "epoch"} if "loss" in letters else {}
    return [
        item._replace(words=tuple(known[item.words[0]].split()))
        if len(item.words) == 1 and item.words[0] in known
        else item
        for item in items
    ]


def _count(
    values: Dict[str, Any], unkeyed: List[Item], line: str, bar: bool, metric: int, places: Dict[str, int]
) -> bool:
    """Find counters without a key: `[10/100]`, a bar's `4/8`, `[ 1,  2000]`, `[200]` after a logger's prefix. Return true if
    unsure."""
    if "batch" in values and "batches" not in values and "epoch" not in values and _STEP_IN_FRONT.match(line):
        del values["batch"], places["batch"]  # the batch size: `20: loss=0.5, batch=16`
    counted = set(values) & {"step", "batch"}
    pairs = [item for item in unkeyed if item.total and not item.unit.strip() and item.text.isdigit()]
    known = pairs and (bar or _EPOCH_BEFORE.search(line))  # else these are samples
    pairs = [item for item in pairs if known or not _PERCENT_BEHIND.match(line[item.end :])]
    first = bool(pairs) and (
        pairs[0].opened in tuple("[(<{") or bar or not _LETTER_OR_DIGIT.search(_SHARE.sub("", line[: pairs[0].start]))
    )
    if pairs and line.lstrip()[:2] in ("[=", "[>") and not line[pairs[-1].end :].strip():
        pairs, first, metric = pairs[-1:], True, len(line)  # `[==>..] Loss: 0.5 20/391`
    if pairs and "epoch" in values and _EPOCH_JUST_BEFORE.search(line[: pairs[0].start]):  # `epoch 5  1000 / 8223`
        first = True
    last = first and pairs[0].opened == "[" and "loss" in values  # `loss: 2.3  [  64/60000]`
    beside = first and counted == {"step"} and "epoch" in values and "steps" not in values  # num_updates=445
    if pairs and first and (not counted or beside) and (bar or "epoch" in values or pairs[0].start < metric or last):
        single = _EPOCH_BEFORE.search(line)
        if single and "epoch" not in values:
            values["epoch"] = number("step", single[1] or single[2])
        if len(pairs) > 1 and "epoch" not in values:  # `[0/300][10/1251]`
            values.update(epoch=number("step", pairs[0].text), epochs=number("epochs", pairs.pop(0).total))
        keras = pairs[0].opened != "[" and not line[: pairs[0].start].strip() and bool(_KERAS.search(line))
        if keras and "/sample" in line:
            return False
        if (last or not line[: pairs[0].start].strip()) and "epoch" not in values and not bar and not keras:
            places["batch"] = pairs[0].start
        name = ("batch", "batches") if "epoch" in values or keras or "batch" in places else ("step", "steps")
        values.update(zip(name, (number("step", pairs[-1].text), number("steps", pairs[-1].total))))
        return False
    both = _EPOCH_AND_BATCH.match(line)
    if both and not counted and "epoch" not in values:
        values.update(epoch=number("epoch", both[1]), batch=number("batch", both[2]))
    single = _STEP_IN_BRACKETS.match(line)
    column = single is not None and line[single.end() :][:1] == "\t"
    if single and not (
        len(values) > 1 or values and (single.start(1) > 1 or column)
    ):  # `[0] loss 0.5` may be a rank's label
        single = None
    single = single or _MANY_STEPS.match(line)
    single = single or (_STEP_IN_FRONT.match(line) if "loss" in values else None)
    guess = None if single or "loss" not in values else _NUMBER_IN_FRONT.match(line)
    seen = single or guess
    if seen and not counted and "epoch" not in values:
        values["step"] = number("step", seen[1])
        return bool(guess)
    return False


_EPOCH_JUST_BEFORE = regex(r"(?i)\bep(?:och)?[\s:=\[(]{0,3}\d{1,6}(?:/\d{1,6})?[\])]?[\s,:|(-]{1,12}$")
_LETTER_OR_DIGIT = regex(r"[^\W_]")
_SHARE = regex(r"\[?\s*\d{1,3}(?:\.\d+)?\s*%\]?")
_KERAS = regex(r"/step|[━=]{3}|\[[.>]")
_PERCENT_BEHIND = regex(r"\s*\(\s*\d{1,3}(?:\.\d+)?\s*%\)")
_EPOCH_BEFORE = regex(r"(?:\[(\d{1,6})\]|(?i:train):? (\d{1,6})) ?\[ *\d{1,9}/\d")  # `[2][10/30]`, `Train: 2 [10/30`
_EPOCH_AND_BATCH = regex(r"\s*[\[(]\s*(\d{1,9}),\s*(\d{1,9})[\])]")
_STEP_IN_FRONT = regex(
    r"\s*\[?(\d{1,12})(?:\s*[:|]\s|\s+\d+\.\d)"
)  # `100: 2.34 loss`, `10 | loss 2.3`, `[10 | 3.4] loss`
_NUMBER_IN_FRONT = regex(
    r"(?i)\W{0,8}(?:train\w{0,3}\W{1,4})?(\d{1,9})(?![\d.])\W{1,6}(?:train|training|avg|mean|total)?[ _/]?loss"
)
_MANY_STEPS = regex(r"\[(\d{3,12})\] (?=[^\W\d][\w/]{2,40}[ :=]{1,3}[\d.]+\W+[^\W\d][\w/]{2,40}[ :=]{1,3}[\d.]+)")
_STEP_IN_BRACKETS = regex(r"(?:[^\[=]{0,80}\]\s|[^\[=]{0,80}\s)?(?:train)?\[(\d{1,12})\]")

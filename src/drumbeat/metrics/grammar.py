"""Read a printed line as metrics, whatever program printed it.

Each level knows only the one below it: tokens.py turns a line into a row of numbers with keys and units, fields.py tells what
one number is, behaviour.py what the lines before tell about it, this module what the numbers are together, and layout.py what
several lines are together. A key is a metric if all its words are known, in any of several languages (vocab.py): `train_loss`
is the loss, `aux loss`, `loss scale` and `packet loss` are not. Only later lines can show if a counter really counts.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from drumbeat.base.regex import regex
from drumbeat.metrics import vocab
from drumbeat.metrics.behaviour import behaved
from drumbeat.metrics.fields import counter_of, meaning_of, quality_of, strength_of
from drumbeat.metrics.shapes import Shapes
from drumbeat.metrics.tokens import (
    BAR,
    EPOCH_BEFORE,
    MASK,
    OF_KERAS,
    TOO_LARGE,
    Item,
    items_of,
    masked,
    number,
    spelled,
    words_of,
)  # fmt: skip

_TOTALS = {"step": "steps", "batch": "batches", "epoch": "epochs"}
_LEARNT = {"loss": "validation", "accuracy": "val_accuracy"}
_MEASURES = 16  # of one line
_SIGNS_OF_BAR = ("%", "━", "╸", "╺", "|█", "|#", "|=", "|>")
_CLOCK_OF_BAR = regex(r"\d{1,3}:\d\d(?=[<,\] ])|<\d{1,3}:\d\d")
_DIGIT = regex(r"\d")
_ASIDE = regex(r"(?<![A-Za-z_])(?:[Bb]est|[Ll]owest|[Ss]av(?:e|ed|ing))(?![A-Za-z_]).*")  # words for past values
# Lines that mention a value without reporting it.
_TALK = regex(
    r"^wandb: |(?<![A-Za-z_])(?:[Rr]esum\w*|[Rr]estor\w*|[Ll]oad(?:ing|ed)?|[Pp]atience|[Pp]ackets?|[Jj]itter|[Pp]rofit"
    r"|[A-Z]\w*(?:Error|Warning)|(?<!Test )(?<!Train )(?<!Val )[Ee]rror(?=: *[A-Za-z])|ERROR|[Cc]heckpoint shards|[Rr]educing)"
    r"(?![A-Za-z_])"
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
    of_test: bool = False  # the set that its validation is on is called test
    measures: Mapping[str, float] = MappingProxyType({})  # a validation's own, by the names that are printed


class _Fields:
    """The values of a line, with the place of each key. Of several keys for one value the strongest counts."""

    def __init__(self, items: List[Item]) -> None:
        self.values: Dict[str, Any] = {}
        self.places: Dict[str, int] = {}
        self.strength: Dict[str, float] = {}
        self.whose, self.validation = "unknown", False
        for item in items:
            words = {*item.words}
            name, value = meaning_of(item, items)
            self.validation = self.validation or name in _TOTALS and item.of_validation
            strong = strength_of(name, words)
            if not name or name in self.values and strong <= self.strength.get(name, 0):
                continue
            if (
                name == "step" and "steps" in self.values and self.values["step"] != value
            ):  # of the epoch, and the global one
                self.values.update(batch=self.values["step"], batches=self.values.pop("steps"))
            self.add(name, value, item.total if name in _TOTALS else "")
            self.strength[name] = strong
            self.places.setdefault(name, item.start)
            if name in ("tokens_per_s", "samples_per_s") and (words | {*words_of(item.unit)}) & vocab.DEVICE:
                self.whose = "device"

    def add(self, name: str, value: Any, total: str = "") -> None:
        self.values[name] = value
        if total:
            self.values[_TOTALS[name]] = number("steps", total)

    def rename(self, new: str, old: str) -> None:
        """Give a counter, and its total, another name."""
        for name, other in ((new, old), (_TOTALS[new], _TOTALS[old])):
            if other in self.values:
                self.values[name] = self.values.pop(other)

    def unlikely(self) -> None:
        """Remove counters that cannot be: beyond their total, fractional, not finite or too large."""
        for count, total in _TOTALS.items():
            made, planned = self.values.get(count), self.values.get(total)
            if planned is not None:
                fits = isinstance(made, (int, float)) and isinstance(planned, int) and made <= planned
                for name in () if fits else (count, total):
                    self.values.pop(name, None)
        for name in vocab.WHOLE:
            if isinstance(self.values.get(name), float):
                del self.values[name]
        if not abs(self.values.get("epoch", 0)) < TOO_LARGE:  # nan, too
            del self.values["epoch"]


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
    if "learn" in line and any(item.words == ("learn",) for item in items):  # `learn: 0.5 test: 0.6`
        items = [item.as_loss() if {*item.words} <= vocab.VALIDATION else item for item in items]
    small = line.lower()
    validates = any(word in small for word in _VALIDATES) or any("val" in item.words for item in items)
    items = _in_parts(items, line) if validates else items
    if shapes is not None and items:
        items = behaved(items, shapes, line, bool(bar))
    if not items:
        return None
    fields = _Fields(items)
    values, places, strength = fields.values, fields.places, fields.strength
    if "loss" in values and not {*_TOTALS} & {*values}:  # `SGD iteration 20 of 100: loss 0.5`
        counters = ((item, *counter_of(item, {*item.words[-1:]}, set())) for item in items)
        named = next(
            (each for each in counters if each[1] and each[0].text.isdigit() and not each[0].of_validation), None
        )
        if named:
            fields.add(named[1], named[2], named[0].total)
    known = {"step", "batch"} & {*values} and {"lr", "grad_norm"} & {*values}
    if known and shapes is not None and not {"loss", "validation"} & {*values}:
        bare = [item for item in items if item.fine and not item.total and not item.words]
        if len(bare) == 1 and bare[0].opened in ("|", ":"):  # `it 500 | 1.91 | lr 1e-5`
            values["loss"] = number("loss", bare[0].text)
            shapes.losses += 1
    if {*values} == {"loss"} and all(item.text.isdigit() for item in items):
        return None  # `win 12 loss 3`
    unkeyed = [item for item in items if {*item.words} <= vocab.NOISE]
    guessed = _count(fields, unkeyed, line, bool(bar))
    if strength.get("loss") == 1 and sum(item.of_loss and not item.of_validation for item in items) > 1:
        del values["loss"]  # one of several parts
    if any(item.total and not vocab.OF_TRIALS.isdisjoint(item.words) for item in items):  # `Trial 1/20: batch=32`
        for name in ("step", "batch"):
            if _TOTALS[name] not in values:
                values.pop(name, None)
                places.pop(name, None)
    batch = "batch" in places and "epoch" not in values and "step" not in values
    if batch:
        fields.rename("step", "batch")
    before = places.get("epoch", -1) < places.get("step", len(line)) and strength.get("step", 0) < 3
    if "epoch" in values and "steps" in values and "batch" not in values and before:  # as far as a single line can tell
        fields.rename("batch", "step")
    if "epochs" in values and "•" in line and bar:  # rich, as Lightning uses it, names the last epoch's number
        values["epochs"] += 1
    label = line[: bar.start()].strip(" []").split(":")[0].rstrip("] ") if bar else ""
    learnt = [place for name, place in places.items() if name in _LEARNT]
    trains = any(item.of_training for item in items if item.start in learnt)
    validation = fields.validation or not vocab.VALIDATION.isdisjoint(words_of(label))
    validation = validation or not trains and validates and _is_for_validation(line, min(learnt, default=0))
    if validating and not validation and not {*_TOTALS} & {*values}:
        validation = not any(item.of_training for item in items)
    measures = _measures(items, validation) if validates or validation else {}
    fields.unlikely()
    found = Line(values, validation, fields.whose, bool(bar), label=label, batch=batch, guessed=guessed)
    judged = _judged(found, tabled, line, items)
    if measures:
        judged = (judged or Line({}, True))._replace(bare=False, measures=measures)
    if not judged:
        return None
    member = not bar and not tabled and not (shapes and shapes.changed) and bool(_MEMBER.fullmatch(text))
    improves = any(item.of_training or not vocab.IMPROVED.isdisjoint(item.words) for item in items)
    of_test = "test" in small and not ("val" in small or "dev" in small)
    judged = judged._replace(member=member, improves=improves, of_test=of_test)
    counted = next((item for item in unkeyed if item.opened == "[" and _PERCENT_BEHIND.match(line[item.end :])), None)
    if counted and counted.total and counted.text.isdigit() and "epoch" in values:
        samples = (int(counted.text), int(number("steps", counted.total)))
        judged = judged._replace(samples=samples) if samples[0] <= samples[1] else judged
    return judged


def _measures(items: List[Item], validation: bool) -> Dict[str, float]:
    """Return what a validation measures beside its loss and its accuracy, by name."""
    found: Dict[str, float] = {}
    for item in items:
        own = (validation or item.of_validation) and not meaning_of(item, items)[0]
        name = quality_of(item) if own else ""
        if name and len(found) < _MEASURES:
            found.setdefault(name, float(number("", item.text)))
    return found


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


def _judged(line: Line, tabled: bool, text: str, items: List[Item]) -> Optional[Line]:
    """Return the line if it reports, or with `bare` if it is a heading or a bar; None for settings and for talk."""
    values, bar = line.values, line.bar
    if not values:
        return None
    planned = any({"num", "max", "total"} & {*item.words} for item in items)
    counters = {*vocab.COUNTERS, *(("step_time", "tokens_per_s", "samples_per_s") if bar else ())}
    if not {*values} <= counters:
        settings = not tabled and {*values} <= {"step", "steps", "lr"} and planned
        return None if settings else line
    meant = [meaning_of(item, items)[0] for item in items]
    first = next((place for place, name in enumerate(meant) if name in vocab.COUNTERS), -1)
    others = [
        item
        for item, name in zip(items[first + 1 :], meant[first + 1 :])
        if item.words and name not in vocab.COUNTERS and not _OTHER_UNIT.match(text, item.end - len(item.unit))
    ]
    if first < 0:  # `[0/25][50/1583] Loss_D: 0.43 Loss_G: 4.1`
        others = [item for item in others if "." in item.text]
    one = first == 0 and len(others) == 1 and "." in others[0].text
    one = one and bool(_IS.search(text[: others[0].start]) or {*others[0].words} & vocab.QUALITIES)
    said = len(others) > 1 or one or bool(_DONE.match(text) or _LONE.match(text))
    done = tabled or not bar and said and any(item.words for item in items)
    rewarded = bool(_REWARDED.search(text))
    rounds = "step" in values and "epoch" not in values and (len(items) > 1 or "steps" not in values)
    if not bar and rounds and {*items[first].words} & vocab.ROUNDS and not rewarded:
        return None
    if not done and not bar:
        spoken = sum(not word.isdigit() for word in words_of(text)) - sum(len(item.words) for item in items)
        if spoken > 11 or any({"total", "max"} & {*item.words} for item in items):
            return None
    return line._replace(bare=not done, unnamed=bool(others) and not rewarded)


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


def _count(fields: _Fields, unkeyed: List[Item], line: str, bar: bool) -> bool:
    """Find counters without a key: `[10/100]`, a bar's `4/8`, `[ 1,  2000]`, `[200]` after a logger's prefix. Return true if
    unsure."""
    values, places = fields.values, fields.places
    metric = min((place for name, place in places.items() if name not in vocab.COUNTERS), default=len(line))
    sized = "batch" in values and not {"batches", "epoch"} & {*values}
    if sized and ("step" in values or _STEP_IN_FRONT.match(line)):  # `20: loss=0.5, batch=16`, `tick 2 minibatch 32`
        del values["batch"], places["batch"]
    counted = {*values} & {"step", "batch"}
    pairs = [item for item in unkeyed if item.total and not item.unit and item.text.isdigit()]
    known = pairs and (bar or EPOCH_BEFORE.search(line))  # else these are samples
    pairs = [item for item in pairs if known or not _PERCENT_BEHIND.match(line[item.end :])]
    if pairs:
        front = line[: pairs[0].start]
        first = bar or pairs[0].opened in ("[", "(", "<", "{") or not _LETTER_OR_DIGIT.search(_SHARE.sub("", front))
        first = first or "epoch" in values and bool(_EPOCH_JUST_BEFORE.search(front))  # `epoch 5  1000 / 8223`
        last = pairs[0].opened == "[" and "loss" in values  # `loss: 2.3  [  64/60000]`
        beside = counted == {"step"} and "epoch" in values and "steps" not in values  # num_updates=445
        if first and (not counted or beside) and (bar or "epoch" in values or pairs[0].start < metric or last):
            single = EPOCH_BEFORE.search(line)
            if single and "epoch" not in values:
                fields.add("epoch", number("step", single[1] or single[2]))
            if len(pairs) > 1 and "epoch" not in values:  # `[0/300][10/1251]`
                fields.add("epoch", number("step", pairs[0].text), pairs.pop(0).total)
            alone = not line[: pairs[0].start].strip()
            keras = pairs[0].opened != "[" and alone and bool(OF_KERAS.search(line))
            if keras and "/sample" in line:
                return False
            if (last or alone) and "epoch" not in values and not bar and not keras:
                places["batch"] = pairs[0].start
            name = "batch" if "epoch" in values or keras or "batch" in places else "step"
            fields.add(name, number("step", pairs[-1].text), pairs[-1].total)
            return False
    if counted or "epoch" in values:
        return False
    both = _EPOCH_AND_BATCH.match(line)
    if both:
        values.update(epoch=number("epoch", both[1]), batch=number("batch", both[2]))
        return False
    single = _STEP_IN_BRACKETS.match(line)
    column = single and line[single.end() :][:1] == "\t"
    if single and not (len(values) > 1 or values and (single.start(1) > 1 or column)):
        single = None  # `[0] loss 0.5` may be a rank's label
    single = single or _MANY_STEPS.match(line) or (_STEP_IN_FRONT.match(line) if "loss" in values else None)
    guess = None if single or "loss" not in values else _NUMBER_IN_FRONT.match(line)
    seen = single or guess
    if seen:
        values["step"] = number("step", seen[1])
    return bool(guess)


_EPOCH_JUST_BEFORE = regex(r"(?i)\bep(?:och)?[\s:=\[(]{0,3}\d{1,6}(?:/\d{1,6})?[\])]?[\s,:|(-]{1,12}$")
_LETTER_OR_DIGIT = regex(r"[^\W_]")
_SHARE = regex(r"\[?\s*\d{1,3}(?:\.\d+)?\s*%\]?")
_PERCENT_BEHIND = regex(r"\s*\(\s*\d{1,3}(?:\.\d+)?\s*%\)")
_EPOCH_AND_BATCH = regex(r"\s*[\[(]\s*(\d{1,9}),\s*(\d{1,9})[\])]")
_STEP_IN_FRONT = regex(
    r"\s*\[?(\d{1,12})(?:\s*[:|]\s|\s+\d+\.\d)"
)  # `100: 2.34 loss`, `10 | loss 2.3`, `[10 | 3.4] loss`
_NUMBER_IN_FRONT = regex(
    r"(?i)\W{0,8}(?:train\w{0,3}\W{1,4})?(\d{1,9})(?![\d.])\W{1,6}(?:train|training|avg|mean|total)?[ _/]?loss"
)
_MANY_STEPS = regex(r"\[(\d{3,12})\] (?=[^\W\d][\w/]{2,40}[ :=]{1,3}[\d.]+\W+[^\W\d][\w/]{2,40}[ :=]{1,3}[\d.]+)")
_STEP_IN_BRACKETS = regex(r"(?:[^\[=]{0,80}\]\s|[^\[=]{0,80}\s)?(?:train)?\[(\d{1,12})\]")

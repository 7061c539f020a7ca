"""Read a printed line as metrics, whatever program printed it.

Dates, clocks, paths and versions are masked first. What is left is a row of numbers, each with its key (the words before it, or
behind it: `2.31 loss`, `200 updates`), the total behind a slash, and its unit. A key is a metric if all its words are known, in
any of several languages: `train_loss` is the loss, `aux loss`, `loss scale` and `packet loss` are not. A row of a table is read
as keys and values once its header has been seen. Whether a counter really counts, only the next lines can show: see printed.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Set, Tuple, Union

from drumbeat.base.regex import regex
from drumbeat.metrics.shapes import Shapes, Slot

KINDS = ("step", "validation", "throughput", "summary", "target")
# The values of a metrics record: docs/metrics.md explains each.
VALUES = (
    "step", "steps", "epoch", "epochs", "batch", "batches", "loss", "validation", "accuracy", "lr", "grad_norm",
    "step_time", "tokens_per_s", "samples_per_s", "tflops_per_device", "memory_gib", "target_reached", "total_s", "nodes",
    "gpus_per_node", "gpus",
)  # fmt: skip
COUNTERS = ("step", "steps", "epoch", "epochs", "batch", "batches")
_TOTALS = {"step": "steps", "batch": "batches", "epoch": "epochs"}
_TOTAL_OF = {total: name for name, total in _TOTALS.items()}
# Whose a value is: the printing rank's own, the average of one device, the whole job's; `unknown` where the line does not say.
WHOSE = ("rank", "device", "all", "unknown")
WHOLE = ("step", "steps", "epochs", "batch", "batches", "nodes", "gpus_per_node", "gpus")

Value = Union[int, float, bool]

_TOO_LARGE = 1e15  # for a count, or an epoch
NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3}){1,6}(?!,?\d)(?:\.\d*)?|\d{1,400}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,4}|[dD][-+]\d\d)?(?:[kKMBT](?![A-Za-z]))?(?![A-Za-z]?\d)"
    r"|[-+]?(?:nan|NaN|NAN|[Ii]nf(?:inity)?|INF)(?![A-Za-z])"
)
_FACTORS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

MASK = "<t>"
_STAMP = regex(
    r"(?<![\w./])(?:\d{4}[/.-]\d{1,2}[/.-]\d{1,2}|\d{1,2}[/.-]\d{1,2}[/.-]\d{2,4}"
    r"|(?:(?<=[\[(])|^)\d{1,2}/\d{1,2}(?=[ T]\d{1,2}:\d\d))"
    r"(?:[ T,:]{1,2}\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)?(?![\w/])"
    r"|(?<![\w:.])\d{1,3}:\d\d:\d\d(?:[.,]\d{1,9})?(?![\w:])|(?<![\w.])[IWE]\d{4}(?= <?\d)"
    r"|\b[a-z][a-z0-9+]{1,12}://[^\s'\"]+"
    r"|(?<![\w.)])(?:~|\.{1,2})?(?:/[\w.+=@%-]{1,80}){2,}|(?<![\w.])v?\d{1,4}\.\d{1,4}\.\d[\w.+-]*"
    r"|(?<![\w.+=@%/-])(?=[A-Za-z])(?:[\w+@%-]{1,80}[./=]){1,8}[\w+@%-]{0,80}\d\.[A-Za-z][A-Za-z0-9]{1,11}(?![\w/=:])"
)
_FIRST_STAMP = regex(r"^\s*(?:[\[(]?<t>[\])]?[\s,|:-]*)+")
_CLOCK_OF_BAR = regex(r"\d{1,3}:\d\d(?=[<,\] ])|<\d{1,3}:\d\d")


def _set(words: str) -> FrozenSet[str]:
    return frozenset(words.split())


# Other spellings of words, and their translations.
ALIASES = {
    word: name
    for name, words in {
        "step": "upd iterate schritt étape etape paso passo stap krok adım шаг 步数 步 ステップ 단계",
        "round": "runde ronde ronda rodada",
        "epoch": "epoka epok epocha epoche époque epoque época epoca эпоха pass 轮次 轮数 轮 エポック 에포크",
        "iteration": "itération iteración iterazione итерация 迭代次数 迭代",
        "loss": "trainloss avgloss verlust trainingsverlust verlies strata kayıp "
        "perte pérdida perdida perda perdita потери потеря 损失值 损失 損失 손실",
        "lr": "lernrate 学习率 学習率 학습률",
        "accuracy": "genauigkeit précision precisión acurácia exactitud dokładność точность 准确率 精度 정확도",
        "train": "tr trn trainings entraînement entrenamiento treino addestramento 训练 訓練",
        "val": "va vl validierung validación validação validazione 验证",
        "after": "nach",
    }.items()
    for word in words.split()
}
_TOGETHER = regex("|".join(sorted((word for word in ALIASES if word > "\u3000"), key=len, reverse=True)))
_SIGNS = str.maketrans(
    {
        "│": "|",
        "┃": "|",
        "║": "|",
        "：": ":",
        "，": ",",
        "＝": "=",
        "—": "-",
        "–": "-",
        "→": ">",
        "·": "|",
        "≈": "=",
        "ℒ": "L",
        "↓": " ",
        "↑": " ",
        "\u00a0": " ",
    }
)
_INITIALS = {"e": "epoch", "b": "batch", "i": "step", "s": "step", "l": "loss"}
_ITEM = regex(
    rf"(?<![\w.%])(?<!@(?!\d+\.\d))(?P<number>{NUMBER})(?:-(?P<until>\d{{1,9}})(?=batch))?"
    rf"(?:\s*(?:/|\(?(?:\bout )?\b(?:of|von|van|de|di|sur|из)\b)\s*(?P<total>\d[\d,]{{0,14}})(?!\w|\.\d|\s*/))?"
    r"(?P<unit>\s?%|\s?(?:ms|us|s|sec)/(?:it|iter|step|batch|sample|epoch)\b|\s?TFLOPS?\b"
    r"|\s?(?:ms|us|s|sec|secs|seconds|[GM]i?B|[GM])(?![\w])(?!\s?/)"
    r"|\s?[A-Za-z]{0,12}\s?(?:/|\bper\s)\s?s(?:ec(?:ond)?)?(?!\w|\s*[:=]\s*[-+.\d])(?:/\w+)?(?:\s?per\s?\w+)?|\s?batches\b(?!\s?[:=])|(?:batch|epoch)\b)?"
)
_NEXT_VALUE = regex(r"\s+[-+.]?\d(?![\d.,]*\s?[A-Za-z]{1,12}/s)")
_KEY_BEHIND = regex(  # `2.45 avg loss, 0.001 LR`, `2.45 loss 0.44 acc`
    r"(?i) ((?:(?:avg|average|train(?:ing)?) )?(?:loss|lr|nll|xent|acc(?:uracy)?))"
    r"(?=\s?[,;|)]| at | after |\s*$|\s+\d+\.\d+ [a-z]+(?:[,;|]|\s*$))"
)
_COUNTED = regex(r"(?i) (steps|updates|iterations|iters|epochs|batches)\b")  # `after 200 updates`
_HAS_COUNTED = _set("after completed finished done at processed trained on seen")
_FRACTION = regex(r"[\])]?(?: (?:steps|iterations|updates|epochs|batches))?(?: ?[:=] ?| (?:is |was )?)-?\d+\.\d")
_LINKS = _set("at after for on in")  # `loss at step 12`
_NO_VALUE = regex(
    r"\?|\s?\*\s?[A-Za-z(]|\s?(?i:gpu|node|rank|device|worker)s?\b(?!\w|\s?[:=]\s?\d)"
)  # a question, code, or how many
_KEY = regex(
    r"(?<![\w.])(?P<key>[^\W\d][\w@./#-]{0,60}(?: (?:[^\W\d]|[(/])[\w@./()-]{0,40}){0,6}?)\.?"
    r"\s{0,3}(?P<more>\([^()]{1,40}\)|\[[a-z]{1,20}\])?(?:['\"],?|,(?=$))?"
    r"(?:\s{0,12}[:=#>|(\[~-]{0,2}){1,3}\s{0,12}(?:(?:is|was|of|now) ){0,2}"
    r"(?:[\w.]{0,12}(?:tensor|rray|int\d\d|float\d\d)\(|['\"(\[]){0,2}$"
)
# What a key only stands behind: `Train Metrics (step 5)`, `stdout F train step 5`; not `eval after train step`.
_CONTEXT = regex(
    r"(?i)^(?!.*\b(?:eval|val|test))(?:.*(?:\(| (?=(?:train|training|global)[ _/]\w))|(?:(?:and|with|the|a) )+)"
)
_WORD = regex(r"TFLOPs?(?![a-z])|[GM]i?B(?![a-z])|[A-Z]?[^\W\d_A-Z]+|[A-Z]+(?![a-z])|\d+")

_STEP = _set(
    "step steps iter iters iteration iterations it itr itn niter nstep nsteps gstep update updates nupdates timestep timesteps"
)
_ROUNDS = _set(
    "round rounds cycle generation gen tick ticks episode episodes frame frames"
)  # steps where nothing else is
_LOSSES = _set("loss xent nll mse bce objective logloss crossentropy bpb bpc bpd learn")
_OTHER_LOSSES = (
    {"cost"},
    {"cross", "entropy"},
    {"ce"},
    {"bits", "dim"},
    {"bit", "dim"},
    {"neg", "log", "likelihood"},
    {"negative", "log", "likelihood"},
)
_OF_ENTROPY = _set("avg average mean softmax with logits sparse categorical")
_QUALITIES = _set(
    "ppl perplexity err error rmse mae reward return score residual fitness psnr iou dice wer cer bleu auc"
)
_REWARDS = _set("reward rewards")
_IMPROVED = _LOSSES | _REWARDS
_OBJECTIVES = _set(
    "ctc mlm clm sft dpo l recon reconstruction diffusion contrastive huber triplet elbo masked causal language"
)
_BATCH = _set("batch batches minibatch")
_EPOCH = _set("epoch epochs ep")
_VALIDATION = _set("val valid validation eval evaluation evaluate evaluating test testing dev validate cv holdout")
# Words that change nothing about what a key names.
_NOISE = _set("info debug main root current cur train training trainer global completed end of perf")
_BEFORE = _set("at after")  # what comes before them belongs to something else: `loss at iteration`
_LOSS = _NOISE | _set(
    "total tot avg avr ave average mean running reduced smoothed smooth batch epoch step lm ce cross entropy per iter mini "
    "binary all ema moving sum averaged last local pretrain losses token tok nll mse bce"
)
_PARTS = _set("ce cross entropy")
_LR = _set("lr learning rate base optim group l r")
_MEMORY = _set("mem memory vram max peak gpu allocated alloc active gib gb mb")
_TFLOPS = _set("tflops tflop s per second sec model throughput") | _set("gpu gpus device chip worker")
_ACCURACY = _NOISE | _set("top prec 1 sparse categorical binary avg average set approx")
_ACCURACIES = _set("acc accuracy accu")
_NOUNS = {
    **dict.fromkeys(_set("tokens token tok toks words word"), "tokens_per_s"),
    **dict.fromkeys(
        _set(
            "samples sample images image imgs img examples example ex sequences sequence seqs seq sentences sents sent"
        ),
        "samples_per_s",
    ),
}
_SECOND = _set("s sec secs second seconds")
_DEVICE = _set("gpu gpus device chip worker")
_RATES = {"tps": "tokens_per_s", "wps": "tokens_per_s", "tgs": "tokens_per_s", "ips": "samples_per_s"}
_TIMES = {"ms": 1e-3, "us": 1e-6, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0}
_SIZES = {"G": 1.0, "GB": 1.0, "GiB": 1.0, "M": 1 / 1024, "MB": 1 / 1024, "MiB": 1 / 1024}

_VALUE = regex(r"\d|(?i:nan|inf)")
_ASIDE = regex(r"(?<![A-Za-z_])(?:[Bb]est|[Ll]owest|[Ss]av(?:e|ed|ing))(?![A-Za-z_]).*")  # of what was, not of what is
# Lines that speak of a value instead of reporting it.
_TALK = regex(
    r"^wandb: |(?<![A-Za-z_])(?:[Rr]esum\w*|[Rr]estor\w*|[Ll]oad(?:ing|ed)?|[Pp]atience|[Pp]ackets?|[Jj]itter|[Pp]rofit"
    r"|[A-Z]\w*(?:Error|Warning)|[Ee]rror(?=: *[A-Za-z])|ERROR|[Cc]heckpoint shards|[Rr]educing)(?![A-Za-z_])"
    r"|(?i:(?<![a-z])(?:hyper-?param(?:eter)?s|params|hparams|config\w*|arg(?:ument)?s|namespace|settings|options|defaults)\s*[:=({])"
)
_LONE = regex(r"(?i)\W*(?:step|iter(?:ation)?)\W{1,4}\d{1,12}(?:[:,] ?| (?:- )?)-?\d+\.\d+\s*$")  # `step 20: 2.5`
_OTHER_UNIT = regex(r"(?:\s?[kMGT]?(?:i?B|bits?|W|Hz)|\s?(?:ms|us|s|sec|seconds))\b")  # of a benchmark, not of training
_REWARDED = regex(r"(?i)reward|return|score|loss|kimg")
_IS = regex(r"(?:(?<![=<>!])[=:]| is)[\[( ]{0,8}$")
_DONE = regex(r"(?i)[\w\s:#/\[\]-]{0,40}\d\]?\s*:?\s*(?:completed|complete|done|finished)\W*$")
_BAR = regex(
    r"\d{1,3}\s*%\s*[|┣├▕](?=[^A-Za-z\d.]{0,200}\d?[^A-Za-z\d.]{0,200}(?:[|┫┤▏]|$))|[━╸╺]{4}|\|[█#=>]{2}[█▉▊▋▌▍▎▏#=> .-]{0,200}\|"
)


class Item(NamedTuple):
    """One number of a line, with what stands around it."""

    words: Tuple[str, ...]  # of its key, in lower case
    text: str
    total: str
    unit: str
    start: int
    end: int
    opened: str = ""  # the bracket that it stands behind


class Line(NamedTuple):
    """Meaning of a line. `values` has counters and metrics; `bare`: nothing but a counter, as a heading or a bar."""

    values: Dict[str, Any]
    validation: bool = False
    whose: str = "unknown"  # the rates
    bar: bool = False
    bare: bool = False
    label: str = ""  # what stands before a bar
    known: bool = False  # a line of a known program
    samples: Tuple[int, int] = (0, 0)  # of the epoch, so far and in all: `Train Epoch: 1 [640/60000 (1%)]`
    loss: str = "rank"  # whose it is
    batch: bool = False  # its step may be a batch of the epoch above it
    guessed: bool = False  # its step is a number in front of the loss
    improves: bool = False  # it has a loss or a reward of any kind
    member: bool = False  # of an open bracket: one setting, unless it repeats


def masked(text: str) -> str:
    """The line with every date, clock, path and version masked, and without those at its start: their numbers count nothing."""
    return _FIRST_STAMP.sub("", _STAMP.sub(MASK, text), 1)


def number(name: str, text: str) -> Union[int, float]:
    """A count is an int, unless it is not whole, not finite or too large."""
    try:
        value = float(text)
    except ValueError:
        factor = _FACTORS.get(text[-1:], 1.0)
        value = float(text.rstrip("kKMBT").replace(",", "").replace("D", "e").replace("d", "e")) * factor
    if name not in WHOLE:
        return value
    whole = round(value, 3)  # 1.13K is 1130, and not the float next to it
    return int(whole) if abs(whole) < _TOO_LARGE and whole == int(whole) else value


def parse(text: str, shapes: Optional[Shapes] = None, tabled: bool = False) -> Optional[Line]:
    """The metrics in a line; None where it holds none. `shapes`: of the lines before it; `tabled`: it was a row of a table."""
    if not _VALUE.search(text) or _TALK.search(text):
        return None
    line = masked(_spelled(_ASIDE.sub("", text, 1)))
    if "," in line:
        line = _with_points(line, shapes)
    bar = _BAR.search(line)
    if bar:
        line = line[: bar.end()] + _CLOCK_OF_BAR.sub(MASK, line[bar.end() :])
    items = _with_initials(_items(line))
    if not items:
        return None
    if _VALIDATES.search(line):
        items = _in_parts(items, line)
    if shapes is not None:
        items = _behaved(items, shapes, line, bool(bar))
    values: Dict[str, Any] = {}
    whose = "unknown"
    validation = False
    unkeyed: List[Item] = []
    strength: Dict[str, float] = {}
    places: Dict[str, int] = {}
    for item in items:
        words = set(item.words)
        if words <= _NOISE:
            unkeyed.append(item)
        name, value = _meaning(item, items)
        if name in ("step", "batch", "epoch"):
            validation = validation or bool(words & _VALIDATION)
        strong = _strength(name, words)
        if not name or (name in values and strong <= strength.get(name, 0)):
            continue
        if name in ("step", "batch", "epoch"):
            total = _TOTALS[name]
            if name == "step" and "steps" in values and values["step"] != value:  # of the epoch, beside the global one
                values.update(batch=values["step"], batches=values.pop("steps"))
            if item.total:
                values[total] = number("steps", item.total)
        values[name], strength[name] = value, strong
        places.setdefault(name, item.start)
        if name in ("tokens_per_s", "samples_per_s") and (words | set(_words(item.unit))) & _DEVICE:
            whose = "device"
    if "loss" in values and not set(values) & {"step", "batch", "epoch"}:  # `SGD iteration 20 of 100: loss 0.5`
        for item in items:
            name, value = _counter(item, set(item.words[-1:]), set())
            if name and item.text.isdigit() and not {*item.words} & _VALIDATION:
                values.update({name: value, **({_TOTALS[name]: number("steps", item.total)} if item.total else {})})
                break
    if set(values) == {"loss"} and all(item.text.isdigit() for item in items):
        return None  # `win 12 loss 3`
    metrics = [place for name, place in places.items() if name not in COUNTERS]
    guessed = _count(values, unkeyed, line, bool(bar), min(metrics, default=len(line)), places)
    summed = next((item for item in items if item.words == ("total",) and "." in item.text and not item.unit), None)
    if strength.get("loss") == 1 and summed:
        values["loss"] = number("loss", summed.text)
    elif (
        strength.get("loss") == 1
        and sum(bool(_LOSSES & {*item.words} and not _VALIDATION & {*item.words}) for item in items) > 1
    ):
        del values["loss"]  # one of several parts
    if any(item.total and not _OF_TRIALS.isdisjoint(item.words) for item in items):
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
    if "epoch" in values and "steps" in values and "batch" not in values and before:  # as far as one line tells
        values.update(batch=values.pop("step"), batches=values.pop("steps"))
    learnt = [place for name, place in places.items() if name in _LEARNT]
    counters = [place for name, place in places.items() if name in ("step", "batch", "epoch")] or learnt
    label = line[: bar.start()].strip().split(":")[0] if bar else ""
    if "epochs" in values and "•" in line and bar:  # rich, as Lightning uses it, names the last epoch's number
        values["epochs"] += 1
    validation = validation or bool(set(_words(label)) & _VALIDATION)
    validation = validation or _is_for_validation(line, min(counters, default=0), min(learnt, default=0))
    judged = _judged(values, validation, whose, "bar" if bar else "row" if tabled else "", label, line, items)
    member = not bar and not tabled and not (shapes and shapes.changed) and bool(_MEMBER.fullmatch(text))
    improves = any(not _IMPROVED.isdisjoint(item.words) for item in items)
    if judged and (batch or guessed or member or improves):
        judged = judged._replace(batch=batch, guessed=guessed, member=member, improves=improves)
    counted = next((item for item in unkeyed if item.opened == "[" and _PERCENT_BEHIND.match(line[item.end :])), None)
    if judged and counted and counted.total and counted.text.isdigit() and "epoch" in values:
        samples = (int(counted.text), int(number("steps", counted.total)))
        judged = judged._replace(samples=samples) if samples[0] <= samples[1] else judged
    return judged


_VALIDATES = regex(r"(?i)val|eval|test|dev|cv|holdout|va_")
_SECTION = regex(
    r"(?i)(?:(?<=[\s|,;(])|(?<=['\"{\[]))(train(?:ing)?|val(?:id(?:ation)?)?|eval(?:uation)?|test|dev)"
    r"(?:[ _](?:metrics?|stats|results?))?(?:\]|['\"]?\s?[:=]?\s?[{(\[]|\s?[:|>]|\s-)\s*(?=['\"]?[A-Za-z])"
)


def _in_parts(items: List[Item], line: str) -> List[Item]:
    """Return the items with the part of the data that a label or a key in front of them names:
    `train: loss 2.0 | val: loss 2.1`, `"train": {"loss": 2.0}, "val": {"loss": 2.1}`, `train loss 2, acc 1, val loss 3`."""
    labels = [(match.end(), match[1].lower()) for match in _SECTION.finditer(line)]
    found: List[Item] = []
    seen: Set[str] = set()
    part, labelled = "", False
    for item in items:
        while labels and labels[0][0] <= item.start:
            part, labelled = labels.pop(0)[1], True
        own = [word for word in item.words if word in _VALIDATION or word in ("train", "training")]
        name = _meaning(item, items)[0]
        if own and name:
            part, labelled = own[0], False
        elif (
            name in _LEARNT
            and part in _VALIDATION
            and _LEARNT[name] not in seen
            and (labelled or name in (*seen, "accuracy"))
        ):
            item = item._replace(words=("val", *item.words))
        seen.add(name)
        found.append(item)
    return found


_LEARNT = {"loss": "validation", "accuracy": "val_accuracy"}
_COUNTED_WITH = _set("of max total num n nb out planned target all")
_OF_TRIALS = _set("trial trials fold folds client clients")
_NO_COUNTER = _set(
    "client worker fold trial run model layer head seed rank size params time t elapsed seconds sec s eta mem memory gpu gpus "
    "seen world node nodes pid port bs"
)


def _behaved(items: List[Item], shapes: Shapes, line: str, bar: bool) -> List[Item]:
    """Return the items with the keys and totals that only time shows."""
    counts = [item.text.isdigit() for item in items]
    form = tuple([item.words for item in items])
    slots = shapes.seen(form, [number("", item.text) for item in items], counts)
    lossy = any(not _LOSSES.isdisjoint(item.words) and "." in item.text and not item.unit for item in items)
    shapes.losses += lossy
    if not shapes.again:
        return items
    names = [
        _count_name(item.words) if count and (item.words[:1] in _TRIED or not slot.doubles) else ""
        for item, slot, count in zip(items, slots, counts)
    ]
    growing = [at for at, slot in enumerate(slots) if names[at] and slot.grows]
    changed: Dict[int, Dict[str, Any]] = {}
    for at, (item, slot) in enumerate(zip(items, slots)):
        new = ""
        if not counts[at]:
            shapes.improving = shapes.improving or bool(growing and _improves(item, slot))
        elif names[at]:  # one that stands still or turns back beside one that grows is a quantity
            beside = growing not in ([], [at])
            new = "quantity" if names[at] == "step" and not item.total and beside and (slot.still or slot.turns) else ""
        elif slot.doubles and not item.total:
            new = "quantity"  # sizes that are tried
        elif item.total and slot.grows and "epoch" in names and item.words and not _meaning(item, items)[0]:
            new = "" if _VALIDATION & {*item.words} else "batch"  # `Epoch: 1/400, Datapoint: 512/4096`
        elif not any(names) and _grows_evenly(item, slot, lossy and _sole_loss(items), len(items) == 1, line, bar):
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
    if counting and not any(not _LOSSES.isdisjoint(item.words) for item in items if item.words != ("learn",)):
        changed.update(_falling(items, slots))
    return (
        [item._replace(**changed[at]) if at in changed else item for at, item in enumerate(items)] if changed else items
    )


_TRIED = (("epoch",), ("step",))  # what may double: epochs 1, 2, 4 are printed


@lru_cache(maxsize=2048)
def _count_name(words: Tuple[str, ...]) -> str:
    return _counter(Item(words, "1", "", "", 0, 0), {*words} - _NOISE, {*words})[0]


def _sole_loss(items: List[Item]) -> bool:
    """Return true if one value is the loss; `mse_y mse_u mse_v` of a video are not."""
    kinds = [{*item.words} & _LOSSES for item in items if not _LOSSES.isdisjoint(item.words)]
    return (len(kinds) == 1 or {"loss"} in kinds) and any(_meaning(item, items)[0] == "loss" for item in items)


def _improves(item: Item, slot: Slot) -> bool:
    """Return true if this value has fallen, not evenly, and is no time."""
    return slot.falls and slot.turns > 1 and bool(item.words) and not item.unit and _NO_COUNTER.isdisjoint(item.words)


def _grows_evenly(item: Item, slot: Slot, lossy: bool, alone: bool, line: str, bar: bool) -> bool:
    """Return true for the counter of a line that names none: `update_t: 00016`, `{"i": 40, "mse": 0.5}`, `25/300 | 0.5 loss`."""
    words = {*item.words}
    if not slot.grows or item.unit:
        return False
    if item.total:
        return lossy and words <= _NOISE and not bar and not _KERAS.search(line)
    if words & (_STEP | _EPOCH) and len(words) < 4 and (lossy or alone):
        return slot.even and slot.ups > 1
    foreign = words & _NO_COUNTER or words & {*_NOUNS} or _UNIT_BEHIND.match(line, item.end)
    return lossy and slot.even and slot.ups > 2 and not foreign and (bool(words) or slot.stride >= 10)


def _is_total(words: Set[str], counter: Item, item: Item) -> bool:
    """Return true if a number that stands still may be a counter's total: `it=380 of=5000`, `step 10 max_steps 500`."""
    own = {*counter.words} - _COUNTED_WITH
    plural = any(word.strip("n") in (f"{each}s", f"{each}es") for word in words for each in own)
    known = words <= own | _COUNTED_WITH | _STEP | _EPOCH | _BATCH | {f"n{each}es" for each in own}
    told = bool(words & _COUNTED_WITH) or plural
    return not counter.total and told and (known or plural) and float(item.text) >= float(number("", counter.text))


def _falling(items: List[Item], slots: List[Slot]) -> Dict[int, Dict[str, Any]]:
    """Return the losses among bare words, if they fall: `Epoch: 10 Train: 0.13 Test: 0.14`, `Score at iteration 10 is 2.1`."""
    floats = [at for at, item in enumerate(items) if item.words and "." in item.text and not item.unit.strip()]
    splits = [at for at in floats if {*items[at].words} <= _VALIDATION | {"train", "training", "learn"}]
    if len(splits) == len(floats) > 1 or len(floats) == 1 and items[floats[0]].words == ("score",):
        return {
            at: {"words": (*items[at].words[:1], "loss") if splits else ("loss",)} for at in floats if slots[at].falls
        }
    return {}


_UNIT_BEHIND = regex(r"\s?[a-zµ]{1,3}[:,;]")  # `1510 nm: loss 0.2`
_KEYED_COMMA = regex(
    r"[^\W\d]\w*\s{0,2}[:=]?\s{0,2}-?(?:0,\d{1,9}|[1-9]\d{0,2},(?:\d{1,2}|\d{4,9}))(?=\s*(?:[%;|)-]|$|\s[^\W\d]))"
)
_POINT = regex(r"\d\.\d")
_COMMA = regex(r"(?<![\d.,])(\d{1,9}),(\d{1,9})(?![\d,])")


def _with_points(line: str, shapes: Optional[Shapes]) -> str:
    """Return a line of an output with decimal commas with points. One that can be nothing else decides for all that follow."""
    if _POINT.search(line):
        return line
    if (shapes is None or not shapes.comma) and not _KEYED_COMMA.search(line):
        return line
    if shapes is not None:
        shapes.comma = True
    return _COMMA.sub(r"\1.\2", line)


_MEMBER = regex(r"""\s*['"]?[A-Za-z][\w.-]*['"]?\s*[:=]\s*[^,:={}()\[\]|]+(?:,|\s*[})\]]+,?)?\s*""")
_FOR_VALIDATION = regex(
    r"(?i)(?:.{0,60}?[\])]:?\s)?[\s\[(*|>-]*(?:train )?(?:val(?:id(?:ation|at(?:e|ing))?)?|eval(?:uation|uat(?:e|ing))?"
    r"|test(?:ing)?|dev)(?![a-z])[\s:\])/|_.-]"
    r"|.{0,80}[|\]:] ?(?:val(?:id(?:ation)?)?|eval(?:uation)?|test)\s?[|:\]]|\s?\* +[A-Z]"
)
_VALIDATING = r"(?:val(?:id(?:ation)?)?|eval(?:uation)?|test)"
_OF_VALIDATION = regex(  # `"event": "eval"`, `split=val`, `phase: test |`
    rf"(?i)[\w'\"]\s?(?:=\s?['\"]?{_VALIDATING}(?![\w.-])|:\s?['\"]{_VALIDATING}['\"]|:\s?{_VALIDATING}(?=\s*(?:[,;}}\])|]|$)))"
)
_TOLD_VALIDATION = regex(rf"(?i)(?<![\w/.-]){_VALIDATING}(?![\w/.-])")  # `Epoch 1 test end 00:03:12, Accuracy=97.3`


def _is_for_validation(line: str, counted: int, first: int) -> bool:
    """Return true if the line says so at its start, between its counter and its first loss or accuracy, or as a value."""
    label = _FOR_VALIDATION.match(line)
    return bool(
        label
        and label.end() <= (first or len(line))
        or _OF_VALIDATION.search(line)
        or _TOLD_VALIDATION.search(line, counted, first)
    )


def _judged(
    values: Dict[str, Any],
    validation: bool,
    whose: str,
    form: str,
    label: str,
    line: str,
    items: List[Item],
) -> Optional[Line]:
    """Say what a line's values mean together. `form`: a progress bar, or the row of a table."""
    bar = form == "bar"
    for count, total in (("step", "steps"), ("batch", "batches"), ("epoch", "epochs")):
        if total in values and not _fits(values.get(count), values[total]):
            values.pop(count, None)  # no counter goes beyond its total
            values.pop(total)
    for name in WHOLE:
        if isinstance(values.get(name), float):  # nothing counts so
            del values[name]
    epoch = values.get("epoch")
    if epoch is not None and not abs(epoch) < _TOO_LARGE:  # nan, too
        del values["epoch"]
    if not values:
        return None
    if set(values) <= ({*COUNTERS, "step_time", "tokens_per_s", "samples_per_s"} if bar else set(COUNTERS)):
        meant = [_meaning(item, items)[0] for item in items]
        first = next((place for place, name in enumerate(meant) if name in COUNTERS), -1)
        others = [
            item
            for item, name in zip(items[first + 1 :], meant[first + 1 :])
            if item.words and name not in COUNTERS and not _OTHER_UNIT.match(line, item.end - len(item.unit))
        ]
        if first < 0:  # `[0/25][50/1583] Loss_D: 0.43 Loss_G: 4.1`
            others = [item for item in others if "." in item.text]
        one = (
            first == 0
            and len(others) == 1
            and "." in others[0].text
            and bool(_IS.search(line[: others[0].start]) or {*others[0].words} & _QUALITIES)
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
            and {*items[first].words} & _ROUNDS
            and not _REWARDED.search(line)
        ):
            return None
        if (
            not done
            and not bar
            and (
                sum(not word.isdigit() for word in _words(line)) - sum(len(item.words) for item in items) > 11
                or any({"total", "max"} & {*item.words} for item in items)
            )
        ):
            return None
        return Line(values, validation, whose, bar, not done, label)
    if set(values) <= {"step", "steps", "lr"} and any({"num", "max", "total"} & {*item.words} for item in items):
        return None  # settings
    return Line(values, validation, whose, bar, False, label)


def _strength(name: str, words: Set[str]) -> float:
    """Of several keys for one value, the strongest counts: a global step over a step, over an iteration; the most memory."""
    if name in ("loss", "validation"):
        return 1 if words & (_LOSSES | _OBJECTIVES | _PARTS) - {"loss"} else 2
    if name == "step":
        if words & _ROUNDS:
            return 0.5 if "total" in words else 0
        return 3 if words & {"global", "num", "up"} else 2 if words & {"step", "steps", "timesteps"} else 1
    return 2 if words & ({"max", "peak"} if name != "step_time" else _STEP | _BATCH) else 1


def _fits(count: Any, total: Any) -> bool:
    return isinstance(count, (int, float)) and isinstance(total, int) and count <= total


def _items(line: str) -> List[Item]:
    found: List[Item] = []
    owed: Tuple[str, ...] = ()
    last = 0
    for match in _ITEM.finditer(line):
        if not match["total"] and _NO_VALUE.match(line, match.end()):
            continue
        left = line[max(last, match.start() - 160) : match.start()]
        key = _KEY.search(left[-120:])
        words = _words(key["key"], key["more"] or "") if key else ()
        text = match["until"] or match["number"]
        opened = left.rstrip()[-1:]
        unit, end = match["unit"] or "", match.end()
        if words and unit[:1].isspace() and "/" in unit and _NEXT_VALUE.match(line, end):
            unit, end = "", match.end("number")  # `loss 0.1 tokens/s 1010`: the key of the next value
        if not words and not match["total"] and not unit:
            behind = _KEY_BEHIND.match(line, end) if "." in text else None
            words = _words(behind[1]) if behind else owed
        owed = ()
        if text.isdigit():
            words, unit, end, owed = _count_behind(line, words, unit, end)
        found.append(Item(words, text, match["total"] or "", unit, match.start(), end, opened))
        last = end
    return found


def _count_behind(line: str, words: Tuple[str, ...], unit: str, end: int) -> Tuple[Tuple[str, ...], str, int, Any]:
    """Key, unit and end of a whole number, and the key of the next: `after 20 steps`, `loss 20 0.5`, `loss at step 20: 0.5`."""
    counted = _COUNTED.match(line, end) if not unit else None
    if set(words) <= _HAS_COUNTED and "loss" in line.lower():
        if unit.strip() == "batches":
            return ("batch",), "", end, ()
        return (_words(counted[1]), unit, counted.end(), ()) if counted else (words, unit, end, ())
    link = next((place for place, word in enumerate(words) if word in _LINKS), len(words))
    told, key = words[:link], words[link + 1 :]
    of_loss = {*told} & (_LOSSES | {"cost", "score"}) or {*told} - _LR and {*key} & (_STEP | _EPOCH)
    if unit or not of_loss or not _FRACTION.match(line, end):
        return words, unit, end, ()
    return key or ("step",), unit, counted.end() if counted else end, told


@lru_cache(maxsize=2048)  # a program prints the same keys again and again
def _words(text: str, more: str = "") -> Tuple[str, ...]:
    found = (word.lower() for word in _WORD.findall(f"{_CONTEXT.sub('', text, 1)} {more}"))
    words = tuple(ALIASES.get(word, word) for word in found)
    return words if set(words) - {"is", "was"} else ()


def _spelled(text: str) -> str:
    """Return the text with plain signs, and with spaces between words that some languages write together."""
    if not text.isascii():
        text = _TOGETHER.sub(r" \g<0> ", text.translate(_SIGNS).replace("d'", ""))
        text = _COUNTED_IN_CJK.sub(r"\2 \1", _DIGITS_IN_CJK.sub(" ", text))
    if "):" in text or ")=" in text:
        text = _OVER.sub("", text)
    if "op-" in text or "OP-" in text:
        text = _TOP.sub("top", text)
    if "..." in text:
        text = _LEADER.sub(": ", text)
    if "it [" in text or "/Unknown" in text:  # a bar without a total
        text = _NO_TOTAL.sub(r"batch \1 ", text)
    if "it/" in text:
        text = _OF_PROGRESS.sub(lambda at: f"step {number('step', at[1])}/{number('steps', at[2])}", text)
    return _GLUED_VALUE.sub(r"\1 \2", _ORDINAL.sub(r"\2 \1", _GLUED.sub(r"\1 \2", text))).replace("'s ", " ")


_TOP = regex(r"(?i)(?<![a-z])top-(?=\d)")
_OVER = regex(r"(?<=[A-Za-z]) ?\([^()\d]{0,30}\d[^()]{0,30}\)(?=\s?[:=]\s?-?\d*\.\d)")  # `loss (last 100): 0.5`
_LEADER = regex(r" {0,3}\.{3,80} {1,3}(?=-?\d)")  # `loss ........ 0.5`
_NO_TOTAL = regex(r"(?<![\w.])(\d{1,12})(?:/Unknown|it (?=\[[^\]]{0,80}(?:loss|acc)))")
_DIGITS_IN_CJK = regex("(?<=[\u3040-\u9fff\uac00-\ud7af])(?=\\d)|(?<=\\d)(?=[\u3040-\u9fff\uac00-\ud7af])")
_COUNTED_IN_CJK = regex("第\\s*(\\d{1,12})\\s*([步轮])")
_GLUED = regex(
    r"(?i)(?<![\w/.-])(epoch|step|iter|iteration|batch|it|ep|upd)[_-]?(\d{1,12})(?=[\s:,;|)\]=]|$)"
)  # `step20`
_GLUED_VALUE = regex(r"(?i)(?<![\w/.-])((?:train_?|val_?)?(?:loss|acc|lr))(\d{1,9}\.\d)")  # `loss0.059`
_ORDINAL = regex(r"(?i)\b(\d{1,12})(?:st|nd|rd|th) (iteration|step|epoch|update)\b")
_OF_PROGRESS = regex(r"\b(\d[\d.]{0,9}[kM]?)it/(\d[\d.]{0,9}[kM]?)it\b")  # `212it/10.0kit`


def header(text: str) -> List[List[str]]:
    """Return the columns of a table whose header this is, in each way in which its words can be cut; [] for any other line."""
    if len(text) > 400 or _PLURAL.search(text) or not _COUNTS.search(text) or _ALONE.search(text):
        return []
    found = []
    for way in _cells(_spelled(text)):
        if len(way) < 2 or way == text.split() and not _WIDE.search(text.strip()) and "loss" not in text.lower():
            continue
        way = [_COLUMNS.get(cell, cell) for cell in way]
        items = [Item(_words(cell), "1", "", "", 0, 0) for cell in way]
        meant = [_meaning(item, items)[0] for item in items]
        if {"step", "epoch", "batch"} & {*(meant if "loss" in meant else meant[:3])}:
            found.append(way)
    return found


def more_of_header(text: str, ways: List[List[str]]) -> bool:
    """Add the second line of a header to its columns; false for any other line."""
    cells = _cells(_spelled(text))[0]
    if "|" not in text or len(cells) != len(ways[0]) or not _LETTERS.search(text) or _ALONE.search(text):
        return False
    ways[0] = [f"{first} {second}" for first, second in zip(ways[0], cells)]
    return True


def pair(text: str) -> Tuple[str, str]:
    """Return key and value of a row of a box, `| loss | 0.5 |`; its value is '' in a row that begins a section."""
    cells = [cell.strip() for cell in _spelled(text).strip().split("|")]
    if len(cells) != 4 or cells[0] or cells[3] or not cells[1][:1].isalpha() or not _FIELD.fullmatch(cells[2]):
        return "", ""
    return cells[1], cells[2]


def row(text: str, ways: List[List[str]]) -> str:
    """Return a row of the table as a line of keys and values, with a bar that stands behind it; '' for any other line."""
    bar = _BAR.search(text) if "[" in text else None
    text, behind = (text[: bar.start()].rstrip(": "), ": " + text[bar.start() :]) if bar else (text, "")
    for fields in _cells(_LIST.sub("-", _spelled(text))):
        way = next((way for way in ways if len(way) == len(fields)), None)
        if way and all(map(_FIELD.fullmatch, fields)):
            return ", ".join(f"{key}: {value}" for key, value in zip(way, fields) if _ALONE.match(value)) + behind
    return ""


def _cells(text: str) -> List[List[str]]:
    text = text.strip().strip("|").lstrip("# \t") or text.strip()
    signs = [sign for sign in "|\t;," if sign in text]
    found = [[cell.strip(" '\"#") or cell.strip() for cell in text.split(sign)] for sign in signs]
    return found if "|" in text else [*found, _WIDE.split(text), text.split()]


_PLURAL = regex(r"(?i)(?<![a-z_/])epochs(?![a-z_])")  # a table of results, one row per run
_COUNTS = regex(r"(?i)step|epoch|\bep\b|iter|batch|update|round|tick|^\W*E\s")
_LETTERS = regex(r"[^\W\d]")
_WIDE = regex(r"\s{2,}")
_LIST = regex(r"\[[^\[\]]*\]")
_ALONE = regex(r"(?<![\w.@-])-?\.?\d")  # a number of its own
_FIELD = regex(rf"|-+|[A-Za-z/]{{1,4}}|\d[\d:.]*|\d+/\d+|(?:{NUMBER})\s?(?:%|s|ms|[GM]i?B?)?")
_COLUMNS = {"#": "step", "E": "epoch"}


_COUNTING = frozenset("ebis") | _STEP | _EPOCH | _BATCH


def _with_initials(items: List[Item]) -> List[Item]:
    """`[E 4][B 100/400][L 0.9]`, `i=10 loss=0.5`: letters count where one of them, or a word, is the loss."""
    letters = {item.words[0] for item in items if len(item.words) == 1}
    counted = any(item.total or not _COUNTING.isdisjoint(item.words) for item in items)
    known = _INITIALS if "l" in letters and counted else {"i": "step", "e": "epoch"} if "loss" in letters else {}
    return [
        item._replace(words=(known[item.words[0]],)) if len(item.words) == 1 and item.words[0] in known else item
        for item in items
    ]


def _meaning(item: Item, items: List[Item]) -> Tuple[str, Any]:
    """The value's name and the value; '' for a number that is no metric."""
    words, unit = _own(item.words), item.unit.strip()
    known, kept = set(words), [word for word in words if word not in _NOISE and not word.isdigit()]
    rest = set(kept)
    rate = _rate(known, unit)
    if rate:
        if known & _VALIDATION:
            return "", None
        return rate, number(rate, item.text)
    if unit in ("epoch", "batch", "batches") and not rest - {"epoch", "batch"}:
        return unit[:5], number("batch", item.text)
    if unit.startswith("TFLOP"):
        return "tflops_per_device", number("tflops_per_device", item.text)
    if not words or unit.partition("/")[2]:
        return _time_of_step(item, unit)
    if known & _LOSSES or rest - _OF_ENTROPY in _OTHER_LOSSES:
        more = rest - _LOSSES - _OBJECTIVES - _OF_ENTROPY - {"cost", "neg", "negative", "log", "likelihood"}
        if more <= _LOSS and unit != "%" and unit not in _TIMES:
            return "loss", number("loss", item.text)
        if known & _VALIDATION and more - _VALIDATION - {"best"} <= _LOSS and unit != "%" and unit not in _TIMES:
            return "validation", number("loss", item.text)
        return "", None
    if _names_accuracy(words, rest) and (unit == "%" or "." in item.text or item.total.strip("0")):
        if rest - _ACCURACIES <= _ACCURACY | _VALIDATION:
            value = number("accuracy", item.text) / (number("", item.total) if item.total else 1)
            name = "val_accuracy" if known & _VALIDATION else "accuracy"
            return name, round(value / 100, 12) if unit == "%" or value > 1 else value
        return "", None
    if (known & {"lr"} or {"learning", "rate"} <= known or words == ("l", "r")) and rest <= _LR:
        return "lr", number("lr", item.text)
    if (
        rest
        and rest <= {"grad", "gradient", "norm", "gnorm", "total", "optim"}
        and rest & {"grad", "gradient", "norm", "gnorm"}
    ):
        return "grad_norm", number("grad_norm", item.text)
    if known & {"tflops", "tflop"} and rest <= _TFLOPS:
        return "tflops_per_device", number("tflops_per_device", item.text)
    if known & {"mem", "memory", "vram"} and rest <= _MEMORY:
        return _memory(item, unit)
    time = _time(item, unit, rest, items)
    if time is not None:
        return "step_time", time
    return _counter(item, rest, known)


def _names_accuracy(words: Tuple[str, ...], rest: Set[str]) -> bool:
    """Return true for the words of an accuracy: `val acc`, `acc@1`, `top-1`, `Prec@1`; not for `acc@5`."""
    of_first = "1" in words and not {"5", "10"} & {*words}
    return not _ACCURACIES.isdisjoint(words) or (of_first and bool(rest & {"top", "prec"}) and "error" not in rest)


def _own(words: Tuple[str, ...]) -> Tuple[str, ...]:
    """Without what only leads to the key: `validation loss at iteration`, `lm loss value`."""
    cut = max((place + 1 for place, word in enumerate(words) if word in _BEFORE), default=0)
    return words[cut:-1] if words[-1:] == ("value",) else words[cut:]


def _counter(item: Item, rest: Set[str], known: Set[str]) -> Tuple[str, Any]:
    if (
        item.words[:1] == ("no",)  # `No Iterations 2`, of a solver
        or item.unit.strip() not in ("", "epoch", "batch")
        or not item.text.lstrip("-+")[:1].isdigit()
        and item.text[-3:].lower() not in ("nan", "inf")
    ):
        return "", None
    rest = rest - _VALIDATION
    for name, words in (("epoch", _EPOCH), ("step", _STEP), ("batch", _BATCH), ("step", _ROUNDS)):
        if rest and rest & words and rest <= words | _MORE_OF_A_COUNTER:
            return name, number("step" if item.text.isdigit() or name != "epoch" else "epoch", item.text)
    if rest == {"up"}:
        return "step", number("step", item.text)
    return "", None


_MORE_OF_A_COUNTER: FrozenSet[str] = _set(
    "num number idx index no optimizer opt max mini env i n id count done finished total learning "
    "start starting begin beginning going into"
)


def _rate(known: Set[str], unit: str) -> str:
    said = _words(unit)
    if said and said[-1] not in _SECOND and set(said) & _SECOND and set(said) & _DEVICE:
        said = tuple(word for word in said if word not in _DEVICE and word != "per")
    if len(said) > 1 and said[-1] in _SECOND and said[0] in _NOUNS:
        return _NOUNS[said[0]]
    if len(said) == 1 and unit.startswith("/") and said[0] in _SECOND:
        return "samples_per_s"
    nouns = [_NOUNS[word] for word in sorted(known) if word in _NOUNS]
    if nouns and known & _SECOND and not said:
        return nouns[0]
    short = [name for word, name in _RATES.items() if word in known]
    return short[0] if short and not known - set(_RATES) - _DEVICE - _SECOND - set(_NOUNS) - {"per"} - _NOISE else ""


def _time(item: Item, unit: str, rest: Set[str], items: List[Item]) -> Optional[float]:
    """Seconds per step. A bare `time` may be that of anything: it counts where its neighbours show what it is."""
    factor = _TIMES.get(unit) or next((_TIMES[word] for word in item.words if word in ("ms", "us")), 1.0)
    own = set(item.words)
    if unit and unit not in _TIMES or item.text[-1:] not in "0123456789kK":
        return None
    if item.text.isdigit() and not unit and not own & set(_TIMES):  # `time/batch: 12` counts
        return None
    counted = own & (_STEP | _BATCH | _EPOCH)
    rest = rest - set(_TIMES) - {"elapsed", "per", "average", "avg"}
    value = float(number("step_time", item.text)) * factor
    if not unit and rest and rest <= _STEP and own & _SECOND:
        if item.words[-1] in _SECOND:  # `steps/s: 1.2`; the other way round, it is the time itself
            return round(1 / value, 12) if value > 0 else None
        return round(value, 12)
    if rest - (_STEP | _BATCH) <= {"time", "dt", "t", "cost", "timing", "in"} and counted & (_STEP | _BATCH):
        if not rest & {"time", "dt", "t", "cost", "timing"} and not own & {"ms", "us"} and unit not in ("ms", "us"):
            return round(value, 12) if rest == {"iter"} and "." in item.text and item.text[-1] not in "kK" else None
        parts = [other for other in items if set(other.words) & {"forward", "backward"} and other.text[-1:].isdigit()]
        return round(value, 12) if value >= max((float(number("", part.text)) for part in parts), default=0.0) else None
    took = rest in ({"in"}, {"took"}) and unit in ("s", "sec", "secs", "seconds")
    if (
        rest not in ({"time"}, {"dt"})
        and item.words != ("time", "data")
        and own != {"seconds"}
        and not took
        or "train" in own
    ):
        return None
    at = items.index(item)
    if took or unit == "ms" or rest == {"dt"} or own == {"seconds"} or any("data" in each.words for each in items):
        return round(value, 12)
    after = [each for each in items[at + 1 : at + 3] if not each.words]
    if any(each.unit.strip().startswith("/s") or each.opened == "(" for each in after[:1]):
        return round(value, 12)
    counters = [each for each in items if set(each.words) & (_STEP | _BATCH | _EPOCH | {"up"}) or each.total]
    return round(value, 12) if len(counters) == 1 and set(counters[0].words) & _EPOCH else None  # of the whole epoch


def _time_of_step(item: Item, unit: str) -> Tuple[str, Any]:
    """`22ms/step`, `1.2s/it`, `10.0it/s`."""
    first, _, last = unit.replace(" ", "").partition("/")
    if first in _TIMES and last in ("it", "iter", "step", "batch"):
        return "step_time", round(float(number("step_time", item.text)) * _TIMES[first], 12)
    if first in ("it", "iter", "iters", "step", "steps") and last in _SECOND and float(number("", item.text)) > 0:
        return "step_time", round(1 / float(number("", item.text)), 12)
    return ("step_time", round(float(number("", item.text)) / 1e3, 12)) if unit == "ms" else ("", None)


def _memory(item: Item, unit: str) -> Tuple[str, Any]:
    value = float(number("memory_gib", item.text.rstrip("M")))
    factor = _SIZES.get("M" if item.text.endswith("M") else unit) or (1.0 if value < 256 else 1 / 1024)
    return "memory_gib", round(value * factor, 12)


def _count(
    values: Dict[str, Any], unkeyed: List[Item], line: str, bar: bool, metric: int, places: Dict[str, int]
) -> bool:
    """Counters without a key: `[10/100]`, a bar's `4/8`, `[ 1,  2000]`, `[200]` behind a logger's prefix. True: only perhaps."""
    if "batch" in values and "batches" not in values and "epoch" not in values and _STEP_IN_FRONT.match(line):
        del values["batch"], places["batch"]  # its size: `20: loss=0.5, batch=16`
    counted = set(values) & {"step", "batch"}
    pairs = [item for item in unkeyed if item.total and not item.unit.strip() and item.text.isdigit()]
    pairs = [item for item in pairs if not _PERCENT_BEHIND.match(line[item.end :]) or bar]
    if pairs and not counted and "epochs" not in values and _PART_OF_EPOCH.match(line):
        values.update(step=number("step", pairs[0].text), steps=number("steps", pairs[0].total))
        places["step"] = pairs[0].start
        return False
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
            values.update(epoch=number("epoch", pairs[0].text), epochs=number("epochs", pairs.pop(0).total))
        keras = pairs[0].opened != "[" and not line[: pairs[0].start].strip() and bool(_KERAS.search(line))
        if keras and "/sample" in line:
            return False
        if (last or not line[: pairs[0].start].strip()) and "epoch" not in values and not bar and not keras:
            places["batch"] = pairs[0].start
        name = ("batch", "batches") if "epoch" in values or keras or "batch" in places else ("step", "steps")
        name = ("epoch", "epochs") if bar and _EPOCHS_OF_BAR.match(line) else name
        values.update(zip(name, (number("step", pairs[-1].text), number("steps", pairs[-1].total))))
        return False
    both = _EPOCH_AND_BATCH.match(line)
    if both and not counted and "epoch" not in values:
        values.update(epoch=number("epoch", both[1]), batch=number("batch", both[2]))
    single = _STEP_IN_BRACKETS.match(line)
    if single and not (len(values) > 1 or values and single.start(1) > 1):  # `[0] loss 0.5` may be a rank's label
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
_EPOCHS_OF_BAR = regex(r"(?i)\s*epochs:?\s")
_LETTER_OR_DIGIT = regex(r"[^\W_]")
_SHARE = regex(r"\[?\s*\d{1,3}(?:\.\d+)?\s*%\]?")
_KERAS = regex(r"/step|[━=]{3}|\[[.>]")
_PERCENT_BEHIND = regex(r"\s*\(\s*\d{1,3}(?:\.\d+)?\s*%\)")
_EPOCH_BEFORE = regex(r"(?:\[(\d{1,6})\]|(?i:train):? (\d{1,6})) ?\[ *\d{1,9}/\d")  # `[2][10/30]`, `Train: 2 [10/30`
_EPOCH_AND_BATCH = regex(r"\s*[\[(]\s*(\d{1,9}),\s*(\d{1,9})[\])]")
_PART_OF_EPOCH = regex(r"(?i)\s*\d{1,12}/\d{1,12} \(epoch \d+\.\d")  # `1/21150 (epoch 0.002), loss`
_STEP_IN_FRONT = regex(
    r"\s*\[?(\d{1,12})(?:\s*[:|]\s|\s+\d+\.\d)"
)  # `100: 2.34 loss`, `10 | loss 2.3`, `[10 | 3.4] loss`
_NUMBER_IN_FRONT = regex(
    r"(?i)\W{0,8}(?:train\w{0,3}\W{1,4})?(\d{1,9})(?![\d.])\W{1,6}(?:train|training|avg|mean|total)?[ _/]?loss"
)
_MANY_STEPS = regex(r"\[(\d{3,12})\] (?=[^\W\d][\w/]{2,40}[ :=]{1,3}[\d.]+\W+[^\W\d][\w/]{2,40}[ :=]{1,3}[\d.]+)")
_STEP_IN_BRACKETS = regex(r"(?:[^\[=]{0,80}\]\s|[^\[=]{0,80}\s)?(?:train)?\[(\d{1,12})\]")

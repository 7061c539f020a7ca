"""Read one number as a field: a loss, an accuracy, a rate, a time, a counter. Its key and its unit decide."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, List, Optional, Set, Tuple

from drumbeat.base.regex import regex
from drumbeat.metrics import vocab
from drumbeat.metrics.tokens import Item, number, words_of

_OF_RUN = vocab.LOSSES | {"elapsed", "reward", "return"}
_OF_LOSS = vocab.LOSSES | vocab.OBJECTIVES | vocab.OF_ENTROPY | {"cost", "neg", "negative", "log", "likelihood"}
_OF_RATE = {*vocab.RATES, *vocab.NOUNS, "per"} | vocab.DEVICE | vocab.SECOND | vocab.NOISE
_OF_TIME = {"time", "dt", "t", "cost", "timing"}
_COUNTED = vocab.STEP | vocab.BATCH
_NORM = {"grad", "gradient", "norm", "gnorm"}


@lru_cache(maxsize=2048)
def counter_name(words: Tuple[str, ...]) -> str:
    return counter_of(Item(words, "1", "", "", 0, 0), {*words} - vocab.NOISE, {*words})[0]


_COUNTERS = (({"global", "num", "up"}, 3), ({"step", "steps"}, 2), ({"iteration"}, 1.5), ({"timesteps"}, 1.2))


def strength_of(name: str, words: Set[str]) -> float:
    """Rank the keys for one value; the strongest wins: a global step over a step over an iteration; peak over current memory."""
    if name in ("loss", "validation"):
        parts = words & (vocab.LOSSES | vocab.OBJECTIVES | vocab.PARTS) - {"loss"}
        own = words & (vocab.BATCH | vocab.EPOCH | vocab.TEST)
        return 1 if parts else 1.5 if own else 2  # `batch_loss: 0.8, loss: 0.9`: the average
    if name == "step":
        if words & vocab.ROUNDS:
            return 0.5 if "total" in words else 0
        return next((strength for names, strength in _COUNTERS if words & names), 1)
    if name == "lr":
        return 1 if "base" in words else 2
    return 2 if words & ({"max", "peak"} if name != "step_time" else vocab.STEP | vocab.BATCH) else 1


def meaning_of(item: Item, items: List[Item]) -> Tuple[str, Any]:
    """Return the metric's name and value; '' for a number that is not a metric."""
    words, unit = _own(item.words), item.unit.strip()
    known, rest = {*words}, {word for word in words if word not in vocab.NOISE and not word.isdigit()}
    rate = _rate(known, unit)
    if rate:
        still = "fps" in known and not any({*each.words} & _OF_RUN for each in items)  # of a video
        return ("", None) if still or known & vocab.VALIDATION else (rate, number(rate, item.text))
    if unit in ("batch", "batches") and not rest - {"epoch", "batch"}:
        return "batch", number("batch", item.text)
    if unit.startswith("TFLOP"):
        return "tflops_per_device", number("tflops_per_device", item.text)
    if not words or unit.partition("/")[2]:
        time = _time_of_step(float(number("", item.text)), unit)
        return ("", None) if time is None else ("step_time", round(time, 12))
    if known & vocab.LOSSES or rest - vocab.OF_ENTROPY - vocab.VALIDATION in vocab.OTHER_LOSSES:
        name = "" if unit == "%" or unit in vocab.TIMES else _loss(known, rest)
        return (name, number("loss", item.text)) if name else ("", None)
    if _names_accuracy(words, rest) and (unit == "%" or "." in item.text or item.total.strip("0")):
        if rest - vocab.ACCURACIES <= vocab.ACCURACY | vocab.VALIDATION:
            value = number("accuracy", item.text) / (number("", item.total) if item.total else 1)
            name = "val_accuracy" if known & vocab.VALIDATION else "accuracy"
            return name, round(value / 100, 12) if unit == "%" or value > 1 else value
        return "", None
    of_optimizer = _of_optimizer(words, rest) or (
        "" if known & (vocab.VALIDATION | vocab.LOSSES) else _of_optimizer(item.leaf, {*item.leaf})
    )
    if of_optimizer:
        return of_optimizer, number(of_optimizer, item.text)
    if known & {"tflops", "tflop"} and rest <= vocab.TFLOPS:
        return "tflops_per_device", number("tflops_per_device", item.text)
    if known & {"mem", "memory", "vram"} and rest <= vocab.MEMORY:
        return _memory(item, unit)
    time = _time(item, unit, rest, items)
    return counter_of(item, rest, known) if time is None else ("step_time", round(time, 12))


def _loss(known: Set[str], rest: Set[str]) -> str:
    """Name the loss or the validation's loss; '' for the entropy of a policy and for parts of a loss."""
    more = rest - _OF_LOSS
    if "entropy" in more and not more & {"cross", "ce"} and not rest & vocab.OF_ENTROPY - {"avg", "average", "mean"}:
        return ""
    validation = known & vocab.VALIDATION and more - vocab.VALIDATION - {"best"} <= vocab.LOSS
    return "loss" if more <= vocab.LOSS else "validation" if validation else ""


def quality_of(item: Item) -> str:
    """Return the name of a validation's own measure, such as perplexity, F1, mAP or BLEU; '' for a count, a time or a rate."""
    words = {*item.words}
    fine = "." in item.text or "e" in item.text.lower() or words & vocab.QUALITIES
    if not fine or item.unit.strip() not in ("", "%"):
        return ""
    name = _SPLIT.sub("", _LEAF.sub("", item.key)).strip(" ()[]-_./").replace(" ", "_")[:40]
    plain = name.lower()
    odd = words & vocab.NO_QUALITY or any(map(_OF_COUNT.fullmatch, words)) or words <= vocab.VALIDATION | vocab.NOISE
    return "" if odd or plain in _TAKEN or not any(map(str.isalpha, name)) else name


_OF_COUNT = regex(r"(?!bpb)[a-z]p[bs]|bsz")  # `wpb`, `ups`
_LEAF = regex(r"^.*[./](?=\w)")
_SPLIT = regex(r"(?i)(?<![^\W_])(?:" + "|".join(sorted(vocab.VALIDATION, key=len, reverse=True)) + r")(?:[\W_]+|$)")
_TAKEN = {"t", "rank", "kind", "rate", "unit", "tokens", "samples", "seconds", "printed", *vocab.VALUES}


def _of_optimizer(words: Tuple[str, ...], rest: Set[str]) -> str:
    """Name a learning rate or a gradient's norm."""
    named = "rate" in words and {"learning", "train", "group"} & {*words}
    if ("lr" in words or named or words == ("l", "r")) and rest <= vocab.LR:
        return "lr"
    return "grad_norm" if rest <= _NORM | {"total", "optim"} and rest & _NORM else ""


def _names_accuracy(words: Tuple[str, ...], rest: Set[str]) -> bool:
    """Return true for the words of an accuracy: `val acc`, `acc@1`, `top-1`, `Prec@1`; not for `acc@5`."""
    of_first = "1" in words and not {"5", "10"} & {*words}
    return not vocab.ACCURACIES.isdisjoint(words) or (of_first and bool(rest & {"top", "prec"}) and "error" not in rest)


def _own(words: Tuple[str, ...]) -> Tuple[str, ...]:
    """Return the key without words that only introduce or end it: `validation loss at iteration`, `lm loss value`."""
    cut = max((place + 1 for place, word in enumerate(words) if word in vocab.BEFORE), default=0)
    return words[cut:-1] if words[-1:] == ("value",) else words[cut:]


def counter_of(item: Item, rest: Set[str], known: Set[str]) -> Tuple[str, Any]:
    if (
        item.words[:1] == ("no",)  # `No Iterations 2`, of a solver
        or item.unit.strip() not in ("", "batch")
        or not item.text.lstrip("-+")[:1].isdigit()
        and item.text[-3:].lower() not in ("nan", "inf")
    ):
        return "", None
    rest = rest - vocab.VALIDATION
    for name, words in (("epoch", vocab.EPOCH), ("step", vocab.STEP), ("batch", vocab.BATCH), ("step", vocab.ROUNDS)):
        # `Num Epochs = 3`, `epochs: 3`
        planned = (
            name == "epoch"
            and "epochs" in rest
            and (rest & {"num", "max", "total"} or not item.total and not item.start)
        )
        if rest and rest & words and rest <= words | vocab.MORE_OF_A_COUNTER and not planned:
            return name, number("step" if item.text.isdigit() or name != "epoch" else "epoch", item.text)
    if rest == {"up"}:
        return "step", number("step", item.text)
    return "", None


def _rate(known: Set[str], unit: str) -> str:
    said = words_of(unit)
    if said and said[-1] not in vocab.SECOND and set(said) & vocab.SECOND and set(said) & vocab.DEVICE:
        said = tuple(word for word in said if word not in vocab.DEVICE and word != "per")
    if len(said) > 1 and said[-1] in vocab.SECOND and said[0] in vocab.NOUNS:
        return vocab.NOUNS[said[0]]
    if len(said) == 1 and unit.startswith("/") and said[0] in vocab.SECOND:
        return "samples_per_s"
    nouns = [vocab.NOUNS[word] for word in sorted(known) if word in vocab.NOUNS]
    if nouns and known & vocab.SECOND and not said:
        return nouns[0]
    short = [name for word, name in vocab.RATES.items() if word in known]
    return short[0] if short and known <= _OF_RATE else ""


def _time(item: Item, unit: str, rest: Set[str], items: List[Item]) -> Optional[float]:
    """Return seconds per step. A bare `time` may measure anything: it counts if its neighbours show that it is a step time."""
    factor = vocab.TIMES.get(unit) or next((vocab.TIMES[word] for word in item.words if word in ("ms", "us")), 1.0)
    own = {*item.words}
    if unit and unit not in vocab.TIMES or item.text[-1:] not in "0123456789kK":
        return None
    if item.text.isdigit() and not unit and not own & {*vocab.TIMES}:  # `time/batch: 12` is a step time
        return None
    rest = rest - {*vocab.TIMES} - {"elapsed", "per", "average", "avg"}
    value = float(number("step_time", item.text)) * factor
    if value > 1e8:  # a date
        return None
    if not unit and rest and rest <= vocab.STEP and own & vocab.SECOND:
        if item.words[-1] not in vocab.SECOND:
            return value
        return 1 / value if value > 0 else None  # `steps/s: 1.2`
    if own & _COUNTED and rest - _COUNTED <= _OF_TIME | {"in"}:
        if not rest & _OF_TIME and not {*own, unit} & {"ms", "us"}:
            return value if rest == {"iter"} and "." in item.text and item.text[-1] not in "kK" else None
        parts = [other for other in items if {*other.words} & {"forward", "backward"} and other.text[-1:].isdigit()]
        return value if value >= max((float(number("", part.text)) for part in parts), default=0.0) else None
    took = rest in ({"in"}, {"took"}) and unit in ("s", "sec", "secs", "seconds")
    bare = rest in ({"time"}, {"dt"}) or item.words == ("time", "data") or own == {"seconds"} or took
    if not bare or "train" in own:
        return None
    if took or unit == "ms" or rest == {"dt"} or own == {"seconds"} or any("data" in each.words for each in items):
        return value
    at = items.index(item)
    after = [each for each in items[at + 1 : at + 3] if not each.words]
    if any(each.unit.strip().startswith("/s") or each.opened == "(" for each in after[:1]):
        return value
    counters = [each for each in items if {*each.words} & (_COUNTED | vocab.EPOCH | {"up"}) or each.total]
    return value if len(counters) == 1 and {*counters[0].words} & vocab.EPOCH else None  # of the whole epoch


def _time_of_step(value: float, unit: str) -> Optional[float]:
    """Parse `22ms/step`, `1.2s/it`, `10.0it/s`."""
    first, _, last = unit.replace(" ", "").partition("/")
    if first in vocab.TIMES and last in ("it", "iter", "step", "batch"):
        return value * vocab.TIMES[first]
    if first in ("it", "iter", "iters", "step", "steps") and last in vocab.SECOND and value > 0:
        return 1 / value
    return value / 1e3 if unit == "ms" else None


def _memory(item: Item, unit: str) -> Tuple[str, Any]:
    value = float(number("memory_gib", item.text.rstrip("M")))
    factor = vocab.SIZES.get("M" if item.text.endswith("M") else unit) or (1.0 if value < 256 else 1 / 1024)
    return "memory_gib", round(value * factor, 12)

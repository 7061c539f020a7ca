"""Read one number as a field: a loss, an accuracy, a rate, a time, a counter. Its key and its unit decide."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, List, Optional, Set, Tuple

from drumbeat.base.regex import regex
from drumbeat.metrics.tokens import Item, number, words_of
from drumbeat.metrics.words import (
    ACCURACIES,
    ACCURACY,
    BATCH,
    BEFORE,
    DEVICE,
    EPOCH,
    LOSS,
    LOSSES,
    LR,
    MEMORY,
    MORE_OF_A_COUNTER,
    NO_QUALITY,
    NOISE,
    NOUNS,
    OBJECTIVES,
    OF_ENTROPY,
    OTHER_LOSSES,
    PARTS,
    QUALITIES,
    RATES,
    ROUNDS,
    SECOND,
    SIZES,
    STEP,
    TFLOPS,
    TIMES,
    VALIDATION,
    VALUES,
)

_OF_RUN = LOSSES | {"elapsed", "reward", "return"}
_NORM = {"grad", "gradient", "norm", "gnorm"}


@lru_cache(maxsize=2048)
def counter_name(words: Tuple[str, ...]) -> str:
    return counter_of(Item(words, "1", "", "", 0, 0), {*words} - NOISE, {*words})[0]


_COUNTERS = (({"global", "num", "up"}, 3), ({"step", "steps"}, 2), ({"iteration"}, 1.5), ({"timesteps"}, 1.2))


def strength_of(name: str, words: Set[str]) -> float:
    """Rank the keys for one value; the strongest wins: a global step over a step over an iteration; peak over current memory."""
    if name in ("loss", "validation"):
        parts = words & (LOSSES | OBJECTIVES | PARTS) - {"loss"}
        return 1 if parts else 1.5 if words & (BATCH | EPOCH) else 2  # `batch_loss: 0.8, loss: 0.9`: the average
    if name == "step":
        if words & ROUNDS:
            return 0.5 if "total" in words else 0
        return next((strength for names, strength in _COUNTERS if words & names), 1)
    if name == "lr":
        return 1 if "base" in words else 2
    return 2 if words & ({"max", "peak"} if name != "step_time" else STEP | BATCH) else 1


def meaning_of(item: Item, items: List[Item]) -> Tuple[str, Any]:
    """Return the metric's name and value; '' for a number that is not a metric."""
    words, unit = _own(item.words), item.unit.strip()
    known, kept = set(words), [word for word in words if word not in NOISE and not word.isdigit()]
    rest = set(kept)
    rate = _rate(known, unit)
    if rate:
        still = "fps" in known and not any({*each.words} & _OF_RUN for each in items)  # of a video
        if still or known & VALIDATION:
            return "", None
        return rate, number(rate, item.text)
    if unit in ("epoch", "batch", "batches") and not rest - {"epoch", "batch"}:
        return unit[:5], number("batch", item.text)
    if unit.startswith("TFLOP"):
        return "tflops_per_device", number("tflops_per_device", item.text)
    if not words or unit.partition("/")[2]:
        return _time_of_step(item, unit)
    if known & LOSSES or rest - OF_ENTROPY - VALIDATION in OTHER_LOSSES:
        more = rest - LOSSES - OBJECTIVES - OF_ENTROPY - {"cost", "neg", "negative", "log", "likelihood"}
        if "entropy" in more and not more & {"cross", "ce"} and not rest & OF_ENTROPY - {"avg", "average", "mean"}:
            return "", None  # of a policy
        if more <= LOSS and unit != "%" and unit not in TIMES:
            return "loss", number("loss", item.text)
        if known & VALIDATION and more - VALIDATION - {"best"} <= LOSS and unit != "%" and unit not in TIMES:
            return "validation", number("loss", item.text)
        return "", None
    if _names_accuracy(words, rest) and (unit == "%" or "." in item.text or item.total.strip("0")):
        if rest - ACCURACIES <= ACCURACY | VALIDATION:
            value = number("accuracy", item.text) / (number("", item.total) if item.total else 1)
            name = "val_accuracy" if known & VALIDATION else "accuracy"
            return name, round(value / 100, 12) if unit == "%" or value > 1 else value
        return "", None
    of_optimizer = _of_optimizer(words, rest) or (
        "" if known & (VALIDATION | LOSSES) else _of_optimizer(item.leaf, {*item.leaf})
    )
    if of_optimizer:
        return of_optimizer, number(of_optimizer, item.text)
    if known & {"tflops", "tflop"} and rest <= TFLOPS:
        return "tflops_per_device", number("tflops_per_device", item.text)
    if known & {"mem", "memory", "vram"} and rest <= MEMORY:
        return _memory(item, unit)
    time = _time(item, unit, rest, items)
    if time is not None:
        return "step_time", time
    return counter_of(item, rest, known)


def quality_of(item: Item) -> str:
    """Return the name of a validation's own measure, such as perplexity, F1, mAP or BLEU; '' for a count, a time or a rate."""
    words = {*item.words}
    if not ("." in item.text or "e" in item.text.lower() or words & QUALITIES) or item.unit.strip() not in ("", "%"):
        return ""
    name = _SPLIT.sub("", _LEAF.sub("", item.key)).strip(" ()[]-_./").replace(" ", "_")[:40]
    plain = name.lower()
    odd = words & NO_QUALITY or any(map(_OF_COUNT.fullmatch, words)) or words <= VALIDATION | NOISE
    return "" if odd or plain in _TAKEN or not any(map(str.isalpha, name)) else name


_OF_COUNT = regex(r"(?!bpb)[a-z]p[bs]|bsz")  # `wpb`, `ups`
_LEAF = regex(r"^.*[./](?=\w)")
_SPLIT = regex(r"(?i)(?<![^\W_])(?:" + "|".join(sorted(VALIDATION, key=len, reverse=True)) + r")(?:[\W_]+|$)")
_TAKEN = {"t", "rank", "kind", "rate", "unit", "tokens", "samples", "seconds", "printed", *VALUES}


def _of_optimizer(words: Tuple[str, ...], rest: Set[str]) -> str:
    """Name a learning rate or a gradient's norm."""
    named = "rate" in words and {"learning", "train"} & {*words}
    if ("lr" in words or named or words == ("l", "r")) and rest <= LR:
        return "lr"
    return "grad_norm" if rest <= _NORM | {"total", "optim"} and rest & _NORM else ""


def _names_accuracy(words: Tuple[str, ...], rest: Set[str]) -> bool:
    """Return true for the words of an accuracy: `val acc`, `acc@1`, `top-1`, `Prec@1`; not for `acc@5`."""
    of_first = "1" in words and not {"5", "10"} & {*words}
    return not ACCURACIES.isdisjoint(words) or (of_first and bool(rest & {"top", "prec"}) and "error" not in rest)


def _own(words: Tuple[str, ...]) -> Tuple[str, ...]:
    """Return the key without words that only introduce or end it: `validation loss at iteration`, `lm loss value`."""
    cut = max((place + 1 for place, word in enumerate(words) if word in BEFORE), default=0)
    return words[cut:-1] if words[-1:] == ("value",) else words[cut:]


def counter_of(item: Item, rest: Set[str], known: Set[str]) -> Tuple[str, Any]:
    if (
        item.words[:1] == ("no",)  # `No Iterations 2`, of a solver
        or item.unit.strip() not in ("", "epoch", "batch")
        or not item.text.lstrip("-+")[:1].isdigit()
        and item.text[-3:].lower() not in ("nan", "inf")
    ):
        return "", None
    rest = rest - VALIDATION
    for name, words in (("epoch", EPOCH), ("step", STEP), ("batch", BATCH), ("step", ROUNDS)):
        planned = name == "epoch" and "epochs" in rest and rest & {"num", "max", "total"}  # `Num Epochs = 3`
        if rest and rest & words and rest <= words | MORE_OF_A_COUNTER and not planned:
            return name, number("step" if item.text.isdigit() or name != "epoch" else "epoch", item.text)
    if rest == {"up"}:
        return "step", number("step", item.text)
    return "", None


def _rate(known: Set[str], unit: str) -> str:
    said = words_of(unit)
    if said and said[-1] not in SECOND and set(said) & SECOND and set(said) & DEVICE:
        said = tuple(word for word in said if word not in DEVICE and word != "per")
    if len(said) > 1 and said[-1] in SECOND and said[0] in NOUNS:
        return NOUNS[said[0]]
    if len(said) == 1 and unit.startswith("/") and said[0] in SECOND:
        return "samples_per_s"
    nouns = [NOUNS[word] for word in sorted(known) if word in NOUNS]
    if nouns and known & SECOND and not said:
        return nouns[0]
    short = [name for word, name in RATES.items() if word in known]
    return short[0] if short and not known - set(RATES) - DEVICE - SECOND - set(NOUNS) - {"per"} - NOISE else ""


def _time(item: Item, unit: str, rest: Set[str], items: List[Item]) -> Optional[float]:
    """Return seconds per step. A bare `time` may measure anything: it counts if its neighbours show that it is a step time."""
    factor = TIMES.get(unit) or next((TIMES[word] for word in item.words if word in ("ms", "us")), 1.0)
    own = set(item.words)
    if unit and unit not in TIMES or item.text[-1:] not in "0123456789kK":
        return None
    if item.text.isdigit() and not unit and not own & set(TIMES):  # `time/batch: 12` is a step time
        return None
    counted = own & (STEP | BATCH | EPOCH)
    rest = rest - set(TIMES) - {"elapsed", "per", "average", "avg"}
    value = float(number("step_time", item.text)) * factor
    if value > 1e8:  # a date
        return None
    if not unit and rest and rest <= STEP and own & SECOND:
        if item.words[-1] in SECOND:  # `steps/s: 1.2`; inverted, it is the time itself
            return round(1 / value, 12) if value > 0 else None
        return round(value, 12)
    if rest - (STEP | BATCH) <= {"time", "dt", "t", "cost", "timing", "in"} and counted & (STEP | BATCH):
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
    counters = [each for each in items if set(each.words) & (STEP | BATCH | EPOCH | {"up"}) or each.total]
    return round(value, 12) if len(counters) == 1 and set(counters[0].words) & EPOCH else None  # of the whole epoch


def _time_of_step(item: Item, unit: str) -> Tuple[str, Any]:
    """Parse `22ms/step`, `1.2s/it`, `10.0it/s`."""
    first, _, last = unit.replace(" ", "").partition("/")
    if first in TIMES and last in ("it", "iter", "step", "batch"):
        return "step_time", round(float(number("step_time", item.text)) * TIMES[first], 12)
    if first in ("it", "iter", "iters", "step", "steps") and last in SECOND and float(number("", item.text)) > 0:
        return "step_time", round(1 / float(number("", item.text)), 12)
    return ("step_time", round(float(number("", item.text)) / 1e3, 12)) if unit == "ms" else ("", None)


def _memory(item: Item, unit: str) -> Tuple[str, Any]:
    value = float(number("memory_gib", item.text.rstrip("M")))
    factor = SIZES.get("M" if item.text.endswith("M") else unit) or (1.0 if value < 256 else 1 / 1024)
    return "memory_gib", round(value * factor, 12)

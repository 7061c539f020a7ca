"""Meaning of a line's numbers from the same numbers in the lines before it, where its words do not tell.

A number that grows evenly counts, one that falls unevenly beside it learns, and one that stays beside a counter may be its total.
"""

from __future__ import annotations

from typing import Any, Dict, List

from drumbeat.base.regex import regex
from drumbeat.metrics import vocab
from drumbeat.metrics.fields import counter_name, meaning_of
from drumbeat.metrics.shapes import Shapes, Slot
from drumbeat.metrics.tokens import EPOCH_BEFORE, OF_KERAS, Item, number

_TRIED = (("epoch",), ("step",))  # counters that may double: epochs 1, 2, 4 are printed
_NO_LOSS = vocab.NO_COUNTER | vocab.PHYSICS
_TUPLE = regex(r"\s*\(\d{1,12}(?:, -?\d{1,9}\.\d[\d.e+-]*){1,6}\)\s*")


def behaved(items: List[Item], shapes: Shapes, line: str, bar: bool) -> List[Item]:
    """Return the items with keys and totals that only their behaviour over several lines shows."""
    counts = [item.text.isdigit() for item in items]
    form = tuple([item.words for item in items])
    slots = shapes.seen(form, [number("", item.text) for item in items], counts)
    lossy = any(item.of_loss and item.fine for item in items)
    shapes.losses += lossy
    if shapes.again:
        items = _by_slots(items, slots, counts, shapes, lossy and _sole_loss(items), line, bar)
    if not shapes.losses and not any(item.of_loss for item in items):  # `train-rmse:0.5 eval-rmse:0.6`
        items = [item.as_loss() if _is_error(item) else item for item in items]
    return items


def _by_slots(
    items: List[Item], slots: List[Slot], counts: List[bool], shapes: Shapes, lossy: bool, line: str, bar: bool
) -> List[Item]:
    names = [
        counter_name(item.words) if count and (item.words[:1] in _TRIED or not slot.doubles) else ""
        for item, slot, count in zip(items, slots, counts)
    ]
    growing = [at for at, slot in enumerate(slots) if names[at] and slot.grows]
    if lossy and not names[0] and _counts_on(items, slots):
        names[0] = "step"
        growing.append(0)
        items = [items[0]._replace(words=("global", "step")), *items[1:]]
    single_total = sum(bool(item.total) for item in items) < 2
    changed: Dict[int, Dict[str, Any]] = {}
    for at, (item, slot) in enumerate(zip(items, slots)):
        new = ""
        if not counts[at]:
            # A value that has fallen, unevenly, and is neither a time nor a quantity of physics.
            learns = slot.learns and not slot.even and item.words and not item.unit and _NO_LOSS.isdisjoint(item.words)
            if growing and learns and not shapes.improving:
                shapes.improving = all(vocab.PHYSICS.isdisjoint(each.words) for each in items)
        elif names[at]:  # a counter that stays or falls beside a growing one is a quantity
            beside = growing not in ([], [at])
            stuck = slot.still or slot.turns and names[at] == "step"
            new = "quantity" if names[at] in ("step", "batch") and not item.total and beside and stuck else ""
        elif slot.doubles and not item.total:
            new = "quantity"  # sizes that are tried
        elif item.total and slot.grows and "epoch" in names and item.words and not meaning_of(item, items)[0]:
            new = "" if item.of_validation else "batch"  # `Epoch: 1/400, Datapoint: 512/4096`
        elif (single_total or not item.total) and not any(names) and _grows_evenly(item, slot, lossy, items, line, bar):
            new = names[at] = "step"
            growing.append(at)
        if counts[at] and slot.still and not item.total and not item.unit:  # a total: `it=380 of=5000`
            of = next((each for each in growing if _is_total(item, items[each])), None)
            if of is not None:
                changed.setdefault(of, {})["total"] = item.text
                new = "quantity"
        if new:
            changed.setdefault(at, {})["words"] = (new,)
    counting = growing or any(count and slot.grows for slot, count in zip(slots, counts))
    if counting and not any(item.of_loss for item in items if item.words != ("learn",)):
        changed.update(_falling(items, slots) or _in_no_known_words(items, slots, growing, line))
    return [item._replace(**changed[at]) if at in changed else item for at, item in enumerate(items)]


def _counts_on(items: List[Item], slots: List[Slot]) -> bool:
    """Return true if the first number goes on where the count of the epoch restarts: `1040 Epoch [3][80/480]`."""
    first, slot = items[0], slots[0]
    if first.words or first.total or first.unit or not first.text.isdigit() or not slot.grows:
        return False
    within = [at for at, item in enumerate(items) if item.total and {*item.words} <= vocab.NOISE and slots[at].ups]
    return any(
        slots[at].last <= slot.last and (slot.stride == slots[at].stride or slot.even and slot.ups > 1) for at in within
    )


def _sole_loss(items: List[Item]) -> bool:
    """Return true if one value is the loss; `mse_y mse_u mse_v` of a video are not."""
    kinds = [{*item.words} & vocab.LOSSES for item in items if item.of_loss]
    return (len(kinds) == 1 or {"loss"} in kinds) and any(
        item.of_loss and meaning_of(item, items)[0] == "loss" for item in items
    )


def _is_error(item: Item) -> bool:
    """Return true for the error of one part of the data, `train-rmse` or `valid_0 l2`: what a program that prints no loss trains
    on."""
    error = {word for word in item.words if not word.isdigit()} - vocab.VALIDATION - {"train", "training"}
    known = len(error) == 1 and error <= vocab.ERRORS or error == {"l"} and not {*"12"}.isdisjoint(item.words)
    return known and (item.of_validation or item.of_training)


def _grows_evenly(item: Item, slot: Slot, lossy: bool, items: List[Item], line: str, bar: bool) -> bool:
    """Return true for an evenly growing number that is the counter of a line without one: `update_t: 00016`, `{"i": 40, "mse":
    0.5}`, `25/300 | 0.5 loss`."""
    words = {*item.words}
    if not slot.grows or item.unit:
        return False
    foreign = words & vocab.NO_COUNTER or words & {*vocab.NOUNS}
    if item.total:
        counts = words <= vocab.NOISE or slot.ups > 1 and not foreign and vocab.OF_TRIALS.isdisjoint(words)
        return lossy and counts and not bar and not OF_KERAS.search(line) and not EPOCH_BEFORE.search(line)
    if words & (vocab.STEP | vocab.EPOCH) and len(words) < 4 and (lossy or len(items) == 1):
        return slot.even and slot.ups > 1
    return lossy and slot.even and slot.ups > 2 and not foreign and (bool(words) or slot.stride >= 10)


def _is_total(item: Item, counter: Item) -> bool:
    """Return true if a constant number may be a counter's total: `it=380 of=5000`, `step 10 max_steps 500`."""
    words, own = {*item.words}, {*counter.words} - vocab.COUNTED_WITH
    plural = any(word.strip("n") in (f"{each}s", f"{each}es") for word in words for each in own)
    known = words <= own | vocab.COUNTED_WITH | vocab.STEP | vocab.EPOCH | vocab.BATCH | {f"n{each}es" for each in own}
    told = bool(words & vocab.COUNTED_WITH) or plural
    return not counter.total and told and (known or plural) and float(item.text) >= float(number("", counter.text))


def _falling(items: List[Item], slots: List[Slot]) -> Dict[int, Dict[str, Any]]:
    """Return the losses among bare words, if they fall: `Epoch: 10 Train: 0.13 Test: 0.14`, `Score at iteration 10 is 2.1`."""
    floats = [at for at, item in enumerate(items) if item.words and item.fine and not meaning_of(item, items)[0]]
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
        if strange[at] and learns and item.fine and not meaning_of(item, items)[0]:
            return {**found, at: {"words": ("loss",)}}
    return {}

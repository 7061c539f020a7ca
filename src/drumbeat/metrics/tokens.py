"""Read a line as a row of numbers, each with its key, its total and its unit.

Dates, clocks, paths, URLs and versions are masked first. The key is the words before a number, or after it: `2.31 loss`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Dict, List, Match, NamedTuple, Tuple, Union

from drumbeat.base.regex import regex
from drumbeat.metrics import vocab

TOO_LARGE = 1e15  # for a count, or an epoch
NUMBER = (
    r"[-+]?(?:\d{1,3}(?:[,'_]\d{3}){1,6}(?![,'_]?\d)(?:\.\d*)?|\d{1,400}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,4}|[dD][-+]\d\d)?(?:[kKMBT](?![A-Za-z]))?(?![A-Za-z]?\d)"
    r"|[-+]?(?:nan|NaN|NAN|[Ii]nf(?:inity)?|INF)(?![A-Za-z])"
)
_FACTORS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
MASK = "<t>"
_STAMP = regex(
    r"(?<![\w./])(?:\d{4}[/.-]\d{1,2}[/.-]\d{1,2}|\d{1,2}(?P<sign>[/.-])\d{1,2}(?P=sign)\d{2,4}"
    r"|(?:(?<=[\[(])|^)\d{1,2}/\d{1,2}(?=[ T]\d{1,2}:\d\d))"
    r"(?:[ T,:]{1,2}\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)?(?![\w/])"
    r"|(?<![\w:.])\d{1,3}:\d\d:\d\d(?:[.,]\d{1,9})?(?![\w:])|(?<![\w.])[IWE]\d{4}(?= <?\d)"
    r"|\b[a-z][a-z0-9+]{1,12}://[^\s'\"]+"
    r"|(?<![\w.)])(?:~|\.{1,2})?(?:/[\w.+=@%?&-]{1,80}){2,}|(?<![\w.])v?\d{1,4}\.\d{1,4}\.\d[\w.+-]*"
)
_FILE_ENDS = regex(r"\d\.[A-Za-z]")
_FILE = regex(
    r"(?<![\w.+=@%/-])(?=[A-Za-z])(?:[\w+@%-]{1,80}[./=]){1,8}[\w+@%-]{0,80}\d\.[A-Za-z][A-Za-z0-9]{1,11}(?![\w/=:])"
)
_FIRST_STAMP = regex(r"^\s*(?:[\[(]?<t>[\])]?[\s,|:-]*)+")
_TOGETHER = regex(
    " ?(" + "|".join(sorted((word for word in vocab.ALIASES if word > "\u3000"), key=len, reverse=True)) + ") ?"
)
_SIGNS: Dict[int, Any] = {**str.maketrans("│┃║：，＝—–→·≈ℒ↓↑\u00a0‖", "|||:,=-->|=L   |"), ord("∇"): "grad"}
_ITEM = regex(
    rf"(?<![\w.%])(?<!@(?!\d+\.\d))(?P<number>{NUMBER})(?:-(?P<until>\d{{1,9}})(?=batch))?"
    rf"(?:\s*(?:/|\(?(?:\bout )?\b(?:of|von|van|de|di|sur|из)\b)\s*(?P<total>\d[\d,]{{0,14}})(?:\.0+)?(?!\w|\.\d|\s*/))?"
    r"(?P<unit>\s?%|\s?(?:ms|us|s|sec)/(?:it|iter|step|batch|sample|epoch)\b|\s?TFLOPS?\b"
    r"|\s?(?:ms|us|s|sec|secs|seconds|[GM]i?B|[GM])(?![\w])(?!\s?/)"
    r"|\s?[A-Za-z]{0,12}\s?(?:/|\bper\s)\s?s(?:ec(?:ond)?)?(?!\w|\s*[:=]\s*[-+.\d])(?:/\w+)?(?:\s?per\s?\w+)?|\s?batches\b(?!\s?[:=])|batch\b)?"
)
BAR = regex(
    r"\d{1,3}\s*%\s*[|┣├▕](?=[^A-Za-z\d.]{0,200}\d?[^A-Za-z\d.]{0,200}(?:[|┫┤▏]|$))|[━╸╺]{4}|\|[█#=>]{2}[█▉▊▋▌▍▎▏#=> .-]{0,200}\|"
)
OF_KERAS = regex(r"/step|[━=]{3}|\[[.>]")
EPOCH_BEFORE = regex(r"(?:\[(\d{1,6})\]|(?i:train):? (\d{1,6})) ?\[ *\d{1,9}/\d")  # `[2][10/30]`, `Train: 2 [10/30`
_NEXT_VALUE = regex(r"\s+[-+.]?\d(?![\d.,]*\s?[A-Za-z]{1,12}/s)")
_KEY_BEHIND = regex(  # `2.45 avg loss, 0.001 vocab.LR`, `2.45 loss 0.44 acc`
    r"(?i) ((?:(?:avg|average|train(?:ing)?) )?(?:loss|lr|nll|xent|acc(?:uracy)?))"
    r"(?=\s?[,;|)]| at | after |\s*$|\s+\d+\.\d+ [a-z]+(?:[,;|]|\s*$))"
)
_COUNTED = regex(r"(?i) (steps|updates|iterations|iters|epochs|batches)\b")  # `after 200 updates`
_FRACTION = regex(r"[\])]?(?: (?:steps|iterations|updates|epochs|batches))?(?: ?[:=] ?| (?:is |was )?)-?\d+\.\d")
_NO_VALUE = regex(
    r"\?|\s?\*\s?[A-Za-z(]|\s?(?i:gpu|node|rank|device|worker)s?\b(?!\w|\s?[:=]\s?\d)"
)  # a question, code, or how many
_KEY = regex(
    r"(?<![\w.])(?P<key>[^\W\d][\w@./#-]{0,60}(?: (?:[^\W\d]|[(/])[\w@./()-]{0,40}){0,6}?)\.?"
    r"\s{0,3}(?P<more>\([^()]{1,40}\)|\[[a-z]{1,20}\])?(?:['\"],?|,(?=$))?"
    r"(?:\s{0,12}[:=#>|(\[~-]{0,2}){1,3}\s{0,12}(?:(?:is|was|of|now) ){0,2}"
    r"(?:[\w.]{0,12}(?:tensor|rray|int\d\d|float\d\d)\(|['\"(\[]){0,2}$"
)
# Words that may only precede a key: `Train Metrics (step 5)`, `stdout F train step 5`; not `eval after train step`.
_CONTEXT = regex(
    r"(?i)^(?!.*\b(?:eval|val|test))(?:.*(?:\(| (?=(?:train|training|global)[ _/]\w))|(?:(?:and|with|the|a) )+)"
)
_LEAF = regex(r"^.*[./](?=\w)")
_WORD = regex(r"TFLOPs?(?![a-z])|[GM]i?B(?![a-z])|[A-Z]?[^\W\d_A-Z]+|[A-Z]+(?![a-z])|\d+")


class Item(NamedTuple):
    """One number of a line, with its context."""

    words: Tuple[str, ...]  # words of its key, in lower case
    text: str
    total: str
    unit: str
    start: int
    end: int
    opened: str = ""  # the bracket before it
    leaf: Tuple[str, ...] = ()  # words of the last part of a key with parts: `optimizer.lr`
    key: str = ""  # as printed

    @property
    def of_loss(self) -> bool:
        return not vocab.LOSSES.isdisjoint(self.words)

    @property
    def of_training(self) -> bool:
        return "train" in self.words or "training" in self.words

    @property
    def of_validation(self) -> bool:
        return not vocab.VALIDATION.isdisjoint(self.words)

    @property
    def fine(self) -> bool:
        """Return true for a number as losses are printed: with a point, and no unit."""
        return "." in self.text and not self.unit

    def as_loss(self) -> Item:
        return self._replace(words=("val", "loss") if self.of_validation else ("loss",)) if self.fine else self


def masked(text: str) -> str:
    """Mask every date, clock, path and version, and remove those at the line's start: their numbers do not count."""
    if _FILE_ENDS.search(text):
        text = _FILE.sub(MASK, text)
    return _FIRST_STAMP.sub("", _STAMP.sub(MASK, text), 1)


_SENTENCE_BEFORE = regex(r"^.*(?<!al)(?<!alid)(?<!est)(?<!ev)\. (?=[A-Z])")  # `done. Loss: 0.5`, but `Val. Loss: 0.5`
_SENTENCE = regex(r" [A-Za-z]|\s*$")  # `Step: 2000. Mean reward: 0.5`
_DIGITS = regex("[,'_]")  # between groups of digits


def number(name: str, text: str) -> Union[int, float]:
    """Parse a number. A count becomes an int, unless it is fractional, not finite or too large."""
    try:
        value = float(text)
    except ValueError:
        factor = _FACTORS.get(text[-1:], 1.0)
        value = float(_DIGITS.sub("", text.rstrip("kKMBT")).replace("D", "e").replace("d", "e")) * factor
    if name not in vocab.WHOLE:
        return value
    whole = round(value, 3)  # 1.13K is 1130, and not the float next to it
    return int(whole) if abs(whole) < TOO_LARGE and whole == int(whole) else value


def items_of(line: str) -> List[Item]:
    found: List[Item] = []
    owed: Tuple[str, ...] = ()
    last = 0
    for match in _ITEM.finditer(line):
        behind = None if match["total"] else _NO_VALUE.match(line, match.end())
        if behind and not (
            "." in match["number"] and behind[0][-1:].isalpha() and "*" not in behind[0]
        ):  # `lr 0.001 rank 0`
            continue
        left = line[max(last, match.start() - 160) : match.start()]
        key = _KEY.search(left[-120:])
        name = key["key"] if key else ""
        if " " in name:
            name = _SENTENCE_BEFORE.sub("", name)
            if key and left[-120:][: key.start()][-1:] == "=":  # `msg=progress epoch=1`
                name = name.partition(" ")[2]
        words = words_of(name, key["more"] or "") if key else ()
        leaf = words_of(_LEAF.sub("", name)) if key and " " not in name else ()
        text = match["until"] or match["number"]
        if "," in text or "_" in text or "'" in text:
            text = _DIGITS.sub("", text)
        if text[-1:] == "." and _SENTENCE.match(line, match.end("number")):
            text = text[:-1]
        opened = left.rstrip()[-1:]
        unit, end = match["unit"] or "", match.end()
        if words and unit[:1].isspace() and "/" in unit and _NEXT_VALUE.match(line, end):
            unit, end = "", match.end("number")  # `loss 0.1 tokens/s 1010`: the next value's key
        if not words and not match["total"] and not unit:
            after = _KEY_BEHIND.match(line, end) if "." in text else None
            words = words_of(after[1]) if after else owed
        owed = ()
        if text.isdigit():
            words, unit, end, owed = _count_behind(line, words, unit, end)
        found.append(Item(words, text, match["total"] or "", unit, match.start(), end, opened, leaf, name))
        last = end
    return found


def _count_behind(line: str, words: Tuple[str, ...], unit: str, end: int) -> Tuple[Tuple[str, ...], str, int, Any]:
    """Return key, unit and end of a whole number, and the next one's key: `after 20 steps`, `loss 20 0.5`, `loss at step 20:
    0.5`."""
    counted = _COUNTED.match(line, end) if not unit else None
    if set(words) <= vocab.HAS_COUNTED and "loss" in line.lower():
        if unit.strip() == "batches":
            return ("batch",), "", end, ()
        return (words_of(counted[1]), unit, counted.end(), ()) if counted else (words, unit, end, ())
    link = next((place for place, word in enumerate(words) if word in vocab.LINKS), len(words))
    told, key = words[:link], words[link + 1 :]
    of_loss = {*told} & (vocab.LOSSES | {"cost", "score"}) or {*told} - vocab.LR and {*key} & (vocab.STEP | vocab.EPOCH)
    if unit or not of_loss or not _FRACTION.match(line, end):
        return words, unit, end, ()
    return key or ("step",), unit, counted.end() if counted else end, told


@lru_cache(maxsize=2048)  # a program prints the same keys again and again
def words_of(text: str, more: str = "") -> Tuple[str, ...]:
    found = (word.lower() for word in _WORD.findall(f"{_CONTEXT.sub('', text, 1)} {more}"))
    words = tuple(" ".join([vocab.ALIASES.get(word, word) for word in found]).split())
    return words if set(words) - {"is", "was"} else ()


def spelled(text: str) -> str:
    """Normalise signs, and add spaces between words that some languages write together."""
    if not text.isascii():
        text = _TOGETHER.sub(r" \1 ", _ACCENTS.sub("", text.translate(_SIGNS)).replace("d'", "")).replace("  ", " ")
        text = _COUNTED_IN_CJK.sub(r"\2 \1", _DIGITS_IN_CJK.sub(" ", text))
        text = _LETTERS.sub(lambda word: vocab.ALIASES.get(word[0].lower(), word[0]), text)
    for sign, form, plain in _FORMS:
        if sign in text:
            text = form.sub(plain, text)
    return _GLUED_VALUE.sub(r"\1 \2", _ORDINAL.sub(r"\2\3 \1", _GLUED.sub(r"\1 \2", text))).replace("'s ", " ")


def _in_pairs(lists: Match[str]) -> str:
    keys, values = lists[1].split(","), lists[2].split(",")
    return ", ".join(f"{key}: {value}" for key, value in zip(keys, values)) if len(keys) == len(values) else lists[0]


_ACCENTS = regex("(?![\\w\\s])[\u0300-\u036f\u0590-\u0eff\u3099\u309a]")  # marks, which are part of a word
_LETTERS = regex(r"[^\W\d_]{2,40}")
_DIGITS_IN_CJK = regex("(?<=[\u3040-\u9fff\uac00-\ud7af])(?=\\d)|(?<=\\d)(?=[\u3040-\u9fff\uac00-\ud7af])")
_COUNTED_IN_CJK = regex("第\\s*(\\d{1,12})\\s*([步轮])")
_GLUED = regex(
    r"(?i)(?<![\w/.-])(epoch|step|iter|iteration|batch|it|ep|upd|[ebis](?=\d{1,9}/\d))[_-]?(\d{1,12})(?=[\s:,;|)\]=/]|$)"
)  # `step20`
_GLUED_VALUE = regex(r"(?i)(?<![\w/.-])((?:train_?|val_?)?(?:loss|acc|lr))(\d{1,9}\.\d)")  # `loss0.059`
_ORDINAL = regex(r"(?i)\b(\d{1,12})(?:(?:st|nd|rd|th) (iteration|step|update)|(?:(?:st|nd|rd|th) )?(epoch))\b")


def _in_steps(counts: Match[str]) -> str:
    return f"step {number('step', counts[1])}/{number('steps', counts[2])}"


_OVER = regex(r"(?<=[A-Za-z]) ?\([^()\d]{0,30}\d[^()]{0,30}\)(?=\s?[:=]\s?-?\d*\.\d)")
_TOP = regex(r"(?i)(?<![a-z])top-(?=\d)")
_FORMS: Tuple[Tuple[str, Any, Any], ...] = (  # a text that each of these forms has, the form, and its plain spelling
    ("):", _OVER, ""), (")=", _OVER, ""),  # `loss (last 100): 0.5`
    ("op-", _TOP, "top"), ("OP-", _TOP, "top"),
    ("|g", regex(r"(?<![\w|])(\|{1,2})g(?:rad)?\1(?!\|)"), "grad_norm"),  # `|g| 1.2`
    ("...", regex(r" {0,3}\.{3,80} {1,3}(?=-?\d)"), ": "),  # `loss ........ 0.5`
    ("(* ", regex(r"\(\* [^()]{1,60}\)"), ""),  # `loss_a = 0.5 (* 1 = 0.5 loss)`
    ("/Unknown", regex(r"(?<![\w.])(\d{1,12})/Unknown"), r"batch \1 "),  # a bar without a total
    ("it [", regex(r"^(?=.*(?:oss|acc))(.*?(?<![\w.]))(\d{1,12})it (?=\[)"), r"\1batch \2 "),
    ("] = [", regex(r"(?<=\]) = (?=\[)"), ": "),
    ("]: [", regex(r"\[([A-Za-z][^\[\]\d]*)\]: \[([-+\d.,eE naif]+)\]"), _in_pairs),  # `[loss, acc]: [0.5, 0.9]`
    (" of the ", regex(r"(?i)\b(average|mean) of the (?=(?:train(?:ing)? )?loss)"), r"\1 "),
    (" last ", regex(r"(?i) (?:over|of|for|in) (?:the )?last \d+ [a-z]+(?=\s?(?:is |was |[=:]))"), ""),
    ("]\t", regex(r"^(?:\S{1,40} )?\[(\d{1,9})\]\t(?=[^\t:]{1,60}[-'][^\t:]{1,60}:)"), "step \\1\t"),  # `[7]\ttrain-auc:0.9`
    ("it/", regex(r"\b(\d[\d.]{0,9}[kM]?)it/(\d[\d.]{0,9}[kM]?)it\b"), _in_steps),  # `212it/10.0kit`
)  # fmt: skip

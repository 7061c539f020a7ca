"""Words with which programs say that their work is done. What comes after them is leaving, not failing."""

from __future__ import annotations

import re

GOOD_ENDS = (
    "Out of bounds values",
    "Avg bus bandwidth",
    "train_runtime",
    "predict_runtime",
    "metrics *****",
    "max_epochs",
    "max_steps",
    "Training completed",
    "Training complete",
    "training finished",
    "Training finished",
    "Finished training",
    "finished training",
    "Done training",
    "Training done",
    "Finetuning",
    "finetuning",
    "Fine-tuning",
    "fine-tuning",
    "Successfully completed",
    "worker group finished (SUCCEEDED)",
    "tests passed",
)
_PATTERN = re.compile(
    r"Out of bounds values : 0 OK"
    r"|# Avg bus bandwidth *: *[\d.]+"
    r"|\b(?:train|predict)_runtime['\"]?\s*[:=]"
    r"|\*{5} (?:train|eval|predict|test) metrics \*{5}"
    r"|`Trainer\.fit` stopped: `max_(?:epochs|steps)="
    r"|^Successfully completed\.$"
    r"|\bworker group finished \(SUCCEEDED\)"
    r"|\b[Aa]ll (?:\d+ )?tests passed\b"
    r"|\b(?:[Tt]raining|[Ff]ine-?[Tt]uning) (?:is )?(?:completed?|finished|done)\b(?! (?:step|epoch|iter))"
    r"|\b(?:[Ff]inished|Done) training\b(?! (?:step|epoch|iter))"
)
_NOT_YET = re.compile(r"(?i)\b(?:until|when|before|after|once|if|not|never|epoch|step) (?:\w+ ){0,3}training|will ")


def is_good_end(text: str) -> bool:
    """Does this line say that the program has done what it was started for?"""
    return any(words in text for words in GOOD_ENDS) and bool(_PATTERN.search(text)) and not _NOT_YET.search(text)

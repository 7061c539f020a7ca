"""Which variables look secret, by their name. Their values are never written (they are handed on by name)."""

from __future__ import annotations

import re

# Whole words between underscores: HF_TOKEN is one, TOKENIZERS_PARALLELISM is not.
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CREDENTIALS|APIKEY"
    r"|(API|ACCESS|PRIVATE|SECRET|AUTH|SSH)_?KEY)(_|$)"
)
_ONLY_A_PLACE = re.compile(r"_(FILE|PATH|DIR)$")


def looks_secret(name: str) -> bool:
    name = name.upper()
    return bool(_SECRET.search(name)) and not _ONLY_A_PLACE.search(name)

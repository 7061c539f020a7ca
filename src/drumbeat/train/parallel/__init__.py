"""Layout: the degrees of parallelism. Arithmetic only: the desk reads it too, where there is no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Dict

from drumbeat.train.refusal import Refusal

# From the outermost to the innermost: neighbours in rank order are neighbours in the machine, so what talks most
# (tensor parallelism, in every layer) is innermost and what talks least (replicas, pipeline) is outermost.
ORDER = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
SHORT = ("ddp", "fsdp", "hsdp", "tp", "pp", "cp", "ep")


@dataclass(frozen=True)
class Layout:
    """-1 means: the rest of the ranks. At most one degree can be the rest."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @staticmethod
    def parse(text: str, ranks_per_node: int = 1) -> Layout:
        """Parse `dp_replicate=2,dp_shard=-1`, or one word: ddp, fsdp, hsdp (shards in a node, replicas between), tp, pp,
        cp, ep."""
        if text == "ddp":
            return Layout(dp_replicate=-1)
        if text == "fsdp":
            return Layout(dp_shard=-1)
        if text == "hsdp":
            return Layout(dp_replicate=-1, dp_shard=ranks_per_node)
        if text in ("tp", "pp", "cp", "ep"):
            return Layout(**{text: -1})
        known = [field.name for field in fields(Layout)]
        degrees: Dict[str, int] = {}
        for part in re.split(r"[,\s]+", text.strip()):
            name, _, value = part.partition("=")
            if name not in known or not re.fullmatch(r"-?\d+", value):
                fix = f"write one of {', '.join(SHORT)}, or degrees such as dp_shard=4,tp=2 (names: {', '.join(known)})"
                raise Refusal(f"layout '{text}': cannot read '{part}'", fix)
            if name in degrees:
                raise Refusal(f"layout '{text}': {name} is given twice")
            degrees[name] = int(value)
        return Layout(**degrees)

    def for_world(self, size: int) -> Layout:
        """Return the layout with `-1` filled in; the product must be the number of ranks."""
        degrees = {name: getattr(self, name) for name in ORDER}
        for name, degree in degrees.items():
            if degree < 1 and degree != -1:
                raise Refusal(f"layout: {name} is {degree}", "a degree is 1 or more, or -1 for the rest")
        rest = [name for name, degree in degrees.items() if degree == -1]
        if len(rest) > 1:
            raise Refusal(f"layout: {' and '.join(rest)} are both -1", "only one degree can be the rest")
        product = 1
        for degree in degrees.values():
            product *= degree if degree > 0 else 1
        resolved = replace(self, **{rest[0]: max(1, size // product)}) if rest else self
        if resolved.ranks != size:
            wanted = f"{product} x n" if rest else f"{product}"
            there = "is 1 rank" if size == 1 else f"are {size} ranks"
            what = f"layout: {self.equation()} = {wanted}, but there {there}"
            raise Refusal(what, "change a degree or the number of ranks")
        return resolved

    @property
    def ranks(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp * self.ep

    @property
    def data_ranks(self) -> int:
        """Return how many ways a batch is split."""
        return self.dp_replicate * self.dp_shard * self.ep

    def equation(self) -> str:
        degrees = {name: getattr(self, name) for name in ORDER if name != "ep" or self.ep != 1}
        return " x ".join(f"{name} {degree if degree > 0 else 'n'}" for name, degree in degrees.items())

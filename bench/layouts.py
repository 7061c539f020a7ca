"""Families of transformers' models on every layout against one process: `make layouts` writes measured/layouts.md.

Each cell is the largest difference of a loss over 20 steps, as a part of it, on gloo ranks of this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any, Dict, List, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "tests", "train")]
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
LIMIT = 1e-5


def cell(world: Any, family: str, layout: str, more: Dict[str, Any], want: List[float], reasons: Dict[str, int]) -> str:
    from families import LAYOUTS, largest_difference, trained_with

    text, size, own = LAYOUTS[layout]
    try:
        words, losses = world.run(trained_with, family, text, {**own, **more}, size=size)[-1]
    except AssertionError as error:
        print(f"{family}, {layout}: {error}", file=sys.stderr, flush=True)
        return "**failed**"
    if words:
        reason = words.partition(";")[0]
        return f"refused [{reasons.setdefault(reason, len(reasons) + 1)}]"
    found = largest_difference(losses, want)
    print(f"{family}, {layout}, {more}: {found:.1e}", flush=True)
    return f"{found:.0e}" if found < LIMIT else f"**{found:.0e}**"


def table(world: Any, rows: List[Tuple[str, str, Dict[str, Any]]], head: str, reasons: Dict[str, int]) -> List[str]:
    """`rows`: label, family, settings."""
    from families import LAYOUTS, trained_with

    found: Dict[str, List[str]] = {label: [] for label, _, _ in rows}
    want = {}
    for label, family, more in rows:
        plain = {name: value for name, value in more.items() if name in ("tied", "freeze")}
        want[label] = world.run(trained_with, family, "ddp", plain, size=1)[0][1]
    for layout in LAYOUTS:  # in the order of their sizes: a world of another size costs seconds
        for label, family, more in rows:
            found[label].append(cell(world, family, layout, more, want[label], reasons))
    lines = [f"| {head} | " + " | ".join(LAYOUTS) + " |", "|---" * (len(LAYOUTS) + 1) + "|"]
    return lines + [f"| {label} | " + " | ".join(cells) + " |" for label, cells in found.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.path.join(HERE, "..", "measured", "layouts.md"))
    out = parser.parse_args().out
    os.environ["DRUMBEAT_PROOFS"] = "1"  # 20 steps
    from families import FAMILIES, VARIANTS
    from gloo_world import GlooWorld

    world, reasons = GlooWorld(), {}
    families = table(world, [(name, name, {}) for name in FAMILIES], "family", reasons)
    variants = table(world, [(name, "Llama", dict(more)) for name, more in VARIANTS.items()], "Llama with", reasons)
    world.close()
    import torch
    import transformers

    text = [
        "# Exact under any layout",
        "",
        "Reference, written by `make layouts`. Small models of transformers' families through `train.setup`, 20 steps of AdamW",
        "in fp32 (eps 1e-5, rate 5e-3, ViT 1e-3) with gradient clipping, rows padded unevenly, a short last batch.",
        "With the usual eps of 1e-8 Adam turns rounding into steps: under tp Qwen 2 was then off by 3e-5, Gemma 3 by",
        "9e-5. The largest difference of a loss from that of",
        "one process, as a part of it. Values are proved on processes of one machine (gloo,",
        f"torch {torch.__version__}, transformers {transformers.__version__}); speed on",
        "several GPUs is not measured. `make test` runs a part of it. The layouts take 2 ranks, hsdp and the compositions 4.",
        f"Run on {time.strftime('%d %B %Y')}, beside a load of {os.getloadavg()[2]:.0f}.",
        "",
        *families,
        "",
        *variants,
        "",
        "A layout that cannot be exact, or is not built for a model, is refused before the first step, with the reason:",
        "",
        *(f"{number}. {reason}" for reason, number in reasons.items()),
    ]
    with open(out, "w", encoding="utf-8") as file:
        file.write("\n".join(text) + "\n")
    return 1 if any("**" in line for line in families + variants) else 0


if __name__ == "__main__":
    sys.exit(main())

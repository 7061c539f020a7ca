"""Which of a head's products may be in 8 bits: its variants beside bf16-master, first their speed, then their losses.

    PYTHONPATH=src python3 bench/head.py all TOKENS OUT --before SRC --timed 16-same --trained 16-same
    PYTHONPATH=src python3 bench/head.py one VARIANT train llama --set ...                     # one training

TOKENS: a file of `bench/fp8_loss.py tokens`. SRC: the source tree whose fp8 the speed is compared with. The losses are of the
same settings as `bench/fp8_loss.py`, stopped when --until seconds are over, all at the same time from the same weights on the
same batches, so they are compared step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import mean, stdev
from typing import Any, Dict, List

# As `HeadProducts` of drumbeat.train.layers.float8.
VARIANTS: Dict[str, Dict[str, bool]] = {
    "8": {},
    "8-same": {"same": True},
    "16": {"logits": False},
    "16-same": {"logits": False, "same": True},
    "16-centred": {"logits": False, "centred": True},
    "16-centred-same": {"logits": False, "centred": True, "same": True},
    "centred": {"centred": True},
    "centred-same": {"centred": True, "same": True},
    "weight": {"logits": False, "hidden": False},
    "hidden": {"logits": False, "weight": False},
    "logits": {"hidden": False, "weight": False},
}
PLAIN = ("bf16-master", "fp8")  # precisions without a variant
TINY = ["model=byte-tiny", "length=64", "batch=4", "validation=8", "validate_every=20"]


def choose(name: str) -> None:
    from drumbeat.train.layers import float8

    float8.HEAD = float8.HeadProducts(**VARIANTS[name])


def one(name: str, arguments: List[str]) -> None:
    if os.environ.get("HEAD_TINY"):  # a rehearsal without a GPU
        from drumbeat.train.layers import float8

        float8.supported = lambda _device: None
    choose(name)
    from drumbeat.cli import program

    sys.argv = ["drumbeat", *arguments]
    program()


def start(name: str, tokens: str, out: str, settings: List[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "one", "8" if name in PLAIN else name, "train", "llama", "--set"]
    command += ["model=1b", f"data={tokens}", "length=1024", "batch=8", "steps=2000", "lr=6e-5", "validation=888"]
    command += ["compile=yes", "deterministic=yes", "validate_every=200", "report_every=10", "seed=1"]
    command += [f"precision={name if name in PLAIN else 'fp8-head'}", f"figures=jsonl={out}/{name}.jsonl"]
    command += TINY if os.environ.get("HEAD_TINY") else []
    with open(f"{out}/{name}.log", "wb") as log:
        return subprocess.Popen([*command, *settings], stdout=log, stderr=subprocess.STDOUT)


def losses(path: str, kind: str) -> Dict[int, float]:
    lines = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file if line.endswith("}\n")]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == kind and "loss" in line}


def compare(names: List[str], out: str) -> None:
    reference = names[0]
    for kind in ("validation", "step"):
        runs = {name: losses(f"{out}/{name}.jsonl", kind) for name in names}
        common = sorted(set.intersection(*(set(run) for run in runs.values())))
        steps = common if kind == "validation" else []
        for step in steps:
            print(f"{kind} {step:5}:", *(f"{name} {runs[name][step]:.4f}" for name in names))
        windows = [[step] for step in steps] or [
            [step for step in common if low < step <= low + 200] for low in range(0, max(common, default=0), 200)
        ]
        for name in names[1:]:
            cells = []
            for window in windows:
                off = [100 * (runs[name][step] / runs[reference][step] - 1) for step in window]
                error = f" ({stdev(off) / len(off) ** 0.5:.2f})" if len(off) > 1 else ""
                cells += [f"to {window[-1]}: {mean(off):+.2f}{error}"] if off else []
            print(f"{kind}, {name} against {reference}, %:", *cells)


def speed(names: List[str], before: str, seconds: float) -> None:
    from gpu import run_case

    rows: Dict[str, Any] = {"before": run_case("llama 8 ours fp8", seconds, before)}
    for name in names:
        rows[name] = run_case("llama 8 ours " + (name if name in PLAIN else f"fp8 head {name}"), seconds, "")
    for name, row in rows.items():
        print(f"speed, {name}:", json.dumps({key: value for key, value in row.items() if key != "top"})[-900:])
        if "ms" in row and "ms" in rows["before"]:
            print(
                f"speed, {name}: {row['tokens_per_s']:,.0f} tokens/s, {rows['before']['ms'] / row['ms']:.3f} x before"
            )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("one")
    verb.add_argument("variant", choices=VARIANTS)
    verb.add_argument("arguments", nargs=argparse.REMAINDER)
    verb = verbs.add_parser("all")
    verb.add_argument("tokens")
    verb.add_argument("out")
    verb.add_argument("--before", default="", metavar="SRC")
    verb.add_argument("--timed", nargs="*", default=[], help="variants whose speed is measured")
    verb.add_argument("--trained", nargs="+", default=[], help="variants that are trained, beside bf16-master")
    verb.add_argument("--seconds", type=float, default=12, help="how long each speed is sustained")
    verb.add_argument("--until", type=float, default=500, help="seconds after the start when trainings are stopped")
    verb.add_argument("--set", nargs="*", default=[], metavar="key=value")
    args = parser.parse_args()
    if args.verb == "one":
        one(args.variant, args.arguments)
        return
    end = time.monotonic() + args.until
    os.makedirs(args.out, exist_ok=True)
    if args.timed:
        speed(args.timed, args.before, args.seconds)
    while not os.path.exists(args.tokens) and time.monotonic() < end:
        time.sleep(0.5)  # it is being made
    names = ["bf16-master", *args.trained]
    runs = {name: start(name, args.tokens, args.out, args.set) for name in names}
    for run in runs.values():
        try:
            run.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
    for name, run in runs.items():
        if run.poll() is None:
            run.kill()
        elif run.returncode:
            print(f"{name}: exit code {run.returncode}")
            with open(f"{args.out}/{name}.log", encoding="utf-8", errors="replace") as file:
                print(file.read()[-1500:])
    compare(names, args.out)


if __name__ == "__main__":
    main()

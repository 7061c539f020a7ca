"""Does fp8 learn as well as bf16-master? Llama 1B from the same weights on the same batches, for several seeds.

    python3 bench/fp8_loss.py tokens TEXT tokens.bin             # a folder of text as BPE tokens; needs the package tokenizers
    python3 bench/fp8_loss.py train tokens.bin OUT --seeds 1 2   # both precisions of a seed at the same time, then the table
    python3 bench/fp8_loss.py table OUT                          # of the runs that are there

About one file in ten is kept for validation. `drumbeat train` validates on every tenth window of a token file, so those windows
are filled from the files that are kept. What follows after --set goes to `drumbeat train llama`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from statistics import mean, stdev
from typing import Dict, Iterator, List, Tuple

import numpy as np
import numpy.typing as npt

LENGTH, BATCH, STEPS = 1024, 8, 2000
VALIDATION = STEPS * BATCH // 9 // BATCH * BATCH  # sequences; a last batch of another size would be compiled anew
VOCABULARY, END = 32_000, "<|endoftext|>"
PLAIN = "bf16-master"
ENDINGS = (".md", ".py", ".rst", ".txt")
SMALLEST, LARGEST = 200, 300_000  # bytes of a file: longer ones are mostly tables
GOAL = 0.5  # percent

Losses = Dict[int, float]  # step -> validation loss


def texts(folder: str) -> Tuple[List[str], List[str]]:
    """Files for training and for validation, in an order that depends on their contents alone; no file twice."""
    by_hash: Dict[str, str] = {}
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(place, name)
            if name.endswith(ENDINGS) and SMALLEST <= os.path.getsize(path) <= LARGEST:
                with open(path, "rb") as file:
                    by_hash.setdefault(hashlib.sha256(file.read()).hexdigest(), path)
    kept = {digest for digest in by_hash if int(digest[-8:], 16) % 10 == 0}
    return (
        [path for digest, path in sorted(by_hash.items()) if digest not in kept],
        [path for digest, path in sorted(by_hash.items()) if digest in kept],
    )


def read(paths: List[str]) -> Iterator[str]:
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield file.read()


def encode(tokenizer: object, paths: List[str], wanted: int) -> npt.NDArray[np.uint16]:
    """The first `wanted` tokens of these files, laid end to end."""
    found: List[npt.NDArray[np.uint16]] = []
    total = files = 0
    for at in range(0, len(paths), 256):
        for piece in tokenizer.encode_batch_fast([text + END for text in read(paths[at : at + 256])]):  # type: ignore[attr-defined]
            found.append(np.array(piece.ids, dtype=np.uint16))
            total, files = total + len(piece.ids), files + 1
            if total >= wanted:
                print(f"{files:,} files, {wanted:,} tokens", flush=True)
                return np.concatenate(found)[:wanted]
    sys.exit(f"only {total:,} tokens in {files:,} files; {wanted:,} are needed")


def tokens(folder: str, out: str) -> None:
    from tokenizers import ByteLevelBPETokenizer

    training, kept = texts(folder)
    windows = -(-STEPS * BATCH // 9)  # nine for training, one for validation
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(read(training[::4]), vocab_size=VOCABULARY, special_tokens=[END], show_progress=False)
    print(
        f"tokenizer: {tokenizer.get_vocab_size():,} tokens, from {len(training[::4]):,} of {len(training):,} files",
        flush=True,
    )
    parts = [
        encode(tokenizer._tokenizer, paths, windows * count * LENGTH).reshape(windows, count, LENGTH)
        for paths, count in ((training, 9), (kept, 1))
    ]
    rows = np.concatenate(parts, axis=1).reshape(-1)
    np.append(rows, rows[:1]).tofile(out)  # one more token: what the last window predicts
    print(f"{out}: {windows * 9:,} sequences of {LENGTH:,} for training, {windows:,} for validation")


def start(tokens_file: str, out: str, precision: str, seed: int, settings: List[str]) -> subprocess.Popen[bytes]:
    name = os.path.join(out, f"{precision}-{seed}")
    command = [sys.executable, "-m", "drumbeat", "train", "llama", "--set", "model=1b", f"data={tokens_file}"]
    command += [
        f"length={LENGTH}",
        f"batch={BATCH}",
        f"steps={STEPS}",
        f"validation={VALIDATION}",
        f"validate_every={STEPS // 2}",
    ]
    command += ["compile=yes", "deterministic=yes", "report_every=50", f"seed={seed}", f"precision={precision}"]
    command += [f"figures=jsonl={name}.jsonl", *settings]
    with open(f"{name}.log", "wb") as log:
        log.write((" ".join(command) + "\n").encode())
        log.flush()
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def train(tokens_file: str, out: str, seeds: List[int], precision: str, settings: List[str]) -> None:
    os.makedirs(out, exist_ok=True)
    for seed in seeds:
        runs = {name: start(tokens_file, out, name, seed, settings) for name in (PLAIN, precision)}
        for name, run in runs.items():
            if run.wait():
                print(
                    f"{name}, seed {seed}: exit code {run.returncode}, see {out}/{name}-{seed}.log",
                    flush=True,
                )


def validation(path: str) -> Losses:
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "validation"}


def table(out: str, eight: str) -> None:
    seeds = sorted({int(name[:-6].rsplit("-", 1)[1]) for name in os.listdir(out) if name.endswith(".jsonl")})
    runs = {
        (precision, seed): validation(f"{out}/{precision}-{seed}.jsonl")
        for precision in (PLAIN, eight)
        for seed in seeds
    }
    print(f"| seed | validation after | {PLAIN} | {eight} | {eight} is higher by |\n|---|---|---|---|---|")
    off: Dict[int, List[float]] = {}
    for seed in seeds:
        for step in sorted({*runs[PLAIN, seed], *runs[eight, seed]}):
            plain, fp8 = (runs[precision, seed].get(step) for precision in (PLAIN, eight))
            percent = None if plain is None or fp8 is None else 100 * (fp8 / plain - 1)
            if percent is not None:
                off.setdefault(step, []).append(percent)
            cells = ["" if loss is None else f"{loss:.4f}" for loss in (plain, fp8)]
            cells.append("" if percent is None else f"{percent:+.2f} %")
            print(f"| {seed} | {step:,} | {' | '.join(cells)} |")
    if not off:
        return
    last = max(off)
    error = f", standard error {stdev(off[last]) / len(off[last]) ** 0.5:.2f} %" if len(off[last]) > 1 else ""
    print(f"after {last:,} steps: {mean(off[last]):+.2f} % over {len(off[last])} seeds{error} (goal: at most {GOAL} %)")
    alone = [runs[PLAIN, seed][last] for seed in seeds if last in runs[PLAIN, seed]]
    if len(alone) > 1:
        print(f"{PLAIN} alone, highest against lowest seed: {100 * (max(alone) / min(alone) - 1):.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("tokens")
    verb.add_argument("text")
    verb.add_argument("out")
    verb = verbs.add_parser("train")
    verb.add_argument("tokens")
    verb.add_argument("out")
    verb.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    verb.add_argument("--set", nargs="*", default=[], metavar="key=value")
    verb.add_argument("--precision", default="fp8", help="what is compared with bf16-master")
    verb = verbs.add_parser("table")
    verb.add_argument("out")
    verb.add_argument("--precision", default="fp8", help="what is compared with bf16-master")
    args = parser.parse_args()
    if args.verb == "tokens":
        tokens(args.text, args.out)
        return
    if args.verb == "train":
        train(args.tokens, args.out, args.seeds, args.precision, args.set)
    table(args.out, args.precision)


if __name__ == "__main__":
    main()

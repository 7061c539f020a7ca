"""Predictions for one GPU, printed first, then checked by short runs of drumbeat's own runtime.

    PYTHONPATH=src python3 bench/predict_gpu.py [--out FILE] [--only WORDS] [--limit SECONDS]

Made for one H200 with torch 2.11; takes less than 8 minutes. Every run is a process of its own; the predictions are worked out
and printed before the first run starts. `--predict` only prints them, without torch or a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from drumbeat.predict.cost import CONTEXT, Layout, Work
from drumbeat.predict.forecast import Case, forecast
from drumbeat.predict.machine import FRAMEWORKS, find_cluster
from drumbeat.predict.models import named

RECOMPUTE = {"none": 0, "selective": 1, "full": 2}


class Trial(NamedTuple):
    model: str
    precision: str
    batch: int
    length: int
    recompute: str = "none"
    bisect: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.precision} {self.batch} x {self.length} {self.recompute}"


TRIALS = [
    Trial("1b", "bf16-master", 2, 8192),
    Trial("1b", "bf16-master", 8, 8192, bisect=True),
    Trial("1b", "fp8", 6, 8192, bisect=True),
    Trial("1b", "bf16-master", 16, 2048),
    Trial("1b", "bf16", 4, 4096),
    Trial("3b", "bf16-master", 2, 8192, bisect=True),
    Trial("3b", "bf16-master", 4, 4096, "selective", bisect=True),
    Trial("3b", "fp8", 2, 8192),
    Trial("8b", "bf16-master", 1, 8192, "selective"),
    Trial("8b", "bf16-master", 2, 2048, "none", bisect=True),
    Trial("8b", "bf16-master", 2, 4096, "full"),
    Trial("resnet-50", "bf16", 256, 224, bisect=True),
]


def case_of(trial: Trial, gpu: str, memory_gib: float, batch: int = 0) -> Case:
    batch = batch or trial.batch
    framework = FRAMEWORKS["drumbeat"]
    layout = Layout(micro=batch, recompute=RECOMPUTE[trial.recompute])
    cluster = find_cluster(gpu, memory_gib=memory_gib)
    return Case(
        named(trial.model).model,
        Work(trial.length, batch),
        layout,
        framework,
        cluster,
        trial.precision,
        framework.constants,
    )


def predictions(gpu: str, memory_gib: float) -> List[Dict[str, Any]]:
    found = []
    for trial in TRIALS:
        guess = forecast(case_of(trial, gpu, memory_gib), look_for_fix=False)
        row = {"trial": trial.name, "ms": guess.seconds * 1e3, "gib": (guess.memory - CONTEXT) / 2**30}
        if trial.bisect:
            row["verdicts"] = {
                n: forecast(case_of(trial, gpu, memory_gib, n), look_for_fix=False).verdict for n in sizes(trial)
            }
        found.append(row)
    return found


def sizes(trial: Trial) -> List[int]:
    """Return the batches that are asked about: one by one, images in steps of 64."""
    return list(range(64, 8193, 64)) if trial.model.startswith("resnet") else list(range(1, 129))


# --- on the GPU ---------------------------------------------------------------------------------------------------------


def make_step(trial: Trial, record: bool = True) -> Any:
    """Build what the recipe builds; returns a function of the batch that makes one optimizer step."""
    import torch

    from drumbeat.train.parallel import Layout as Degrees
    from drumbeat.train.parallel.meshes import Meshes
    from drumbeat.train.precision import Precision
    from drumbeat.train.step import Step

    device = torch.device("cuda")
    meshes, kind = Meshes(Degrees(), "cuda"), Precision(trial.precision)
    if trial.model.startswith("resnet"):
        import torch.nn.functional as F

        from drumbeat.train.images import record_first_call
        from drumbeat.train.models.resnet import ResNet

        torch.backends.cudnn.benchmark = True
        with device:
            model = ResNet(50)
        model = model.to(memory_format=torch.channels_last)
        if record:
            record_first_call(model)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)
        loss = lambda m, x, y: F.cross_entropy(m(x).float(), y, reduction="sum")  # noqa: E731
        step = Step([model], optimizer, loss, meshes, kind, device)

        def images(batch: int) -> Any:
            pictures = torch.randn(batch, 3, 224, 224, device=device)
            return step([(pictures, torch.randint(0, 1000, (batch,), device=device))])

        return images

    from drumbeat.train.models.llama import SHAPES, Llama
    from drumbeat.train.optim import MasterAdamW
    from drumbeat.train.parallel.parallelize import parallelize

    with device:
        net = Llama(SHAPES[trial.model])
    net = parallelize(
        net, meshes, device=device, precision=kind, blocks="blocks", compile=True, recompute=trial.recompute
    )
    if trial.precision in ("bf16-master", "fp8"):
        optimizer = MasterAdamW(net.parameters(), lr=3e-4)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)
    step = Step([net], optimizer, lambda m, x, y: m(x, y), meshes, kind, device, clip=1.0)

    def tokens(batch: int) -> Any:
        drawn = torch.randint(0, 128_256, (batch, trial.length + 1), device=device)
        return step([(drawn[:, :-1], drawn[:, 1:])])

    return tokens


def measure(trial: Trial, step: Any, seconds: float) -> Dict[str, Any]:
    """Run for some seconds after three steps; the median step, and the most that the allocator gave out."""
    import torch

    for _ in range(3):
        step(trial.batch)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(marks) < 6:
        step(trial.batch)
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        marks[-2].synchronize()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
    return {
        "ms": times[len(times) // 2],
        "gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "steps": len(times),
        "device": torch.cuda.get_device_name(),
        "total_gib": torch.cuda.get_device_properties(0).total_memory / 2**30,
    }


def largest(trial: Trial, step: Any, near: int, seconds: float) -> Dict[str, Any]:
    """Find the largest batch that two steps run with, by bisection. `near`: where to start looking."""
    import torch

    grain = 64 if trial.model.startswith("resnet") else 1
    began = time.perf_counter()

    def runs(count: int) -> bool:
        try:
            for _ in range(2):
                step(count * grain)
            torch.cuda.synchronize()
            return True
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            for p in (p for group in step_parameters(step) for p in group):
                p.grad = None
            torch.cuda.empty_cache()

    runs(1)
    low, failed, asked = 0, 0, max(2, near // grain)
    while time.perf_counter() - began < seconds and failed - low != 1:
        if runs(asked):
            low = asked
        else:
            failed = asked
        step_up = max(1, low // 8)
        asked = (
            (low + failed + 1) // 2
            if low and failed
            else (low + step_up if low else max(1, failed - max(1, failed // 8)))
        )
    return {"largest": low * grain, "first_failed": failed * grain, "proven": failed - low == 1}


def step_parameters(step: Any) -> List[List[Any]]:
    """Return the parameters behind a step function, so that a failed step's gradients can be freed."""
    inner = next(cell.cell_contents for cell in step.__closure__ if hasattr(cell.cell_contents, "optimizer"))
    return [group["params"] for group in inner.optimizer.param_groups]


# --- the parent ---------------------------------------------------------------------------------------------------------


def run_child(index: int, near: int, limit: float) -> List[Dict[str, Any]]:
    """Run one trial in a process of its own; what it had found when its time was up counts."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    argv = [sys.executable, os.path.abspath(__file__), "--child", str(index), "--near", str(near)]
    try:
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=limit)
        out, error = done.stdout, done.stderr[-800:]
    except subprocess.TimeoutExpired as late:
        out = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        error = f"no answer in {limit:.0f} s"
    found = [json.loads(line[7:]) for line in out.splitlines() if line.startswith("RESULT ")]
    return found or [{"error": error}]


def child(trial: Trial, near: int) -> None:
    """Measure, then look for the largest batch, in one process: the model is built and compiled once."""
    step = make_step(trial)
    print("RESULT " + json.dumps(measure(trial, step, 3)), flush=True)
    if trial.bisect:
        if trial.model.startswith("resnet"):  # its recorded kernels hold their own memory
            del step
            step = make_step(trial, record=False)
        print("RESULT " + json.dumps(largest(trial, step, near, 30)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="", help="file for the figures as JSON")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--memory-gib", type=float, default=139.8, help="of the device, as its driver says")
    parser.add_argument("--only", default="", help="trials whose name contains this")
    parser.add_argument("--limit", type=float, default=470, help="seconds after which nothing new is started")
    parser.add_argument("--predict", action="store_true", help="print the predictions and stop")
    for hidden in ("--child", "--near"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(TRIALS[args.child], args.near)
        return 0
    guesses = predictions(args.gpu, args.memory_gib)
    print("predicted before any run:")
    for guess in guesses:
        verdicts = guess.get("verdicts", {})
        fits = max((n for n, verdict in verdicts.items() if verdict == "fits"), default=0)
        fails = min((n for n, verdict in verdicts.items() if verdict == "does not fit"), default=0)
        batches = f"; fits up to {fits}, does not fit from {fails}" if verdicts else ""
        print(f"  {guess['trial']:40} {guess['ms']:8.1f} ms {guess['gib']:6.1f} GiB{batches}", flush=True)
    if args.predict:
        return 0
    began = time.perf_counter()
    rows: List[Dict[str, Any]] = []
    order = sorted(range(len(TRIALS)), key=lambda i: not TRIALS[i].bisect)  # what takes longest first
    for index in order:
        trial, guess = TRIALS[index], guesses[index]
        left = args.limit - (time.perf_counter() - began)
        if args.only not in trial.name:
            continue
        if left < 20:
            print(f"  {trial.name}: not run, the time is up")
            continue
        verdicts = guess.get("verdicts", {})
        near = min((n for n, verdict in verdicts.items() if verdict == "does not fit"), default=8)
        row: Dict[str, Any] = dict(guess)
        for found in run_child(index, near, min(left, 110 if trial.bisect else 70)):
            row.update(found if "largest" in found or "error" in found else {"measured": found})
            if "ms" in found:
                row["time_error"], row["memory_error"] = guess["ms"] / found["ms"] - 1, guess["gib"] / found["gib"] - 1
                print(
                    f"  {trial.name:40} {guess['ms']:8.1f} / {found['ms']:8.1f} ms {row['time_error']:+6.1%}   "
                    f"{guess['gib']:6.1f} / {found['gib']:6.1f} GiB {row['memory_error']:+6.1%}   ({found['steps']} steps)",
                    flush=True,
                )
            elif "largest" in found:
                most, grain = found["largest"], sizes(trial)[0]
                wrong = [
                    n
                    for n, v in verdicts.items()
                    if (n > most and v == "fits") or (n <= most - 2 * grain and v == "does not fit")
                ]
                row["wrong"] = wrong
                proven = "" if found["proven"] else f" (cut short; {found['first_failed'] or 'nothing'} failed)"
                judged = "verdicts right" if not wrong else f"wrong verdicts for {wrong}"
                print(f"  {trial.name:40} largest batch {most}{proven}: {judged}", flush=True)
            else:
                print(f"  {trial.name}: {found['error']}", flush=True)
        rows.append(row)
    timed = [row for row in rows if "time_error" in row]
    if timed:
        mean = lambda key: sum(abs(row[key]) for row in timed) / len(timed)  # noqa: E731
        print(
            f"{len(timed)} runs: step time {mean('time_error'):.1%} (goal 6 %), peak "
            f"memory {mean('memory_error'):.1%} (goal 5 %); {time.perf_counter() - began:.0f} s"
        )
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

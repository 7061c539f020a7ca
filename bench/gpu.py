"""Training speed on one GPU, ours beside its peers, in one run: `PYTHONPATH=src python3 bench/gpu.py [--out FILE]`.

Every case is a process of its own with a time limit. All take the same model, fresh random batches made on the device,
and the same measurement. Ours run for --seconds (60), with the energy that the card counted; peers for 10 steps. `--against
SRC` runs our cases with the package in another source tree too, taking turns. `--only WORDS` runs some of it.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any, Callable, Dict, List

import torch
import torch.nn.functional as F
from gpu_peers import LLAMA_PEERS, RESNET_PEERS

LENGTH, VOCABULARY, IMAGES = 8192, 128_256, 256
LENGTHS = [("1b", 8192, "none"), ("1b", 32_768, "none"), ("1b", 131_072, "selective"), ("8b", 32_768, "full")]
DEVICE = torch.device("cuda")


def measure(step: Callable[[], Any], count: int, warm: int = 4) -> Dict[str, float]:
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    for _ in range(warm):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
    memory = torch.cuda.max_memory_allocated() / 2**30
    return {"ms": times[count // 2], "ms_p90": times[count * 9 // 10], "first_step_s": first, "memory_gib": memory}


def sustained(step: Callable[[], Any], seconds: float) -> Dict[str, float]:
    """The first step alone, up to three to warm up, then as many as fit: steps per second and joules over the whole time."""
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(3):
        step()
        torch.cuda.synchronize()
        if time.perf_counter() - began > 10:
            break
    ahead = 4 if time.perf_counter() - began < seconds else 1
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    joules, began = -energy_j(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(ahead):
            step()
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        marks[-1 - ahead].synchronize()  # the host stays a few steps ahead, not more
    torch.cuda.synchronize()
    joules += energy_j()
    took, count = time.perf_counter() - began, len(marks) - 1
    times = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
    return {
        "ms": took / count * 1e3,
        "ms_median": times[count // 2],
        "first_step_s": first,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "seconds": took,
        "watts": joules / took,
    }


def energy_j() -> float:
    """What the card has used since its driver was loaded."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
    if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
        return float("nan")
    return millijoules.value / 1e3


def tokens(sequences: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (sequences, length + 1), device=DEVICE)


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(IMAGES, 3, 224, 224, device=DEVICE), torch.randint(0, 1000, (IMAGES,), device=DEVICE)


# --- ours -------------------------------------------------------------------------------------------------------


def our_llama(
    sequences: int,
    precision: str,
    model: str = "1b",
    recompute: str = "none",
    accumulate: int = 1,
    length: int = LENGTH,
    optimizer: str = "MasterAdamW",
) -> Callable[[], Any]:
    """`sequences`: per micro-batch."""
    from drumbeat.train import optim
    from drumbeat.train.models.llama import SHAPES, Llama
    from drumbeat.train.parallel import Layout
    from drumbeat.train.parallel.meshes import Meshes
    from drumbeat.train.parallel.parallelize import parallelize
    from drumbeat.train.precision import Precision
    from drumbeat.train.step import Step

    with DEVICE:
        net = Llama(replace(SHAPES[model], context=length))
    meshes, kind = Meshes(Layout(), "cuda"), Precision(precision)
    net = parallelize(net, meshes, device=DEVICE, precision=kind, blocks="blocks", compile=True, recompute=recompute)
    made = getattr(optim, optimizer)(net.parameters(), lr=3e-4)
    step = Step([net], made, lambda m, x, y: m(x, y), meshes, kind, DEVICE, clip=1.0)

    def once() -> Any:
        batches = [tokens(sequences, length) for _ in range(accumulate)]
        return step([(batch[:, :-1], batch[:, 1:]) for batch in batches])

    return once


def set_up_llama(sequences: int, precision: str) -> Callable[[], Any]:
    """transformers' own 1B through `train.setup`, as a user's script has it."""
    from gpu_peers import hugging_face_model

    from drumbeat import train

    model = hugging_face_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    trainer = train.setup(model, optimizer, precision=precision, compile=True, clip=1.0)

    def once() -> Any:
        batch = tokens(sequences)[:, 1:]
        return trainer.step({"input_ids": batch, "labels": batch})

    return once


def recipe_llama(
    sequences: int,
    precision: str,
    torchao: str = "",
    optimizer: str = "adamw",
    shape: str = "1b",
    recompute: str = "none",
    length: int = LENGTH,
) -> Callable[[], Any]:
    """A shape as the recipe trains it, through `train.setup`; `torchao`: its float8 layers, by the name of one of its recipes,
    in the place of ours."""
    from drumbeat import train
    from drumbeat.train.models.llama import SHAPES, Llama
    from drumbeat.train.recipes import TOKENS, optimizer_of
    from drumbeat.train.settings import TokenSettings

    with DEVICE:
        model = Llama(replace(SHAPES[shape], context=length))
    if torchao:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(torchao)
        convert_to_float8_training(
            model.bfloat16(), config=config, module_filter_fn=lambda _, name: name.startswith("blocks")
        )
    made = optimizer_of(TokenSettings(optimizer=optimizer, lr=3e-4), model)
    trainer = train.setup(
        model, made, precision=precision, compile=True, clip=1.0, blocks="blocks", recompute=recompute
    )

    def once() -> Any:
        batch = tokens(sequences, length)
        return trainer.advance((batch[:, :-1], batch[:, 1:]), TOKENS)

    return once


def recipe_resnet() -> Callable[[], Any]:
    from drumbeat.train.images import CLASSES, set_up_images
    from drumbeat.train.models.resnet import ResNet
    from drumbeat.train.recipes import meshes_for, resolved
    from drumbeat.train.recipes.resnet import ResNetSettings
    from drumbeat.train.world import join

    world, settings = join(), ResNetSettings(precision="bf16", decay=1e-4)
    meshes = meshes_for(settings, world)
    settings = resolved(settings, world, meshes)
    trainer = set_up_images(settings, world, meshes, lambda: ResNet(50), lambda step: 1.0, graph="auto")
    return lambda: trainer.advance(pictures(), CLASSES)


def float8_beside(seconds: float, name: str) -> Dict[str, Any]:
    """torchao's float8 in our model and step: what ours has to be faster than, or more exact."""
    if importlib.util.find_spec("torchao") is None:
        return {"missing": "torchao is not installed here"}
    return llama_case(recipe_llama(8, "bf16-master", name), 8, seconds, look=True)


def attention_of(model: str) -> str:
    """The kernel that our attention takes here."""
    from drumbeat.train.layers.attention import attention_kernel
    from drumbeat.train.models.llama import SHAPES

    shape = SHAPES[model]
    group = shape.heads // shape.kv_heads
    return attention_kernel(DEVICE, torch.bfloat16, LENGTH, shape.head_width, group, False)


def our_resnet() -> Callable[[], Any]:
    from drumbeat.train.models.resnet import ResNet
    from drumbeat.train.parallel import Layout
    from drumbeat.train.parallel.meshes import Meshes
    from drumbeat.train.precision import Precision
    from drumbeat.train.step import Step

    torch.backends.cudnn.benchmark = True
    with DEVICE:
        model = ResNet(50)
    model = model.to(memory_format=torch.channels_last)
    if importlib.util.find_spec("drumbeat.train.images") is None:
        model.compile()  # an older tree, without kernels of its own: torch.compile made them
    else:
        importlib.import_module("drumbeat.train.images").record_first_call(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)

    def loss(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m(x).float(), y, reduction="sum")

    step = Step([model], optimizer, loss, Meshes(Layout(), "cuda"), Precision("bf16"), DEVICE)
    return lambda: step([pictures()])


# --- cases ------------------------------------------------------------------------------------------------------


def ceilings() -> Dict[str, Any]:
    from drumbeat.train.measure import matmul_tflops

    a = torch.empty(1 << 30, device=DEVICE, dtype=torch.bfloat16)
    b = torch.empty_like(a)
    copy = measure(lambda: b.copy_(a), 10)
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "matmul_tflops_burst": matmul_tflops(DEVICE, torch.bfloat16, count=20),
        "matmul_tflops_sustained": matmul_tflops(DEVICE, torch.bfloat16, count=1500),
        "copy_tb_s": 4 * (1 << 30) / copy["ms"] / 1e9,
    }


def llama_case(
    step: Callable[[], Any],
    sequences: int,
    seconds: float = 0,
    look: bool = False,
    model: str = "1b",
    length: int = LENGTH,
) -> Dict[str, Any]:
    from drumbeat.train.measure import transformer_flops
    from drumbeat.train.models.llama import SHAPES

    shape = SHAPES[model]
    result: Dict[str, Any] = sustained(step, seconds) if seconds else measure(step, 10)
    result["tokens_per_s"] = sequences * length / result["ms"] * 1e3
    flops = transformer_flops(shape.matmul_parameters, shape.layers, shape.width, length, causal=True)
    result["tflops"] = result["tokens_per_s"] * flops / 1e12
    if "watts" in result:
        result["mj_per_token"] = result["watts"] / result["tokens_per_s"] * 1e3
    if seconds:
        result["attention"] = attention_of(model)
    return {**result, **(where(step) if look else {})}


def resnet_case(step: Callable[[], Any], seconds: float = 0, look: bool = False) -> Dict[str, Any]:
    result: Dict[str, Any] = sustained(step, seconds) if seconds else measure(step, 40, warm=6)
    result["images_per_s"] = IMAGES / result["ms"] * 1e3
    if "watts" in result:
        result["mj_per_image"] = result["watts"] / result["images_per_s"] * 1e3
    return {**result, **(where(step) if look else {})}


def where(step: Callable[[], Any]) -> Dict[str, Any]:
    """Milliseconds of one step by kind of kernel, and the ten largest kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / 1e3, e.count) for e in seen.key_averages() if e.self_device_time_total]
    kinds: Dict[str, float] = {}
    words = {
        "attention": ("sdpa", "compute_dot_do_o", "convert_dq", "flash_attn"),
        "products": ("nvjet", "gemm", "cutlass", "xmma", "conv"),
        "cross-entropy": ("_slope", "_cross_entropy", "_odds"),
        "to fp8": ("_cast_", "AbsMax"),
        "gate": ("_swiglu",),
        "optimizer": ("copy_copy__div", "copy__div", "multi_tensor", "FusedSgd"),
    }
    for key, ms, _ in rows:
        kind = next((kind for kind, marks in words.items() if any(mark in key for mark in marks)), "norms and the rest")
        kinds[kind] = kinds.get(kind, 0.0) + ms
    rows.sort(key=lambda row: -row[1])
    return {"by_kind_ms": kinds, "top": [[key[:90], ms, count] for key, ms, count in rows[:10]]}


Case = Callable[[float], Dict[str, Any]]  # seconds to sustain -> figures
_PRECISIONS = {"muon": "bf16"}  # it keeps fp32 weights, and autocast computes
OURS: Dict[str, tuple[int, Case]] = {  # seconds beside the sustained ones, at most
    "llama 2 ours": (50, lambda s: llama_case(our_llama(2, "bf16-master"), 2, s)),
    "llama 8 ours": (60, lambda s: llama_case(our_llama(8, "bf16-master"), 8, s, look=True)),
    "llama 2 ours fp8": (50, lambda s: llama_case(our_llama(2, "fp8"), 2, s)),
    "llama 8 ours fp8": (60, lambda s: llama_case(our_llama(8, "fp8"), 8, s, look=True)),
    "llama 2 setup": (60, lambda s: llama_case(set_up_llama(2, "bf16-master"), 2, s)),
    "llama 8 setup": (70, lambda s: llama_case(set_up_llama(8, "bf16-master"), 8, s, look=True)),
    "llama 8 setup fp8": (70, lambda s: llama_case(set_up_llama(8, "fp8"), 8, s, look=True)),
    "llama 8 recipe": (60, lambda s: llama_case(recipe_llama(8, "bf16-master"), 8, s)),
    "llama 8 recipe fp8": (60, lambda s: llama_case(recipe_llama(8, "fp8"), 8, s)),
    "llama 8 torchao tensorwise": (80, lambda s: float8_beside(s, "tensorwise")),
    "llama 8 torchao rowwise": (80, lambda s: float8_beside(s, "rowwise")),
    "resnet recipe": (110, lambda s: resnet_case(recipe_resnet(), s)),
    "8b ours": (90, lambda s: llama_case(our_llama(1, "bf16-master", "8b", "selective"), 1, s, look=True, model="8b")),
    "8b ours fp8 x 16": (
        150,
        lambda s: llama_case(our_llama(1, "fp8", "8b", "lean", 16), 16, s, look=True, model="8b"),
    ),
    **{
        f"8b ours fp8 x 16 8-bit {how}": (
            150,
            lambda s, how=how: llama_case(
                our_llama(1, "fp8", "8b", how, 16, optimizer="AdamW8"), 16, s, look=True, model="8b"
            ),
        )
        for how in ("none", "selective")
    },
    "experts 8x1b ours": (90, lambda s: llama_case(our_llama(4, "bf16-master", "8x1b"), 4, s, look=True, model="8x1b")),
    **{
        f"length {length} {model}": (
            200,
            lambda s, model=model, length=length, how=how: llama_case(
                our_llama(1, "bf16-master", model, how, 1, length), 1, s, model=model, length=length
            ),
        )
        for model, length, how in LENGTHS
    },
    **{
        f"optimizer {name}": (
            90,
            lambda s, name=name: llama_case(recipe_llama(2, _PRECISIONS.get(name, "bf16-master"), "", name), 2, s),
        )
        for name in ("adamw", "adamw-8bit", "adamw-offload", "muon")
    },
    "length 131072 8b offload": (
        300,
        lambda s: llama_case(
            recipe_llama(1, "bf16-master", "", "adamw-offload", "8b", "full", 131_072), 1, s, model="8b", length=131_072
        ),
    ),
    "resnet ours": (110, lambda s: resnet_case(our_resnet(), s, look=True)),
}
CASES: Dict[str, tuple[int, Case]] = {
    "ceilings": (30, lambda _: ceilings()),
    "checks": (90, lambda _: __import__("gpu_checks").all_checks()),
    **{f"resnet {name}": (90, lambda _, make=make: resnet_case(make())) for name, make in RESNET_PEERS.items()},
    **{f"llama 2 {name}": (70, lambda _, make=make: llama_case(make(), 2)) for name, make in LLAMA_PEERS.items()},
    **OURS,
}
BEFORE = " before"  # the same case with the package of --against


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gpu.json", help="file for the figures")
    parser.add_argument("--only", default="*", help="names of cases, comma between; * stands for anything")
    parser.add_argument("--seconds", type=float, default=60, help="how long each of our cases is sustained")
    parser.add_argument("--against", metavar="SRC", help="another source tree of this package to compare ours with")
    parser.add_argument("--against-seconds", type=float, default=0, help="how long that one is; 0: as long")
    parser.add_argument(
        "--attention",
        default="",
        metavar="WORDS",
        help="the kernel that must run, such as 'FlashAttention 4'; else nothing is measured",
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here")
    if args.attention and not attention_of("1b").startswith(args.attention):
        print(f"{args.attention} was asked for, and attention here is {attention_of('1b')}", file=sys.stderr)
        return 1
    if args.case:
        print("RESULT " + json.dumps(CASES[args.case][1](args.seconds)), flush=True)
        return 0
    wanted: List[str] = []
    for name in CASES:
        if any(fnmatch.fnmatch(name, word.strip()) for word in args.only.split(",")):
            wanted += [name + BEFORE, name] if args.against and name in OURS else [name]
    results: Dict[str, Any] = {}
    began = time.perf_counter()
    for name in wanted:
        old = name.endswith(BEFORE)
        seconds = args.against_seconds or args.seconds if old else args.seconds
        results[name] = run_case(name.removesuffix(BEFORE), seconds, args.against if old else "")
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    print(
        f"\n{'case':32} {'ms':>8} {'per second':>11} {'TFLOP/s':>8} {'GiB':>6} {'first step s':>12} {'W':>5} {'mJ each':>8}"
    )
    for name, row in results.items():
        if "ms" in row:
            rate = row.get("tokens_per_s") or row.get("images_per_s") or 0
            each = row.get("mj_per_token") or row.get("mj_per_image") or 0
            print(
                f"{name:32} {row['ms']:8.1f} {rate:11,.0f} {row.get('tflops', 0):8.0f} {row['memory_gib']:6.1f} "
                f"{row['first_step_s']:12.1f} {row.get('watts', 0):5.0f} {each:8.2f}"
            )
            if name + BEFORE in results and "ms" in results[name + BEFORE]:
                print(" " * 8 + f"{results[name + BEFORE]['ms'] / row['ms']:.3f} x before")
        else:
            print(f"{name:32} {json.dumps(row)[-700:]}")
        if "attention" in row:
            print(" " * 8 + f"attention: {row['attention']}")
        if "by_kind_ms" in row:
            parts = sorted(row["by_kind_ms"].items(), key=lambda item: -item[1])
            print(" " * 8 + ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in parts))
    print(f"total {time.perf_counter() - began:.0f} s")
    return 1 if any("error" in row for row in results.values()) else 0


def run_case(name: str, seconds: float, source: str) -> Dict[str, Any]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if source:
        environment["PYTHONPATH"] = source
    limit = CASES[name][0] + (seconds if name in OURS else 0)
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), "--case", name, "--seconds", str(seconds)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        print(f"{name}: no answer in {limit:.0f} s", flush=True)
        return {"error": f"no answer in {limit:.0f} s"}
    lines: List[str] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"{name}: {done.stderr[-1500:]}", flush=True)
        return {"error": done.stderr[-3000:]}
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    result: Dict[str, Any] = json.loads(lines[0][len("RESULT ") :])
    return result


if __name__ == "__main__":
    sys.exit(main())

"""The Megatron-LM presets with a trainer in Megatron's place: ranks, arguments, printed numbers and exit codes.

MEGATRON_LM, a checkout of NVIDIA/Megatron-LM, gives the stand-in the real argument parser; its interpreter then needs torch and
what else that parser imports.
"""

import json
import os
import sys

from tests.runs import little_torch

TRAINER = """
import argparse, os, sys
if os.environ.get("MEGATRON_LM"):
    sys.path.insert(0, os.environ["MEGATRON_LM"])
    from megatron.training.arguments import parse_args
    args = parse_args()
else:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("num-layers", "seq-length", "global-batch-size", "train-iters", "log-interval"):
        parser.add_argument("--" + name, type=int, required=True)
    args, _ = parser.parse_known_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if os.environ.get("FAIL_RANK") == str(rank):
    raise RuntimeError("no such token")
if rank == world - 1:  # Megatron prints on the last rank
    for step in (1, 2):
        print(f" [2026-03-01 10:00:00] iteration {step:8d}/{args.train_iters:8d} | consumed samples: {step * 128:12d} | "
              f"elapsed time per iteration (ms): 1250.0 | throughput per GPU (TFLOP/s/GPU): 401.5 | learning rate: 1.5E-04 | "
              f"global batch size: {args.global_batch_size:5d} | lm loss: {11.5 - step:.6E} | grad norm: 2.500 |", flush=True)
"""
# As ROCm's script does it: torchrun into tee.
SCRIPT = """#!/bin/bash
torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 32 --seq-length $SEQ_LENGTH --global-batch-size $BS \
    --train-iters $TOTAL_ITERS --log-interval 1 2>&1 | tee train.log
"""


def summary(drumbeat):
    return json.loads((drumbeat.run_folder() / "summary.json").read_text())


def test_nvidias_ranks_and_numbers(drumbeat):
    (drumbeat.folder / "pretrain_gpt.py").write_text(TRAINER)
    flags = ("--preset", "megatron-lm-nvidia", "--nodes", 2, "--ranks-per-node", 2, "--container", "none")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = drumbeat("run", *flags, env={**os.environ, "PATH": path}, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = summary(drumbeat)
    assert (seen["ranks"], seen["progress"]["step"], seen["progress"]["last_loss"]) == (4, 2, 9.5)


def test_rocms_script_fails_with_its_rank_although_it_pipes_into_tee(drumbeat, tmp_path):
    library, programs = little_torch.install(tmp_path / "little", sys.executable)
    path = os.pathsep.join([programs, os.path.dirname(sys.executable), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join([library, os.environ["PYTHONPATH"]])}
    (drumbeat.folder / "pretrain_gpt.py").write_text(TRAINER)
    (drumbeat.folder / "examples" / "llama").mkdir(parents=True)
    (drumbeat.folder / "examples" / "llama" / "train_llama3.sh").write_text(SCRIPT)
    flags = ("--preset", "megatron-lm", "--nodes", 2, "--container", "none")
    done = drumbeat("run", *flags, env={**environ, "FAIL_RANK": "2"}, timeout=300)
    assert done.returncode == 1 and "RuntimeError: no such token" in done.stderr, done.stderr
    assert summary(drumbeat)["failure"]["rank"] == 2

"""Runs the collective test with a fault in rank 1, from outside: `python faulty.py FAULT --out FILE ...`.

corrupt: one element of what it adds and sends is off by one, and it returned a wrong matmul result. silent: it never answers its
partner. Sizes are small: faults show at any.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from drumbeat.inrank.collective_test import __main__, pair_tests, sweep

fault = sys.argv.pop(1)
mine = os.environ["RANK"] == "1"
product = sweep.compare_products


def break_collectives():
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    reduce, collect = dist.all_reduce, getattr(dist, gather)

    def spoilt(tensor):
        tensor = tensor.clone()
        tensor[len(tensor) // 2] += 1
        return tensor

    def all_reduce(tensor, *rest):
        if len(tensor) > 1:  # not our own measuring
            tensor.copy_(spoilt(tensor))
        reduce(tensor, *rest)

    dist.all_reduce = all_reduce
    setattr(dist, gather, lambda output, tensor: collect(output, spoilt(tensor)))


def never_answers(world, partner, size, step):
    time.sleep(3)
    raise RuntimeError("nobody home")


def wrong_product(world, quick):
    torch.Tensor.__matmul__ = lambda a, b: torch.mm(a, b) + 1
    product(world, quick)


sweep.sweep_sizes = lambda world, quick: [1 << 10, 1 << 14]
pair_tests.PAIR_SECONDS = 1.5
if mine and fault == "corrupt":
    break_collectives()
    sweep.compare_products = wrong_product
if mine and fault == "silent":
    pair_tests.with_partner = never_answers
sys.exit(__main__.main())

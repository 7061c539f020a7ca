"""Runs the collective test with a fault in rank 1, from outside: `python faulty.py FAULT --out FILE ...`.

corrupt: one element of what it adds and sends is off by one, and it multiplies wrongly. silent: it never answers its
partner. Sizes are small: faults show at any.
"""

import os
import sys
import time

from drumbeat.verify import collectives

fault = sys.argv.pop(1)
mine = os.environ["RANK"] == "1"
load_torch = collectives.load_torch


def load_and_break():
    load_torch()
    dist = collectives.dist
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


def product(world, quick):
    collectives.torch.Tensor.__matmul__ = lambda a, b: collectives.torch.mm(a, b) + 1
    matrix_product(world, quick)


collectives.sweep_sizes = lambda world, quick: [1 << 10, 1 << 14]
collectives.PAIR_SECONDS = 1.5
matrix_product = collectives.matrix_product
if mine and fault == "corrupt":
    collectives.load_torch = load_and_break
    collectives.matrix_product = product
if mine and fault == "silent":
    collectives.with_partner = never_answers
sys.exit(collectives.main())

"""`python .../collective_test/__main__.py`: the parts of the test, one after the other.

Run by its path, it imports its folder as a package, wherever that was copied to. torch is imported only after the GPU's smoke
test was started.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys


def main() -> int:
    from .gpu import Smoke

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="where rank 0 writes its results")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto")
    args = parser.parse_args()
    smoke = Smoke(args.backend)  # the child imports torch at the same time
    try:
        import torch  # noqa: F401 - only here: the child is to be started first
    except ImportError as error:
        print(f"verify: {sys.executable} cannot import torch ({error}); name one that can: --python", file=sys.stderr)
        return 2
    smoked = smoke.answer()
    if not smoked.get("ok"):
        print(f"verify: {smoked['why']}; --backend gloo tests the CPUs and their network alone", file=sys.stderr)
        return 3
    from . import pair_tests, sweep
    from .world import World

    world = World(args, smoked)
    try:
        for part in (pair_tests.run, sweep.run, sweep.compare_products):
            if not world.broken:
                part(world, args.quick)
        world.results["complete"] = not world.broken
    finally:
        world.leave()
    return 0


if __name__ == "__main__":
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.dirname(folder)
    sys.exit(importlib.import_module(os.path.basename(folder) + ".__main__").main())

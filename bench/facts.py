"""How long reading all facts takes, against the second it may take: this machine, and the largest test machine.

PYTHONPATH=src:. python bench/facts.py
"""

import tempfile
import time
from pathlib import Path

from tests.trees.archetypes import build

from drumbeat.machine.gather import gather
from drumbeat.machine.host import LiveHost
from drumbeat.machine.replay import FolderHost

ALLOWED = 1.0


def seconds(host):
    start = time.perf_counter()
    gather(host)
    return time.perf_counter() - start


print(f"this machine  first {seconds(LiveHost()):.3f} s")
best = min(seconds(LiveHost()) for _ in range(5))
print(f"this machine  {best:.3f} s  {best / ALLOWED:.2f} of what is allowed")
for name in ("olivia", "dgx-h100"):
    with tempfile.TemporaryDirectory() as folder:
        build(name, Path(folder))
        best = min(seconds(FolderHost(folder)) for _ in range(5))
        print(f"{name:12s}  {best:.3f} s  {best / ALLOWED:.2f} of what is allowed")

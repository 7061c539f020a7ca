"""How long expanding 10,000 hosts takes, against the 50 ms it may take: `python bench/hostlist.py`."""

import time

from drumbeat.base.ranges import expand

ALLOWED = 0.050
LISTS = {
    "one range": "nid[000001-010000]",
    "singles": "nid[" + ",".join(f"{number:06d}" for number in range(1, 20001, 2)) + "]",
    "both": "nid[" + ",".join(f"{number:06d}-{number + 1:06d},{number + 4:06d}" for number in range(0, 26664, 8)) + "]",
    "plain names": ",".join(f"nid{number:06d}" for number in range(10000)),
    "two groups": "x[1000-1099]c0s[0-99]b0",
}

for name, text in LISTS.items():
    best = min(
        (lambda start: (len(expand(text)), time.perf_counter() - start)[1])(time.perf_counter()) for _ in range(7)
    )
    print(f"{name:12s} {len(expand(text))} hosts  {best * 1000:6.1f} ms  {best / ALLOWED:.2f} of what is allowed")

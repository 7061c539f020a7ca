"""An attempt as its watchers know it, for tests of one watcher."""

import time

from drumbeat.agent.watchers.contract import WatchedAttempt
from drumbeat.machine.model import Facts
from drumbeat.plan.binding import Binding

PLAIN = WatchedAttempt(
    node=0, node_rank=0, first_rank=0, facts=Facts("n"), bound=Binding((), 1, ""), right=Binding((), 1, ""), variables=(),
    ranks=0, attempt=0, planned_ranks=1, port=61234, mains=list, are_ranks=lambda: True, met=lambda: None,
)  # fmt: skip


def scene(**changes):
    return WatchedAttempt(**{**{name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__}, **changes})


def polled(sensor, now):
    """Return what a sensor says at that time once its child has answered."""
    saws = sensor.poll(now)
    while not saws and sensor.asked.busy:
        time.sleep(0.005)
        saws = sensor.poll(now)
    return saws

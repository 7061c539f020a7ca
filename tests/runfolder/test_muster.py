"""Who has come, and who is waited for, from the lead's events."""

from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.state import Course


def event(kind, **more):
    return kind(kind="", t=100.0, mono=0.0, seq=0, host="n0", node=0, attempt=0, **more)


def joined(*nodes):
    return [event(kinds.NodeJoined, peer=n, peer_host=f"n{n}", address="", clock_offset=0.0) for n in nodes]


STARTED = event(kinds.RunStarted, run_id="r", nodes=4, ranks_per_node=1, launcher="ranks", launcher_why="")
TOGETHER = event(kinds.Mustered, seconds=2.0, master_addr="n0", master_port=1)


def test_it_counts_and_names():
    assert Course([]).muster is None
    assert Course([STARTED, *joined(0)]).muster.words == "1 of 4 nodes are here; waiting for nodes 1-3"
    told = event(kinds.Waiting, missing="n[1-3]", seconds=10.0, here=1)
    assert Course([STARTED, *joined(0), told]).muster.words == "1 of 4 nodes are here; waiting for n[1-3]"
    later = Course([STARTED, *joined(0), told, *joined(1, 2)]).muster
    assert later.words == "3 of 4 nodes are here; waiting for node 3" and later.since == 100.0


def test_not_after_they_have_come_together_but_again_after_a_restart():
    whole = [STARTED, *joined(0, 1, 2, 3), TOGETHER]
    assert Course(whole).muster is None
    assert Course([*whole, STARTED, *joined(0, 1)]).muster.here == 2

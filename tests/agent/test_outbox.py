"""The lead's messages to its members: all of them, in order, and never so many in one turn that the rest must wait."""

from types import SimpleNamespace

from drumbeat.agent.lead import connections
from drumbeat.agent.wire.messages import RunEnded, Start, Stop, encode


def test_thousands_of_messages_take_several_turns(monkeypatch):
    clock, delivered, turns = [0.0], [], []
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def deliver(member, message, data):
        clock[0] += 0.001  # what one message costs
        assert data == encode(message)
        delivered.append((member, message))
        if member == 0 and isinstance(message, Start):
            box.put(Stop(15, 1.0), (0,))  # starting the lead's own ranks may lead to the next decision

    box = connections.Outbox(deliver)
    starts = [(number, Start(0, number)) for number in [*range(1, 1000), 0]]
    for number, start in starts:
        box.put(start, (number,))
    everybody = (*range(1, 1000), 0)
    box.put(RunEnded(1), everybody)
    while box:
        before, begin = len(delivered), clock[0]
        box.send_some()
        turns.append(len(delivered) - before)
        assert clock[0] - begin < 0.15, "one turn is bounded"
    assert delivered == [*starts, *((number, RunEnded(1)) for number in everybody), (0, Stop(15, 1.0))]
    assert len(turns) > 15 and min(turns) > 0

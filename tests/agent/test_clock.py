"""A clock that is set while a run goes on changes no duration."""

import time

from drumbeat.base import clock


def test_what_another_process_noted_is_shifted_by_the_step(monkeypatch):
    real = time.time
    assert clock.own(real()) == real() or abs(clock.own(real()) - real()) < 1
    monkeypatch.setattr(time, "time", lambda: real() - 86400.0)  # a day back
    assert abs(clock.stepped() + 86400.0) < 1
    assert abs(clock.own(time.time()) - clock.now()) < 1
    before = clock.now() - 3600.0  # noted before the step
    assert clock.own(before) == before

"""Private copies of the bundle go when their process does, and a handler of the caller stays as it is."""

import signal

import pytest

from drumbeat.bundle.pinned import removed_after


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_stop_that_nobody_handles_ends_the_process_in_order(tmp_path, handlers):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    (tmp_path / "copy").mkdir()
    with pytest.raises(SystemExit) as end, removed_after([str(tmp_path / "copy")]):
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 128 + signal.SIGTERM and not (tmp_path / "copy").exists()


def test_a_handler_of_the_caller_is_kept(tmp_path, handlers):
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    with removed_after([]):
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]

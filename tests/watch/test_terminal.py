"""The terminal view, driven by its keys."""

import asyncio

import pytest

from drumbeat.watch.session import Session
from tests.runfolder.folders import events, log, make_run
from tests.watch.pages import running
from tests.watch.recorded import gpu, recorded, sample, steps

pytest.importorskip("textual")

from drumbeat.watch.terminal import NodeScreen, RankScreen, WatchApp  # noqa: E402

LONG_FIX = f"a smaller batch, or {'more accumulation, ' * 6}the last word"


def text_of(app):
    """The screen as lines of text."""
    width, height = app.size
    lines = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip)[:width] for strip in lines][:height]


async def shows(app, pilot, *words, screen=None):
    """Wait until all words stand on the screen."""
    for _ in range(300):
        text = "\n".join(text_of(app))
        if all(word in text for word in words) and (screen is None or isinstance(app.screen, screen)):
            return True
        await pilot.pause(0.1)
    raise AssertionError(f"{words} not on the screen:\n{text}")


async def has_rows(app, pilot, count):
    for _ in range(300):
        if app.query_one("#nodes").row_count == count:
            return
        await pilot.pause(0.1)
    raise AssertionError(app.query_one("#nodes").row_count)


def drive(session, size, script):
    async def play():
        app = WatchApp(session)
        async with app.run_test(size=size) as pilot:
            await script(app, pilot)

    asyncio.run(play())


def test_a_look_that_ends_while_the_program_ends_is_no_crash(tmp_path):
    session = Session(running(recorded(tmp_path / "r")))
    session.load()

    async def script(app, pilot):
        await app.query_one("#glance").remove()
        await app.refresh_run()

    drive(session, (80, 24), script)


def test_keys_open_nodes_and_ranks(tmp_path):
    run = running(recorded(tmp_path / "r"))
    log(run, 3, "a line with [bold]markup[/bold] and \x1b[31mcolour\n", node=1)
    session = Session(run)
    session.load()

    async def script(app, pilot):
        await shows(app, pilot, "step 40/100  loss 3.6", "n001", "80 %")
        steps(run, 41, 41, run.record.created + 41)
        await shows(app, pilot, "step 41/100")
        await pilot.press("down", "enter")
        await shows(app, pilot, "500 W", "last report", screen=NodeScreen)
        await pilot.press("down", "enter")
        await shows(app, pilot, "a line with [bold]markup[/bold] and ?[31mcolour", screen=RankScreen)
        assert "\x1b" not in "\n".join(text_of(app))
        await pilot.press("escape", "escape")
        await shows(app, pilot, "step 41/100")
        await pilot.press("slash", *"n001", "enter")
        await has_rows(app, pilot, 1)
        await pilot.press("escape")
        await has_rows(app, pilot, 2)
        await pilot.press("q")

    drive(session, (80, 24), script)


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
def test_many_nodes(tmp_path, size):
    session = Session(running(recorded(tmp_path / "r", nodes=300, ranks=1, last=5)))
    session.load()

    async def script(app, pilot):
        await shows(app, pilot, "n000", "step 5/100")
        await has_rows(app, pilot, 300)
        await pilot.press("end")
        await shows(app, pilot, "n299", "step 5/100")
        assert max(map(len, text_of(app))) <= size[0]

    drive(session, size, script)


def test_the_most_important_columns_are_whole_at_80_columns(tmp_path):
    run = running(recorded(tmp_path / "r"))
    slow = [gpu(index, 47.0, throttle=["power limit", "temperature"], power=690.0) for index in range(4)]
    for node, host in enumerate(("nid005026.hsn.cm.example.org", "nid005027.hsn.cm.example.org")):
        events(run, ("node-joined", {"peer": node, "peer_host": host, "address": "", "clock_offset": 0.0}))
        for second in (50, 55):
            sample(
                run,
                node,
                run.record.created + second,
                slow,
                12 * 10**9 * second,
                12 * 10**9 * second,
                second,
                500,
                host,
            )
    session = Session(run)
    session.load()

    async def script(app, pilot):
        await shows(app, pilot, "node  host", "slowed by")
        lines = [line.split() for line in text_of(app)]
        (head,) = [line for line in lines if line[:2] == ["node", "host"]]
        assert head == ["node", "host", "GPU", "use", "mem", "power", "slowed", "by"], (
            "others are left out, none is clipped"
        )
        row = ["0", "nid005026…ample.org", "4", "47", "%", "50", "%", "2760", "W", "power", "limit,", "temperature"]
        assert row in lines, lines

    drive(session, (80, 24), script)

    async def wide(app, pilot):
        await shows(app, pilot, "clock", "12 GB/s  12 GB/s", "nid005026.hsn.cm.example.org")

    drive(session, (200, 50), wide)


def test_a_queued_run_shows_why_and_an_ended_one_how(tmp_path, demo_run, monkeypatch):
    from drumbeat.backends.contract import QUEUED, Status
    from drumbeat.desk import state as module

    monkeypatch.setattr(module, "status", lambda run: Status("slurm://c/7", QUEUED, "Priority"))
    queued = Session(make_run(tmp_path / "q"))
    queued.load()

    async def waits(app, pilot):
        await shows(app, pilot, "queued, ", ": Priority", "not started yet")

    drive(queued, (80, 24), waits)
    monkeypatch.undo()
    ended = Session(demo_run)
    ended.load()

    async def over(app, pilot):
        await shows(app, pilot, "finished in", "exit code 0")

    drive(ended, (80, 24), over)


def test_a_failure_appears(tmp_path):
    run = running(recorded(tmp_path / "r"))
    session = Session(run)
    session.load()

    async def script(app, pilot):
        finding = {"code": "oom", "severity": "error", "title": "out of memory", "rank": 2, "fix": LONG_FIX}
        events(run, ("failed", {"finding": finding}))
        await shows(app, pilot, "rank 2: out of memory", "a smaller batch, or", "the last word")

    drive(session, (80, 24), script)

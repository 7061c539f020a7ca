"""What ranks print and the terminal that it is shown on: control sequences, and more lines than anybody can show."""

import signal
import sys

from tests.conftest import wait_for

RED = "\x1b[31mred\x1b[0m"
STEERS = "\x1b]52;c;ZXZpbA==\x07 \x1b]0;title\x07 \x1b[2J"
SHOWN = STEERS.replace("\x1b", "\\x1b").replace("\x07", "\\x07")


def test_control_sequences_of_ranks_are_shown_and_not_obeyed(drumbeat):
    code = (
        f"import sys; print({RED!r}, {STEERS!r}); print('a', {STEERS!r}, file=sys.stderr); print('b', file=sys.stderr)"
    )
    done = drumbeat("run", "--ranks-per-node", 2, "--", sys.executable, "-c", code)
    assert done.returncode == 0 and f"{RED} {SHOWN}" in done.stdout and SHOWN in done.stderr, done.stdout + done.stderr
    assert STEERS[:4] not in done.stdout + done.stderr
    logs = drumbeat("logs", drumbeat.run_folder().name)
    assert logs.stdout.count(f"{RED} {SHOWN}") == 2 and STEERS[:4] not in logs.stdout


FLOOD = """
import sys, time
line = b"x" * 199 + b"\\n"
for _ in range(300):
    sys.stdout.buffer.write(line * 2000)
    sys.stdout.buffer.flush()
open("printed", "w").close()
time.sleep({})
"""


def test_a_flood_is_summarised_and_a_stop_is_obeyed_at_once(drumbeat):
    """120 MB: the end comes long before all of it could be shown, and says what was left out and where it is."""
    process = drumbeat.start("run", "--", sys.executable, "-c", FLOOD.format(600))
    wait_for((drumbeat.folder / "printed").exists, 120, "the flood")
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 143 and "of what the ranks printed were not shown here: drumbeat logs" in output
    assert len(output) < 60_000_000

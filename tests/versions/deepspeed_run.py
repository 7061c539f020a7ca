"""`make versions` only: DeepSpeed takes long to import. Its own launcher starts the ranks of two emulated nodes."""

import sys

from tests.runs.test_wrapped_launchers import needs, worlds


def test_deepspeed(drumbeat):
    needs("deepspeed")
    command = (sys.executable, "-m", "deepspeed", "--num_gpus", "2", "-q", "--no_local_rank", "who.py")
    assert worlds(drumbeat, *command)[0] == [0, 1, 2, 3]

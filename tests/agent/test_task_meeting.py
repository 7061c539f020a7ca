"""Where the tasks of a node meet: a name that nobody can work out, and one line where it is taken all the same."""

import socket

import pytest

from drumbeat.agent.place import task_meeting
from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.agent.wire.messages import WireError
from drumbeat.machine.model import Identity

WHO = Identity("slurm", job_id="812", step_id="0")


def test_the_name_depends_on_the_token_and_on_everything_that_tells_runs_apart():
    names = {
        task_meeting(WHO, {}, 0, "a" * 32), task_meeting(WHO, {}, 0, "b" * 32), task_meeting(WHO, {}, 1, "a" * 32),
        task_meeting(Identity("slurm", job_id="813", step_id="0"), {}, 0, "a" * 32),
        task_meeting(Identity("slurm", job_id="812", step_id="1"), {}, 0, "a" * 32),
    }  # fmt: skip
    assert len(names) == 5 and all(name.startswith("\0drumbeat-") for name in names)


def test_a_name_that_is_taken_is_one_clear_error():
    meeting = task_meeting(WHO, {}, 0, "c" * 32)
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(meeting)
        with pytest.raises(WireError, match="taken|in use"):
            Tasks().gather(meeting, "c" * 32, 2, 5.0, lambda: None, lambda text: None)

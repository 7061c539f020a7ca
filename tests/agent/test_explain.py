"""Why a rank ended, where only the agent can know."""

import os
import sys

import pytest

from drumbeat.agent.ranks.explain import Explainer
from drumbeat.agent.ranks.launchers import End, launcher_of
from drumbeat.agent.ranks.start import start
from drumbeat.runfolder.layout import NodeFolder
from tests.agent.test_lead import order


def test_a_missing_working_directory_is_named_as_such(tmp_path):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(workdir=str(tmp_path / "gone"), command=(sys.executable, "-V"))
    launcher = launcher_of(asked, folder, folder, "", str(tmp_path))
    pid = start(asked.command, os.environ, asked.workdir, folder.log(0, 3, "out"), folder.log(0, 3, "err"))
    (end,) = launcher.ends(0, type("Process", (), {"rank": 3})(), os.waitpid(pid, 0)[1], 0.0)
    finding = Explainer(asked, folder, launcher, 0, str(tmp_path)).explain(end, False)
    assert end.exit_code == 127
    assert finding.code == "workdir-missing" and asked.workdir in finding.title
    assert "No such file or directory" in finding.evidence[0].text and "python" not in finding.title


@pytest.mark.parametrize(
    "after,doubted",
    [
        (["done"], True),
        (["W torchrun's table"] * 30, True),
        (["{'loss': '6.043', 'grad_norm': '1.5', 'learning_rate': '5e-05', 'epoch': '0.1'}"], False),
        ([f"another try: {number}" for number in range(60)], False),
    ],
)
def test_a_failure_counts_only_if_the_work_did_not_go_on(tmp_path, after, doubted):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(command=("bash", "x.sh"))
    launcher = launcher_of(asked, folder, folder, "", str(tmp_path))
    failed = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "MemoryError: no more"]
    with open(folder.log(0, 0, "out"), "w", encoding="utf-8") as file:
        file.write("\n".join([*failed, *after]) + "\n")
    doubt = Explainer(asked, folder, launcher, 0, str(tmp_path)).doubt(End(0, 0, None, 0.0), False)
    assert (doubt is not None) == doubted
    if doubt:
        assert doubt.severity == "warning" and doubt.evidence[0].file == "nodes/0/attempt-0/rank-0.out"

"""Why a rank ended, where only the agent can know."""

import os
import sys

from drumbeat.agent.ranks.explain import Explainer
from drumbeat.agent.ranks.launchers import launcher_of
from drumbeat.agent.ranks.start import start
from drumbeat.runfolder.layout import NodeFolder
from tests.agent.test_lead import order


def test_a_missing_working_directory_is_named_as_such(tmp_path):
    folder = NodeFolder(str(tmp_path / "nodes" / "0"), 0)
    os.makedirs(folder.attempt(0))
    asked = order(workdir=str(tmp_path / "gone"), command=(sys.executable, "-V"))
    launcher = launcher_of(asked, folder, folder, "", str(tmp_path))
    pid = start(asked.command, os.environ, asked.workdir, folder.log(0, 3, "out"), folder.log(0, 3, "err"))
    (end,) = launcher.ends(0, type("Process", (), {"rank": 3})(), os.waitpid(pid, 0)[1])
    finding = Explainer(asked, folder, launcher, 0).explain(end, False, str(tmp_path))
    assert end.exit_code == 127
    assert finding.code == "workdir-missing" and asked.workdir in finding.title
    assert "No such file or directory" in finding.evidence[0].text and "python" not in finding.title

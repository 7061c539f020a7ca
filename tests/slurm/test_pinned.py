"""A queued job's folder may be writable by a group: what others change there before the job starts is not run."""

import os

from tests.bench.cluster import HEAD
from tests.slurm.conftest import output
from tests.slurm.test_submit import PLAIN, nothing_left


def held(oar, name):
    job = oar.job(
        name, ranks_per_node=1, command=f"python3 {oar.ranks('plain', PLAIN)} 0.2", submit_options='["--hold"]'
    )
    number, folder = oar.submit(job)
    folder.chmod(0o2770)
    return number, folder


def released(oar, number):
    oar.cluster.run(HEAD, ["scontrol", "release", str(number)])
    return oar.cluster.wait(number, ["COMPLETED", "FAILED"])["JobState"]


def test_a_replaced_program_is_refused_on_every_node(oar):
    number, folder = held(oar, "replaced")
    marker = folder / "taken-over"
    evil = folder / "evil.py"
    evil.write_text(f"open({str(marker)!r}, 'w')\n")
    os.replace(evil, folder / "drumbeat.pyz")
    assert released(oar, number) == "FAILED"
    text = output(folder)
    assert text.count("drumbeat.pyz was changed after the job was submitted") >= 1 and not marker.exists(), text
    nothing_left(oar, "oar9", "oar10")


def test_a_replaced_script_is_not_read(oar):
    """Neither by Slurm, which keeps its own, nor on the nodes."""
    number, folder = held(oar, "script")
    marker = folder / "taken-over"
    (folder / "job.sh").write_text(f"touch {marker}\n")
    assert released(oar, number) == "COMPLETED", output(folder)
    assert "rank 1 on" in output(folder) and not marker.exists()

"""Which packages a run records."""

from drumbeat.facts.host import LiveHost
from drumbeat.facts.packages import all_versions


def test_packages_of_environments_that_use_others(tmp_path):
    """The system's, where pyvenv.cfg allows it, and folders that a .pth file names; code in a .pth file is not run."""
    system, venv, other = tmp_path / "system", tmp_path / "venv", tmp_path / "other"
    inside = "lib/python3.11/site-packages"
    for folder, package in ((system / inside, "torch-2.9.0"), (venv / inside, "mine-1.0"), (other, "yours-2.0")):
        (folder / f"{package}.dist-info").mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").touch()
    (venv / inside / "x.pth").write_text(f"import os; os.abort()\n# a note\n\n{other}\n/not/there\n")
    settings = venv / "pyvenv.cfg"
    settings.write_text(f"home = {system}/bin\ninclude-system-site-packages = true\n")
    assert all_versions(LiveHost(), str(venv / "bin/python"))["packages"] == {
        "mine": "1.0",
        "torch": "2.9.0",
        "yours": "2.0",
    }
    settings.write_text(f"home = {system}/bin\ninclude-system-site-packages = false\n")
    assert all_versions(LiveHost(), str(venv / "bin/python"))["packages"] == {"mine": "1.0", "yours": "2.0"}

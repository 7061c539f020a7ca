"""Which packages a run records."""

from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Facts
from drumbeat.machine.software import all_versions, package_versions
from drumbeat.machine.table import table


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


def test_a_torch_in_a_folder_that_a_pth_file_names_is_found_and_what_is_not_is_named(tmp_path, monkeypatch):
    venv, other = tmp_path / "venv", tmp_path / "other"
    inside = venv / "lib/python3.11/site-packages"
    inside.mkdir(parents=True)
    (other / "torch-2.13.0.dist-info").mkdir(parents=True)
    (inside / "a.pth").write_text(f"{other}\n")
    monkeypatch.setenv("VIRTUAL_ENV", str(venv))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    found = package_versions(LiveHost())
    assert found == {"torch": "2.13.0"}
    assert "no torch among the packages" not in table(Facts("h", versions=found))
    assert "no torch among the packages of the active environment" in table(Facts("h"))

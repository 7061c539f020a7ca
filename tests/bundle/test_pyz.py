"""drumbeat.pyz: one file, any Python from 3.9, nothing installed; older ones get a line that helps."""

import ast
import glob
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from drumbeat.base.data import parse_yaml
from drumbeat.bundle.build import _BROUGHT, _LEFT_OUT, bundle_bytes

ROOT = Path(__file__).parent.parent.parent


def pythons():
    """Every Python on this machine: PATH, and pyenv's. Nothing is started: every worker that collects the tests comes here."""
    names = [f"python{version}" for version in ("2.7", "3.6", "3.7", "3.8", *(f"3.{minor}" for minor in range(9, 20)))]
    found = {name: shutil.which(name) for name in names}
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    for path in sorted(glob.glob(f"{pyenv}/versions/*/bin/python")):
        version = ".".join(Path(path).parent.parent.name.split(".")[:2])
        found[f"python{version}"] = path
    there = {name: path for name, path in found.items() if path and not path.startswith(f"{pyenv}/shims/")}
    return {tuple(map(int, name[len("python") :].split("."))): path for name, path in there.items()}


PYTHONS = pythons()
NEW = sorted(version for version in PYTHONS if version >= (3, 9))
OLD = sorted(version for version in PYTHONS if version < (3, 9))
ENDS = sorted({NEW[0], NEW[-1]}) if NEW else []


def call(version, pyz, *words, **options):
    argv = [PYTHONS[version], "-I", "-S", str(pyz), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=150, **options)


def test_same_sources_same_bytes(pyz):
    assert bundle_bytes() == pyz.read_bytes()


def test_only_comments_are_left_out_of_the_code(pyz):
    with zipfile.ZipFile(pyz) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py") and name != "__main__.py"]
        assert len(names) > 300 and "yaml/scanner.py" in names
        for name in names:
            site = Path(yaml.__file__).parent.parent if name.startswith("yaml/") else ROOT / "src"
            sent, written = archive.read(name), (site / name).read_bytes()
            assert sent.count(b"\n") == written.count(b"\n"), name
            assert compile(sent, name, "exec") == compile(written, name, "exec"), (
                name
            )  # also by the first line of each function


def test_its_rules_are_those_of_the_source(pyz):
    with zipfile.ZipFile(pyz) as archive:
        names = [
            name for name in archive.namelist() if name.startswith("drumbeat/logs/rules/") and name.endswith(".json")
        ]
        made = {name[: -len("json")] + "yaml": json.loads(archive.read(name)) for name in names}
    assert made
    for name, rules in made.items():
        assert rules == parse_yaml((ROOT / "src" / name).read_bytes())


def test_a_python_3_9_is_tried():
    if (3, 9) not in PYTHONS:
        pytest.skip("no Python 3.9 on PATH or in pyenv")
    assert ENDS[0] == (3, 9)


@pytest.mark.parametrize("version", ENDS)
def test_runs_a_job_with_nothing_installed(version, pyz, home, tmp_path):
    (tmp_path / "job.yaml").write_text("command: echo hello\nnodes: 2\n")
    done = call(version, pyz, "run", "job.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1] hello", "hello"]


@pytest.mark.parametrize("version", ENDS)
def test_lints_and_converts_with_nothing_installed(version, pyz, home, tmp_path):
    """Rules are read without the examples that only readers and tests need."""
    (tmp_path / "x.sh").write_text("#!/bin/bash\n#SBATCH -N 2\nexport NCCL_SOKET_IFNAME=eth0\nsrun python train.py\n")
    assert "variable-misspelt" in call(version, pyz, "lint", "x.sh", cwd=tmp_path).stdout
    assert "command: python train.py" in call(version, pyz, "convert", "x.sh", cwd=tmp_path).stdout


@pytest.mark.parametrize("version", ENDS)
def test_every_command_of_the_bundle_answers(version, pyz, home):
    listed = [line.split()[0] for line in call(version, pyz, "--help").stdout.splitlines() if line.startswith("  ")]
    assert "run" in listed and len(listed) > 10
    code = (  # all in one process: compiling what it imports is what takes long
        "import sys; sys.path.insert(0, sys.argv[1]); from drumbeat.cli import main\n"
        "for name in sys.argv[2:]:\n"
        "    try: main([name, '--help'])\n"
        "    except SystemExit as end: assert not end.code, (name, end.code)\n"
    )
    argv = [PYTHONS[version], "-I", "-S", "-c", code, str(pyz), *listed]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert [name for name in listed if f"usage: drumbeat {name}" not in done.stdout] == []


@pytest.mark.parametrize("version", OLD)
def test_an_old_python_gets_one_line_that_helps(version, pyz):
    done = subprocess.run([PYTHONS[version], str(pyz), "run"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("drumbeat needs Python 3.9 or newer")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("version", ENDS)
def test_all_node_modules_import(version, pyz):
    code = (
        "import sys, pkgutil, importlib; sys.path.insert(0, sys.argv[1]); import drumbeat\n"
        "names = [m.name for m in pkgutil.walk_packages(drumbeat.__path__, 'drumbeat.')]\n"
        "assert len(names) > 40, names\n"
        "for name in names:\n"
        "    if name.endswith(('__main__', 'launcher_driver')) or '.collective_test.' in name: continue\n"
        "    importlib.import_module(name)\n"
        "from drumbeat.metrics.printed import read_line\n"
        "assert read_line('step 7 loss 0.5')[0]['step'] == 7, 'what printed lines need came along'\n"
    )
    argv = [PYTHONS[version], "-I", "-S", "-c", code, str(pyz)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


def test_ranks_neither_see_the_zip_nor_lose_their_own_drumbeat(pyz, home, tmp_path):
    own = tmp_path / "site" / "drumbeat"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("whose = 'the rank\\'s own'\n")
    code = "import drumbeat, sys; print(drumbeat.whose, any('.pyz' in p for p in sys.path))"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    argv = [sys.executable, str(pyz), "run", "--", sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150, env=env, cwd=tmp_path)
    assert done.stdout == "the rank's own False\n", done.stderr


ALLOWED = {"yaml", "drumbeat"}
DESK_ONLY = ("train", "watch", "report", "predict")


def test_the_node_world_imports_only_the_standard_library():
    """By reading the code, so that a lazy import in a branch nobody runs is found too."""
    standard = set(sys.stdlib_module_names)
    wrong = []
    for path in sorted((ROOT / "src" / "drumbeat").rglob("*.py")):
        place = path.relative_to(ROOT / "src" / "drumbeat")
        away = place.parts[0] in DESK_ONLY and str(place) not in _BROUGHT
        if away or place.parts[0] == "inrank" or place.parts[:2] == ("metrics", "integrations"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            wrong += [f"{place}: {name}" for name in names if name.split(".")[0] not in standard | ALLOWED]
    assert wrong == []


def _only_for_types(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_what_stays_out_of_the_bundle_is_imported_by_the_command_line_alone():
    """`cli` does so lazily, and says what to install; any other room would break on a node."""
    modules = ("drumbeat." + name[: -len(".py")].replace("/", ".") for name in _BROUGHT)
    brought = {name[: -len(".__init__")] if name.endswith(".__init__") else name for name in modules}
    wrong = []
    for path in sorted((ROOT / "src" / "drumbeat").rglob("*.py")):
        place = path.relative_to(ROOT / "src" / "drumbeat")
        if str(place).startswith((*_LEFT_OUT, "cli/")) and str(place) not in _BROUGHT:
            continue
        tree = ast.parse(path.read_text())
        for_types = {inner for node in ast.walk(tree) if _only_for_types(node) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if node in for_types:
                continue
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module or ""]
            wrong += [
                f"{place}: {name}"
                for name in names
                if name not in brought and name.rpartition(".")[0] not in brought
                if name.startswith(tuple("drumbeat." + room.replace("/", ".") for room in _LEFT_OUT))
            ]
    assert wrong == []

"""Build the wheel and drumbeat.pyz into dist/, install them where nothing else is, and try them. `make dist`."""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DIST = os.path.join(ROOT, "dist")
TRIED = (
    ("--version",),
    ("site", "show", "lumi"),
    ("plan", "--site", "olivia", "--nodes", "2", "--", "python3", "train.py"),
    ("run", "--site", "localhost", "--nodes", "2", "--ranks-per-node", "1", "--", sys.executable, "-c", "pass"),
    ("status",),
    ("report",),
)


def main():
    shutil.rmtree(DIST, ignore_errors=True)
    own = os.path.join(ROOT, ".venv", "bin", "python")
    done([own, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", DIST, ROOT])
    (wheel,) = glob.glob(os.path.join(DIST, "*.whl"))
    pyz = os.path.join(DIST, "drumbeat.pyz")
    done([own, "-m", "drumbeat.bundle.build", pyz])
    compare_with_source(wheel)
    with tempfile.TemporaryDirectory() as place:
        python = os.path.join(place, "venv", "bin", "python")
        done([sys.executable, "-m", "venv", os.path.join(place, "venv")])
        done([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel])
        attempt("wheel", [os.path.join(place, "venv", "bin", "drumbeat")], place)
        attempt("drumbeat.pyz", [sys.executable, "-I", "-S", pyz], place)
        try_tools(place, wheel)
    print(f"{wheel}\n{pyz}")


def try_tools(place, wheel):
    """`pipx install` and `uvx`, as people install command line tools today; both come into an environment of their own."""
    tools = os.path.join(place, "tools")
    done([sys.executable, "-m", "venv", tools])
    done(
        [
            os.path.join(tools, "bin", "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "pipx",
            "uv",
        ]
    )
    attempt("uvx", [os.path.join(tools, "bin", "uvx"), "--from", wheel, "drumbeat"], place, TRIED[:2])
    homes = {name: os.path.join(place, "pipx-home", name) for name in ("PIPX_HOME", "PIPX_BIN_DIR", "PIPX_MAN_DIR")}
    done([os.path.join(tools, "bin", "pipx"), "install", wheel], quiet=True, env={**os.environ, **homes})
    attempt("pipx", [os.path.join(homes["PIPX_BIN_DIR"], "drumbeat")], place)


def compare_with_source(wheel):
    """Every module and data file of the source is in the wheel."""
    with zipfile.ZipFile(wheel) as file:
        there = set(file.namelist())
    source = os.path.join(ROOT, "src")
    wanted = {
        os.path.relpath(path, source)
        for ending in ("py", "yaml", "sh", "html", "js", "css")
        for path in glob.glob(os.path.join(source, "drumbeat", "**", f"*.{ending}"), recursive=True)
    }
    missing = sorted(wanted - there)
    if missing:
        sys.exit(f"{wheel} lacks {', '.join(missing)}")
    print(f"wheel: {len(wanted)} modules and data files, none missing")


def attempt(what, before, place, tried=TRIED):
    folder = os.path.join(place, what)
    os.makedirs(os.path.join(folder, "home"))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "XDG"))}
    for words in tried:
        done([*before, *words], cwd=folder, env={**env, "HOME": os.path.join(folder, "home")}, quiet=True)
    print(f"{what}: {len(tried)} commands work")


def done(argv, quiet=False, **options):
    result = subprocess.run(argv, capture_output=quiet, text=True, **options)
    if result.returncode:
        sys.exit(f"{' '.join(argv)}: exit code {result.returncode}\n{(result.stdout or '') + (result.stderr or '')}")


if __name__ == "__main__":
    main()

"""Build the sdist, the wheel and drumbeat.pyz into dist/, check and install them where nothing else is. `make dist`."""

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
    ("demo",),
    ("site", "show", "lumi"),
    ("plan", "--site", "olivia", "--nodes", "2", "--", "python3", "train.py"),
    ("run", "--site", "localhost", "--nodes", "2", "--ranks-per-node", "1", "--", sys.executable, "-c", "pass"),
    ("status",),
    ("report",),
)


def main():
    shutil.rmtree(DIST, ignore_errors=True)
    own = os.path.join(ROOT, ".venv", "bin", "python")
    pyz = os.path.join(DIST, "drumbeat.pyz")
    with tempfile.TemporaryDirectory() as place:
        tools = make_tools(place)
        # The wheel is built from the sdist, as an index would.
        done([os.path.join(tools, "python"), "-m", "build", "--outdir", DIST, ROOT], quiet=True)
        (wheel,), (source,) = glob.glob(os.path.join(DIST, "*.whl")), glob.glob(os.path.join(DIST, "*.tar.gz"))
        done([os.path.join(tools, "twine"), "check", "--strict", wheel, source])
        done([own, "-m", "drumbeat.bundle.build", pyz])
        compare_with_source(wheel)
        python = os.path.join(place, "venv", "bin", "python")
        done([sys.executable, "-m", "venv", os.path.join(place, "venv")])
        done([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel])
        attempt("wheel", [os.path.join(place, "venv", "bin", "drumbeat")], place)
        attempt("drumbeat.pyz", [sys.executable, "-I", "-S", pyz], place)
        try_tools(place, tools, wheel)
        resolve_extras(tools, python, wheel)
    print(f"{source}\n{wheel}\n{pyz}")


def make_tools(place):
    """What builds, checks and installs packages, in an environment of its own; its bin folder."""
    tools = os.path.join(place, "tools")
    done([sys.executable, "-m", "venv", tools])
    pip = [os.path.join(tools, "bin", "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done([*pip, "build", "twine", "pipx", "uv"])
    return os.path.join(tools, "bin")


def try_tools(place, tools, wheel):
    """`pipx run`, `pipx install` and `uvx`, as people use command line tools today; each in an environment of its own."""
    attempt("uvx", [os.path.join(tools, "uvx"), "--from", wheel, "drumbeat"], place, TRIED[:2])
    names = ("PIPX_HOME", "PIPX_BIN_DIR", "PIPX_MAN_DIR")
    homes = {name: os.path.join(place, "pipx-home", name) for name in names}
    pipx, env = os.path.join(tools, "pipx"), {**os.environ, **homes}
    done([pipx, "run", "--spec", wheel, "drumbeat", "demo"], quiet=True, env=env, cwd=place)
    done([pipx, "install", wheel], quiet=True, env=env)
    attempt("pipx", [os.path.join(homes["PIPX_BIN_DIR"], "drumbeat")], place)


def resolve_extras(tools, python, wheel):
    """Every extra that users are told of names versions that exist together; nothing is installed."""
    for extra in ("torch", "cpu", "watch", "web", "docs"):
        wanted = f"drumbeat[{extra}] @ file://{wheel}"
        done([os.path.join(tools, "uv"), "pip", "install", "--quiet", "--dry-run", "--python", python, wanted])
    print("extras: torch, cpu, watch, web and docs resolve")


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

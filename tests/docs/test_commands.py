"""Every drumbeat line in README and docs is one that drumbeat takes, and every page is in the site."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tools.reference.__main__ import PAGES as MADE

from drumbeat.cli import COMMANDS, parser_for
from drumbeat.jobfile.job import job_from_text
from drumbeat.jobfile.site import site_from_text

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
START = re.compile(r"(?:^|\s)(?:python3 )?(?:\S*/)?drumbeat(?:\.pyz)? (?! )")


def lines(page):
    """Commands in fenced blocks: what stands after a `$`, or in a block without output."""
    for kind, text in FENCE.findall(page.read_text()):
        if kind in ("python", "yaml", "json", "dockerfile"):
            continue
        text = text.replace("\\\n", " ")
        shown = "$ " in text
        for line in text.splitlines():
            if shown != line.startswith("$ "):
                continue
            line = line[2:] if shown else line
            found = START.search(line)
            if (
                found
                and not line.lstrip().startswith("#")
                and (found.start() == 0 or line.split()[0] in ("srun", "python3"))
            ):
                yield line[found.end() :]


def words_of(line):
    line = re.split(r"\s(?:\||&&|>|2>|<)\s?|\s#\s", line)[0]
    return shlex.split(line.replace("[", "").replace("]", ""), comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_are_taken(page, capsys):
    for line in lines(page):
        words = words_of(line)
        if not words or "..." in words or words[0].endswith(("COMMAND", ":")):
            continue  # a form to be filled in, or a message of drumbeat's
        assert words[0] in COMMANDS or words[0].startswith("-"), f"{page.name}: drumbeat {line}"
        if words[0] not in COMMANDS:
            continue
        own = words[1 : words.index("--")] if "--" in words else words[1:]
        try:
            parser_for(words[0])[0].parse_args(own)
        except SystemExit as end:
            assert end.code == 0, f"{page.name}: drumbeat {line}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_job_files_and_profiles_are_valid(page):
    for kind, text in FENCE.findall(page.read_text()):
        if kind == "yaml" and re.search(r"^summary:", text, re.MULTILINE):
            site_from_text(text, "ours", page.name)
        elif kind == "yaml" and re.search(r"^(command|preset|expect|checks):", text, re.MULTILINE):
            job_from_text(text)


FILE = re.compile(r"[\w./-]+\.(?:py|sh|yaml|sbatch|log|out)\b")
YOURS = re.compile(
    r"(train\w*|main|run_clm)\.(py|sh)|job\.yaml|run\.sbatch|slurm-\d+\.out|order\.json"
)  # the reader's own


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "docs"], ids=lambda page: page.name)
def test_files_in_commands_exist(page):
    """Tutorials, how-tos and README: what a command names is here, is written by the page, or is plainly the reader's own."""
    text = page.read_text()
    for line in re.findall(r"^(?:\$ )?((?:python3? |\S*drumbeat(?:\.pyz)? |cp |sh |bash ).*)$", text, re.MULTILINE):
        for name in FILE.findall(line.split(" # ")[0]):
            written = re.search(r"(>|--html|--save) " + re.escape(name.removeprefix("./")), text)
            assert written or YOURS.fullmatch(name) or (ROOT / name).exists(), f"{page.name}: {line}"


def test_the_tutorial_about_batch_scripts_as_typed(tmp_path, drumbeat):
    """Every command of it that needs no cluster, with the output that the page shows."""
    page = (ROOT / "docs/howto/from-sbatch.md").read_text()
    script = (ROOT / "examples/run.sbatch").read_text()
    blocks = [text for _, text in FENCE.findall(page)]
    assert script in blocks
    (drumbeat.folder / "run.sbatch").write_text(script)
    shown = next(text for text in blocks if text.startswith("$ drumbeat lint"))
    assert drumbeat.here("lint", "run.sbatch").stdout.splitlines() == shown.splitlines()[1:]
    job = drumbeat.here("convert", "run.sbatch").stdout
    assert job == next(text for text in blocks if text.startswith("# From run.sbatch"))
    (drumbeat.folder / "job.yaml").write_text(job)
    rendered = drumbeat.here("plan", "--site", "olivia", "--render", "job.yaml").stdout
    for line in next(text for text in blocks if "#SBATCH --chdir" in text).splitlines():
        if not re.search(r"--(chdir|output)=", line):
            assert line in rendered.splitlines(), line


def shown(page, command):
    """What the page prints below a command, up to the next one."""
    text = (ROOT / "docs" / page).read_text().partition(f"$ {command}\n")[2]
    return re.split(r"^(?:\$ |```)", text, maxsplit=1, flags=re.MULTILINE)[0].splitlines()


@pytest.mark.parametrize("name", ["rdma", "tcp"])
def test_the_logs_of_the_howto_say_what_it_shows(name, drumbeat, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (drumbeat.folder / "examples").symlink_to(ROOT / "examples")
    command = f"diagnose examples/logs/{name}.log"
    printed = drumbeat.here(*command.split()).stdout.splitlines()
    assert [line.rstrip() for line in printed] == [
        line.rstrip() for line in shown("howto/rdma.md", f"drumbeat {command}")
    ]


def test_the_job_file_that_init_writes(drumbeat):
    loop = (
        "for epoch in range(3):\n    loss.backward()\n    optimizer.step()\n    print(f'epoch {epoch} loss {loss}')\n"
    )
    (drumbeat.folder / "train.py").write_text("import torch\n" + loop)
    (drumbeat.folder / "requirements.txt").write_text("torch\n")
    assert drumbeat.here("init").stdout.splitlines() == shown("howto/init.md", "drumbeat init")


def test_the_prediction_that_the_page_shows(drumbeat):
    line = next(line for line in lines(ROOT / "docs/predict.md") if "model=1b" in line)
    printed = drumbeat.here(*words_of(line)).stdout.splitlines()
    assert printed[:7] == shown("predict.md", f"drumbeat {line}")[:7]


def test_the_failure_that_the_page_shows(drumbeat, monkeypatch):
    """But for run ids, hosts and folders, which differ, and so where lines break."""
    monkeypatch.setenv("COLUMNS", "1000")  # no path is broken
    (drumbeat.folder / "examples").symlink_to(ROOT / "examples")
    flags = ("--name", "broken", "--nodes", 2, "--ranks-per-node", 2)
    assert drumbeat("run", *flags, "--", sys.executable, "examples/broken.py").returncode == 1
    texts = [
        drumbeat.here("diagnose", "broken").stdout,
        "\n".join(shown("howto/why-did-it-die.md", "drumbeat diagnose broken")),
    ]
    plain = [
        re.sub(r"\S*/examples/|broken-\d{8}-\d{6}-\w{4}| on \S+\)", "", re.sub(r"\s+", " ", text)) for text in texts
    ]
    assert plain[0].strip() == plain[1].strip()


@pytest.mark.parametrize("name", MADE)
def test_pages_made_from_the_code_are_current(name):
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert page == MADE[name](), "python -m tools.reference writes it"
    if name == "commands":
        assert all(f"## drumbeat {name}" in page for name in COMMANDS) and "`--table markdown\\|csv\\|latex`" in page


def test_the_site_stays_short():
    """Words of all pages; 10,000 of them are generated lists (codes, commands, variables, keys of a job)."""
    texts = {page: re.sub(r"\A---\n.*?\n---\n", "", page.read_text(), flags=re.DOTALL) for page in PAGES[1:]}
    words = {name: sum(1 for word in text.split() if re.search(r"\w", word)) for name, text in texts.items()}
    assert sum(words.values()) <= 35_000, sum(words.values())


LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


OUTSIDE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(page):
    """As mkdocs and GitHub make them of headings."""
    heads = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", OUTSIDE.sub("", page.read_text())):
        if "://" in link:
            continue
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}#{anchor}"


def test_every_page_is_reached_by_links():
    """From README and index.md on, and in the site's menu."""
    seen, ahead = set(), [ROOT / "README.md", ROOT / "docs/index.md"]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        links = {(page.parent / link).resolve() for link in LINK.findall(page.read_text()) if link.endswith(".md")}
        ahead += [link for link in links if link in PAGES and link not in seen]
    assert not [page.relative_to(ROOT).as_posix() for page in PAGES if page not in seen]
    menu = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(menu) == sorted({page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]})


def test_the_glossary_is_in_order():
    words = re.findall(r"^\| \*\*(.+?)\*\*", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert len(words) >= 20 and words == sorted(words, key=str.lower)


def test_no_internal_ids():
    ids = re.compile(r"\b[SE]\d-[0-9a-z]{1,2}\b|\b[Ii]ssue \d{1,2}\b|\brequirements? \d\.\d|\bdesign rule \d")
    for page in [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.yaml")]:
        assert not ids.findall(page.read_text()), page


def test_nothing_is_installed_from_an_index_under_our_name():
    """It is installed from its source tree; `pip install drumbeat` would bring somebody else's package, or none. Only
    base/problem.py may say it, of a drumbeat that came from an index."""
    told = re.compile(r"pipx? install\s+(?:-\S+\s+)*['\"]?drumbeat(?![\w-]*[./])")
    assert told.search("pip install 'drumbeat[web]'") and told.search("pip install drumbeat where")
    for page in [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.yaml")]:
        assert page.name == "problem.py" or not told.search(page.read_text()), page


def test_a_script_stays_usable_without_drumbeat(tmp_path):
    """The two forms that docs/metrics.md gives, in a Python that cannot import drumbeat."""
    page = (ROOT / "docs/metrics.md").read_text()
    section = page[page.index("## What the ranks need") : page.index("## One record")]
    guarded, bare = [text for kind, text in FENCE.findall(section) if kind == "python"]
    env = {"DRUMBEAT_METRICS": str(tmp_path / "metrics.jsonl"), "RANK": "3"}
    for text in (guarded, bare):
        subprocess.run([sys.executable, "-I", "-S", "-c", text], env=env, cwd=tmp_path, check=True, timeout=150)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert {**json.loads(line), "t": 0} == {"t": 0, "rank": 3, "kind": "step", "step": 1, "loss": 1.2}

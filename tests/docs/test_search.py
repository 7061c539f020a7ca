"""The site's own search finds the right page first for what newcomers type (questions.yaml).

mkdocs builds the site, and node runs its search worker: the JavaScript that the browser runs.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from drumbeat.base.data import parse_yaml

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".venv-docs/bin/python"
QUESTIONS = parse_yaml((ROOT / "tests/docs/questions.yaml").read_bytes())

pytestmark = pytest.mark.skipif(
    not PYTHON.exists() or not shutil.which("node"), reason="make docs-search: needs mkdocs and node"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    build = [PYTHON, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder]
    subprocess.run(build, cwd=ROOT, env=env, check=True, timeout=300)
    return folder


def search(site, questions):
    """Return the pages that are found for each question, best first."""
    asked = subprocess.run(
        ["node", ROOT / "tests/docs/search.js", site, *questions],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return dict(zip(questions, (line.split() for line in asked.stdout.split("\n"))))


def test_the_right_page_comes_first(site):
    assert len(QUESTIONS) >= 40 and all((ROOT / f"docs/{page}.md").exists() for page in QUESTIONS.values())
    found = search(site, [str(question) for question in QUESTIONS])
    wrong = {
        question: (f"not {page}", pages[:3])
        for (question, pages), page in zip(found.items(), QUESTIONS.values())
        if pages[:1] != [f"{page}.html"]
    }
    assert not wrong


def test_a_code_is_found(site):
    codes = ["gpu-xid", "nan-loss", "connect-failed", "rdma-not-used", "hang-asleep"]
    for code, pages in search(site, codes).items():
        assert "codes.html" in pages[:10], (code, pages[:10])


@pytest.mark.skipif(not shutil.which("chromium"), reason="make docs-search: needs chromium")
def test_the_search_box_works_from_disk_without_a_network(site):
    """A page opened by its path, with the question in its address; nothing may be loaded from elsewhere."""
    text = (site / "index.html").read_text()
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=.https?://", text)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000", "--dump-dom"]
    page = f"file://{site}/howto/rdma.html?q=out+of+memory"
    shown = subprocess.run(["chromium", *flags, page], capture_output=True, text=True, check=True, timeout=300).stdout
    links = re.findall(r'href="([^"#?]*)[^"]*" class="md-search-result__link', shown)
    assert links[:1] == [f"file://{site}/howto/out-of-memory.html"]

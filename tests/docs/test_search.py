"""The site's own search finds the right page first for what newcomers type (questions.yaml).

mkdocs builds the site, and node runs its search worker: the JavaScript that the browser runs.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".venv-docs/bin/python"
QUESTIONS = yaml.safe_load((ROOT / "tests/docs/questions.yaml").read_text())

pytestmark = pytest.mark.skipif(
    not PYTHON.exists() or not shutil.which("node"), reason="make docs-search: needs mkdocs and node"
)


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    build = [PYTHON, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", site]
    subprocess.run(build, cwd=ROOT, env=env, check=True, timeout=300)

    def ask(questions):
        asked = subprocess.run(
            ["node", ROOT / "tests/docs/search.js", site, *questions],
            check=True, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        return dict(zip(questions, (line.split() for line in asked.stdout.split("\n"))))

    return ask


def test_the_right_page_comes_first(search):
    assert len(QUESTIONS) == 40 and all((ROOT / f"docs/{page}.md").exists() for page in QUESTIONS.values())
    found = search([str(question) for question in QUESTIONS])
    wrong = {
        question: (f"not {page}", pages[:3])
        for (question, pages), page in zip(found.items(), QUESTIONS.values())
        if pages[:1] != [f"{page}.html"]
    }
    assert not wrong


def test_a_code_is_found(search):
    for code, pages in search(["gpu-xid", "nan-loss", "connect-failed", "rdma-not-used", "hang-asleep"]).items():
        assert "codes.html" in pages[:10], (code, pages[:10])

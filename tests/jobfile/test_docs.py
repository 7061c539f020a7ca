"""docs/job.md and docs/site.md are what the fields say; importing spec costs nothing but YAML."""

import subprocess
import sys
from pathlib import Path

import pytest
from tools.reference.jobfile import _EXAMPLE, _SITE_EXAMPLE, page

from drumbeat.jobfile.job import job_from_text
from drumbeat.jobfile.site import site_from_text

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.mark.parametrize("which", ["job", "site"])
def test_the_committed_page_is_the_generated_one(which):
    assert (DOCS / f"{which}.md").read_text() == page(which), "python -m tools.reference"


def test_the_pages_examples_are_right():
    assert job_from_text(_EXAMPLE).restarts == 2
    assert site_from_text(_SITE_EXAMPLE, "stairs", "stairs.yaml").nodes == 2


@pytest.mark.skipif(sys.version_info < (3, 10), reason="needs sys.stdlib_module_names of Python 3.10")
def test_no_third_party_module_but_yaml():
    code = (
        "import sys, pkgutil, importlib, drumbeat.jobfile as s; before = set(sys.modules)\n"
        "[importlib.import_module('drumbeat.jobfile.' + m.name) for m in pkgutil.iter_modules(s.__path__)]\n"
        "from drumbeat.jobfile.job import job_from_text; job_from_text('nodes: 1')\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(*(m for m in new if m not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    others = {name for name in done.stdout.split() if "cython" not in name}  # Cython's names come with yaml's C half
    assert "yaml" in others and others <= {"drumbeat", "yaml", "_yaml"}

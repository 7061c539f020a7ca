"""Every line of the threat model names the test that holds it, and that test is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_line_of_the_threat_model_names_an_existing_test():
    text = (ROOT / "measured" / "security.md").read_text()
    table = text.partition("## Who can do what")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.rsplit("|", 2)[1])
        assert named, f"no test: {row}"
        for path, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), f"{path} has no {name}"

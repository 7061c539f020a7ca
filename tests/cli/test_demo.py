"""`drumbeat demo`, which needs nothing but Python, and messages that name how drumbeat was installed."""

import json
from importlib import metadata

import pytest

from drumbeat.base.problem import pip_install


def test_the_demo_trains_one_model_on_four_ranks(drumbeat):
    done = drumbeat("demo")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "of 4: y = " in line]
    learned = {line.partition(": ")[2] for line in lines}
    assert len(lines) == 4 and len(learned) == 1, "four ranks, one model"
    assert "2 nodes, 4 ranks" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "url, words",
    [
        (
            "file:///tmp/my%20dist/drumbeat-0.1.0-py3-none-any.whl",
            "'/tmp/my dist/drumbeat-0.1.0-py3-none-any.whl[web]'",
        ),
        ("file:///src/drumbeat", "'/src/drumbeat[web]'"),
        ("https://x.org/drumbeat.whl", "'drumbeat[web] @ https://x.org/drumbeat.whl'"),
        (None, "'drumbeat[web]'"),
    ],
)
def test_the_command_that_adds_an_extra(url, words, monkeypatch):
    class Installed:
        def read_text(self, name):
            return json.dumps({"url": url}) if url else None

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    assert pip_install("web") == f"pip install {words}"


def test_where_nothing_is_installed(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert pip_install("web") == "pip install '.[web]' in drumbeat's source tree"

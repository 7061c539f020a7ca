"""What a member sends of its files stays in that member's folder, whatever it is called."""

import base64
import os

import pytest

from drumbeat.agent.wire.messages import FilePart, take
from drumbeat.runfolder.layout import NodeFolder


def part(name, text="x", first=True):
    return FilePart(name, base64.b64encode(text.encode()).decode(), first)


@pytest.mark.parametrize(
    "name",
    [
        "../../summary.json",
        "/etc/x",
        "attempt-0/../../x",
        "attempt-0/rank-0.out/../../../x",
        "..",
        "",
        "a\0b",
        "A",
        "x/y",
        ".x",
    ],
)
def test_no_name_leads_out_of_the_nodes_folder(tmp_path, name):
    folder = NodeFolder(str(tmp_path / "run" / "nodes" / "1"), 1)
    take(folder, part(name))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_pieces_add_up_and_links_are_not_followed(tmp_path):
    folder = NodeFolder(str(tmp_path / "nodes" / "1"), 1)
    take(folder, part("attempt-0/rank-4.out", "one "))
    take(folder, part("attempt-0/rank-4.out", "two", first=False))
    assert (tmp_path / "nodes" / "1" / "attempt-0" / "rank-4.out").read_text() == "one two"
    (tmp_path / "victim").write_text("mine")
    os.symlink(tmp_path / "victim", folder.at("facts.json"))
    with pytest.raises(OSError):
        take(folder, part("facts.json"))
    assert (tmp_path / "victim").read_text() == "mine"

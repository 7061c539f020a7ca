"""NCCL's log for ourselves: what it is set to, what is read as it grows, what the user still gets, what is kept."""

import pytest

from drumbeat.agent.watchers.nccl_log import Asked, LogFiles, private_log
from drumbeat.base.order import EnvVar

WARN = "n1:7:9 [0] transport/net_ib.cc:149 NCCL WARN NET/IB : Unable to open device mlx5_0"
INFO = "n1:7:9 [0] NCCL INFO Using network Socket"
VERSION = "NCCL version 2.27.3+cuda12.9"


def settings(environ=None, variables=()):
    made, asked = private_log(list(variables), environ or {}, "/local", "/logs")
    return {variable.name: variable.value for variable in made}, asked


def test_nothing_asked_for():
    made, asked = settings()
    assert made["NCCL_DEBUG"] == "INFO" and made["NCCL_DEBUG_SUBSYS"] == "INIT,ENV,NET,BOOTSTRAP"
    assert made["NCCL_DEBUG_FILE"] == "/local/nccl.%h.%p"
    assert not any(asked.wants(line) for line in (WARN, INFO, VERSION))


def test_what_the_user_asked_for_is_never_narrowed():
    made, asked = settings({"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_SUBSYS": "COLL,NET", "NCCL_DEBUG_FILE": "log.%h"})
    assert made["NCCL_DEBUG"] == "TRACE" and made["NCCL_DEBUG_SUBSYS"] == "INIT,ENV,NET,BOOTSTRAP,COLL"
    assert asked.file == "/logs/log.%h" and asked.wants(INFO)
    assert settings({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^COLL"})[0]["NCCL_DEBUG_SUBSYS"] == "ALL"
    assert settings({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "all"})[0]["NCCL_DEBUG_SUBSYS"] == "ALL"
    assert "TUNING" not in settings({"NCCL_DEBUG": "warn", "NCCL_DEBUG_SUBSYS": "TUNING"})[0]["NCCL_DEBUG_SUBSYS"]


def test_the_jobs_own_variables_count_and_each_name_stands_once():
    mine = [EnvVar("NCCL_DEBUG", "WARN", "as the job asks", "user"), EnvVar("A", "1", "as the job asks", "user")]
    made, asked = private_log(mine, {"NCCL_DEBUG": "INFO"}, "/local", "/logs")
    assert [variable.name for variable in made].count("NCCL_DEBUG") == 1 and made[0].name == "A"
    assert asked.level == "WARN" and "your WARN lines" in made[1].why


@pytest.mark.parametrize(
    "level,wanted", [("WARN", [WARN, VERSION]), ("VERSION", [VERSION]), ("INFO", [WARN, INFO, VERSION]), ("NONE", [])]
)
def test_the_user_gets_the_level_that_was_asked_for(level, wanted):
    assert [line for line in (WARN, INFO, VERSION) if Asked(level).wants(line)] == wanted


class Files:
    def __init__(self, tmp_path, asked=None, wanted=True):
        self.folder, self.kept = tmp_path / "local", tmp_path / "kept"
        self.folder.mkdir()
        self.kept.mkdir()
        self.out = tmp_path / "rank.out"
        self.log = LogFiles(
            str(self.folder), asked or Asked(), {31: 4}.get, lambda rank: str(self.out), lambda: wanted, "nodes/1"
        )  # fmt: skip

    def write(self, text, pid=31):
        with (self.folder / f"nccl.n1.{pid}").open("a") as file:
            file.write(text)


def test_lines_are_seen_once_whole_and_with_their_place(tmp_path):
    files = Files(tmp_path)
    assert files.log.poll(0.0) == []
    files.write(f"{VERSION}\n{INFO[:10]}")
    (first,) = files.log.poll(1.0)
    assert first.data == {"rank": 4, "stream": "nccl", "file": "nodes/1/nccl-rank4.log", "number": 1, "text": VERSION}
    files.write(INFO[10:] + "\n")
    (second,) = files.log.poll(2.0)
    assert (second.data["number"], second.data["text"]) == (2, INFO)
    assert files.log.poll(3.0) == []
    files.write("the end")
    assert [saw.data["text"] for saw in files.log.poll(4.0, final=True)] == ["the end"]


def test_a_process_of_no_known_rank_is_read_too(tmp_path):
    files = Files(tmp_path)
    files.write(INFO + "\n", pid=77)
    (saw,) = files.log.poll(1.0)
    assert saw.data["rank"] is None and saw.data["file"] == "nodes/1/nccl-77.log"


def test_asked_lines_go_to_the_users_file_or_to_standard_output(tmp_path):
    files = Files(tmp_path, Asked("WARN", str(tmp_path / "mine.%h.%p")))
    files.write(f"{INFO}\n{WARN}\n")
    files.log.poll(1.0)
    assert (tmp_path / "mine.n1.31").read_text() == WARN + "\n"
    files.log.asked = Asked("INFO")
    files.write(INFO + "\n")
    files.log.poll(2.0)
    assert files.out.read_text() == INFO + "\n"


def test_when_nobody_wants_lines_the_user_still_gets_them(tmp_path):
    files = Files(tmp_path, Asked("WARN"), wanted=False)
    files.write(WARN + "\n")
    assert files.log.poll(1.0) == [] and files.out.read_text() == WARN + "\n"


def test_both_ends_of_a_large_file_are_kept(tmp_path):
    files = Files(tmp_path)
    files.write("first\n" + "x" * (3 << 20) + "\nlast\n")
    files.log.poll(1.0)
    files.log.keep(str(files.kept))
    kept = (files.kept / "nccl-rank4.log").read_text()
    assert kept.startswith("first\n") and kept.endswith("last\n") and "bytes are left out" in kept
    assert len(kept) < (2 << 20) + 100

"""`on-start` runs once before all ranks, and what it exports reaches them."""

import json
import subprocess
import sys

import pytest

TEXT = """
echo x >> times
export GIVEN="two words $(wc -l < times)"
NOT_GIVEN=1
sleep 30 &
export LEFT=$!
"""
SHOW = "import os; open('rank-' + os.environ['RANK'], 'w').write(repr([os.environ.get(n) for n in ('GIVEN', 'NOT_GIVEN')]))"


def write(drumbeat, text, **more):
    job = drumbeat.folder / "job.yaml"
    job.write_text(json.dumps({"on-start": text, "command": [sys.executable, "-c", SHOW], **more}))
    return str(job)


def test_it_runs_once_and_its_exports_reach_every_rank(drumbeat):
    done = drumbeat("run", write(drumbeat, TEXT, **{"nodes": 2, "ranks-per-node": 1, "restarts": 1}))
    assert done.returncode == 0, done.stderr
    assert [(drumbeat.folder / f"rank-{rank}").read_text() for rank in range(2)] == [repr(["two words 1", None])] * 2
    assert (drumbeat.folder / "times").read_text() == "x\n"


@pytest.mark.parametrize(("text", "code"), [("false\ntouch more", 1), ("exit 7", 7), ("set +e; false\nexit 0", 0)])
def test_no_rank_starts_if_it_does_not_reach_its_end(text, code, drumbeat):
    done = drumbeat("run", write(drumbeat, text))
    assert done.returncode == code and f"on-start ended the job (exit {code})" in done.stderr
    assert not list(drumbeat.folder.glob("rank-*")) and not (drumbeat.folder / "more").exists()


def test_the_batch_script_runs_it_before_the_agents(drumbeat, tmp_path):
    job = write(drumbeat, "export GIVEN='a\"b'\nexport BASE=elsewhere\nfalse || true", time="1h")
    text = drumbeat("plan", "--render", "--site", "slurm", job).stdout
    part = text[text.index("# The job's on-start") : text.index("# by this token")]
    done = subprocess.run(
        ["bash", "-c", f'RUN=/r\n{part}\nprintf "%s|%s|%s" "$GIVEN" "$BASE" "$(env | grep -c ^GIVEN=)"'],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    given, base, exported = done.stdout.split("|")
    assert (given, exported) == ('a"b', "1") and base.startswith("/") and not done.stderr
    ends = subprocess.run(["bash", "-c", part.replace("false || true", "exit 5") + "\necho on"], capture_output=True)
    assert ends.returncode == 5 and b"on-start ended the job (exit 5)" in ends.stderr and not ends.stdout


def test_it_is_refused_where_each_node_starts_by_itself(drumbeat):
    done = drumbeat("plan", "--render", "--site", "kubernetes", write(drumbeat, "true", container="a/b:1"))
    assert done.returncode == 2 and "on-start: Kubernetes runs nothing before all nodes" in done.stderr

"""Bad input: one clear message, exit code 2, nothing started and nothing half-written."""

import os
import subprocess
import sys

import pytest


def test_arguments_that_are_not_utf_8_reach_the_ranks(drumbeat):
    code = "import os, sys; print([os.fsencode(each) for each in sys.argv[1:]])"
    done = drumbeat("run", "--", sys.executable, "-c", code, os.fsdecode(b"a\xff.txt"))
    assert done.returncode == 0 and r"[b'a\xff.txt']" in done.stdout, done.stderr


def refused(drumbeat, *words, says):
    done = drumbeat.here(*words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2, done.stderr
    assert not drumbeat.runs(), "nothing half-written"


@pytest.mark.parametrize(
    "text,says",
    [
        (b"", "empty"),
        (b"{unclosed", "job.yaml"),
        (b"\x00\x01\x02", "job.yaml"),
        (b"command: x\nnode: 2\n", "job.yaml:2: unknown key 'node'"),
        (b"command: x\nnodes: 0\n", "job.yaml:2"),
        (b"command: x\nnodes: two\n", "job.yaml:2"),
        (b"nodes: 1\n", "no command"),
        pytest.param(b"\xff\xfe" * 5_000_000, "job.yaml", id="10 MB of no text"),
    ],
)
def test_job_file(drumbeat, text, says):
    (drumbeat.folder / "job.yaml").write_bytes(text)
    refused(drumbeat, "run", "job.yaml", says=says)


@pytest.mark.parametrize(
    "words,says",
    [
        (("missing.yaml",), "missing.yaml"),
        (("--site", "atlantis", "--", "true"), "no site 'atlantis'"),
        (("--nodes", "0", "--", "true"), "--nodes"),
        (("--nodes", "-1", "--", "true"), "--nodes"),
        (("--ranks-per-node", "4000", "--", "true"), "--oversubscribe"),
        (("--", "no-such-command-here"), "command not found: no-such-command-here"),
        (("--",), "no command"),
        (("--nodes", "2", "--node-rank", "1", "--", "true"), "--master"),
        (("--nodes", "2", "--node-rank", "1", "--master", "localhost", "--", "true"), "localhost cannot be the master"),
        (("--nodes", "2", "--node-rank", "2", "--master", "h", "--", "true"), "node rank 2 of 2 nodes"),
        (("--nodes", "2", "--node-rank", "-1", "--master", "h", "--", "true"), "count from 0"),
        (("--nodes", "2", "--master", "h", "--", "true"), "--node-rank"),
        (("--workdir", "/no/such/place", "--", "true"), "/no/such/place"),
        (("--env", "HF_TOKEN=abc", "--", "true"), "HF_TOKEN"),
    ],
)
def test_flags(drumbeat, words, says):
    refused(drumbeat, "run", *words, says=says)


@pytest.mark.parametrize(
    "job",
    [
        {"PBS_JOBID": "12.server", "PBS_NODEFILE": "nodes"},
        {"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "n1 2 n2 2"},
    ],
)
def test_a_batch_job_of_several_nodes_is_not_run_on_one(drumbeat, monkeypatch, job):
    (drumbeat.folder / "nodes").write_text("n1\nn1\nn2\n")
    for name, value in job.items():
        monkeypatch.setenv(name, str(drumbeat.folder / value) if value == "nodes" else value)
    refused(drumbeat, "run", "--nodes", "2", "--", "true", says="job has 2 nodes, and from its shell")
    refused(drumbeat, "run", "--", "true", says="drumbeat run --hosts n1,n2 reaches them by ssh; --site localhost")


def test_unwritable_run_folder(drumbeat):
    (drumbeat.folder / "file").write_text("")
    refused(drumbeat, "run", "--runs", "file/runs", "--", "true", says="choose another place with --runs")


def test_full_disk(drumbeat, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    script = 'mount -t tmpfs -o size=64k none "$1" && shift && exec "$@"'
    place = tmp_path / "small"
    place.mkdir()
    argv = ["unshare", "-m", "sh", "-c", script, "x", str(place), sys.executable, "-m", "drumbeat"]
    done = subprocess.run(
        [*argv, "run", "--runs", str(place / "runs"), "--", "true"], capture_output=True, text=True, cwd=drumbeat.folder
    )
    if "mount" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr}")
    assert done.returncode == 2 and "No space left" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_limit_of_open_files_that_is_too_low_is_one_clear_end(drumbeat):
    """The agent keeps descriptors to end with: its ranks, its words and its record need some."""
    argv = f"ulimit -n 20; exec {sys.executable} -m drumbeat run --ranks-per-node 2 --name few -- true"
    done = subprocess.run(["bash", "-c", argv], cwd=drumbeat.folder, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode and "Traceback" not in done.stderr, done.stderr
    assert "failed     no more files can be opened on node 0" in done.stderr and "ulimit -n" in done.stderr, done.stderr

"""What cannot run is refused with one clear message, and nothing stays queued or behind."""

import shutil

import pytest


@pytest.fixture
def nothing_queued(oar):
    before = set(oar.cluster.out("squeue", "-h", "-o", "%i").split())
    folders = set(oar.home.glob("runs/*"))
    yield
    assert set(oar.cluster.out("squeue", "-h", "-o", "%i").split()) <= before
    assert set(oar.home.glob("runs/*")) == folders


@pytest.mark.usefixtures("nothing_queued")
@pytest.mark.parametrize(
    ("keys", "what", "fix"),
    [
        ({"partition": "nowhere"}, "invalid partition specified: nowhere", "sinfo -s lists the partitions"),
        ({"gpus": 64}, "Requested node configuration is not available", "fewer GPUs"),
        ({"nodes": 400}, "more processors requested than permitted", "fewer nodes"),
        (
            {"container": "/no/such.sif", "container-runtime": "apptainer"},
            "the image /no/such.sif does not exist",
            "pull it",
        ),
        (
            {"container": "/etc/hostname", "container-runtime": "apptainer"},
            "/etc/hostname is not an image",
            "apptainer pull",
        ),
        ({"container": "/no/such.sif"}, "no container runtime is known for slurm", "container-runtime"),
        ({"command": "no-such-program"}, "command not found: no-such-program", ""),
        ({"account": '"two words"'}, "cannot be one word of an sbatch line", ""),
        ({"site": "localhost", "array": "0-3"}, "the queue of this machine has no arrays", ""),
        ({"launcher": "task"}, "'task' is not one of", "did you mean 'tasks'"),
    ],
)
def test_refused(oar, keys, what, fix):
    done = oar("submit", oar.job("refused", **{"command": "python3 -V", **keys}))
    assert done.returncode == 2
    assert what.lower() in done.stderr.lower() and fix in done.stderr
    told = [line for line in done.stderr.splitlines() if not line.startswith("warning")]
    assert done.stdout == "" and "Traceback" not in done.stderr and len(told) <= 3


@pytest.mark.usefixtures("nothing_queued")
def test_full_disk_at_the_desk(oar):
    small = oar.home / "small"
    before = sorted(small.iterdir())
    (small / "fill").write_bytes(bytes(shutil.disk_usage(small).free - (100 << 10)))
    done = oar("submit", oar.job("full", command="python3 -V", runs=small))
    (small / "fill").unlink()
    assert done.returncode == 2 and "No space left on device" in done.stderr and "--runs" in done.stderr
    assert sorted(small.iterdir()) == before


@pytest.mark.usefixtures("nothing_queued")
def test_a_limit_that_slurm_chooses_and_leaves_no_time(oar):
    job = oar.job("short", command="python3 -V")
    job.write_text(job.read_text().replace("time: 10m\n", ""))
    done = oar("submit", job, env={"SBATCH_TIMELIMIT": "1"})
    assert done.returncode == 2 and "Slurm's own limit for jobs without time: 60 s" in done.stderr
    oar.cluster.out("scontrol", "update", "PartitionName=debug", "DefaultTime=00:01:00")
    try:
        done = oar("submit", job)
    finally:
        oar.cluster.out("scontrol", "update", "PartitionName=debug", "DefaultTime=UNLIMITED")
    assert done.returncode == 2 and "leave no time to train" in done.stderr


def test_the_jobs_own_time_wins_over_an_exported_limit(oar):
    done = oar("submit", oar.job("timed", command="python3 -V", time="10m"), env={"SBATCH_TIMELIMIT": "1"})
    number = int("".join(filter(str.isdigit, done.stdout.split("slurm://")[-1].split()[0].rpartition("/")[2])))
    assert oar.cluster.job(number)["TimeLimit"] == "00:10:00"
    oar.cluster.out("scancel", str(number))

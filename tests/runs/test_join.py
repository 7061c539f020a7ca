"""Without a scheduler, typed once on each machine: two hosts are two network namespaces with a wire between them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from drumbeat.runfolder.layout import ask_to_stop
from tests.conftest import need_torch, wait_for
from tests.runs.programs import SAVES

PY = sys.executable

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"),
    reason="network namespaces need root and iproute2 (apt install iproute2)",
)


@pytest.fixture(scope="module")
def hosts():
    """Two namespaces, 10.91.0.9 and 10.91.0.10; their names as command prefixes."""
    names = [f"db{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        wire = [
            "ip",
            "link",
            "add",
            "eth7",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "eth7",
            "netns",
            names[1],
        ]
        subprocess.run(wire, check=True, capture_output=True)
        for name, address in zip(names, ("10.91.0.9/24", "10.91.0.10/24")):
            for words in (
                ("addr", "add", address, "dev", "eth7"),
                ("link", "set", "eth7", "up"),
                ("link", "set", "lo", "up"),
            ):
                subprocess.run(["ip", "-n", name, *words], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
    yield [("ip", "netns", "exec", name) for name in names]
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False)


def on_both(drumbeat, hosts, *command, flags=(), second=None, master="10.91.0.9"):
    """Type the same line on both; exit codes and outputs."""
    started = []
    for node, prefix in enumerate(hosts):
        words = ("run", "--nodes", 2, "--node-rank", node, "--master", master, *flags, "--", *command)
        started.append(drumbeat.start(*(second or words if node else words), prefix=prefix))
    outputs = [process.communicate(timeout=330)[0] for process in started]
    return [process.returncode for process in started], outputs


def test_two_machines_join_one_run(drumbeat, hosts):
    code = "import os; print('I am', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], os.environ['MASTER_ADDR'])"
    codes, outputs = on_both(drumbeat, hosts, PY, "-c", code, flags=("--ranks-per-node", 2))
    assert codes == [0, 0], outputs
    assert "I am 0 of 4 10.91.0.9" in outputs[0] and "I am 3 of 4 10.91.0.9" in outputs[1]
    assert "I am 2" not in outputs[0], "each machine shows its own ranks"
    peers = json.loads((drumbeat.run_folder() / "peers.json").read_text())
    assert [peer["address"] for peer in peers["nodes"]] == ["10.91.0.9", "10.91.0.10"]


def test_gloo_across_both(drumbeat, hosts):
    need_torch("needs torch")
    code = (
        "import torch, torch.distributed as d; d.init_process_group('gloo'); x = torch.ones(1) * (d.get_rank() + 1);"
        "d.all_reduce(x); print('sum', x.item()); d.destroy_process_group()"
    )
    codes, outputs = on_both(drumbeat, hosts, PY, "-c", code)
    assert codes == [0, 0] and "sum 3.0" in outputs[0] and "sum 3.0" in outputs[1], outputs


def test_exported_names_win(drumbeat, hosts):
    env = {**os.environ, "MASTER_ADDR": "10.91.0.9", "NNODES": "2"}
    started = [
        drumbeat.start("run", "--", PY, "-c", "print('up')", env={**env, "NODE_RANK": str(node)}, prefix=prefix)
        for node, prefix in enumerate(hosts)
    ]
    outputs = [process.communicate(timeout=330)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs


def test_a_failure_on_one_machine_ends_the_other(drumbeat, hosts):
    code = "import os, sys, time; sys.exit(5) if os.environ['RANK'] == '1' else time.sleep(60)"
    codes, outputs = on_both(drumbeat, hosts, PY, "-c", code)
    assert codes == [5, 5], outputs
    assert json.loads((drumbeat.run_folder() / "summary.json").read_text())["failure"]["rank"] == 1


@pytest.mark.parametrize("rank, codes", [(0, [5, 0]), (1, [5, 5])])
def test_a_pod_fails_where_its_ranks_failed(drumbeat, hosts, rank, codes):
    code = f"import os, sys, time; sys.exit(5) if os.environ['RANK'] == '{rank}' else time.sleep(60)"
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_NNODES": "2", "MASTER_ADDR": "10.91.0.9", "MASTER_PORT": "29571"}
    pod |= {"RUNAI_JOB_NAME": f"job-{rank}", "DRUMBEAT_TOKEN": "t" * 40}
    started = [
        drumbeat.start("run", "--", PY, "-c", code, env={**os.environ, **pod, "RANK": str(node)}, prefix=prefix)
        for node, prefix in enumerate(hosts)
    ]
    outputs = [process.communicate(timeout=330)[0] for process in started]
    assert [process.returncode for process in started] == codes, outputs


def test_a_repeated_node_rank_is_refused_by_name(drumbeat, hosts):
    flags = ("--nodes", 3, "--master", "10.91.0.9")
    command = ("--", PY, "-c", "pass")
    lead = drumbeat.start("run", *flags, "--node-rank", 0, *command, prefix=hosts[0])
    drumbeat.start("run", *flags, "--node-rank", 1, *command, prefix=hosts[1])
    wait_for(lambda: any('"peer":1' in path.read_text() for path in drumbeat.folder.glob("runs/*/events.jsonl")))
    second = drumbeat.start("run", *flags, "--node-rank", 1, *command, prefix=hosts[1])
    said = second.communicate(timeout=150)[0]
    assert second.returncode == 69 and "node rank 1 is taken by" in said, said
    assert lead.wait(120) == 69, "this run's own node is refused: the muster cannot succeed"


def test_another_job_on_the_second_machine_is_refused_by_name(drumbeat, hosts):
    other = (
        "run",
        "--nodes",
        2,
        "--node-rank",
        1,
        "--master",
        "10.91.0.9:61556",
        "--name",
        "python3",
        "--",
        PY,
        "-c",
        "other",
    )
    lead = drumbeat.start(
        "run", "--nodes", 2, "--node-rank", 0, "--master", "10.91.0.9:61556", "--name", "python3", "--", PY, "-c", "pass",
        prefix=hosts[0],
    )  # fmt: skip
    second = drumbeat.start(*other, prefix=hosts[1])
    said = second.communicate(timeout=150)[0]
    assert second.returncode == 69 and "belongs to another run than python3-" in said and ": command is" in said, said
    assert lead.poll() is None


def test_another_token_is_refused(drumbeat, hosts):
    flags = ("run", "--nodes", 2, "--master", "10.91.0.9:61555")
    env = {**os.environ, "DRUMBEAT_TOKEN": "x" * 32}
    drumbeat.start(*flags, "--node-rank", 0, "--", PY, "-c", "pass", prefix=hosts[0])
    second = drumbeat.start(*flags, "--node-rank", 1, "--", PY, "-c", "pass", prefix=hosts[1], env=env)
    time.sleep(3)
    assert second.poll() is None, "it goes on looking for its own lead"
    second.terminate()
    said = second.communicate(timeout=150)[0]
    assert second.returncode != 0, said


def test_without_shared_storage_the_lead_gathers(drumbeat, hosts, tmp_path):
    """The second machine sees another file system in the place of the run folder."""
    code = "import os, sys; print('out of', os.environ['RANK']); print('err', file=sys.stderr)"
    runs = drumbeat.folder / "runs"
    runs.mkdir()
    hide = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$1" && shift && exec "$@"', "x", str(runs))
    codes, outputs = on_both(drumbeat, [hosts[0], (*hosts[1], *hide)], PY, "-c", code)
    assert codes == [0, 0], outputs
    gathered = drumbeat.run_folder() / "nodes" / "1"
    assert (gathered / "attempt-0" / "rank-1.out").read_text() == "out of 1\n"
    assert (gathered / "facts.json").exists() and (gathered / "events.jsonl").exists()


def test_two_runs_at_once_do_not_disturb_each_other(drumbeat, hosts):
    """Same user, token, name and first machine, so the same candidate ports: each node finds the lead of its own run."""

    def node(rank, text):
        flags = ("--nodes", 2, "--node-rank", rank, "--master", "10.91.0.9", "--name", "same", "--ranks-per-node", 1)
        return drumbeat.start("run", *flags, "--", PY, "-c", f"print('I am {text}')", prefix=hosts[rank])

    leads = [node(0, "first")]
    wait_for(lambda: leads_of(drumbeat) == 1, what="the first lead")
    leads.append(node(0, "second"))
    wait_for(lambda: leads_of(drumbeat) == 2, what="the second lead")
    second = node(1, "second")
    said = second.communicate(timeout=150)[0]
    assert second.returncode == 0 and "I am second" in said, said
    assert "belongs to another run than same-" in said, "the first run's lead has the first port"
    assert leads[0].poll() is None, "a node of another run does not end this one"
    assert "I am first" in node(1, "first").communicate(timeout=150)[0]
    outputs = [lead.communicate(timeout=150)[0] for lead in leads]
    assert [lead.returncode for lead in leads] == [0, 0], outputs
    assert "I am first" in outputs[0] and "I am second" in outputs[1]


def leads_of(drumbeat):
    return sum(path.stat().st_size > 0 for path in drumbeat.folder.glob("runs/*/events.jsonl"))


def task(drumbeat, hosts, rank, *command):
    """One task per rank, with the variables that mpirun gives it: task `rank` of two nodes with two tasks each."""
    env = {
        **os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2), "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "10.91.0.9",
        "PMIX_NAMESPACE": str(drumbeat.folder),
    }  # fmt: skip
    return drumbeat.start("run", "--launcher", "tasks", "--", *command, env=env, prefix=hosts[rank // 2])


def test_two_nodes_with_two_tasks_each_end_quietly(drumbeat, hosts):
    code = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    tasks = [task(drumbeat, hosts, rank, PY, "-c", code) for rank in range(4)]
    outputs = [each.communicate(timeout=150)[0] for each in tasks]
    assert [each.returncode for each in tasks] == [0] * 4, outputs
    text = "".join(outputs)
    assert all(f"rank {rank} of 4" in text for rank in range(4)), text
    assert "Traceback" not in text and "Error" not in text, text
    assert json.loads((drumbeat.run_folder() / "summary.json").read_text())["outcome"] == "finished"


@pytest.mark.parametrize("by_file", [True, False], ids=["stop file", "signal"])
def test_a_node_that_waits_for_its_tasks_obeys_a_stop(drumbeat, hosts, by_file):
    lead = task(drumbeat, hosts, 0, "true")
    wait_for(lambda: leads_of(drumbeat), what="the lead")
    if by_file:
        ask_to_stop(str(drumbeat.run_folder() / "stop"), "CANCEL", "the user cancels")
    else:
        lead.terminate()
    text = lead.communicate(timeout=150)[0]
    assert lead.returncode == 128 + signal.SIGTERM and "Traceback" not in text, text
    assert json.loads((drumbeat.run_folder() / "summary.json").read_text())["outcome"] == "cancelled"


def test_a_partitioned_node_saves_and_ends(drumbeat, hosts):
    """The wire is cut, no connection closes: the lead gives the node up, and the node its lead, each by itself."""
    wire = ("ip", "-n", hosts[1][-1], "link", "set", "eth7")
    flags = ("run", "--nodes", 2, "--master", "10.91.0.9", "--stop-grace", "10s")
    started = [
        drumbeat.start(*flags, "--node-rank", node, "--", PY, "-c", SAVES, prefix=prefix)
        for node, prefix in enumerate(hosts)
    ]
    wait_for(lambda: len(list(drumbeat.folder.glob("up-*"))) == 2, 180, "the ranks")
    try:
        subprocess.run([*wire, "down"], check=True)
        outputs = [process.communicate(timeout=180)[0] for process in started]
    finally:
        subprocess.run([*wire, "up"], check=True)
    assert [process.returncode for process in started] == [69, 69], outputs
    assert (drumbeat.folder / "saved-0").exists() and (drumbeat.folder / "saved-1").exists()
    assert "the lead has been silent for" in outputs[1] and "node 1" in outputs[0], outputs
    summary = json.loads((drumbeat.run_folder() / "summary.json").read_text())
    assert summary["failure"]["code"] == "node-lost" and summary["failure"]["node"] == 1

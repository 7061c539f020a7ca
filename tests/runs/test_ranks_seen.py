"""What counts as a rank, which ranks are one training, and which rank has failed although it has not ended: real processes."""

import json
import os
import shutil
import sys

import pytest

from drumbeat.base.signals import EXIT_DOUBTFUL
from tests.conftest import need_torch, wait_for
from tests.runs import little_torch
from tests.runs.test_join import hosts  # noqa: F401

PY = sys.executable


def events(drumbeat):
    files = [run / "events.jsonl" for run in drumbeat.runs()]
    lines = [line for path in files if path.exists() for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def findings(drumbeat, code):
    return [
        each["finding"] for each in events(drumbeat) if each["kind"] == "finding" and each["finding"]["code"] == code
    ]


def worlds(drumbeat):
    verdicts = [each["verdict"] for each in events(drumbeat) if each["kind"] == "verdict"]
    return [each for each in verdicts if each["check"] == "world"]


HELPERS = """
import os, subprocess, sys, time

erased = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
helpers = [subprocess.Popen(["sleep", "600"], env=erased) for _ in range(2)]
step = 0
while not os.path.exists("enough"):
    step += 1
    print(f"step {step} loss {1 / step:.4f}", flush=True)
    time.sleep(0.2)
for helper in helpers:
    helper.kill()
"""


def test_helpers_with_a_part_of_their_ranks_identity_do_not_end_the_run(drumbeat):
    (drumbeat.folder / "train.py").write_text(HELPERS)
    (drumbeat.folder / "job.yaml").write_text(json.dumps({"command": [PY, "train.py"], "checks": {"world": "stop"}}))
    run = drumbeat.start("run", "job.yaml")
    wait_for(lambda: worlds(drumbeat) or run.poll() is not None, what="a verdict about the world")
    (drumbeat.folder / "enough").touch()
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert [each["answer"] for each in worlds(drumbeat)] == ["as planned"]


WORLD = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
step, go = 0, torch.ones(1)
while go.item():
    step += 1
    if dist.get_rank() == 0:
        go = torch.tensor([0.0 if os.path.exists("enough") else 1.0])
        print(f"step {step} loss {1 / step:.4f}", flush=True)
    dist.broadcast(go, 0)
dist.barrier()
time.sleep(1)  # for the others to pass it
os._exit(0)  # when the interpreter ends, threads of gloo may abort it
"""


# The same with the small torch in place of the real one, which takes each process seconds of CPU time to import.
LITTLE_WORLD = """
import os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    listener = socket.create_server(where)
    peers = [listener.accept()[0] for _ in range(size - 1)]
while rank:
    try:
        peers = [socket.create_connection(where)]
        break
    except OSError:
        time.sleep(0.05)
step, go = 0, b"y"
while go == b"y":
    step += 1
    if rank == 0:
        go = b"n" if os.path.exists("enough") else b"y"
        print(f"step {step} loss {1 / step:.4f}", flush=True)
        time.sleep(0.05)
    for peer in peers:
        peer.sendall(go * 20000)
    read = [peer.recv(20000, socket.MSG_WAITALL) for peer in peers]
    go = go if rank == 0 else read[0][:1]
time.sleep(1)  # for the others to pass it
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"),
    reason="network namespaces need root and iproute2 (apt install iproute2)",
)
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.proof)], ids=["little", "script"])
def test_torchrun_with_a_pods_number_is_not_a_rank(drumbeat, hosts, tmp_path, real):  # noqa: F811
    """Two pods of Run:ai: each has its place in RANK, which torchrun inherits and its workers do not."""
    environ = {**os.environ, "PATH": f"{os.path.dirname(PY)}:{os.environ['PATH']}"}
    if real:
        need_torch("needs torch")
    else:
        library, programs = little_torch.install(tmp_path / "little", PY)
        environ.update(PYTHONPATH=f"{library}:{os.environ['PYTHONPATH']}", PATH=f"{programs}:{environ['PATH']}")
    (drumbeat.folder / "train.py").write_text(WORLD if real else LITTLE_WORLD)
    (drumbeat.folder / "run.sh").write_text(
        "#!/bin/bash\ntorchrun --nproc-per-node 2 --nnodes $PET_NNODES --node_rank $RANK --master_addr 10.91.0.9 "
        "--master_port 29617 train.py\n"
    )
    pods = []
    for node, prefix in enumerate(hosts):
        pod = {
            "RANK": str(node), "WORLD_SIZE": "2", "PET_NNODES": "2", "RUNAI_NUM_OF_GPUS": "2", "MASTER_ADDR": "10.91.0.9",
            "MASTER_PORT": "29617", "DRUMBEAT_TOKEN": "a" * 32,
        }  # fmt: skip
        words = ["torchrun", "--nproc-per-node", "2", "--nnodes", "2", "--node_rank", str(node)]
        words += ["--master_addr", "10.91.0.9", "--master_port", "29617", "train.py"]
        flags = ("--ranks-per-node", 2, "--launcher", "once") if real else ()
        command = ("bash", "run.sh") if real else words
        pods.append(drumbeat.start("run", *flags, "--", *command, env={**environ, **pod}, prefix=prefix))
    ended = [False]

    def seen():
        ended[0] = any(pod.poll() is not None for pod in pods)
        return ended[0] or any(each["answer"] == "as planned" for each in worlds(drumbeat))

    wait_for(seen, what="one world")
    (drumbeat.folder / "enough").touch()
    outputs = [pod.communicate(timeout=330)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0] and not ended[0], outputs
    answers = [
        (each["answer"], each["count"]) for each in worlds(drumbeat)
    ]  # ranks that start slowly are unknown before
    assert answers[-1] == ("as planned", 4) and {answer for answer, _ in answers[:-1]} <= {"unknown"}, outputs
    assert "affinity mismatch" not in outputs[0] and "mismatch: 0/2" not in outputs[0], outputs[0]


COPIES = """
import os
while not os.path.exists("enough"):
    sum(number * number for number in range(100_000))
"""


def test_copies_of_one_training_that_print_nothing_are_noticed_while_they_run(drumbeat):
    (drumbeat.folder / "train.py").write_text(COPIES)
    run = drumbeat.start("run", "--ranks-per-node", 2, "--", PY, "train.py")
    wait_for(lambda: findings(drumbeat, "ranks-never-joined"), what="the warning")
    (drumbeat.folder / "enough").touch()
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert (
        "warning    2 ranks are not connected so far: unless they connect later, they are 2 copies of one training"
        in said
    )
    assert "ended before connections" not in said


GROUPS = """
import os, socket, time
rank = int(os.environ["RANK"])
place = f"port-{rank // 2}"
if rank % 2 == 0:
    listener = socket.create_server(("127.0.0.1", 0))
    open(place + ".new", "w").write(str(listener.getsockname()[1]))
    os.replace(place + ".new", place)
    peer = listener.accept()[0]
else:
    while not os.path.exists(place):
        time.sleep(0.02)
    peer = socket.create_connection(("127.0.0.1", int(open(place).read())))
step = 0
while not os.path.exists("enough"):
    step += 1
    print(f"step {step} loss {1 / step:.4f}", flush=True)
    try:
        peer.sendall(b"x" * 5000)
        peer.recv(5000, socket.MSG_WAITALL)
    except OSError:
        break  # it has seen that it is enough
    time.sleep(0.2)
"""


@pytest.mark.parametrize("level, code", [("warn", 0), ("stop", EXIT_DOUBTFUL)])
def test_two_groups_that_train_apart_are_told_and_doubtful_where_one_world_is_asked_for(drumbeat, level, code):
    (drumbeat.folder / "train.py").write_text(GROUPS)
    (drumbeat.folder / "job.yaml").write_text(f"checks: {{world: {level}}}\ncommand: {PY} train.py\n")
    run = drumbeat.start("run", "job.yaml", "--ranks-per-node", 4, "--oversubscribe", 4, "--site", "localhost")
    wait_for(lambda: findings(drumbeat, "ranks-never-joined"), what="the warning")
    (drumbeat.folder / "enough").touch()
    said, _ = run.communicate(timeout=120)
    assert "4 ranks are in 2 groups that are not connected: 2 separate trainings" in said
    assert run.returncode == code and ("but its ranks trained apart" in said) == bool(code), said


ALONE = """
import os, socket, time
number, own = int(os.environ["RANK"]), os.environ.get("OWN")
if own:  # as a wrapper does that sets these itself, in each of its ranks
    listener = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
else:  # init_process_group(rank=0, world_size=1)
    listener = socket.create_server(("127.0.0.1", 0))
store = socket.create_connection(listener.getsockname())
peer = listener.accept()[0]
step = 0
while not os.path.exists("enough"):
    step += 1
    print(f"step {step} loss {1 / step:.4f}", flush=True)
    peer.sendall(b"x" * 20000)
    store.recv(20000, socket.MSG_WAITALL)
    time.sleep(0.2)
"""


@pytest.mark.parametrize("level, code", [("warn", 0), ("stop", EXIT_DOUBTFUL)])
def test_ranks_that_each_made_a_world_of_one_are_copies(drumbeat, level, code):
    (drumbeat.folder / "train.py").write_text(ALONE)
    (drumbeat.folder / "job.yaml").write_text(f"checks: {{world: {level}}}\ncommand: {PY} train.py\n")
    run = drumbeat.start("run", "job.yaml", "--ranks-per-node", 3, "--oversubscribe", 4, "--site", "localhost")
    wait_for(lambda: findings(drumbeat, "ranks-never-joined"), what="the warning")
    (drumbeat.folder / "enough").touch()
    said, _ = run.communicate(timeout=120)
    (found,) = findings(drumbeat, "ranks-never-joined")
    assert (
        found["title"] == "3 ranks are not connected: they are 3 copies of one training"
        and "WORLD_SIZE" in found["fix"]
    )
    assert run.returncode == code and ("but its ranks trained apart" in said) == bool(code), said


WRAPPER = """#!/bin/bash
export OWN=1 WORLD_SIZE=1 MASTER_PORT=$((MASTER_PORT + 1 + RANK)) RANK=0
"$@"
"""


@pytest.mark.parametrize("level", ["warn", "stop"])
def test_ranks_whose_wrapper_says_that_each_is_a_world_of_one(drumbeat, level):
    (drumbeat.folder / "train.py").write_text(ALONE)
    (drumbeat.folder / "wrapper").write_text(WRAPPER)
    job = {"command": ["bash", "wrapper", PY, "train.py"], "ranks-per-node": 3, "checks": {"world": level}}
    (drumbeat.folder / "job.yaml").write_text(json.dumps(job))
    run = drumbeat.start("run", "job.yaml", "--oversubscribe", 4, "--site", "localhost")
    wait_for(lambda: findings(drumbeat, "separate-worlds"), what="the warning")
    if level == "warn":
        (drumbeat.folder / "enough").touch()
    said, _ = run.communicate(timeout=120)
    assert "3 separate worlds of 1 rank each instead of one of 3 ranks" in said
    assert "keep RANK, WORLD_SIZE and MASTER_PORT as drumbeat sets them" in said
    assert run.returncode == (0 if level == "warn" else 1), said
    assert {each["answer"] for each in worlds(drumbeat)} == {"separate worlds"}


AVERAGES = """
import os, socket, time
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    listener = socket.create_server(address)
    peer = listener.accept()[0]
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.02)
step = 0
while not os.path.exists("enough"):
    step += 1
    print(f"step {step} loss {1 / step:.4f}", flush=True)
    time.sleep(0.05)
    if not os.path.exists("meet"):
        continue
    try:
        peer.sendall(b"x" * 40)
        peer.recv(40, socket.MSG_WAITALL)
    except OSError:
        break  # it has seen that it is enough
"""


def test_ranks_that_exchange_figures_for_a_log_are_not_said_to_train_together(drumbeat):
    (drumbeat.folder / "train.py").write_text(AVERAGES)
    run = drumbeat.start("run", "--ranks-per-node", 2, "--site", "localhost", "--", PY, "train.py")
    wait_for(lambda: worlds(drumbeat), what="the ranks that are connected")
    wait_for(lambda: any(each["kind"] == "first-step" for each in events(drumbeat)), what="the lead to know a step")
    (drumbeat.folder / "meet").touch()
    wait_for(lambda: any("not proven" in each["summary"] for each in worlds(drumbeat)), 300, "the verdict")
    (drumbeat.folder / "enough").touch()
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0 and "bytes per step, so it is not proven that they average gradients" in said
    assert {(each["answer"], each["confidence"]) for each in worlds(drumbeat)} == {("as planned", "likely")}, said


FIGURES = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model, data = torch.nn.Linear(300, 300), torch.randn(8, 300)
step = 0
go = torch.ones(1)
while go.item():
    step += 1
    loss = model(data).square().mean()
    loss.backward()  # the model is not in DistributedDataParallel
    losses = [None] * 2
    dist.all_gather_object(losses, {"rank": dist.get_rank(), "loss": loss.item()})
    dist.all_reduce(loss.detach())
    if dist.get_rank() == 0:
        go = torch.tensor([0.0 if os.path.exists("enough") else 1.0])
        print(f"step {step} loss {sum(each['loss'] for each in losses):.4f}", flush=True)
    dist.broadcast(go, 0)
    time.sleep(0.02)
dist.barrier()
time.sleep(1)  # for the others to pass it
os._exit(0)  # when the interpreter ends, threads of gloo may abort it
"""


def test_ranks_that_gather_figures_from_the_first_step_on_are_never_said_to_train_together(drumbeat):
    need_torch("needs torch")
    (drumbeat.folder / "train.py").write_text(FIGURES)
    run = drumbeat.start("run", "--ranks-per-node", 2, "--site", "localhost", "--", PY, "train.py")
    wait_for(lambda: any("not proven" in each["summary"] for each in worlds(drumbeat)), what="the verdict")
    (drumbeat.folder / "enough").touch()
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert {(each["answer"], each["confidence"]) for each in worlds(drumbeat)} == {("as planned", "likely")}, said


RAISES = """
import atexit, os, socket, sys, time

def leave():  # as JAX does: the others must come, too
    while not os.path.exists("enough"):
        time.sleep(0.1)
    print("Failed to disconnect from coordination service with status: INTERNAL: Shutdown barrier has failed.",
          file=sys.stderr, flush=True)
    os._exit(1)

rank = int(os.environ["RANK"])
atexit.register(leave)
for step in range(1, 9):
    if rank == 0:
        print(f"step {step} loss {1 / step:.4f}", flush=True)
    time.sleep(0.2)
if rank == 1:
    raise ValueError("bad sample 1234")
leave()
"""


def test_a_rank_that_raises_and_waits_at_its_exit_is_the_failure(drumbeat):
    (drumbeat.folder / "train.py").write_text(RAISES)
    run = drumbeat.start("run", "--ranks-per-node", 2, "--", PY, "train.py")
    wait_for(lambda: findings(drumbeat, "hang-raised") or run.poll() is not None, what="the rank that raised")
    (drumbeat.folder / "enough").touch()
    said, _ = run.communicate(timeout=120)
    (found,) = findings(drumbeat, "hang-raised")
    assert found["rank"] == 1 and "rank 1 is still alive after it raised ValueError: bad sample 1234" in found["title"]
    failure = json.loads((drumbeat.run_folder() / "summary.json").read_text())["failure"]
    assert failure["rank"] == 1 and "ValueError: bad sample 1234" in failure["title"], said


CATCHES = """
import os, socket, threading, time, traceback

rank = int(os.environ["RANK"])
for step in range(1, 9):
    if rank == 0:
        print(f"step {step} loss {1 / step:.4f}", flush=True)
    time.sleep(0.2)
try:
    raise ValueError("no thumbnail")
except ValueError:
    traceback.print_exc()
threading.Thread(target=int, args="x").start()
time.sleep(15)
"""


def test_a_rank_that_catches_an_exception_or_loses_a_thread_has_not_failed(drumbeat):
    (drumbeat.folder / "train.py").write_text(CATCHES)
    job = {"command": [PY, "train.py"], "ranks-per-node": 2, "checks": {"hang": "stop"}}
    (drumbeat.folder / "job.yaml").write_text(json.dumps(job))
    done = drumbeat("run", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert not findings(drumbeat, "hang-raised")

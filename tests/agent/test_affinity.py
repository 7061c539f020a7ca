"""When the ranks are looked at, and what counts as seen."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from drumbeat.agent.watchers.affinity import Placement, RankLooks
from drumbeat.agent.watchers.contract import Emit, Saw, Stop, Warn
from drumbeat.base.order import EnvVar
from drumbeat.base.record import to_plain
from drumbeat.findings.model import CERTAIN
from drumbeat.inspector.gpu import compute_users, kfd_gpus, look_at_ranks, mig_instances
from drumbeat.inspector.record import RankSeen
from drumbeat.machine.model import Cpus, Facts, Gpu
from drumbeat.machine.replay import FolderHost
from drumbeat.plan.binding import Binding, Slot
from tests.agent.making import polled, scene
from tests.conftest import wait_for

NUMA = {"0": (0, 1, 2, 3), "1": (4, 5, 6, 7)}
CPUS = Cpus(online=tuple(range(8)), allowed=tuple(range(8)), numa=NUMA)
TWO = Facts("n", cpus=CPUS, gpus=(Gpu(0, "nvidia", numa=0), Gpu(1, "nvidia", numa=1)))
BOUND = Binding((Slot(0, 0, (0, 1), gpus=(0,)), Slot(1, 1, (4, 5), gpus=(1,))), 2, "")


def placement(facts, bound, right, variables, level, ranks):
    return Placement(scene(facts=facts, bound=bound, right=right, variables=variables, ranks=ranks), level)


def watcher(facts=TWO, level="warn", ranks=2):
    return placement(facts, BOUND, BOUND, (), level, ranks)


def ranks(*seen):
    return Saw("ranks", {"seen": [(RankSeen(rank, 10 + rank, cpus, gpus, gpus), {}) for rank, cpus, gpus in seen]})


def answers(actions):
    return [action.data["verdict"].answer for action in actions if isinstance(action, Emit)]


GOOD = ((0, (0, 1), (0,)), (1, (4, 5), (1,)))


def test_nothing_is_said_while_torch_is_still_importing():
    watch = watcher()
    importing = ranks((0, (0, 1), ()), (1, (4, 5), ()))
    assert [watch.on(importing, now) for now in (1, 3, 60, 300)] == [[]] * 4
    assert watch.on(ranks(*GOOD), 301) == []
    assert answers(watch.on(ranks(*GOOD), 302)) == ["as planned"]
    assert watch.done and watch.on(ranks(*GOOD), 303) == []


def test_one_look_while_a_library_changes_its_own_mask_is_no_mismatch():
    watch = watcher()
    watch.on(ranks((0, (6,), (0,)), GOOD[1]), 1)
    watch.on(ranks(*GOOD), 2)
    assert answers(watch.on(ranks(*GOOD), 3)) == ["as planned"]


def test_a_first_step_asks_for_a_look_at_once():
    watch, asked = watcher(), []
    watch.on_first_step = asked.append
    watch.on(Saw("metric", {"step": 1}), 5.0)
    watch.on(Saw("metric", {"step": 2}), 6.0)
    assert asked == [5.0]
    cpu_only = ranks((0, (0, 1), ()), (1, (4, 5), ()))
    watch.on(cpu_only, 6)
    (verdict, warning) = watch.on(cpu_only, 8)
    assert answers([verdict]) == ["mismatch"] and warning.finding.code == "rank-without-gpu"


@pytest.mark.parametrize("level, kind", [("warn", Warn), ("stop", Stop)])
def test_a_wrong_mask_warns_or_stops(level, kind):
    watch = watcher(level=level)
    wrong = ranks((0, (4, 5), (0,)), (1, (0, 1), (1,)))
    watch.on(wrong, 1)
    actions = watch.on(wrong, 2.5)
    if level == "stop":
        assert actions == [], "one look more before a run is ended"
        actions = watch.on(wrong, 3.6)
    assert answers(actions) == ["mismatch"] and isinstance(actions[1], kind) and actions[1].finding.node == 0


def test_a_mismatch_that_a_later_look_refutes_is_withdrawn_in_words():
    watch = watcher()
    for now in (1, 2.5, 4):
        said = watch.on(ranks((0, (4, 5), (0,)), (1, (0, 1), (1,))), now)
    assert said == []
    watch.on(ranks(*GOOD), 10)
    (withdrawn,) = watch.on(ranks(*GOOD), 12)
    verdict = withdrawn.data["verdict"]
    assert verdict.answer == "as planned" and verdict.summary.endswith(
        "; the earlier warning (mismatch) no longer holds"
    )
    assert watch.done
    watch = watcher(level="stop")
    for now in (1, 2.5):
        assert watch.on(ranks((0, (4, 5), (0,)), (1, (0, 1), (1,))), now) == []
    watch.on(ranks(*GOOD), 4)
    assert answers(watch.on(ranks(*GOOD), 6)) == ["as planned"]


def test_a_launcher_that_has_the_number_of_a_pod_is_not_taken_for_its_rank():
    """torchrun under a pod's RANK, and its first worker, which has the same one."""
    sleeps = "import time; time.sleep(60)"
    starts = (
        "import os, subprocess, sys\n"
        f"one = [sys.executable, '-c', {sleeps!r}]\n"
        "ranks = [subprocess.Popen(one, env={**os.environ, 'RANK': r, 'LOCAL_RANK': r}) for r in '01'[:int(sys.argv[1])]]\n"
        "print(*(rank.pid for rank in ranks), flush=True)\n"
        "sys.stdin.read()\n"
        "for rank in ranks: rank.kill(); rank.wait()"
    )
    for count in (0, 1, 2):
        environ = {**os.environ, "DRUMBEAT_RUN": "pod", "NODE_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}
        environ.pop("LOCAL_RANK", None)
        argv = [sys.executable, "-c", starts, str(count)]
        launcher = subprocess.Popen(argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        seen = look_at_ranks("pod", 0, (), None, [launcher.pid])
        launcher.communicate(timeout=60)
        assert [(about.rank, about.pid) for about, _ in seen] == list(enumerate(pids))


def test_ranks_that_a_launcher_inside_the_command_started_are_looked_at_and_named_as_seen():
    """accelerate, deepspeed or a script with torchrun: one process was started, and the masks are those of its ranks."""
    one = Binding((Slot(0, 0, tuple(range(8)), gpus=(0, 1)),), 8, "")
    watch = placement(TWO, one, BOUND, (), "warn", 0)
    watch.on(ranks(*GOOD), 1)
    (said,) = watch.on(ranks(*GOOD), 2)
    verdict = said.data["verdict"]
    assert (verdict.answer, verdict.confidence) == ("as planned", CERTAIN)
    assert [row.rank for row in said.data["rows"]] == [0, 1]
    assert all(any(f"rank {rank}" in text for text in verdict.seen) for rank in (0, 1)), verdict.seen
    unbound = ranks((0, tuple(range(8)), (0,)), (1, tuple(range(8)), (1,)))
    watch = placement(TWO, one, BOUND, (), "warn", 0)
    watch.on(unbound, 1)
    said = watch.on(unbound, 2)[0].data["verdict"]
    assert said.answer == "not pinned" and len(said.seen) == 2, "ranks that may use the whole node are not placed"


def test_ended_before_anything_was_seen():
    (said,) = watcher().on(Saw("ended"), 1)
    assert said.data["verdict"].answer == "unknown" and said.data["verdict"].seen == ()
    assert watcher(ranks=0).on(Saw("ended"), 1) == [], "a command that started no rank has nothing to place"


def test_a_rank_that_has_ended_is_said_to_have():
    watch = watcher()
    watch.on(Saw("exited", {"rank": 1, "exit_code": 0}), 1)
    watch.on(ranks(GOOD[0]), 2)
    (said,) = watch.on(ranks(GOOD[0]), 4)
    assert said.data["verdict"].answer == "unknown"
    assert said.data["verdict"].summary == "1/2 ranks beside their GPU; rank 1: it ended before it was looked at"
    assert "ended before it was looked at" in said.data["table"][2]


def test_what_was_seen_of_a_rank_before_it_ended_counts():
    watch = watcher()
    importing = (0, (0, 1), ())
    for now in (1, 2.5):
        watch.on(ranks(importing, GOOD[1]), now)
    watch.on(Saw("exited", {"rank": 1, "exit_code": 0}), 3)
    watch.on(ranks(GOOD[0]), 4)
    assert answers(watch.on(ranks(GOOD[0]), 6)) == ["as planned"]


class AtOnce:
    """A child that has always answered, with what `answer` gives."""

    def __init__(self, answer):
        self.answer, self.busy = answer, False

    def ask(self, question):
        self.busy = True

    def take(self):
        self.busy = False
        return self.answer() or []


def test_looks_become_rarer(monkeypatch):
    times = []
    looks, clock = RankLooks("r", 0, TWO, lambda: True), [0.0]
    monkeypatch.setattr(looks, "asked", AtOnce(lambda: times.append(clock[0])))
    while clock[0] < 300:
        looks.poll(clock[0])
        clock[0] += 0.1
    assert times[0] >= 1 and len(times) < 35 and times[-1] - times[-2] >= 14
    before = len(times)
    looks.look_soon(clock[0])
    polled(looks, clock[0])
    assert len(times) == before + 1


def test_a_process_that_hangs_in_the_kernel_does_not_hold_the_agent(monkeypatch):
    monkeypatch.setattr("drumbeat.agent.watchers.affinity.look_at_ranks", lambda *_: time.sleep(600))
    looks = RankLooks("r", 0, TWO, lambda: True)
    assert [looks.poll(now) for now in (0.0, 2.0, 3.0)] == [[], [], []] and looks.asked.busy
    looks.asked.end()


def test_what_is_new_is_looked_at_again_soon(monkeypatch, tmp_path):
    """A rank that has just opened its GPU needs a second look, however long its imports took."""
    shown = [[(RankSeen(0, 1, (0,), (), ()), {})]]
    looks, now = RankLooks("r", 0, TWO, lambda: True), 0.0
    monkeypatch.setattr(looks, "asked", AtOnce(lambda: to_plain(shown[0])))
    while now < 120:
        looks.poll(now)
        now += 0.1
    shown[0] = [(RankSeen(0, 1, (0,), (0,), (0,)), {})]
    while not looks.poll(now):
        now += 0.1
    seen_at = now
    now += 0.1
    while not looks.poll(now):
        now += 0.1
    assert now - seen_at < 1.2


def test_what_proc_shows_of_a_process_with_a_gpu_open(tmp_path):
    """The wrapper and the data loader carry the rank's number too; the oldest that has the device open counts."""
    device = tmp_path / "nvidia0"
    device.write_text("")
    rank = "import subprocess, sys, time\nf = open(sys.argv[1])\nprint('up', flush=True)\ntime.sleep(60)"
    env = {**os.environ, "DRUMBEAT_RUN": "here-1", "NODE_RANK": "0", "RANK": "5"}
    wrapper = subprocess.Popen(
        ["sh", "-c", f'{sys.executable} -c "$0" "$1"; true', rank, str(device)],
        env=env, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert wrapper.stdout.readline() == "up\n"
        gpus = [Gpu(0, "nvidia", device=str(device)), Gpu(1, "nvidia", device=str(tmp_path / "nvidia1"))]
        ((seen, environ),) = look_at_ranks("here-1", 0, gpus, {})
        assert (seen.rank, seen.gpus, seen.open) == (5, (0,), (0,)) and seen.pid != wrapper.pid
        assert set(seen.cpus) == os.sched_getaffinity(wrapper.pid) and environ["RANK"] == "5"
        assert look_at_ranks("here-1", 1, gpus, {}) == [] and look_at_ranks("other", 0, gpus, {}) == []
    finally:
        os.killpg(wrapper.pid, 9)
        wrapper.wait()


def driver(tmp_path, monkeypatch, text):
    """An nvidia-smi that does this."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_the_drivers_list_tells_which_of_several_open_gpus(tmp_path, monkeypatch):
    gpus = [replace(gpu, uuid=f"GPU-{gpu.index}") for gpu in TWO.gpus]
    driver(tmp_path, monkeypatch, "printf 'GPU-1, 77\\nGPU-9, 78\\nGPU-0, 77\\nwarning: something\\n'")
    assert compute_users(gpus) == {77: (0, 1)}
    driver(tmp_path, monkeypatch, "exit 9")
    assert compute_users(gpus) == {} and compute_users([Gpu(0, "amd")]) == {}


def test_amds_driver_tells_on_which_gpus_a_process_has_memory(tmp_path):
    kfd = tmp_path / "sys" / "class" / "kfd" / "kfd"
    files = {
        "topology/nodes/0/gpu_id": 0,
        "proc/7/vram_900": 1 << 20,
        "proc/7/vram_901": 9 << 30,
        "proc/7/sdma_900": 1 << 40,
    }
    files.update({f"topology/nodes/{node}/gpu_id": 898 + node for node in (1, 2, 3, 10)})  # 899, 900, 901, 908
    for path, value in files.items():
        (kfd / path).parent.mkdir(parents=True, exist_ok=True)
        (kfd / path).write_text(f"{value}\n")
    (tmp_path / "host.json").write_text("{}")
    host = FolderHost(str(tmp_path))
    assert kfd_gpus(7, (0, 1, 2, 3), host) == (2,), "a context that only looks at a GPU has little memory there"
    assert kfd_gpus(7, (0, 1), host) is None and kfd_gpus(8, (0, 1, 2, 3), host) is None


def test_a_helper_that_has_the_gpu_open_from_its_parent_is_no_rank(tmp_path):
    """A library's daemon, an orted of MPI say, keeps what the program had open when it was started."""
    device = tmp_path / "nvidia0"
    device.write_text("")
    program = (
        "import subprocess, sys, time\nf = open(sys.argv[1])\n"
        "helper = subprocess.Popen(['sleep', '60'], pass_fds=[f.fileno()])\nprint(helper.pid, flush=True)\ntime.sleep(60)"
    )
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    env.update(DRUMBEAT_RUN="here-2", NODE_RANK="0")
    main = subprocess.Popen(
        [sys.executable, "-c", program, str(device)], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        helper = int(main.stdout.readline())
        wait_for(lambda: Path(f"/proc/{helper}/environ").read_bytes(), what="its environment, which exec sets last")
        gpus = [Gpu(0, "nvidia", device=str(device))]

        def look(users):
            return [(seen.pid, seen.gpus) for seen, _ in look_at_ranks("here-2", 0, gpus, users)]

        assert look(None) == [(main.pid, None)], "the driver has not answered yet"
        assert look({}) == [(main.pid, (0,))], "it names no process of ours"
        assert look({main.pid: (0,), 7: (0,)}) == [(main.pid, (0,))]
        assert look({helper: (0,)}) == [(helper, (0,))], "a worker of a program that only looked at the GPU"
    finally:
        os.killpg(main.pid, 9)
        main.wait()


def test_what_only_the_driver_can_tell_is_told_once_it_has_answered(monkeypatch, tmp_path):
    driver(tmp_path, monkeypatch, "exec sleep 60")
    gpu = Gpu(0, "nvidia", device="/dev/nvidia0")
    looks = RankLooks("r", 0, replace(TWO, gpus=(gpu,)), lambda: True)

    def look(run_id, node, gpus, users, commands):
        return [(RankSeen(None, 10, (0, 1), None if users is None else (0,), (0,)), {})]

    monkeypatch.setattr("drumbeat.agent.watchers.affinity.look_at_ranks", look)
    told = [(now, polled(looks, float(now))) for now in range(6)]
    first = next(now for now, saw in told if saw)
    assert first >= 3, "nvidia-smi has two seconds"
    assert told[first][1][0].data["seen"][0][0].gpus == (0,)
    looks._users.asked.end()


def unnumbered(pid=10):
    return Saw("ranks", {"seen": [(RankSeen(None, pid, (0, 1), (0,), (0,)), {})]})


def test_a_launcher_that_has_looked_at_the_gpus_is_no_rank():
    """torchrun asks the driver how many there are, before its ranks start and after they have ended."""
    watch = watcher()
    assert watch.on(unnumbered(), 1) + watch.on(unnumbered(), 3) == []
    watch.on(Saw("exited", {"rank": 0, "exit_code": -11}), 4)
    watch.on(unnumbered(), 5)
    (said,) = watch.on(Saw("ended"), 6)
    assert [row.rank for row in said.data["rows"]] == [0, 1]
    assert said.data["verdict"].summary.startswith("not looked at: rank 0")


def test_the_only_rank_of_a_launcher_that_numbers_none_is_that_rank():
    one = Binding((Slot(0, 0, (0, 1), gpus=(0,)),), 2, "")
    watch = placement(TWO, one, one, (EnvVar("MASTER_PORT", "61000", "why", "detected"),), "warn", 1)
    assert watch.on(unnumbered(), 1) + watch.on(unnumbered(), 3) == [], "it may be the launcher"
    watch.on(Saw("metric", {"step": 1}), 4)
    watch.on(unnumbered(), 5)
    (said,) = watch.on(unnumbered(), 7)
    assert [(row.rank, row.gpus) for row in said.data["rows"]] == [(0, (0,))]
    assert said.data["verdict"].answer == "as planned"


def test_a_variable_that_a_script_has_changed_is_named():
    planned = (EnvVar("NCCL_IB_GID_INDEX", "3", "why", "detected"), EnvVar("MASTER_PORT", "61000", "why", "detected"))
    watch = placement(TWO, BOUND, BOUND, planned, "warn", 0)  # the command starts the ranks itself
    has = {"NCCL_IB_GID_INDEX": "1", "MASTER_PORT": "29500"}  # a launcher's own port is its own matter
    seen = Saw("ranks", {"seen": [(RankSeen(rank, 10 + rank, cpus, gpus, gpus), has) for rank, cpus, gpus in GOOD]})
    actions = watch.on(seen, 1.0) + watch.on(seen, 3.0)
    (warning,) = [action.finding for action in actions if isinstance(action, Warn)]
    assert warning.title == "2 of 2 ranks have NCCL_IB_GID_INDEX=1, planned was 3"
    assert warning.seen == ("the environment of ranks 0-1 in /proc",)  # and of no other
    placed, verdict = [action.data["verdict"] for action in actions if isinstance(action, Emit)]
    assert (placed.check, placed.answer) == ("affinity", "as planned"), "the cores are right"
    assert (verdict.check, verdict.answer, verdict.summary) == ("environment", "mismatch", warning.title)


def test_a_variable_that_differs_between_ranks_is_a_verdict_of_its_own_and_withdrawn():
    def seen(*environs):
        rows = [(RankSeen(rank, 10 + rank, cpus, gpus, gpus), has) for (rank, cpus, gpus), has in zip(GOOD, environs)]
        return Saw("ranks", {"seen": rows})

    watch = placement(TWO, BOUND, BOUND, (), "warn", 2)
    plain, other = {"NCCL_IB_HCA": "mlx5_0", "NCCL_DEBUG": "INFO"}, {"NCCL_IB_HCA": "mlx5_1", "NCCL_ALGO": "Tree"}
    actions = watch.on(seen(plain, other), 1.0) + watch.on(seen(plain, other), 3.0)
    (warning,) = [action.finding for action in actions if isinstance(action, Warn)]
    assert (warning.code, warning.title) == ("environment-mismatch", "rank 1 has NCCL_ALGO=Tree, elsewhere unset"), (
        warning
    )
    checks = [action.data["verdict"] for action in actions if isinstance(action, Emit)]
    assert [(each.check, each.answer) for each in checks] == [("affinity", "as planned"), ("environment", "mismatch")]
    again = [action.data["verdict"] for action in watch.on(seen(plain, plain), 5.0)]
    assert [each.answer for each in again] == ["as planned", "as planned"]
    assert again[1].summary == "the ranks have the planned variables; the earlier warning (mismatch) no longer holds"
    assert "earlier" not in again[0].summary


MINORS = "config 1\nmonitor 2\ngpu0/gi3/access 30\ngpu0/gi3/ci0/access 31\ngpu0/gi5/access 48\ngpu0/gi5/ci0/access 49\n"


@pytest.mark.parametrize(
    "opened, variables, names",
    [
        (("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31"), {}, ("gi3/ci0",)),
        (("/dev/nvidia-caps/nvidia-cap48",), {"CUDA_VISIBLE_DEVICES": "MIG-1"}, ("gi5",)),
        (("/dev/nvidia-caps/nvidia-cap1",), {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, ("MIG-1",)),
        ((), {"CUDA_VISIBLE_DEVICES": "0"}, ()),
    ],
)
def test_which_instance_of_a_divided_gpu(tmp_path, opened, variables, names):
    (tmp_path / "minors").write_text(MINORS)
    assert mig_instances(opened, variables, str(tmp_path / "minors")) == names
    assert mig_instances(opened, {}, str(tmp_path / "no")) == ()


def test_a_process_that_the_command_started_and_did_not_number_is_one_row_of_the_table():
    """Lightning on one GPU: there is no second rank that was not found."""
    one = Binding((Slot(0, 0, (0, 1), gpus=(0,)),), 2, "")
    watch = placement(TWO, one, one, (), "warn", 0)
    assert watch.on(unnumbered(), 1) + watch.on(unnumbered(), 3) == [], "it may be about to start the ranks"
    watch.on(Saw("metric", {"step": 1}), 4)
    (said,) = watch.on(unnumbered(), 5)
    assert [(row.rank, row.pid, row.gpus) for row in said.data["rows"]] == [(None, 10, (0,))]
    assert said.data["verdict"].summary == "1/1 ranks beside their GPU"


def test_workers_that_a_program_starts_after_it_has_looked_at_the_gpu_itself():
    one = Binding((Slot(0, 0, (0, 1), gpus=(0,)),), 2, "")
    watch = placement(TWO, one, one, (), "warn", 0)
    workers = [(RankSeen(None, pid, (0, 1), (0,), (0,)), {}) for pid in (11, 12)]
    watch.on(unnumbered(), 1)
    watch.on(unnumbered(), 5)
    watch.on(Saw("ranks", {"seen": workers}), 6)
    watch.on(Saw("metric", {"step": 1}), 7)
    said = watch.on(Saw("ranks", {"seen": workers}), 8)
    assert answers(said) == ["mismatch"] and said[1].finding.code == "gpu-shared"


def test_a_program_without_steps_is_judged_after_a_minute():
    one = Binding((Slot(0, 0, (0, 1), gpus=(0,)),), 2, "")
    watch = placement(TWO, one, one, (), "warn", 0)
    assert [watch.on(unnumbered(), now) for now in (1, 20, 50)] == [[]] * 3
    assert answers(watch.on(unnumbered(), 62)) == ["as planned"]

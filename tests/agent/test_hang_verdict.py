"""What one look at all ranks shows is judged: the odd rank is named with what it does. No clock."""

from dataclasses import replace

from drumbeat.agent.watchers.hang import in_words
from drumbeat.agent.watchers.hang_verdict import Ended, Silence, doing, judge
from drumbeat.inspector.activity import ANSWER
from drumbeat.inspector.record import Collective
from tests.agent.looks import GLOO, busy, look, meets, others, waits


def test_a_rank_that_waits_for_no_other_is_never_left_out():
    looks = [look(rank, waits_for=f"rank {rank - 1}", waits_in="recv") for rank in range(1, 5)]
    words = in_words([*looks, look(0, "R", cpu=1.0, place="a.py:3 find")])
    assert words.startswith("rank 0 is busy at a.py:3 find; ") and words.endswith("and 2 more"), words


def verdict(odd, seconds=8.0, **more):
    looks = sorted(others(odd), key=lambda each: each.rank)
    found = judge(looks, Silence(seconds, **more))
    return (found.code, found.rank) if found else None


def test_the_odd_rank_is_named_with_what_it_does():
    asleep = look(2, call="clock_nanosleep", place="train.py:31 load", stack=("train.py:31 load",))
    found = judge(sorted(others(asleep), key=lambda each: each.rank), Silence(8.0))
    assert (found.code, found.rank, found.node, found.host) == ("hang-asleep", 2, 1, "h1")
    assert "rank 2 is asleep at train.py:31 load" in found.title
    assert "ranks 0-1,3 are waiting in all_reduce 8 at train.py:20 step" in found.title
    assert found.fix == "check train.py:31 for a retry or a poll that never ends"
    assert verdict(look(1, "T")) == ("hang-stopped", 1)
    assert verdict(look(0, place="train.py:9 f", stack=("train.py:9 f",), call="futex")) == ("hang-waits", 0)
    assert verdict(look(3, stack=("data/dataloader.py:1200 _next_data",), call="ppoll")) == ("hang-input", 3)
    assert verdict(look(3, asked=False, call="clock_nanosleep")) == ("hang-no-answer", 3)


def test_who_works_alone_is_given_time_unless_it_spins_in_one_place():
    assert verdict(busy(2)) is None
    assert verdict(busy(2), seconds=1700.0) is None
    assert verdict(busy(2), seconds=1800.0) == ("hang-busy", 2)
    assert verdict(busy(2, spins=True, still=20.0)) is None
    assert verdict(busy(2, spins=True)) == ("hang-loop", 2)
    assert verdict(busy(2), seconds=1800.0, longest=650.0) is None
    assert verdict(busy(2, asked=False), seconds=1700.0) is None, "a call into C that computes may return"
    in_kernel = look(2, "R", cpu=1.0, gpu=100.0, power=0.17, traffic=0.0, place="train.py:9 f", stack=("train.py:9 f",))
    assert verdict(in_kernel) == ("hang-gpu-kernel", 2)  # as one H200 shows an endless kernel: 126 of 700 W
    assert judge([in_kernel], Silence(40.0)).code == "hang-gpu-kernel", "a job of one rank"
    assert judge([busy(0, spins=True)], Silence(40.0)).code == "hang-loop"
    assert judge([busy(0)], Silence(400.0)) is None
    assert verdict(look(2, "R", cpu=1.0, gpu=100.0, power=0.3, traffic=40.0, stack=("train.py:9 f",))) is None
    assert verdict(look(0, io=5e6, call="write", place="train.py:50 save", stack=("train.py:50 save",))) is None
    assert verdict(look(0, compiler="ptxas", call="wait4", place="x.py:1 f", stack=("x.py:1 f",))) is None
    assert verdict(look(0, gpu=99.0, power=0.9, call="poll", place="x.py:1 f", stack=("x.py:1 f",))) is None


def test_storage_may_hold_a_rank_for_a_while():
    saving = look(0, "D", call="fsync", place="train.py:50 save", stack=("train.py:50 save",))
    assert verdict(saving) is None
    assert verdict(saving, seconds=40.0, again=True) == ("hang-kernel", 0)


def test_all_busy_alike_is_no_hang_and_all_idle_is_one():
    assert judge([busy(rank) for rank in range(4)], Silence(60.0)) is None
    assert judge([waits(rank) for rank in range(4)], Silence(8.0)) is None
    assert judge([waits(rank) for rank in range(4)], Silence(38.0)).code == "hang-all-idle"
    assert judge([waits(rank, network=5e6) for rank in range(4)], Silence(38.0)) is None  # something comes or goes
    assert judge([busy(0), *(waits(rank) for rank in (1, 2, 3))], Silence(8.0)) is None
    assert judge([waits(0), *(busy(rank) for rank in (1, 2, 3))], Silence(8.0)) is None  # it has done its share
    spins = busy(0, asked=False, left=True, raised="ValueError: no", raised_for=9.0)
    found = judge([spins, waits(1)], Silence(9.0, False, again=True))
    assert found.code == "hang-raised" and "rank 0 is still alive after it raised ValueError: no" in found.title
    assert judge([replace(spins, asked=True), waits(1)], Silence(9.0, again=True)) is None, "it may save at its end"
    assert judge([replace(spins, granted=0.1), waits(1)], Silence(9.0, again=True)) is None, "its exit needs a core too"
    for call in ("clock_nanosleep", "futex", "accept"):
        assert judge([look(0, call=call)], Silence(100.0, False, again=True)) is None, "a timer, a server, a script"
    resting = look(2, call="nanosleep", place="a.py:1 f", stack=("a.py:1 f",))
    assert judge([busy(0), busy(1), resting, busy(3)], Silence(8.0)) is None
    assert judge([busy(0), busy(1), resting, busy(3)], Silence(70.0)).rank == 2
    spinning = [waits(rank, state="R", cpu=1.0) for rank in (0, 1, 3)]  # NCCL waits by spinning
    found = judge([*spinning, resting], Silence(8.0))
    assert (found.code, found.rank) == ("hang-asleep", 2)


def test_where_nobody_stands_out_it_is_said_what_each_does():
    """Of two ranks without a stack either may wait for the other."""
    found = judge([look(0, call="futex"), look(1, call="clock_nanosleep")], Silence(8.0))
    assert (found.code, found.rank) == ("hang-all-idle", None)
    assert found.title == "no step for 8 s: no rank is working; rank 0 is waiting in futex; rank 1 is asleep"


def test_of_two_ranks_without_a_stack_the_one_that_sleeps_through_holds_the_other_up():
    asleep = look(1, call="clock_nanosleep", wakes=0.0)
    found = judge([look(0, call="futex", wakes=0.5), asleep], Silence(18.0))
    assert (found.code, found.rank, found.host) == ("hang-asleep", 1, "h0")
    assert found.title == "no step for 18 s: rank 1 is asleep; rank 0 is waiting in futex"
    assert found.fix.startswith("py-spy dump --pid 101 on h0 shows where rank 1 is; drumbeat names the line if")
    assert "metrics.report" in found.fix
    polls = look(
        1, call="clock_nanosleep", wakes=100.0
    )  # one that looks for something all the time may wait for rank 0
    found = judge([look(0, call="futex", wakes=0.5), polls], Silence(18.0))
    assert found.code == "hang-all-idle" and found.fix.startswith(
        "py-spy dump --pid 101 on h0 shows where rank 1 waits"
    )
    parent = look(0, call="wait4", wakes=0.0)  # it waits for a process of its own
    assert judge([parent, asleep], Silence(70.0)).code == "hang-all-idle"


def test_flight_recorders_tell_who_is_behind_and_who_calls_something_else():
    bare = [look(rank, call="futex", collectives=(Collective("0", 9, "all_reduce", False),)) for rank in (0, 1, 2)]
    behind = look(3, call="futex", collectives=(Collective("0", 8, "all_reduce", True),))
    assert judge([*bare, behind], Silence(8.0)).rank == 3
    desync = look(3, call="futex", collectives=(Collective("0", 9, "barrier", False),))
    found = judge([*bare, desync], Silence(8.0))
    assert (found.code, found.rank) == ("hang-desync", 3)


def test_flight_recorders_of_groups_that_hold_some_of_the_ranks():
    """Tensor groups (0, 1) and (2, 3), data groups (0, 2) and (1, 3): rank 3 only waits for rank 2."""

    def at(rank, tensor, data):
        last = (Collective(f"t{rank // 2} tp", *tensor), Collective(f"d{rank % 2} dp", *data))
        return look(rank, call="futex", collectives=last)

    waits_in_tensor, waits_in_data = ((20, "all_gather", False, 18), (7, "all_reduce", True))
    looks = [
        at(0, (30, "all_gather", True), (8, "all_reduce", False)),
        at(1, (30, "all_gather", True), (8, "all_reduce", False)),
    ]
    looks += [at(2, (17, "all_gather", True), (7, "all_reduce", True)), at(3, waits_in_tensor, waits_in_data)]
    assert judge(looks, Silence(8.0)).rank == 2


def test_of_the_ranks_behind_the_one_that_is_in_no_collective_is_named():
    """Groups (0, 1) and (2, 3), and one of all: rank 1 sleeps before the call in which rank 0 waits for it."""

    def at(rank, whole, own, **more):
        stack = more.pop("stack", GLOO)
        return look(rank, collectives=(Collective("0", *whole), Collective(f"{rank // 2}", *own)), stack=stack, **more)

    behind, ahead = (9, "all_reduce", True), (10, "all_reduce", False)
    there = {"call": "clock_nanosleep", "place": "a.py:9 main", "stack": ("a.py:9 main",)}
    looks = [
        at(0, behind, (1, "all_reduce", False), place="a.py:10 main", call="futex"),
        at(1, behind, (0, "all_reduce", True), **there),
        *(at(rank, ahead, (1, "all_reduce", True), place="a.py:12 main", call="futex") for rank in (2, 3)),
    ]
    found = judge(looks, Silence(34.0))
    assert (found.code, found.rank) == ("hang-asleep", 1) and "rank 1 is asleep at a.py:9 main" in found.title
    working = [looks[0], replace(looks[1], state="R", cpu=0.9, call=""), *looks[2:]]
    assert judge(working, Silence(34.0)) is None, "rank 0 waits for one that computes"


def test_a_rank_that_left_is_the_cause():
    found = judge([waits(rank) for rank in (0, 1, 3)], Silence(8.0, ended=(Ended(2, 1, "h1", -1.0),)))
    assert (found.code, found.rank, found.host) == ("hang-early-exit", 2, "h1")
    assert judge([busy(rank) for rank in (0, 1, 3)], Silence(8.0, ended=(Ended(2, 1, "h1", -1.0),))) is None
    works = [look(0, call="accept", waits_in="accept"), look(1, call="nanosleep", waits_in="nanosleep", wakes=0.1)]
    assert judge(works, Silence(8.0, False, ended=(Ended(2, 1, "h1", -1.0),))) is None, "it has no steps, and sleeps"


def test_a_rank_that_left_after_an_error_is_quoted():
    gone = (Ended(1, 0, "h0", -1.5), Ended(2, 1, "h1", -1.0, "ERROR: no labels"))
    found = judge([waits(rank) for rank in (0, 3)], Silence(8.0, ended=gone))
    assert (found.code, found.rank, found.host) == ("hang-early-exit", 2, "h1")
    assert "rank 2 had written: ERROR: no labels" in found.cause and "exit code other than 0" in found.fix


def test_a_silent_rank_among_others_that_go_on():
    asleep = look(2, call="clock_nanosleep", place="train.py:31 load", stack=("train.py:31 load",))
    silence = Silence(9.0, quiet=(2,))
    assert judge([busy(0), busy(1), asleep, busy(3)], silence).rank == 2
    assert (
        judge([busy(0), busy(1), waits(2), busy(3)], silence) is None
    )  # it had fewer steps to do, and waits at the end


def test_gpus_that_draw_power_work_whatever_the_stack_says():
    """One rank, whose Python waits in the backward pass while its GPU computes: no hang, however long the step."""
    stack = ("torch/autograd/graph.py:841 _engine_run_backward", "step.py:129 accumulate")
    at_work = look(0, gpu=100.0, power=0.97, call="futex", stack=stack)
    assert judge([at_work], Silence(60.0, again=True)) is None
    spinning = look(0, gpu=100.0, power=0.2, call="futex", stack=stack)
    assert judge([spinning], Silence(60.0, again=True)).code == "hang-all-idle"


def test_a_rank_without_a_gpu_that_is_busy_in_its_backward_pass_computes():
    """A CPU collective waits without computing, so this is no hang, however long the step; without the CPU time it may be one."""
    stack = ("torch/autograd/graph.py:841 _engine_run_backward", "step.py:129 accumulate")
    for silence in (Silence(2000.0, again=True), Silence(2000.0, steps=False, again=True)):
        assert judge([look(0, cpu=1.09, stack=stack)], silence) is None
        assert judge([look(0, call="futex", stack=stack)], silence).code == "hang-all-idle"
    reduces = ("torch/distributed/distributed_c10d.py:3001 all_reduce", "train.py:9 main")
    assert judge([look(0, cpu=1.0, stack=reduces)], Silence(400.0, again=True)).code == "hang-all-idle", "MPI spins"
    waits, computes = look(0, call="futex", stack=reduces), look(1, cpu=1.0, stack=stack)
    assert judge([waits, computes], Silence(104.0, again=True)) is None, "nor while another rank waits for it"
    assert judge([waits, computes], Silence(1800.0, again=True)).code == "hang-busy"


def test_what_follows_the_last_step_is_no_hang_unless_ranks_wait_for_each_other():
    """An upload, or a sleep until the logs are flushed: no steps are missing, and nobody waits for anybody."""
    uploads = look(
        0, call="wait4", place="subprocess.py:2004 _wait", stack=("subprocess.py:2004 _wait", "train.py:50 main")
    )
    asleep = look(1, call="clock_nanosleep", place="train.py:51 main", stack=("train.py:51 main",))
    ended = (Ended(1, 0, "h0", 8.0),)
    assert judge([uploads], Silence(8.0, ended=ended, done=True)) is None
    assert judge([uploads, asleep], Silence(90.0, again=True, done=True)) is None
    assert judge([uploads, asleep], Silence(90.0, again=True)).code == "hang-all-idle"
    assert judge([waits(0), asleep], Silence(8.0, done=True)).code == "hang-asleep"  # a last barrier
    assert judge([waits(0)], Silence(8.0, ended=ended, done=True)).code == "hang-early-exit"
    own_time = look(0, call="clock_nanosleep", wakes=0.1, still=8.0)
    assert judge([own_time], Silence(8.0, ended=ended)) is None, "it sleeps of its own accord, and waits for nobody"
    assert judge([uploads], Silence(8.0, ended=ended)) is None, "what it waits for may be at work"
    assert judge([uploads], Silence(90.0, ended=ended)).code == "hang-all-idle", "not for the rank that left"


def test_a_rank_that_shows_progress_is_given_half_an_hour():
    polls = look(
        0, call="clock_nanosleep", place="a.py:1 f", stack=("a.py:1 f",), signs="it woke 7 times in 7 s", still=0.0
    )
    assert verdict(polls, seconds=1700.0) is None
    assert verdict(polls, seconds=1801.0) == ("hang-asleep", 0)
    assert verdict(waits(0, number=7, still=0.0), seconds=38.0) == ("hang-waits", 0), "in a collective"
    assert judge([polls], Silence(1700.0, again=True)) is None
    assert judge([polls], Silence(1801.0, again=True)).evidence[0].text.count("it woke 7 times in 7 s") == 1
    assert verdict(look(0, io=5e6, call="futex", stack=("a.py:1 f",)), seconds=3000.0) is None, "an upload"


def test_a_rank_that_waits_where_nobody_can_meet_it_is_named_before_the_first_step():
    missed = meets(1, 29501, missed="where nobody listens")
    found = judge([meets(0), missed, meets(2)], Silence(12.0, False))
    assert (found.code, found.rank) == ("hang-missed", 1)
    assert found.title == (
        "nothing moves for 12 s: rank 1 is waiting for the other ranks at node0:29501, where nobody listens, at train.py:5 "
        "main; ranks 0,2 are waiting for the other ranks at node0:29500, at train.py:5 main"
    )
    late = [look(0, place="train.py:3 load", stack=("train.py:3 load",), cpu=1.0, state="R"), missed]
    assert judge(late, Silence(12.0, False)) is None, "rank 0 may still come"
    other = replace(missed, missed="where process 7 (nginx) answers, which is not of this run")
    assert judge([late[0], other], Silence(12.0, False)).code == "hang-missed"


def test_a_rank_that_tries_to_connect_where_nobody_listens_is_named_if_the_others_do_not_wait_for_it():
    tries = look(1, call="clock_nanosleep", place="a.py:9 main", dials="node0:29501", missed="where nobody listens")
    tries = replace(tries, signs="it woke 12 times in 8 s")
    accepts = look(0, call="accept", place="a.py:3 main")
    found = judge([accepts, tries], Silence(40.0, False, again=True))
    assert (found.code, found.rank) == ("hang-missed", 1) and "one port on both sides" in found.fix
    assert "rank 1 is trying to connect to node0:29501, where nobody listens, at a.py:9 main" in found.title
    assert judge([accepts, tries], Silence(20.0, False, again=True)) is None, "it may come yet"
    for_it = replace(accepts, call="recvfrom", waits_for="rank 1")
    assert judge([for_it, tries], Silence(40.0, False)) is None, "it waits for a server of its own"
    assert judge([replace(accepts, state="R", cpu=0.9), tries], Silence(40.0, False, again=True)) is None, "it works"
    rests = replace(accepts, call="clock_nanosleep")
    found = judge([rests, tries], Silence(40.0, again=True))
    assert found is None or found.code != "hang-missed", "rank 0 may listen there later"


def test_who_waits_for_a_process_of_its_own_holds_up_whoever_waits_for_it():
    for_a_child = look(
        0, call="recvfrom", waits_for="its own process 71 (python)", place="a.py:1 f", stack=("a.py:1 f",)
    )
    for_it = look(1, call="recvfrom", waits_for="rank 0", place="a.py:9 g", stack=("a.py:9 g",))
    found = judge([for_a_child, for_it], Silence(38.0))
    assert (found.code, found.rank) == ("hang-waits", 0)
    assert "rank 0 is waiting for its own process 71 (python) at a.py:1 f; rank 1 is waiting for rank 0" in found.title
    assert judge([replace(for_a_child, waits_for="rank 1"), for_it], Silence(38.0)).code == "hang-all-idle"
    asks = replace(for_a_child, signs=f"it waits for {ANSWER}")
    assert judge([asks, for_it], Silence(1700.0)) is None and judge([asks, for_it], Silence(1801.0)).rank == 0
    unknown = replace(asks, waits_for="")
    assert judge([unknown, unknown], Silence(290.0)) is None, "each may ask a server"
    assert judge([unknown, unknown], Silence(301.0)).code == "hang-all-idle", "or each other, over two nodes"


def test_bytes_of_a_socket_are_not_said_to_be_read_or_written():
    there = {"place": "ddp.py:27", "stack": ("ddp.py:27 main",)}
    assert doing(look(0, io=8e6, carried=4e6, **there)) == "sending or receiving 4 MB/s at ddp.py:27"
    assert doing(look(0, io=8e6, carried=1e6, **there)) == "reading or writing 8 MB/s at ddp.py:27"

"""What failed first: causes before symptoms before consequences, and 'not known' when it is not known."""

import pytest

from drumbeat.logs.events import Event
from drumbeat.logs.failure import NO_FAILURE, NOT_KNOWN
from drumbeat.logs.reader import Reader
from tests.logs.reading import IB, read, read_files, run, start_up

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
FULL = "OSError: [Errno 28] No space left on device"
CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.2]:4567"
TIMEOUT = (
    "[rank{rank}]:[E102 03:14:0{rank}.1 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=80, NumelOut=80, Timeout(ms)=600000) ran for 600096 ms"
)


def timeout(rank, seq=78, op="BROADCAST"):
    return TIMEOUT.format(rank=rank, seq=seq, op=op)


def traceback(error, prefix=""):
    frames = [
        "Traceback (most recent call last):",
        '  File "/home/u/train.py", line 12, in <module>',
        "    main()",
        error,
    ]
    return "\n".join(prefix + line for line in frames)


def test_an_exception_without_words_is_not_the_cause():
    bare = 'Traceback (most recent call last):\n  File "/w/spawn.py", line 119, in join\n    raise E(msg)\nException:\n'
    nccl = "RuntimeError: NCCL error in: /w/NCCLUtils.hpp:82, invalid argument, NCCL version 2.4.8"
    assert read(f"{nccl}\n[default] Worker group failed\n{bare}").failure.answer == "nccl-error"


def test_a_launcher_that_was_interrupted_names_it():
    killing = "[2025-02-20 20:27:13,107] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 2606346"
    last = "[2025-02-20 20:27:14,902] [INFO] [launch.py:328:sigkill_handler] Main process received SIGINT, exiting"
    assert read(f"{killing}\n{last}").failure.answer == "cancelled"


def test_nothing_wrong():
    failure = read("step 1 loss 2.0\nstep 2 loss 1.9\ndone").failure
    assert (failure.answer, failure.finding) == (NO_FAILURE, None)


def test_the_cause_is_found_among_what_follows_from_it():
    text = "\n".join([f"[rank0]: {CLOSED}", f"[rank1]: {CLOSED}", f"[rank2]: {OOM}", f"[rank3]: {CLOSED}"])
    failure = read(text).failure
    assert (failure.answer, failure.confidence, failure.finding.rank) == ("gpu-out-of-memory", "certain", 2)
    assert (failure.finding.evidence[0].file, failure.finding.evidence[0].line) == ("log", 3)
    assert failure.finding.fix and failure.rule == "P1"
    assert [finding.code for finding in failure.consequences] == ["peer-lost"]


def test_only_consequences_is_a_lost_peer_and_never_certain():
    failure = read(f"[rank0]: {CLOSED}\n[rank1]: {CLOSED}").failure
    assert (failure.answer, failure.confidence) == ("peer-lost", "likely")
    assert "another rank ended first" in failure.why_first


def test_a_launchers_report_alone_is_not_a_cause_but_says_who():
    failure = read("srun: error: nid001: task 3: Exited with exit code 1").failure
    assert (failure.answer, failure.finding.rank, failure.finding.host) == (NOT_KNOWN, 3, "nid001")


def test_an_exception_is_named_with_its_own_words_and_place():
    failure = read(traceback("ValueError: shapes (3,4) and (5,)", "[rank1]: ")).failure
    assert (failure.answer, failure.finding.rank) == ("exception", 1)
    assert failure.finding.title == "ValueError: shapes (3,4) and (5,)"
    assert failure.finding.cause == "raised at /home/u/train.py:12"


def test_interleaved_tracebacks_keep_to_their_ranks():
    one, two = traceback("KeyError: 'a'", "[rank0]: ").split("\n"), traceback("mylib.Oops: b", "[rank1]: ").split("\n")
    text = "\n".join(line for pair in zip(one, two) for line in pair)
    failure = read(text).failure
    assert failure.finding.title == "KeyError: 'a'" and failure.finding.rank == 0


def test_an_exception_that_the_rank_lived_through_is_not_the_cause():
    steps = "\n".join(f"[rank1]: step {n}" for n in range(150))
    text = "\n".join([traceback("ConnectionError: tracking server", "[rank1]: "), steps, f"[rank1]: {OOM}"])
    assert read(text).failure.answer == "gpu-out-of-memory"
    other = "\n".join([traceback("ConnectionError: tracking server", "[rank0]: "), steps, f"[rank1]: {OOM}"])
    assert read(other).failure.answer == "connect-failed", "another rank's end does not excuse it"


def test_a_traceback_beats_a_watchdog_elsewhere():
    failure = read("\n".join([timeout(1), timeout(2), traceback("ValueError: bad", "[rank0]: ")])).failure
    assert failure.answer == "exception"
    assert "collective-timeout" in [other.code for other in failure.others]


def test_times_decide_across_files():
    files = {"rank-0.err": f"2026-01-02 03:04:09 {OOM}", "rank-1.err": f"2026-01-02 03:04:05 {FULL}"}
    failure = read_files(files).failure
    assert (failure.answer, failure.finding.rank, failure.why_first) == ("disk-full", 1, "earliest by its time")
    assert failure.confidence == "certain"


def test_files_without_times_are_at_most_likely():
    failure = read_files({"rank-0.err": OOM, "rank-1.err": FULL}).failure
    assert failure.confidence == "likely" and "no times" in failure.why_first


def test_torchrun_settles_who_was_first():
    summary = """
    [rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
    [rank4]: OSError: [Errno 28] No space left on device
    torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
    Root Cause (first observed failure):
    [0]:
      time      : 2026-03-29_22:03:17
      host      : node-b
      rank      : 4 (local_rank: 0)
      exitcode  : 1 (pid: 10)
      error_file: <N/A>
      traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
    """
    failure = read(summary).failure
    assert (failure.answer, failure.finding.rank) == ("disk-full", 4)
    assert failure.why_first == "torchrun saw rank 4 fail first"


def test_a_summary_does_not_name_the_rank_of_another_files_error():
    summary = """
    Root Cause (first observed failure):
    [0]:
      host      : node-b
      rank      : 4 (local_rank: 4)
      exitcode  : 1 (pid: 10)
      traceback : x
    """
    failure = read_files({"a.log": OOM, "b.log": summary}).failure
    assert (failure.answer, failure.finding.rank) == ("gpu-out-of-memory", None)
    failure = read_files({"a.log": f"{OOM}\n{summary}"}).failure
    assert (failure.answer, failure.finding.rank, failure.finding.host) == ("gpu-out-of-memory", 4, "node-b")


def test_of_several_summaries_the_earliest_counts_and_a_terminated_rank_does_not():
    block = """
    Root Cause (first observed failure):
    [0]:
      time      : 2026-03-29_22:{time}
      host      : node-{rank}
      rank      : {rank} (local_rank: 0)
      exitcode  : {code} (pid: 10)
      traceback : To enable traceback see: x
    """
    summaries = [(0, "03:30", 1), (4, "03:17", 1), (8, "03:01", -15)]
    text = "".join(block.format(rank=rank, time=time, code=code) for rank, time, code in summaries)
    failure = read(text + "\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError:").failure
    assert (failure.answer, failure.finding.rank, failure.finding.host) == (NOT_KNOWN, 4, "node-4")


def test_a_traceback_in_a_box():
    text = """
    \u256d\u2500\u2500 Traceback (most recent call last) \u2500\u2500\u256e
    \u2502 /home/u/train.py:12 in main \u2502
    \u2502 \u2771 12 x = y \u2502
    \u2570\u2500\u2500\u256f
    NameError: name 'y' is not defined
    """
    failure = read(text).failure
    assert failure.finding.title == "NameError: name 'y' is not defined"
    assert failure.finding.cause == "raised at /home/u/train.py:12"


def test_torchrun_names_the_rank_of_a_signal():
    summary = """
    Root Cause (first observed failure):
    [0]:
      time      : 2026-03-29_22:03:17
      host      : node-b
      rank      : 4 (local_rank: 4)
      exitcode  : -7 (pid: 10)
      error_file: <N/A>
      traceback : Signal 7 (SIGBUS) received by PID 10
    """
    failure = read(summary).failure
    assert (failure.answer, failure.finding.rank, failure.finding.host) == ("bus-error", 4, "node-b")
    assert failure.confidence == "likely"


def test_time_limit_hides_no_earlier_cause():
    text = """
    n1:7:9 [0] transport/net_ib.cc:789 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129
    slurmstepd: error: *** JOB 812 ON n1 CANCELLED AT 2026-01-27T14:51:17 DUE TO TIME LIMIT ***
    """
    failure = read(text).failure
    assert failure.answer == "ib-retry-exceeded"
    assert [other.code for other in failure.others] == ["time-limit"]


def test_time_limit_alone_is_the_answer():
    assert (
        read("slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***").failure.answer == "time-limit"
    )


def test_the_rank_of_an_nccl_line_comes_from_its_process():
    warn = "n1:101:201 [0] init.cc:1 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory"
    failure = read("\n".join([start_up(0, more=[IB]), start_up(1, more=[IB]), warn])).failure
    assert (failure.answer, failure.finding.rank, failure.finding.host) == ("memlock-low", 1, "n1")


def test_who_sees_a_dead_peer_is_not_to_blame():
    warn = "n0:100:200 [0] net_ib.cc:1 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4> with error 12, opcode 0, len 0"
    failure = read("\n".join([start_up(0, more=[IB]), start_up(1, more=[IB]), warn])).failure
    assert failure.finding.rank == 0 and "first seen by rank 0 on n0" in failure.finding.title
    assert "10.0.0.2<4>" in failure.finding.title


# --- who was missing ---------------------------------------------------------------------------------------------------


def test_the_rank_without_a_timeout_is_named():
    text = "\n".join([*(start_up(rank, 4, 4, more=[IB]) for rank in range(4)), *(timeout(rank) for rank in (0, 1, 3))])
    failure = read(text).failure
    assert (failure.answer, failure.finding.rank) == ("collective-timeout", 2)
    assert any(other.code == "rank-absent" and "rank 2" in other.title for other in failure.others)


def test_a_rank_behind_by_sequence_number():
    failure = read("\n".join([timeout(0, 96117), timeout(1, 64088), timeout(2, 96117)])).failure
    (behind,) = [other for other in failure.others if other.code == "rank-behind"]
    assert behind.rank == 1 and "64088 to 96117" in behind.title


def test_desync_by_operation():
    failure = read("\n".join([timeout(0, 5, "ALLREDUCE"), timeout(1, 5, "BROADCAST")])).failure
    assert failure.answer == "collective-desync"
    assert "ALLREDUCE" in failure.finding.title and "BROADCAST" in failure.finding.title


def test_last_enqueued_names_the_rank_behind_and_garbage_is_ignored():
    behind = (
        "[rank1]:[E1] [PG ID 0 PG GUID 0(default_pg) Rank 1] Exception detected by watchdog at work: 4, "
        "last enqueued NCCL work: 4, last completed NCCL work: 3."
    )
    garbage = (
        behind.replace("Rank 1", "Rank 2").replace("rank1", "rank2").replace("work: 4,", "work: 76280750235782912,")
    )
    front = timeout(0, 5).replace("[Rank 0]", "[PG ID 0 PG GUID 0(default_pg) Rank 0]")
    failure = read("\n".join([front, behind, garbage])).failure
    assert any(other.rank == 1 for other in failure.others)


def test_start_without_complete_names_who_never_came():
    text = "\n".join(start_up(rank, 3, 3, more=[IB], complete=False) for rank in (0, 2))
    failure = read(text).failure
    assert failure.answer == "ranks-missing" and "rank 1 did not come" in failure.finding.title


def test_start_without_complete_when_all_came():
    text = "\n".join([start_up(0, more=[IB]), start_up(1, more=[IB], complete=False)])
    failure = read(text).failure
    assert (failure.answer, failure.finding.host) == ("init-incomplete", "n1")


def test_start_without_complete_of_all_ranks_of_one_host_is_where_any_log_may_be_cut():
    one = [start_up(rank, nodes=1, host="n0", complete=False) for rank in (0, 1)]
    assert read("\n".join(one)).failure.answer == "none"
    two = [start_up(0, complete=False), start_up(1, complete=False)]
    assert read("\n".join(two)).failure.answer == "init-incomplete"


def test_different_networks_on_different_nodes():
    text = "\n".join(
        [start_up(0, network="IB", more=[IB], complete=False), start_up(1, network="Socket", complete=False)]
    )
    failure = read(text).failure
    assert failure.answer == "networks-differ" and "Socket on n1" in failure.finding.title


def test_settings_that_differ_are_reported():
    proto = "NCCL_PROTO set by environment to {}"
    name = "NCCL_SOCKET_IFNAME set by environment to {}"
    text = "\n".join(
        start_up(rank, more=[IB, proto.format(value), name.format(f"eth{rank}")])
        for rank, value in ((0, "LL"), (1, "Simple"))
    )
    found = {finding.title.split()[0]: finding.severity for finding in read(text).environment}
    assert found == {"NCCL_PROTO": "warning", "NCCL_SOCKET_IFNAME": "info"}
    same = "\n".join(start_up(rank, more=[IB, proto.format("LL")]) for rank in (0, 1))
    assert read(same).environment == ()


def test_worlds_of_one_rank_are_noticed():
    text = "\n".join(start_up(0, 1, 1, host=f"n{n}", comm_id=f"0x{n}") for n in range(3))
    assert [finding.code for finding in read(text).environment] == ["lone-worlds"]


@pytest.mark.parametrize("text", ["", "\x00\x00\x00", "\n\n\n"])
def test_empty_logs(text):
    failure = read(text).failure
    assert failure.answer == NOT_KNOWN and failure.finding is None


def test_a_log_that_is_cut_off_in_torchruns_table():
    assert read("Root Cause (first observed failure):").failure.answer == NOT_KNOWN


LOST = """node01:4121:4175 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer node02<47242>
node01:4121:4175 [0] NCCL INFO misc/socket.cc:752 -> 6
"""


def test_a_lost_peer_is_a_failure_when_nccl_gave_up_and_the_log_ends_there():
    failure = read(LOST).failure
    assert (failure.answer, failure.confidence) == ("peer-lost", "likely") and "node02" in failure.finding.evidence[
        0
    ].text
    went_on = LOST + "".join(f"step {n} loss 2.1\n" for n in range(200))
    assert read(went_on).failure.answer == NO_FAILURE


def test_what_is_not_about_a_run_gets_no_verdict():
    failure = read("hello").failure
    assert (failure.answer, failure.why_first) == (NOT_KNOWN, "nothing here is about a run")
    assert read("step 1 loss 2.5").failure.answer == NO_FAILURE


def test_a_warning_alone_is_a_line_of_nccl():
    assert "only warnings" in read(LOST.splitlines()[0]).transport.unseen[0]


def test_an_exception_long_before_a_cancel_did_not_end_the_run():
    steps = "\n".join(f"step {number} loss 2" for number in range(400))
    cancel = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-08-21T02:53:05 ***"
    failure = read(f"{traceback('OSError: no config.json')}\n{cancel}\n{cancel}\n{cancel}\n{steps}\n{cancel}").failure
    assert (failure.answer, failure.finding.rank) == ("cancelled", None)
    assert read(f"{traceback('OSError: no config.json')}\nstep 1\n{cancel}").failure.answer == "file-missing"


def test_what_is_raised_while_an_ignored_exception_is_handled_is_ignored_too():
    inner = (
        'Traceback (most recent call last):\n  File "/e/lib/python3.8/site-packages/rich/logging.py", line 7, in emit\n'
    )
    chain = f"{inner}OSError: closed\n\nDuring handling of the above exception, another exception occurred:\n\n{inner}"
    assert read(f"step 1 loss 2\n--- Logging error ---\n{chain}").failure.answer == NO_FAILURE
    assert read(f"step 1 loss 2\n{chain}").failure.answer == "exception"


def test_what_the_documents_own_logs_mean():
    """A management network on Slingshot, a device chosen by the global rank, an interface that torch no longer has."""
    refused = (
        "nid1:1:1 [0] NCCL INFO Bootstrap : Using [0]nmn0:10.252.1.26<0> [1]hsn0:10.253.1.1<0>\n"
        "nid1:1:9 [0] include/socket.h:409 NCCL WARN Net : Connect to 10.252.1.27<41321> failed : Connection refused\n"
    )
    assert read(refused).failure.answer == "bootstrap-interface"
    trace = 'Traceback (most recent call last):\n  File "/h/t.py", line 3, in <module>\n'
    assert read(trace + "RuntimeError: CUDA error: invalid device ordinal").failure.answer == "invalid-device-ordinal"
    gone = "ImportError: cannot import name 'default_auto_wrap_policy' from 'torch.distributed.fsdp.wrap'"
    assert read(trace + gone).failure.answer == "removed-api"


def test_the_only_rdma_device_is_never_advised_away():
    bond = "NET/IB : Using [0]mlx5_bond_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>"
    report = read(run("NET/IB/0/GDRDMA", more=[bond]))
    assert report.transport.path.answer == "rdma" and not [note for note in report.failure.notes if "^" in note.fix]


def test_thousands_of_exceptions_are_not_compared_with_each_other(monkeypatch):
    """The work grows with the number of lines, not with its square."""
    compared = [0]
    monkeypatch.setattr(Event, "__eq__", lambda one, other: compared.__setitem__(0, compared[0] + 1) or one is other)
    reader = Reader()
    reader.feed_lines("log", 1, [b"[rank%d]: ValueError: %d" % (number, number) for number in range(1000)])
    reader.report()
    assert compared[0] < 3000

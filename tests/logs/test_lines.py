"""One physical line: what launchers and loggers put before it, and lines that are torn, glued or wrapped."""

import pytest

from drumbeat.desk.log_sources import Source, lines
from drumbeat.logs.nccl.grammar import records
from drumbeat.logs.read.prefixes import MAX_LINE, clean
from drumbeat.logs.reader import Reader
from tests.logs.reading import IB, channels, read, start_up

MESSAGE = "n1:7:9 [0] NCCL INFO Using network IB"


@pytest.mark.parametrize(
    "prefix,rank,host",
    [
        ("", None, None),
        ("[1,5]<stdout>:", 5, None),
        ("[1,5]<stderr>: ", 5, None),
        ("12: ", 12, None),
        (" 3: ", 3, None),
        ("[rank3]:", 3, None),
        ("[rank3]: ", 3, None),
        ("[rank1]: [rank1]: ", 1, None),
        ("[default7]:", None, None),
        ("[worker0]: ", None, None),
        ("(RayWorkerWrapper pid=927) ", None, None),
        ("(RayWorkerWrapper pid=927, ip=10.0.0.3) ", None, "10.0.0.3"),
        ("(EngineCore_DP0 pid=742) (RayWorkerWrapper pid=927) ", None, None),
        ("(VllmWorker rank=2 pid=11) ", 2, None),
        ("\x1b[36m(RayTrainWorker pid=1)\x1b[0m ", None, None),
        ("2026-01-02T03:04:05.678Z ", None, None),
        ("2026-01-02 03:04:05,678 ", None, None),
        ("[2026-01-02 03:04:05] ", None, None),
        ("2026-01-02T03:04:05.678901234Z stderr F ", None, None),
        ("[pod/train-0/main] ", None, "train-0"),
        ("trainer-1  | ", None, None),
        ("nid001234: ", None, "nid001234"),
        ("[80746] [rank3]:", 3, None),
        ("> ", None, None),
        ("\u2502 ", None, None),
        ("(EngineCore pid=7) ERROR 11-12 11:11:57 [core.py:586] ", None, None),
        ("0: [rank0]: 2026-01-02 03:04:05,678 ", 0, None),
    ],
)
def test_prefixes(prefix, rank, host):
    line = clean(prefix + MESSAGE)
    assert (line.text, line.rank, line.host) == (MESSAGE, rank, host)
    assert read(prefix + MESSAGE).transport.selected == ("IB",)


@pytest.mark.parametrize("text", ["ValueError: 3", "loss: 2.0", "Epoch 3: 12%", "RuntimeError: x | y", "  File 'x'"])
def test_ordinary_lines_are_left_alone(text):
    assert clean(text).text == text


def test_ray_counts_are_cut_off():
    assert read(MESSAGE + " [repeated 7x across cluster] (Ray deduplicates logs)").transport.selected == ("IB",)


@pytest.mark.parametrize(
    "early,late",
    [
        ("2026-01-02 03:04:05 x", "2026-01-02 03:04:06 x"),
        ("[2026-01-02 03:04:05] x", "2026-03-01T00:00:00Z x"),
        ("[rank1]:[E102 03:04:05.1 a.cpp:1] x", "[rank2]:[E102 03:04:05.2 a.cpp:1] x"),
        ("E0102 03:04:05.100000 99 torch/x.py:1] x", "2026-01-02 03:04:05,200 x"),
        ("10%| 1/9 [45:39<51:20, 1.8s/it][rank2]:[E102 03:04:05.5 a.cpp:1] x", "2026-01-02 03:04:06 x"),
        ("Jan  2 03:04:05 n1 kernel: x", "kern  :err   : 2026-01-02T03:04:06,000000+01:00 x"),
    ],
)
def test_times_can_be_compared_across_formats(early, late):
    assert clean(early).time < clean(late).time


@pytest.mark.parametrize(
    "text", ["2026-99-99 99:99:99 x", "[E9999 03:04:05.1 a.cpp:1] x", "Foo  2 03:04:05 n1 kernel: x"]
)
def test_nonsense_times_are_no_times(text):
    assert clean(text).time is None


def test_two_records_glued_into_one_line():
    torn = "n1:7:9 [0] NCCL INFO Channel 03/0 : 3[3] -> 7[3] [receive] via NET/IB/1/GDRD"
    torn += "n2:8:8 [3] NCCL INFO cudaDriverVersion 12020"
    first, second = records(torn)
    assert first.torn and first.message == "Channel 03/0 : 3[3] -> 7[3] [receive] via NET/IB/1/"
    assert not second.torn and second.pid == 8


def test_a_torn_end_says_nothing_about_gdr():
    text = "\n".join(start_up(rank, more=[IB]) for rank in (0, 1)) + "\n"
    half = "n0:100:300 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0"
    for cut in (half + "n1:101:101 [0] NCCL INFO cudaDriverVersion 12020", half + "/GDR", half + "/GDRDM"):
        path = read(text + cut).transport.path
        assert (path.answer, path.gdr) == ("rdma", None)
    assert read(text + half).transport.path.gdr is False


def test_a_host_name_with_something_glued_before_it_is_mended():
    text = "\n".join([start_up(rank, more=[IB]) for rank in (0, 1)] + [channels("NET/IB/0/GDRDMA")])
    text += "\n   64   16   float   sumn0:100:300 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA"
    assert read(text).transport.nodes == ("n0", "n1")


def test_a_warning_that_was_wrapped_is_read_as_one():
    text = """
    NCCL WARN Call to ibv_modify_qp failed with 22 Invalid argument,
              on dev rocep1s0f1:1, curr state INIT, next state RTR
    """
    report = read(text)
    assert (report.transport.path.answer, report.transport.path.link) == ("rdma", "RoCE")
    assert report.failure.answer == "gid-wrong"


def test_carriage_returns_hide_nothing():
    text = "10%|#   | 1/10\r20%|##  | 2/10\rtorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\r"
    assert read(text).failure.answer == "gpu-out-of-memory"


def test_lines_without_end_are_cut():
    assert len(clean("x" * 10 * MAX_LINE).text) == MAX_LINE
    assert read("y" * 10**6 + " CUDA out of memory").failure.answer == "unknown"


def test_function_names_and_lines_between_head_and_message():
    for between in ("ncclIbInit, 716 ", "misc/ibvwrap.cc:380 ", "net.cc:12 (wrap_x) ", "12.5 init.cc:7 ", ""):
        (record,) = records(f"n1:7:9 [0] {between}NCCL INFO hello")
        assert (record.host, record.pid, record.message) == ("n1", 7, "hello")


def test_host_is_cut_at_the_first_dot():
    (record,) = records("n1.cluster.org:7:9 [0] NCCL INFO hello")
    assert record.host == "n1"


def test_what_stands_at_the_end_of_a_long_progress_bar_is_read(tmp_path):
    path = tmp_path / "slurm.out"
    bar = b"".join(b"\r%dit [00:01,  7.00s/it]" % step for step in range(20_000))
    path.write_bytes(b"start\n" + bar + b"slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-10-13T04:10:12 ***")
    reader = Reader()
    for number, some in lines(Source(str(path), "slurm.out")):
        reader.feed_lines("slurm.out", number, some)
    failure = reader.report().failure
    assert failure.answer == "cancelled" and failure.finding.evidence[0].line == 2

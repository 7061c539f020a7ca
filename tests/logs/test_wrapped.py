"""Text that was copied from a terminal, which cuts lines at its width."""

import pytest

from drumbeat.desk.log_sources import read
from drumbeat.logs.read.records import unquoted, unwrap

STUCK = (
    "[rank6]:[E429 13:55:49.384372190 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 6] "
    "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives. "
    "This typically indicates a NCCL/CUDA API hang"
)
ASSERTS = [
    f"/src/Indexing.cu:1422: indexSelectLargeIndex: block: [31,0,0], thread: [{thread},0,0] Assertion `index < size` failed."
    for thread in range(16, 20)
]


def wrapped(lines, width, padded=False):
    """As a terminal of that width shows them."""
    pieces = [line[start : start + width] for line in lines for start in range(0, len(line), width)]
    return [piece.ljust(width) if padded else piece for piece in pieces]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("width", [80, 101, 110])
def test_lines_that_a_terminal_cut_are_made_whole_and_keep_their_numbers(width, padded):
    shown = [piece.encode() for piece in wrapped([STUCK, *ASSERTS, STUCK], width, padded)]
    whole = unwrap(shown)
    assert len(whole) == len(shown)
    assert [line.decode().rstrip() for line in whole if line] == [STUCK, *ASSERTS, STUCK]
    assert whole[0].decode().rstrip() == STUCK and not whole[1]


@pytest.mark.parametrize(
    "lines",
    [
        ASSERTS,
        [f"n7:12:3{n} [{n}] NCCL INFO Channel 00 : {n}[1d000] -> {n + 1}[1e000] via P2P/IPC/read" for n in range(7)],
        ["+" + "-" * 88 + "+", "| NVIDIA-SMI 560.28" + " " * 70 + "|", "+" + "-" * 88 + "+", "| N/A" + " " * 84 + "|"],
        ["x" * 90, "  self.pid = os.fork()", "x" * 90, "  self.pid = os.fork()", "step 1"],
        ["n7 saved the first of two files" + "." * 60, "step 12 loss 2.5", "step 13 loss 2.5"],
        ["one line"],
        [],
    ],
)  # fmt: skip
def test_lines_that_are_merely_as_long_as_each_other_stay_apart(lines):
    raw = [line.encode() for line in lines]
    assert unwrap(raw) == raw


def test_what_a_cut_line_says_is_read(tmp_path):
    log = tmp_path / "pasted.log"
    log.write_text("\n".join(wrapped([STUCK, STUCK], 116)) + "\n")
    found = read([str(log)]).report().failure
    assert (found.answer, found.finding.rank, found.finding.evidence[0].line) == ("watchdog-stuck", 6, 1)
    log.write_text("\n".join(wrapped(ASSERTS, 111, padded=True)))
    assert read([str(log)]).report().failure.answer == "device-assert"


def test_one_message_of_several_ranks_is_no_terminals_width():
    lines = [
        f"{rank}: {part}"
        for rank in range(4)
        for part in (f"Error: Key 'optimizr' is not in struct{'.' * 24}", "  full_key: o")
    ]
    assert unwrap([line.encode() for line in lines]) == [line.encode() for line in lines]


OF_A_MAIL = [
    "step 10/5000 loss 6.500",
    "step 20/5000 loss 6.000",
    "[rank3]: Traceback (most recent call last):",
    '[rank3]:   File "/home/anna/llm/train.py", line 171, in main',
    "[rank3]:     loss = model(input_ids, labels=labels).loss",
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 3 has a total capacity of 79.11 GiB "
    "of which 2.74 GiB is free. Including non-PyTorch memory, this process has 76.36 GiB memory in use",
    *(
        f"[rank{rank}]:[E312 14:06:04.774120334 ProcessGroupNCCL.cpp:552] [Rank {rank}] Collective WorkNCCL(SeqNum=412, "
        "OpType=ALLREDUCE) raised the following async exception: NCCL error: remote process exited"
        for rank in range(4, 8)
    ),
]


@pytest.mark.parametrize("marks", ["", "> ", ">", "> > ", ">>"])
@pytest.mark.parametrize("folded", ["", "at words", "at a width"])
def test_a_log_in_a_mail_is_read_as_it_was_written(marks, folded, tmp_path):
    lines = [line[at : at + 78] for line in OF_A_MAIL for at in range(0, len(line), 78)]
    if folded != "at a width":
        lines = [piece for line in OF_A_MAIL for piece in (at_words(line) if folded else [line])]
    mail = tmp_path / "mail.txt"
    mail.write_text("\n".join(["Hi, it died:", "", *(marks + line for line in lines)]) + "\n")
    failure = read([str(mail)]).report().failure
    assert (failure.answer, failure.finding.rank, failure.notes) == ("gpu-out-of-memory", 3, ())
    assert failure.finding.evidence[0].text == OF_A_MAIL[5].partition(": ")[2]


def at_words(line, width=76):
    """As a mail program cuts a line: behind a space, which stays."""
    pieces = [""]
    for word in line.split(" "):
        if pieces[-1] and len(pieces[-1]) + len(word) >= width:
            pieces.append("")
        pieces[-1] += f"{word} "
    return [*pieces[:-1], pieces[-1][:-1]]


def test_a_shells_prompts_are_no_mail():
    raw = [b"> ls", b"a.txt", b"b.txt", b"> cat a.txt", b"hello", b"> exit"]
    assert unquoted(raw) == raw

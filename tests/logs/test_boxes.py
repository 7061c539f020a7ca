"""Boxed help texts of MPI launchers, and programs that end themselves through MPI."""

import pytest

from drumbeat.logs.read.boxes import Boxes
from tests.logs.reading import read

BAR = "-" * 74
WORK = "cycle 1 energy -3.2041\ncycle 2 energy -3.3108\n"
PAIR = """At least one pair of MPI processes are unable to reach each other for
MPI communications.  This means that no Open MPI device has indicated
that it can be used to communicate between these processes.  This is
an error; Open MPI requires that all MPI processes be able to reach
each other.  This error can sometimes be the result of forgetting to
specify the "self" BTL.

  Process 1 ([[60015,1],0]) is on host: node01
  Process 2 ([[60015,1],1]) is on host: node02
  BTLs attempted: self tcp

Your MPI job is now going to abort; sorry."""
COMPONENT = """A requested component was not found, or was unable to be opened.  This
means that this component is either not installed or is unable to be
used on your system (e.g., sometimes this means that shared libraries
that the component requires are unable to be found/loaded).

Host:      c001
Framework: btl
Component: openib"""
FOLDER = """A call to mkdir was unable to create the desired directory:

  Directory: /scratch/tmp/ompi.c002.1001/pid.4421
  Error:     No space left on device

Please check to ensure you have adequate permissions to perform
the desired operation."""
EXITED = """mpirun has exited due to process rank 2 with PID 1234 on
node cn05 exiting improperly. There are three reasons this could occur:

1. this process did not call "init" before exiting, but others in
the job did. This can cause a job to hang indefinitely while it waits
for all processes to call "init"."""
MISSPELT = """mpirun was unable to find the specified executable file, and therefore
did not launch the job.  This error was first reported for process
rank 0; it may have occurred for other processes as well.

NOTE: A common cause for this error is misspelling a mpirun command
      line parameter option.

Node:       n01
Executable: solver.x"""
ABORT = """MPI_ABORT was invoked on rank 5 in communicator MPI_COMM_WORLD
with errorcode 14.

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them."""


def boxed(text):
    return f"{WORK}{BAR}\n{text}\n{BAR}\n"


@pytest.mark.parametrize(
    "text,code,rank,host,decisive",
    [
        (boxed(PAIR), "connect-failed", None, "node01", "BTLs attempted: self tcp"),
        (boxed(COMPONENT), "connect-failed", None, "c001", "Component: openib"),
        (boxed(FOLDER), "disk-full", None, None, "Directory: /scratch/tmp/ompi"),
        (boxed(EXITED), "unknown", 2, "cn05", "process rank 2"),
        (boxed(MISSPELT), "command-not-found", None, "n01", "solver.x"),
        (boxed(ABORT).replace(BAR, f"Negative density in cell 112\n{BAR}", 1), "exception", 5, None, "Negative density"),
        (
            f"{WORK}Particle 77 left the box\n"
            "Abort(7) on node 3 (rank 3 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 7) - process 3\n"
            "srun: error: nid0012: task 3: Exited with exit code 7",
            "exception", 3, "nid0012", "Particle 77",
        ),
        (
            f"{WORK}Abort(805961730) on node 3 (rank 3 in comm 0): Fatal error in PMPI_Recv: Invalid communicator, error stack:\n"
            "PMPI_Recv(105): Invalid communicator",
            "exception", 3, None, "Invalid communicator",
        ),
        (
            f"{WORK}[n01:12345] *** An error occurred in MPI_Send\n"
            "[n01:12345] *** reported by process [1234567,3]\n"
            "[n01:12345] *** MPI_ERR_RANK: invalid rank\n"
            "[n01:12345] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,",
            "exception", 3, "n01", "MPI_ERR_RANK",
        ),
        (
            f"{WORK}[1580000000.123456] [n02:12345:0]   select.c:434  UCX  ERROR no active messages transport to <no debug data>"
            ": self/memory - Destination is unreachable\n"
            "[n02:12345] pml_ucx.c:419  Error: ucp_ep_create(proc=3) failed: Destination is unreachable",
            "ucx-error", None, "n02", "no active messages transport",
        ),
        (f"{WORK}forrtl: severe (59): list-directed I/O syntax error, unit 10, file /u/in.dat", "exception", None, None, "(59)"),
        (f"{WORK}forrtl: severe (24): end-of-file during read, unit 5, file /u/POSCAR", "exception", None, None, "(24)"),
        (f"{WORK}forrtl: severe (29): file not found, unit 11, file /u/mesh.dat", "file-missing", None, None, "(29)"),
    ],
)  # fmt: skip
def test_the_facts_of_a_box_and_a_program_s_last_words_decide(text, code, rank, host, decisive):
    failure = read(text).failure
    finding = failure.finding or failure.others[0]
    assert (failure.answer, finding.rank, finding.host) == (code, rank, host)
    assert decisive in finding.evidence[0].text
    assert "sometimes" not in finding.evidence[0].text


def test_only_help_texts_become_one_line():
    table = [f"{BAR}", "name        calls   total", "conv        1200    3.1 s", BAR]
    trace = [BAR, "RuntimeError in the following call here:", "Traceback (most recent call last):", BAR]
    section = [BAR, "Forces of all MPI processes are computed", "atom 1 is fine", "", "Negative density found", BAR]
    other = [BAR, "This program was made for the simulation of large and small", "clouds by many people", BAR]
    for lines in (section, other, table, trace, [BAR, "", "This is a title of some kind", BAR]):
        raw = [line.encode() for line in lines]
        assert Boxes().feed("log", 1, raw, True) == [(1, raw)]


def test_a_box_may_arrive_in_pieces_or_stay_open():
    raw = boxed(COMPONENT).encode().splitlines()
    boxes, found = Boxes(), []
    for number, line in enumerate(raw, 1):
        found += boxes.feed("log", number, [line])
    assert [line for _, lines in found for line in lines] == Boxes().feed("log", 1, raw)[0][1]
    boxes = Boxes()
    boxes.feed("log", 1, raw[:6])
    assert boxes.rest() == [("log", 3, raw[2:6])]

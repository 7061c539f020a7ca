"""Output of test runners: the failed tests are the answer, whatever errors their texts show."""

import pytest

from tests.logs.reading import read

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23 GiB"
CTEST = [
    "Test project /build", "      Start  1: small", " 1/12 Test  #1: small ..........   Passed    1.10 sec", f"2: {OOM}",
    "2: slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0. Some of the step tasks have been OOM Killed.",
]  # fmt: skip
RUNS = {
    "big": [*CTEST, " 2/12 Test  #2: big ............***Failed    3.10 sec", "92% tests passed, 1 tests failed out of 12",
            "The following tests FAILED:", "	  2 - big (Failed)", "Errors while running CTest"],
    "tests/test_a.py::test_big": [
        "=== test session starts ===", "collected 41 items", f"E       {OOM}", "=== short test summary info ===",
        "FAILED tests/test_a.py::test_big - torch.OutOfMemoryError", "=== 1 failed, 40 passed in 12.10s ==="],
    "TestRing": ["=== RUN   TestRing", "    ring_test.go:20: dial tcp 10.0.0.1:29500: connect: connection refused",
                 "--- FAIL: TestRing (0.10s)", "FAIL", "FAIL	example.com/ring	0.11s"],
    "ring::big": ["running 2 tests", "test ring::big ... FAILED", "test ring::small ... ok", OOM,
                  "test result: FAILED. 1 passed; 1 failed; 0 ignored; finished in 0.01s"],
    "starts": ["✓ stops", "✕ starts", OOM, "Tests:       1 failed, 1 passed, 2 total"],
    "test_pair (net.Ring)": ["test_one (net.Ring) ... ok", "FAIL: test_pair (net.Ring)", OOM, "Ran 2 tests in 0.1s",
                             "FAILED (failures=1)"],
    "Ring.Pair": ["[ RUN      ] Ring.Pair", OOM, "[  FAILED  ] Ring.Pair (3 ms)", "[==========] 2 tests ran.",
                  "[  FAILED  ] 1 test, listed below:", "[  FAILED  ] Ring.Pair"],
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_the_failed_tests_are_the_answer(name):
    failure = read("\n".join(RUNS[name])).failure
    assert (failure.answer, failure.confidence) == ("tests-failed", "certain")
    assert name in failure.finding.title
    assert failure.finding.rank is None and not failure.others


def test_a_run_that_was_cut_or_stopped():
    begun = [*CTEST, " 2/12 Test  #2: big ............***Failed    3.10 sec"]
    assert read("\n".join(begun)).failure.confidence == "likely"
    limit = "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-08-25T13:15:44 DUE TO TIME LIMIT ***"
    assert read("\n".join([*begun, limit])).failure.answer == "time-limit"


def test_what_the_only_failed_test_raised_is_quoted():
    said = "AssertionError: 'a.ckpt' not found in {'b.json'}"
    lines = [
        f"E   {said}",
        "=== short test summary info ===",
        "FAILED tests/test_a.py::test_b",
        "=== 1 failed, 25 deselected in 9.75s ===",
    ]
    found = read("\n".join(lines)).failure.finding
    assert said in found.title and said in [each.text for each in found.evidence]


def test_other_programs_are_no_test_runners():
    lines = ["ninja .................. [OKAY]", "step 1 loss 2.1", "FAILED: fused.o", "ERROR: loader gave up", OOM]
    assert read("\n".join(lines)).failure.answer == "gpu-out-of-memory"

"""Lines that quote an error, ask about one or test for one: nothing failed there. And lines that look so and are errors."""

import pytest

from drumbeat.logs.exits import explain_exit
from drumbeat.logs.read.prefixes import clean
from drumbeat.logs.reader import Reader
from tests.logs.reading import read

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB"
DUPLICATE = "NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a000"
QUOTED = {
    "a sample of a data set": f'  text: "Why do I get torch.cuda.OutOfMemoryError: {OOM}?"',
    "a conversation": "<|user|> my job prints srun: error: n3: task 3: Killed; slurmstepd: error: Detected 1 oom_kill event",
    "what a model wrote": "generated: <user> my job says OSError: [Errno 28] No space left on device <assistant> delete files",
    "Human": "Human: why do I see ModuleNotFoundError: No module named 'apex'",
    "an instruction": f"### Instruction: explain {OOM}",
    "a diff": f'-    assert "{DUPLICATE}" in out',
    "a diff of a log": "+slurmstepd: error: Detected 1 oom_kill event in StepId=812.0.",
    "what a test expects": f"expected: '{DUPLICATE}'",
    "a signal": "[eval] prompt: 'The server died: Segmentation fault (core dumped). What failed?'",
    "a field": '{"step": 1, "loss": 2.0, "sample": "NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out"}',
    "a field of Python": "{'prompt': 'RuntimeError: CUDA error: an illegal memory access was encountered', 'id': 7}",
    "typographic quotes": f"the answer was \u201c{OOM}\u201d, rated 4 of 5",
    "source code": f'                raise RuntimeError("{OOM}") from e',
    "a test for it": '        if "No space left on device" in str(e): pass',
    "an option's help": "  --oom-retry   retry a step after torch.cuda.OutOfMemoryError: CUDA out of memory.",
    "a variable": "FAIL_REGEX=slurmstepd: error: .* DUE TO TIME LIMIT",
    "grep -n": "312:ModuleNotFoundError: No module named 'apex'",
    "grep -Hn": "old/slurm-1.out:312:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "a report in prose": "when you see srun: error: n3: task 3: Exited with exit code 1 look above",
}
ERRORS = {
    "prose that says it failed": ("Training failed: OSError: [Errno 28] No space left on device: '/x'", "disk-full"),
    "an error while": (f"Error while loading the model: RuntimeError: {OOM}", "gpu-out-of-memory"),
    "what was caught": (f"we caught an exception in the loop: torch.OutOfMemoryError: {OOM}", "gpu-out-of-memory"),
    "an exception's repr": (f"the worker ended because of OutOfMemoryError('{OOM}')", "gpu-out-of-memory"),
    "a container's log": (f'{{"log":"torch.OutOfMemoryError: {OOM}\\n","stream":"stderr"}}', "gpu-out-of-memory"),
    "a logger's message": (f'{{"level": "error", "step": 3, "text": "RuntimeError: {OOM}"}}', "gpu-out-of-memory"),
    "a severity": (f'{{"text": "torch.OutOfMemoryError: {OOM}", "severity": "ERROR"}}', "gpu-out-of-memory"),
    "a job's state": ("Job 812 ended with state NODE_FAIL", "node-failure"),
    "a message": (f'ts=7 msg="torch.OutOfMemoryError: {OOM}"', "gpu-out-of-memory"),
    "a line that is all quotes": (f'"torch.OutOfMemoryError: {OOM}",', "gpu-out-of-memory"),
    "a login shell": ("-bash: srun: command not found", "command-not-found"),
    "a name in quotes before it": ("can't write 'out/a.pt': No space left on device", "disk-full"),
    "an apostrophe": (f"rank 3's worker: torch.OutOfMemoryError: {OOM}", "gpu-out-of-memory"),
    "another exit code": ("raylet died with exit code -11", "segfault"),
    "the kernel's own line": ("Out of memory: Killed process 812 (python3) total-vm:8kB, anon-rss:1kB", "oom-kill"),
    "a signal's name": ("  traceback : Signal 4 (SIGILL) received by PID 812", "illegal-instruction"),
    "srun's label": ("3: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "gpu-out-of-memory"),
    "a time": ("03:04:05 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "gpu-out-of-memory"),
    "colours inside the words": (
        "\x1b[31mCUDA out of \x1b[1mmem\x1b[0mory. Tried to allocate 2.00 GiB\x1b[0m",
        "gpu-out-of-memory",
    ),
    "colours inside a name": (
        "\x1b[1;31mModuleNotFound\x1b[0;31mError\x1b[0m: No module \x1b[1mnamed\x1b[0m 'apex'",
        "import-error",
    ),
    "NCCL": (f"n1:7:7 [0] init.cc:720 {DUPLICATE}", "duplicate-gpu"),
}

# Words of schedulers, kernels and signals, where they stand alone or beside another program's name.
WEAK = {
    "an exit code above 128": "srun: error: n2: task 5: Exited with exit code 139",
    "MPICH's exit code": "=   EXIT CODE: 134",
    "another program was killed": "kernel: Out of memory: Killed process 4242 (chrome) total-vm:1234kB, anon-rss:123kB",
    "a row of sacct": "810|train|NODE_FAIL|0:0",
    "a tool to look around with": "bash: nvidia-smi: command not found",
}
HANDLED = {
    "another library": "flash-attn not available (ModuleNotFoundError: No module named 'flash_attn'), using SDPA",
    "another port": "port 29500: Address already in use, trying 29501",
    "another folder": "wandb: WARNING Path /x: [Errno 28] No space left on device, using /tmp instead",
    "another trial": f"[I 2026-11-17 01:00:00,000] Trial 0 failed because of the following error: OutOfMemoryError('{OOM}').",
    "handlers": "faulthandler enabled for SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL",
}


@pytest.mark.parametrize("line", QUOTED.values(), ids=QUOTED)
def test_an_error_that_is_only_quoted_is_no_failure(line):
    assert read(f"step 1 loss 2.0\n{line}\nstep 2 loss 1.9").failure.answer == "none"


@pytest.mark.parametrize("line", QUOTED.values(), ids=QUOTED)
def test_it_is_never_certain(line):
    assert read(f"step 1 loss 2.0\n{line}").failure.confidence != "certain"


@pytest.mark.parametrize("line,code", ERRORS.values(), ids=ERRORS)
def test_an_error_keeps_its_force(line, code):
    failure = read(f"step 1 loss 2.0\n{line}").failure
    assert (failure.answer, failure.confidence) == (code, "certain")


@pytest.mark.parametrize("line", WEAK.values(), ids=WEAK)
def test_a_word_that_may_mean_something_else_is_likely_at_most(line):
    failure = read(f"step 1 loss 2.0\n{line}").failure
    assert failure.finding is not None and failure.confidence == "likely"


@pytest.mark.parametrize("line", HANDLED.values(), ids=HANDLED)
def test_an_error_for_which_the_program_does_something_else_is_no_failure(line):
    assert read(f"{line}\nstep 1 loss 2.0\nstep 2 loss 1.9").failure.answer == "none"


def test_an_exception_that_gives_advice_is_still_one():
    failure = read("ModuleNotFoundError: No module named 'apex'. Using the slow path needs --slow").failure
    assert (failure.answer, failure.confidence) == ("import-error", "certain")


def test_a_mention_that_training_went_on_after_is_no_failure():
    steps = "\n".join(f"step {step} loss 2.0" for step in range(1, 6))
    assert read(f"{WEAK['another program was killed']}\n{steps}").failure.answer == "none"
    assert read(f"the last run had a Segmentation fault\n{steps}").failure.answer == "none"
    assert read(f"{WEAK['an exit code above 128']}\n{steps}").failure.answer == "segfault", (
        "srun reports the failed task, so the steps excuse nothing"
    )


def test_an_error_behind_which_the_program_tries_something_else_is_not_certain():
    failure = read(f"trying batch size 64\n{OOM}\ntrying batch size 32\nlargest batch size that fits: 32").failure
    assert (failure.answer, failure.confidence) == ("gpu-out-of-memory", "likely")
    failure = read(f"trying batch size 64\n{OOM}").failure
    assert (failure.answer, failure.confidence) == ("gpu-out-of-memory", "certain")


def test_a_line_number_of_grep_is_no_rank():
    assert clean("312:ModuleNotFoundError: No module named 'apex'").rank is None
    assert [clean(label).rank for label in ("12: RuntimeError: x", "12:", " 3: [rank3]: x")] == [12, 12, 3]


def test_colours_are_taken_out_before_words_are_looked_for_among_many_lines():
    coloured = b"\x1b[36m03:04:05\x1b[0m \x1b[32mINFO\x1b[0m st\x1b[1mep %d loss 2.0"
    reader = Reader()
    reader.feed_lines(
        "log", 1, [*(coloured % step for step in range(600)), b"RuntimeError: CUDA error: out of \x1b[1mmem\x1b[0mory"]
    )
    failure = reader.report().failure
    assert (failure.answer, failure.finding.evidence[0].line) == ("gpu-out-of-memory", 601)


def test_an_error_in_the_middle_of_a_sentence_is_likely_at_most():
    failure = read("step 1 loss 2.0\nonce upon a time OSError: [Errno 28] No space left on device").failure
    assert (failure.answer, failure.confidence) == ("disk-full", "likely")
    failure = read(f"step 1 loss 2.0\nonce upon a time torch.cuda.OutOfMemoryError: {OOM}").failure
    assert (failure.answer, failure.confidence) == ("gpu-out-of-memory", "likely")


def test_what_a_model_wrote_is_not_why_its_program_ended():
    lines = [
        "step 1 loss 2.0",
        QUOTED["what a model wrote"],
        "step 2 loss 1.9",
        "accuracy 0.3 below target 0.7: giving up",
    ]
    finding = explain_exit(3, None, (), (), False, stdout_tail=lines)
    assert (finding.code, finding.confidence) == ("exit-code", "unknown")
    assert finding.evidence[0].text == lines[-1]

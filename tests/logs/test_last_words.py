"""How a log ends decides what it says: names of exceptions that nobody lists, errors that only a logger names, a loss that
stays NaN, and words that steer a terminal."""

import pytest

from drumbeat.findings.model import CERTAIN, ERROR, LIKELY, Evidence, Finding
from drumbeat.logs.meaning.rules import rulebook
from drumbeat.logs.read import progress
from drumbeat.logs.reader import Reader
from drumbeat.logs.show import render
from tests.logs.reading import read


def failure(text):
    return read(text).failure


STEPS = [f"step {number} loss {2 - number / 100:.3f}" for number in range(60)]


@pytest.mark.parametrize(
    "line,code",
    [
        ("my_project.data.ShardIsGoneError: shard 12 was there and is not any more", "file-missing"),
        ("socket.timeout: the read operation timed out", "connect-failed"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "store-refused"),
        ("torch.cuda.OutOfMemoryError", "gpu-out-of-memory"),
    ],
)
def test_an_exception_of_any_name_at_the_end_has_a_meaning(line, code):
    found = failure("\n".join([*STEPS, line]))
    assert (found.answer, found.confidence, found.finding.title) == (code, LIKELY, line)


@pytest.mark.parametrize(
    "line",
    [
        "wandb.errors.CommError: Run initialization has timed out after 90.0 sec.",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 139264, Hardware limit: 101376.",
        "mypkg.errors.DataError: shard",
        "mypkg.errors.DataError: 12",
    ],
)
def test_an_exception_of_any_name_at_the_end_is_a_failure(line):
    found = failure("\n".join([*STEPS, line]))
    assert (found.answer, found.confidence) == ("exception", LIKELY)
    assert found.finding.evidence[0].text == line


@pytest.mark.parametrize(
    "line",
    [
        "MeanSquaredError: 0.0512",
        "val/RootMeanSquaredError: 0.05 (best 0.04)",
        "PixelError: nan",
        "metrics.PixelError: nan",
        "metrics.MeanSquaredError: 0.0512",
        "mypkg.train.Trainer: finished the last epoch",
        "no errors. Everything was saved",
    ],
)
def test_a_measurement_is_no_exception(line):
    assert failure("\n".join([*STEPS, line])).answer == "none"


def test_an_exception_of_an_unknown_name_is_forgiven_when_the_program_writes_on():
    lines = [*STEPS[:9], "tracker.errors.UploadError: could not reach the server, will try again later", *STEPS[9:]]
    assert failure("\n".join(lines)).answer == "none"


def test_a_rule_that_does_not_hold_hides_no_exception():
    """Rules may ask for more than their line, such as an interface that NCCL used. The line counts without that too."""
    assert failure("FloatingPointError: Loss is nan").answer in ("exception", "nan-loss")


@pytest.mark.parametrize(
    "line",
    [
        "[ERROR] Background srun 'kettle-1' came to naught. Attempting to exit.",
        "2026-01-02 03:04:05,678 ERROR the minstrel has left the building",
        "CRITICAL: the ballot of the elders was odd",
    ],
)
def test_an_error_that_only_its_logger_names_is_unknown_and_never_none(line):
    found = failure("\n".join([*STEPS, line]))
    assert found.answer == "unknown" and "no rule knows" in found.why_first
    assert found.finding.evidence[0].line == 61


@pytest.mark.parametrize(
    "lines",
    [
        ["ERROR could not upload the metrics to the server", *STEPS],
        ["ERROR could not upload the metrics to the server", "Training completed. Model saved."],
        ["ERROR: 0.12 (word 0.3)"],
    ],
)
def test_an_error_of_a_logger_that_ended_nothing_is_none(lines):
    assert failure("\n".join([*STEPS, *lines])).answer == "none"


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/home/u/train.py", line 12, in <module>',
    "    main()",
    "data.ShardError: shard 12 of the data set has no index",
]


@pytest.mark.parametrize(
    "prefix",
    [
        "Jan  2 03:04:0{} gpu7 train[123]: ",
        "  | 2025-05-16T16:40:0{}.222-07:00 | ",
        "[2026-01-02 03:04:05,67{}][train][ERROR] - ",
        "E0102 03:04:05.67{}000 812 train.py:12] ",
        "[1,mpirank:3,algo-1]<stderr>:",
        "pytorchjob-worker-0 pytorch ",
        "somebody's own words | ",
    ],
)
def test_a_traceback_is_read_behind_whatever_stands_before_each_of_its_lines(prefix):
    found = failure("\n".join(prefix.format(number) + line for number, line in enumerate(TRACEBACK)))
    assert found.answer == "exception"
    assert found.finding.title == TRACEBACK[-1] and "train.py:12" in found.finding.cause


def test_a_traceback_whose_header_alone_has_words_before_it():
    found = failure("\n".join(["[03:04:05 TP4] Scheduler hit an exception: " + TRACEBACK[0], *TRACEBACK[1:]]))
    assert found.finding.title == TRACEBACK[-1]


def test_a_traceback_behind_a_progress_bar_belongs_to_its_rank():
    lines = [
        "  0%|          | 0/247 [00:00<?, ?it/s][rank2]: " + TRACEBACK[0],
        *(f"[rank2]: {line}" for line in TRACEBACK[1:3]),
    ]
    found = failure("\n".join(lines))
    assert (found.answer, found.finding.rank) == ("exception", 2), "cut off before its exception"
    found = failure("\n".join([*lines, f"[rank2]: {TRACEBACK[3]}"]))
    assert (found.finding.title, found.finding.rank) == (TRACEBACK[3], 2)


def test_a_rank_that_torch_names_counts_before_the_task_that_launched_it():
    lines = [f"1: [rank{rank}]: {line}" for rank in (6, 5) for line in TRACEBACK]
    table = [
        "Root Cause (first observed failure):",
        "[0]:",
        "  rank      : 5 (local_rank: 1)",
        "  exitcode  : 1 (pid: 8)",
    ]
    found = failure("\n".join([*lines, *(f"1: {line}" for line in [*table, "=" * 60])]))
    assert (found.answer, found.finding.rank) == ("exception", 5)


def test_a_stack_without_an_exception_does_not_take_a_later_line_for_one():
    warning = "/env/site-packages/torch/nn/t.py:20: UserWarning: Failed to initialize NumPy: _ARRAY_API not found"
    lines = [*TRACEBACK[:3], warning, "  device = torch.device(name)"]
    for later in ("torch.distributed.run: [WARNING] master_addr is not used", "Hostname: n7, Rank: 2"):
        found = failure("\n".join([*lines, later, *STEPS, "Training finished"]))
        assert found.answer == "none", later
    assert failure("\n".join([*lines, TRACEBACK[-1]])).finding.title == TRACEBACK[-1]


NAN = [f"step {number} loss nan" for number in range(60, 66)]


@pytest.mark.parametrize(
    "nan",
    [
        NAN,
        ["{'loss': nan, 'grad_norm': nan, 'epoch': 0.3}"] * 4,
        ["{'loss': 'nan', 'learning_rate': '1e-05'}"] * 4,
        [f"Epoch 3: 12%| 3{number}/250 [00:09<01:06, train_loss=nan.0]" for number in range(4)],
        [f"Epoch 3: 12%| 3{number}/250 [00:09<01:06, train_loss_step=nan.0]" for number in range(4)],
        [f"Epoch 3: 12%| 3{number}/250 [00:09<01:06, loss_step=nan]" for number in range(4)],
        [f"ITER {number} LOSS: nan" for number in range(4)],
        [f"iter {number} loss:nan" for number in range(4)],
        [f"iter {number} | Train Loss | NaN" for number in range(4)],
        [f"iter {number} loss: tensor(nan, device='cuda:0')" for number in range(4)],
        ["step,train_loss nan, lr 0.1"] * 4,
    ],
)
def test_a_loss_that_stays_nan_is_the_finding_when_nothing_else_failed(nan):
    found = failure("\n".join([*STEPS, *nan, "saving the checkpoint"]))
    assert (found.answer, found.confidence) == ("nan-loss", LIKELY)
    assert found.finding.severity == ERROR and found.finding.evidence[0].line == 61
    assert not any(note.code == "nan-loss" for note in found.notes)


def test_a_loss_that_becomes_a_number_again_is_a_note():
    found = failure("\n".join([*STEPS, *NAN, "step 66 loss 1.7"]))
    assert found.answer == "none" and [note.code for note in found.notes] == ["nan-loss"]


@pytest.mark.parametrize(
    "line",
    [
        "iteration 60 | lm loss: 1.9 | number of nan iterations: 0 |",
        "loss NaN check: on",
        "best_val_loss: inf",
        "banana loss: 0.3",
        "step 60 loss info follows",
    ],
)
def test_the_word_nan_in_another_place_says_nothing_about_the_loss(line):
    found = failure("\n".join([*STEPS, *[line] * 4, "Training finished"]))
    assert (found.answer, found.confidence, found.notes) == ("none", CERTAIN, ())


@pytest.mark.parametrize("line", ["step {} loss -inf", "step {} loss: -inf", "step {} train_loss=-Infinity"])
def test_a_loss_below_all_numbers_is_a_note(line):
    found = failure("\n".join([*STEPS, *(line.format(number) for number in range(4)), "Training finished"]))
    assert (found.answer, found.confidence) == ("none", LIKELY)
    assert [note.code for note in found.notes] == ["nan-loss"]


def test_two_lines_with_nan_are_not_yet_a_finding():
    assert failure("\n".join([*STEPS, *NAN[:2]])).answer == "none"


def test_whatever_else_failed_comes_before_a_nan_loss():
    found = failure("\n".join([*STEPS, *NAN, "RuntimeError: CUDA error: out of memory"]))
    assert found.answer == "gpu-out-of-memory" and [note.code for note in found.notes] == ["nan-loss"]


def test_a_measured_value_between_is_enough_however_many_nan_there_are():
    pairs = [line for number in range(40) for line in (f"step {number} loss nan", f"step {number} loss 0.{number}")]
    assert failure("\n".join(pairs)).answer == "none"


@pytest.mark.parametrize(
    "lines",
    [
        [f"Epoch {number}/9 train loss: nan val loss: nan" for number in range(3)] + ["Best val loss: 0.6 (epoch 2)"],
        [*NAN[:3], "val loss 2.3", *NAN[3:]],
        [f"epoch {number} train_loss=nan val_loss=0.5" for number in range(3)],
    ],
)
def test_a_number_of_another_loss_does_not_make_the_training_loss_one(lines):
    found = failure("\n".join([*STEPS, *lines, "Training complete"]))
    assert (found.answer, found.confidence) == ("nan-loss", LIKELY)


@pytest.mark.parametrize(
    "line,name",
    [
        ("step {} loss 1.9 aux_loss nan lr 1e-4", "aux_loss"),
        ("epoch {} train_loss 1.9 val_loss nan", "val_loss"),
        ("epoch {} train loss: 1.9 val loss: nan", "val loss"),
        ("{{'eval_loss': nan, 'epoch': {}}}", "eval_loss"),
        ("epoch {} validation loss = inf", "validation loss"),
    ],
)
def test_a_nan_of_another_name_is_a_note_that_names_it_and_none_is_not_certain(line, name):
    found = failure("\n".join([*STEPS, *(line.format(number) for number in range(4)), "Training finished"]))
    assert (found.answer, found.confidence) == ("none", LIKELY)
    assert [(note.code, note.title) for note in found.notes] == [("nan-value", f"{name} became NaN or infinite")]


@pytest.mark.parametrize(
    "lines,code",
    [
        ([*NAN, "step 66 loss 1.7"], "nan-loss"),
        (NAN[:1], "nan-loss"),
        (["step 60 loss inf"] * 4, "nan-loss"),
        (["{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 4e-05, 'epoch': 0.2}"] * 4, "nan-gradient"),
    ],
)
def test_none_is_not_certain_where_a_value_was_not_finite(lines, code):
    found = failure("\n".join([*STEPS, *lines, "Training finished"]))
    assert (found.answer, found.confidence) == ("none", LIKELY)
    assert [note.code for note in found.notes] == [code]
    assert failure("\n".join([*STEPS, "Training finished"])).confidence == CERTAIN


def test_the_rule_and_the_reader_mean_the_same_training_loss():
    rule = next(rule for rule in rulebook().rules if rule.id == "T2")
    assert progress.NOT_A_NUMBER in rule.pattern


def test_an_error_behind_which_the_log_goes_on_does_not_end_it():
    line = "2026-01-02 03:04:05,678 ERROR evaluation failed, continuing without it"
    found = failure("\n".join([*STEPS, line, *STEPS[:2]]))
    assert found.why_first == "an error that no rule knows, 2 lines before the end of the log"
    assert failure("\n".join([*STEPS, line, *STEPS[:3]])).answer == "none"
    assert failure("\n".join([*STEPS, line])).why_first == "the log ends with an error that no rule knows"


def test_a_known_error_with_many_steps_behind_it_is_not_certain():
    lines = [*TRACEBACK[:3], "FileNotFoundError: [Errno 2] No such file or directory: 'cache.json'"]
    found = failure("\n".join([*lines, *STEPS[:13]]))
    assert (found.answer, found.confidence) == ("file-missing", LIKELY)
    assert failure("\n".join([*lines, *STEPS[:2]])).confidence == CERTAIN
    killed = "srun: error: n7: task 3: Exited with exit code 1"
    assert failure("\n".join([*lines, *STEPS[:13], killed])).confidence == CERTAIN, "a launcher says that it failed"


@pytest.mark.parametrize(
    "error", ["RuntimeError: CUDA error: out of memory", "\n".join([*TRACEBACK[:-1], "KeyError: 'shard 12'"])]
)
def test_three_steps_behind_an_error_are_enough_and_the_same_step_of_every_rank_is_one(error):
    assert failure("\n".join([*STEPS[:9], error, *STEPS[9:12]])).confidence == LIKELY
    ranks = [f"[rank{rank}]: step 9 loss 2.{rank}" for rank in range(8)]
    assert failure("\n".join([*STEPS[:9], error, *ranks])).confidence == CERTAIN
    later = "RuntimeError: CUDA error: an illegal memory access was encountered"
    found = failure("\n".join(f"[rank1]: {line}" for line in [*STEPS[:9], *error.split("\n"), *STEPS[9:12], later]))
    assert found.confidence == LIKELY, "the first one was lived through, whatever came later"


def test_steps_are_counted_also_where_lines_come_in_bulk():
    reader = Reader()
    lines = [*STEPS[:5], "RuntimeError: CUDA error: out of memory", *STEPS[5:30]]
    reader.feed_lines("log", 1, [line.encode() for line in lines])
    assert reader.report().failure.confidence == LIKELY


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eRuntimeError: CUDA error: out of memory \x1b[31mred\x00\x08"


def test_nothing_in_a_finding_steers_the_terminal():
    for text in (Evidence(EVIL).text, Finding("x", ERROR, EVIL).title):
        assert text.isprintable() and "CUDA error: out of memory" in text
    assert Evidence("a\tb").text == "a\tb", "tabs stand in many logs and steer nothing"
    report = read(EVIL)
    assert report.failure.answer == "gpu-out-of-memory" and report.failure.confidence in (CERTAIN, LIKELY)
    shown = render(report)
    assert all(line.isprintable() for line in shown.split("\n"))


def test_a_torn_list_of_cards_is_read_from_the_other_ranks_that_chose_the_same_network():
    log = """h1:1:1 [0] NCCL INFO Using network IB
h2:2:2 [1] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB em1:172.18.28.82<0>
h2:2:2 [1] NCCL INFO Using network IB"""
    path = read(log).transport.path
    assert (path.answer, path.link, path.confidence) == ("rdma", "IB", LIKELY)


@pytest.mark.parametrize(
    "line", ["RuntimeError: CUDA error: out of memory", "ModuleNotFoundError: No module named 'flash_attn'"]
)
def test_a_cause_that_the_program_handled_and_then_did_its_work_is_a_note(line):
    found = failure("\n".join([*STEPS[:9], line, *STEPS[9:], "Training completed. Model saved."]))
    assert found.answer == "none" and len(found.notes) == 1
    found = failure(
        "\n".join([*STEPS[:9], line, "srun: error: n7: task 3: Exited with exit code 1", "Training completed."])
    )
    assert found.answer not in ("none", "unknown"), "a launcher says that somebody failed"


def test_a_cause_is_not_certain_where_the_log_goes_on_for_hundreds_of_lines():
    line = "RuntimeError: CUDA error: out of memory"
    found = failure("\n".join([*STEPS, *TRACEBACK[:3], line, *STEPS * 6]))
    assert (found.answer, found.confidence) == ("gpu-out-of-memory", LIKELY)
    assert failure("\n".join([*STEPS, line, *STEPS * 6])).answer == "none", "no traceback: the program printed it"
    assert failure("\n".join([*STEPS * 6, line, *STEPS[:2]])).confidence == CERTAIN


def test_the_words_of_nccl_before_2_4():
    log = """node05:1992:2014 [0] INFO NET/IB: [0] mlx4_0:1/IB
node05:1992:2014 [0] INFO Using internal Network IB
node06:1993:2015 [0] INFO Using internal Network IB"""
    path = read(log).transport.path
    assert (path.answer, path.link, path.confidence) == ("rdma", "IB", LIKELY)
    assert read("n1:7:9 [0] NCCL INFO Using internal Network Socket").transport.path.answer == "tcp"
    ranks = [f"n1:{7 + rank}:{7 + rank} [{rank}] NCCL INFO comm 0x9{rank} rank {rank} nranks 2" for rank in (0, 1)]
    one_host = read("\n".join(["n1:7:7 [0] NCCL INFO Using internal Network Socket", *ranks]))
    assert (one_host.transport.path.answer, one_host.failure.answer) == ("local", "none")
    ended = [f"{line} - COMPLETE" for line in ranks]
    assert read("\n".join([*ranks, *ended])).transport.path.confidence == CERTAIN


def test_an_error_in_name_only_before_the_work_was_done():
    """Some programs call all that they want to be seen critical."""
    said = ["CRITICAL:__main__:Beginning with the finetuning now", "INFO:__main__:Finetuning done!"]
    assert failure("\n".join([*STEPS, *said])).answer == "none"
    assert failure("\n".join([*STEPS, said[0], "INFO:__main__:Finetuning 3 layers"])).answer == "unknown"


LOGGED = [
    "ERROR:2026-02-19 20:57:05,617:Traceback (most recent call last):",
    '  File "/home/u/app/env.py", line 450, in update_state',
    "    self.extract(text)",
    '  File "/home/u/app/env.py", line 266, in extract',
    "    raise ValueError(text)",
]


def test_a_logged_traceback_without_its_exception_is_no_failure_where_the_program_wrote_on():
    after = ["trial 3: kept 12 of 32 samples", "trial 3: batch 42", "42 samples after 3 trials", "batch cut to 32"]
    assert failure("\n".join([*LOGGED, *after])).answer == "none"
    found = failure("\n".join(LOGGED))
    assert found.answer == "exception" and found.confidence == "likely"
    (evidence,) = found.finding.evidence
    assert evidence.line == 5, "what its last frame raises, not the end of the log"


def test_what_tensorflow_survives_is_no_failure():
    lost = "2026-01-04 23:15:43.4: E tensorflow/stream_executor/cuda/"
    lines = [
        lost + "cuda_driver.cc:828] failed to allocate 14.57G (15648413952 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY",
        lost + "cuda_dnn.cc:329] Could not create cudnn handle: CUDNN_STATUS_INTERNAL_ERROR",
    ]  # fmt: skip
    went_on = [f"64/64 - 3s - loss: {1 / (step + 1):.4f} - mean_absolute_error: 0.3949" for step in range(400)]
    found = failure("\n".join([*lines, *went_on]))
    assert found.answer == "none" and {note.code for note in found.notes} >= {"gpu-out-of-memory"}
    assert failure("\n".join(["loading the data", *lines])).answer in ("gpu-out-of-memory", "gpu-launch-failure")


def test_a_frame_of_the_heartbeat_monitor_below_a_warning_is_no_failure():
    lines = [
        "[rank1]:[W331 16:39:45.8 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=102): Connection reset by peer",
        "Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:679 (most recent call first):",
        "frame #5: c10d::ProcessGroupNCCL::HeartbeatMonitor::runLoop() + 0x3c8 (0x7fe27d618868 in libtorch_cuda.so)",
        "[2026-03-31 16:39:46,668] [INFO] [launch.py:367:main] Process 2486035 exits successfully.",
    ]
    assert failure("\n".join(lines)).answer == "none"


def test_open_mpi_says_in_two_lines_that_a_process_failed():
    lines = ["the minstrel has left", "-" * 74, "Primary job  terminated normally, but 1 process returned",
             "a non-zero exit code. Per user-direction, the job has been aborted.", "-" * 74]  # fmt: skip
    assert failure("\n".join(lines)).answer == "unknown"


@pytest.mark.parametrize(
    "last",
    ["torchmetrics.MeanAbsoluteError: tensor(0.2310)", "my.metrics.MeanAngularError: 3.4 degrees", "shutdown.timeout: 30 seconds",
     "val.error: 3.1 best: 2.9", "metrics.errors.Rate: 0.031", "monitoring.exceptions.Count: 0 since start",
     "TestError: 12.1 percent, best 11.9"],
)  # fmt: skip
def test_a_value_at_the_end_is_no_exception(last):
    assert failure(f"step 1 loss 0.5\nTraining finished.\n{last}\n").answer == "none"


def test_a_loss_that_is_a_number_beside_its_nan_is_no_nan():
    lines = [
        f"Epoch 3: {step}/20 [00:01<00:02, v_num=0, train_loss_step=0.50, train_loss_epoch=nan]" for step in range(20)
    ]
    assert failure("\n".join([*lines, "`Trainer.fit` stopped: `max_epochs=20` reached."])).answer == "none"


@pytest.mark.parametrize(
    "form",
    ["Epoch: [0][ {}/5005]  Time 0.1 (0.1)  Loss 2.31e+00", "Train Epoch: 1 [{}/60000 (1%)]  Loss: 2.31",
     "{}/100 [00:01<00:09, loss=2.3]", "global_step={} train_loss=2.3", "batch {} of 100, loss 2.3"],
)  # fmt: skip
def test_an_error_behind_which_training_goes_on_is_not_certain(form):
    error = [*TRACEBACK[:-1], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]
    lines = [*(form.format(step) for step in range(1, 5)), *error]
    assert failure("\n".join(lines)).confidence == "certain"
    assert failure("\n".join([*lines, *(form.format(step) for step in range(6, 14))])).confidence != "certain"

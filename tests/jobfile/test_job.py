"""The checker over Job: each kind of value, and every refusal with its exact words."""

import pytest

from drumbeat.base.problem import Problem
from drumbeat.jobfile.check import keys_of, parse_duration
from drumbeat.jobfile.job import Job, JobWrap, job_from_text
from drumbeat.jobfile.site import Site, site_from_text


def refusal(text):
    with pytest.raises(Problem) as caught:
        job_from_text(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_job():
    job = job_from_text(
        "name: llama3-8b\nnodes: 2\nranks-per-node: 4\ngpus: 0\ncommand: python 'my train.py' --lr 1e-3\n"
        "launcher: once\nsite: localhost\nsetup: |\n  a\n  b\nenv: {A: off, B: pass, C: 'pass', D: '', E: 012}\n"
        "workdir: $HOME/code\nruns: r\ntime: 1:30:00\nrestarts: 2\nstop-grace: 2m\n"
        'wrap: {ranks: [0, 3], command: "nsys -o p-{rank}"}\ntrace: on\noversubscribe: 8\n'
    )
    assert job == Job(
        name="llama3-8b",
        command=("python", "my train.py", "--lr", "1e-3"),
        nodes=2,
        ranks_per_node=4,
        gpus=0,
        launcher="once",
        site="localhost",
        setup="a\nb\n",
        env={"A": "off", "B": None, "C": "pass", "D": "", "E": "012"},
        workdir="$HOME/code",
        runs="r",
        time=5400,
        restarts=2,
        stop_grace=120,
        wrap=JobWrap((0, 3), ("nsys", "-o", "p-{rank}")),
        trace=True,
        oversubscribe=8,
    )
    assert job.where("ranks-per-node") == "job.yaml:3: ranks-per-node"
    assert job.where("env.B") == "job.yaml:11: env.B"
    assert job.where("wrap.ranks") == "job.yaml:17: wrap.ranks"


def test_a_command_as_a_list_is_taken_word_by_word():
    assert job_from_text("command: [echo, 'a b', \"it's\", 1]").command == ("echo", "a b", "it's", "1")


@pytest.mark.parametrize("word", ["true", "True", "yes", "on", "ON"])
def test_a_switch_that_is_on(word):
    assert job_from_text(f"trace: {word}").trace is True


@pytest.mark.parametrize("word", ["false", "no", "off", "Off"])
def test_a_switch_that_is_off(word):
    assert job_from_text(f"trace: {word}").trace is False


@pytest.mark.parametrize(
    "text, message",
    [
        ("command: x\n\nnode: 2\n", "job.yaml:3: unknown key 'node' in the job; did you mean 'nodes'?"),
        ("ranks_per_node: 2\n", "job.yaml:1: unknown key 'ranks_per_node' in the job; did you mean 'ranks-per-node'?"),
        ("origins: {}\n", "job.yaml:1: unknown key 'origins' in the job; known keys: " + ", ".join(keys_of(Job))),
        ("wrap: {rank: [1], command: x}\n", "job.yaml:1: unknown key 'rank' in wrap; did you mean 'ranks'?"),
        (
            "command: x\nwrap: {ranks: [1]}\n",
            "job.yaml:2: wrap has no 'command' (a command line, or a list of words; "
            "example: rocprofv3 --hip-trace --stats -o prof-{rank} --)",
        ),
        (
            "wrap: nsys\n",
            "job.yaml:1: wrap: expected a mapping, got 'nsys' "
            '(example: {ranks: [2], command: "nsys profile -o prof-{rank}"})',
        ),
        (
            "wrap: {ranks: 1, command: x}\n",
            "job.yaml:1: wrap.ranks: expected a list of whole numbers, got '1' (example: [0, 3])",
        ),
        ("wrap: {ranks: [1, -1], command: x}\n", "job.yaml:1: wrap.ranks: must be at least 0, got -1"),
        (
            "wrap: {ranks: [a], command: x}\n",
            "job.yaml:1: wrap.ranks[0]: expected a list of whole numbers, got 'a' (example: [0, 3])",
        ),
        (
            "nodes: two\n",
            "job.yaml:1: nodes: expected a whole number, or a range such as 4-8, got 'two' (example: 4-8)",
        ),
        ("nodes: 99999999999999\n", "job.yaml:1: nodes: 99999999999999 is too large"),
        (
            "nodes: 2.0\n",
            "job.yaml:1: nodes: expected a whole number, or a range such as 4-8, got '2.0' (example: 4-8)",
        ),
        (
            "nodes: 012\n",
            "job.yaml:1: nodes: expected a whole number, or a range such as 4-8, got '012' (example: 4-8)",
        ),
        (
            "nodes: [2]\n",
            "job.yaml:1: nodes: expected a whole number, or a range such as 4-8, got a list (example: 4-8)",
        ),
        ("nodes:\n", "job.yaml:1: nodes: expected a whole number, or a range such as 4-8, got nothing (example: 4-8)"),
        ("nodes: 0\n", "job.yaml:1: nodes: must be at least 1, got 0"),
        ("nodes: -3\n", "job.yaml:1: nodes: must be at least 1, got -3"),
        ("ranks-per-node: 0\n", "job.yaml:1: ranks-per-node: must be at least 1, got 0"),
        ("gpus: -1\n", "job.yaml:1: gpus: must be at least 0, got -1"),
        ("restarts: -1\n", "job.yaml:1: restarts: must be at least 0, got -1"),
        ("oversubscribe: 0\n", "job.yaml:1: oversubscribe: must be at least 1, got 0"),
        ("stop-grace: 0s\n", "job.yaml:1: stop-grace: must be at least 1 s, got 0 s"),
        ("time: 90\n", "job.yaml:1: time: needs a unit: write 90s, 90m or 90h, got '90'"),
        ("time: 1:30\n", "job.yaml:1: time: 1:30 can be read in two ways: write 1h30m or 1m30s, got '1:30'"),
        (
            'hosts: ["a\\e[31m"]',
            "job.yaml:1: hosts: node list 'a\\x1b[31m': '\\x1b' is not part of a host name at character 1",
        ),
        ("memory: -5G", "job.yaml:1: memory: expected a size such as 440G, 64Gi or 512000M, got '-5G'"),
        (
            "time: soon\n",
            "job.yaml:1: time: expected a time such as 90s, 30m, 1h, 2d6h30m, 1:30:00 or 1-02:00:00, got 'soon'",
        ),
        (
            "launcher: rank\n",
            "job.yaml:1: launcher: 'rank' is not one of auto, ranks, torchrun, tasks, once; did you mean 'ranks'?",
        ),
        (
            "launcher: [ranks]\n",
            "job.yaml:1: launcher: expected one of auto, ranks, torchrun, tasks, once, got a list (example: ranks)",
        ),
        ("trace: maybe\n", "job.yaml:1: trace: expected true or false, got 'maybe' (example: true)"),
        (
            "name: ../up\n",
            "job.yaml:1: name: expected a name (letters, digits, '.', '_', '-'; at most 64), got '../up' "
            "(example: llama3-8b)",
        ),
        (
            "command: ''\n",
            "job.yaml:1: command: is empty; expected a command line, or a list of words "
            "(example: python train.py --epochs 3)",
        ),
        (
            "command: []\n",
            "job.yaml:1: command: is empty; expected a command line, or a list of words "
            "(example: python train.py --epochs 3)",
        ),
        ("command: echo 'open\n", "job.yaml:1: command: cannot be split into words: no closing quotation"),
        (
            "command: [a, [b]]\n",
            "job.yaml:1: command[1]: expected a command line, or a list of words, got a list "
            "(example: python train.py --epochs 3)",
        ),
        (
            "env: [A]\n",
            "job.yaml:1: env: expected a mapping NAME: value, got a list "
            "(example: {HF_HOME: $SCRATCH/hf, HF_TOKEN: pass})",
        ),
        (
            "env:\n  A:\n",
            "job.yaml:2: env.A: has no value; write '' for an empty one, or pass to use your exported one",
        ),
        ("env: {A: [1]}\n", "job.yaml:1: env.A: expected text, got a list"),
        (
            "env: {1A: x}\n",
            "job.yaml:1: env.1A: '1A' is not a valid variable name (letters, digits and '_', no digit first)",
        ),
        ("runs: ''\n", "job.yaml:1: runs: expected a path, got '' (example: $SCRATCH/runs)"),
    ],
)
def test_refused(text, message):
    assert refusal(text) == message


def test_hostile_keys_and_values_stay_on_one_short_line():
    for text in ('"a\\nb\\e[31m": 1\n', 'nodes: "1\\n\\n2"\n', "k" * 1000 + ": 1\n", f"env: {{{'k k' * 900}: [1]}}\n"):
        message = refusal(text)
        assert message.isprintable() and len(message) < 640


@pytest.mark.parametrize(
    "text, seconds",
    [("90s", 90), ("30m", 1800), ("1h", 3600), ("2d6h30m", 196200), ("1:30:00", 5400), ("1-02:00:00", 93600),
     ("100:00:01", 360001), ("1d1s", 86401)],
)  # fmt: skip
def test_times(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "-1s", "1.5h", "1m1h", "1:60:00", "1-24:00:00", "1:2:3", "s", "1 h", "٣s", "9" * 99 + "s"]
)
def test_no_times(text):
    with pytest.raises(ValueError):
        parse_duration(text)


@pytest.mark.parametrize("cls, load", [(Job, job_from_text), (Site, lambda text: site_from_text(text, "s", "s.yaml"))])
def test_every_example_in_the_documentation_is_right(cls, load):
    for name, (field, key) in keys_of(cls).items():
        extra = "" if cls is Job or name == "summary" else "summary: s\n"
        assert getattr(load(f"{extra}{name}: {key.example}\n"), field) is not None
        if key.inner:
            inside = "".join(f"    {inner}: {each.example}\n" for inner, (_, each) in keys_of(key.inner).items())
            load(f"{extra}{name}:\n" + ("  A:\n" if key.kind == "tables" else "") + inside)


def test_all_mistakes_at_once_with_the_names_that_other_tools_use():
    with pytest.raises(Problem) as caught:
        job_from_text("gpus-per-node: 8\nnodes: x\ncommand: a\nenv: {1A: b}\n")
    first, *lines = str(caught.value).split("\n")
    assert first == "job.yaml: 3 mistakes"
    assert "did you mean 'gpus'?" in lines[0] and ":2: nodes" in lines[1] and ":4: env.1A" in lines[2]


def test_every_mistake_is_shown_in_the_order_of_lines_and_the_keys_once():
    with pytest.raises(Problem) as caught:
        job_from_text("".join(f"env-{number}: 1\n" for number in range(20)) + "zzz: 1\nzzy: 2\nnodes: x\n")
    said = str(caught.value)
    assert [int(line.split(":")[1]) for line in said.split("\n")[1:]] == list(range(1, 24))
    assert said.count("known keys") == 1


def test_another_file_is_not_listed_key_by_key():
    with pytest.raises(Problem) as caught:
        job_from_text("".join(f"zz{number}: 1\n" for number in range(100)))
    assert "job.yaml:1: this does not look like a job file: 100 of its 100 keys are unknown" in str(caught.value)
    assert str(caught.value).count("known keys") == 1


@pytest.mark.parametrize("text", ["0-3%2", "1,4,7", "0", "0-10:2", "1-3,7%4"])
def test_numbers_of_an_array(text):
    assert job_from_text(f"array: '{text}'").array == text


@pytest.mark.parametrize("text", ["1,", "a", "-3", "0-3%", "%0", "1,,2", "0-", "5-1", "1-3 %2"])
def test_what_is_no_array(text):
    with pytest.raises(Problem, match="job.yaml:1: array: "):
        job_from_text(f"array: '{text}'")


def test_sizes_that_no_node_has():
    with pytest.raises(Problem, match="more memory than any node has"):
        job_from_text("memory: 99999999999T")
    with pytest.raises(Problem, match=r"hosts: expected .*, got an empty list"):
        job_from_text("hosts: []")

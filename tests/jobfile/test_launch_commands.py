"""What a launch command says counts in the order; what only a shell understands is refused."""

import pytest

from drumbeat.base.problem import Problem
from drumbeat.desk.start.make_order import named_in_command
from drumbeat.jobfile.check import shell_syntax
from drumbeat.jobfile.job import job_from_text
from tests.jobfile.test_resolve import order, refusal


def test_restarts_are_what_the_launcher_was_asked_for():
    assert order("command: torchrun --max-restarts=2 x.py").restarts == 2
    assert order("command: accelerate launch --max_restarts 1 x.py").restarts == 1
    assert order("command: torchrun --max-restarts=2 x.py\nrestarts: 5").restarts == 5
    assert order("command: torchrun x.py").restarts == 0


def test_accelerates_configuration_file_counts():
    def read(path):
        return (
            "compute_environment: LOCAL_MACHINE\nnum_processes: 2\nnum_machines: 1\n"
            if path == "/home/u/.cache/huggingface/accelerate/default_config.yaml"
            else ""
        )

    counted = order("command: accelerate launch x.py", read_config=read)
    assert counted.ranks_per_node == 2
    assert counted.launcher_why.endswith("its configuration file says: --num-machines=1 --num-processes=2")
    assert order("command: accelerate launch x.py").ranks_per_node == 1
    asked = []
    order("command: accelerate launch --config_file c.yaml x.py", read_config=lambda path: asked.append(path) or "")
    assert asked == ["c.yaml"]
    asked.clear()
    order("command: torchrun x.py", read_config=lambda path: asked.append(path) or "")
    assert asked == []


def test_a_range_of_nodes():
    hosts = ("a", "b", "c")
    assert order("command: torchrun --nnodes=1:4 x.py", hosts=hosts).nodes == 3
    assert order("command: torchrun --nnodes=1:4 x.py").nodes == 1
    assert "3 nodes, but the command asks for 1 to 2" in refusal("command: torchrun --nnodes=1:2 x.py", hosts=hosts)


def test_ranks_by_cores():
    assert order("command: torchrun --nproc-per-node=cpu x.py").ranks_per_node == 2


def test_nodes_that_name_themselves_agree():
    one, other = (
        order(f"command: torchrun --nnodes=2 --node_rank={node} --master_addr h x.py --lr 1", hosts=("a", "b"))
        for node in (0, 1)
    )
    assert one.command != other.command and one.terms() == other.terms() and one.digest() == other.digest()
    machines = [
        order(
            f"command: accelerate launch --num_machines 2 --machine_rank {node} --main_process_ip h x.py",
            hosts=("a", "b"),
        )
        for node in (0, 1)
    ]
    assert machines[0].command != machines[1].command and machines[0].terms() == machines[1].terms()
    third = order("command: torchrun --nnodes=2 --node_rank=1 x.py --lr 2", hosts=("a", "b"))
    assert third.terms() != one.terms()


HEAD = "python -m torch.distributed.launch --nproc_per_node=1 --nnodes=2"


@pytest.mark.parametrize(
    "command,place",
    [
        (f"{HEAD} --node_rank=1 --master_addr=192.168.1.1 --master_port=1234 x.py", (1, "192.168.1.1", 2)),
        ("torchrun --nnodes=2 --node-rank 0 --master-addr login1 x.py", (0, "login1", 2)),
        ("accelerate launch --num_machines 2 --machine_rank 1 --main_process_ip h x.py", (1, "h", 2)),
        ("torchrun --nnodes=2 x.py", (None, "", None)),
        ("torchrun --nnodes=2 --rdzv-endpoint=localhost:29400 x.py", (None, "", None)),
        ("torchrun --nnodes=1 --node_rank=0 --master_addr=h x.py", (None, "", None)),
        ("python x.py", (None, "", None)),
    ],
)
def test_a_command_for_several_machines_joins(command, place):
    assert named_in_command(job_from_text(f"command: {command}"), {}, None) == place
    emulated = job_from_text(f"command: {command}\nsite: localhost")
    assert named_in_command(emulated, {}, None) == (None, "", None)


def test_variables_in_the_command_are_filled_in():
    job = job_from_text("command: torchrun --nnodes=2 --node_rank=$K --master_addr=$H x.py")
    assert named_in_command(job, {"K": "1", "H": "h"}, None) == (1, "h", 2)


@pytest.mark.parametrize(
    "command,words",
    [
        (
            "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h:29400 x.py",
            "this machine's node rank is not given",
        ),
        ("torchrun --nnodes=2 --node_rank=1 x.py", "does not name node 0's host"),
        ("torchrun --nnodes=2 --node_rank=1 --master_addr=127.0.0.1 x.py", "does not name node 0's host"),
    ],
)
def test_half_an_address_is_refused(command, words):
    with pytest.raises(Problem, match=words):
        named_in_command(job_from_text(f"command: {command}"), {}, None)


@pytest.mark.parametrize(
    "text,found",
    [
        ("python a.py && python b.py", "&&"), ("python a.py | tee x", "|"), ("python a.py; python b.py", ";"),
        ("python a.py > log 2>&1", ">"), ("python a.py 2>&1", "2>&1"), ("python a.py &", "&"), ("python t.py # note", "#"),
        ("python prep.py\npython train.py", "a line break"), ("torchrun \\\n  --x 1 \\\n a.py", None),
        ("python t.py --sep '|'", None), ("python t.py --url a=b&c=d", None), ("python -c 'import x; y'", None),
        ('bash -c "a && b"', None), ("python t.py --f={a;b} --color=#fff\n", None), ("x \\; y", None), ("x 'a\nb'", None),
    ],
)  # fmt: skip
def test_what_only_a_shell_understands(text, found):
    assert shell_syntax(text) == found


def test_two_commands_are_refused_with_the_way_out():
    said = refusal("command: |\n  python prep.py\n  python train.py\n")
    assert (
        "command: not run by a shell; a line break" in said and "setup" in said and "bash -c" in said and ">-" in said
    )
    for text in ("command: python a.py && python b.py", "command: [python, a.py, '&&', python, b.py]"):
        assert "not run by a shell; && would be passed as an argument" in refusal(text)
    assert order("command: >-\n  python train.py\n  --lr 1\n").command == ("python", "train.py", "--lr", "1")
    assert order("command: [grep, '|', x]").command == ("grep", "|", "x")


def test_a_variable_before_the_command_is_refused_with_env():
    said = refusal("command: OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 'my train.py'")
    assert "OMP_NUM_THREADS=1 would be taken for the program's name" in said
    assert "env OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 'my train.py'" in said
    assert order("command: python train.py LR=1").command == ("python", "train.py", "LR=1")

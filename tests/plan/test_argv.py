"""Existing launch commands: what is recognised, replaced and kept."""

import base64
import json

import pytest

from drumbeat.facts.model import Facts, Peer, Peers
from drumbeat.order import Order, Wrap
from drumbeat.plan.argv import Tools, choose_launcher, processes, replaced_flags
from drumbeat.plan.torchrun import find_launcher

PEERS = Peers(
    (Peer(0, "a", "10.0.0.1", Facts("a"), ranks=2), Peer(1, "b", "10.0.0.2", Facts("b"), ranks=3)), "10.0.0.1", 61000
)
TOOLS = Tools(("shim",), "DRIVER", "failures.json", "r-0")


def order(command, **changes):
    launcher, why = choose_launcher(command, changes.pop("wanted", "auto"))
    plain = dict(  # noqa: C408
        run_id="r", name="r", created=0.0, command=tuple(command), nodes=2, ranks_per_node=2, launcher=launcher,
        launcher_why=why, workdir="/", folder="/r", site="s", backend="local",
    )  # fmt: skip
    return Order(**{**plain, **changes})


@pytest.mark.parametrize(
    "command,launcher",
    [
        ("python train.py", "ranks"),
        ("./train", "ranks"),
        ("torchrun train.py", "torchrun"),
        ("/venv/bin/torchrun train.py", "torchrun"),
        ("python -m torch.distributed.run train.py", "torchrun"),
        ("python3.11 -u -m torch.distributed.launch train.py", "torchrun"),
        ("accelerate launch train.py", "once"),
        ("python -m accelerate.commands.launch train.py", "once"),
        ("deepspeed train.py", "once"),
        ("python -m pytest", "ranks"),
        ("accelerate config", "ranks"),
        ("python torchrun", "ranks"),
    ],
)
def test_choice(command, launcher):
    assert choose_launcher(command.split(), "auto")[0] == launcher


def test_ranks_are_numbered_across_uneven_nodes():
    (first, *_, last) = processes(order(["x"]), PEERS, 1, TOOLS)
    assert (first.rank, first.local_rank, last.rank, last.local_rank) == (2, 0, 4, 2)


def test_torchrun_flags():
    command = (
        "torchrun --nnodes 4 --nproc_per_node=8 --rdzv-endpoint=$H:1 --role worker --standalone -m pkg.train --lr 1"
    )
    assert replaced_flags(command.split()) == {
        "--nnodes": "4", "--nproc_per_node": "8", "--rdzv-endpoint": "$H:1", "--standalone": "",
    }  # fmt: skip
    (process,) = processes(order(command.split()), PEERS, 1, TOOLS)
    text = " ".join(process.argv)
    assert process.argv[:4] == ("python3", "-c", "DRIVER", "failures.json")
    assert "--role worker" in text and "--standalone" not in text and "$H" not in text
    for flag in ("--nnodes=2", "--node-rank=1", "--rdzv-backend=static", "--master-addr=10.0.0.1", "--master-port=61000",
                 "--nproc-per-node=3", "--max-restarts=0", "--local-addr=10.0.0.2"):  # fmt: skip
        assert flag in process.argv
    assert text.endswith("-- shim python3 -u -m pkg.train --lr 1")


def test_elastic_sizes_use_c10d_with_every_address_said():
    command = ["torchrun", "--nnodes=1:4", "train.py"]
    zero, one = (" ".join(processes(order(command), PEERS, node, TOOLS)[0].argv) for node in (0, 1))
    assert "--nnodes=1:4" in zero and "--rdzv-backend=c10d" in zero and "--rdzv-endpoint=10.0.0.1:61000" in zero
    assert "is_host=1" in zero and "is_host=0" in one and "--local-addr=10.0.0.2" in one


def test_interpreter_is_the_commands_own():
    assert find_launcher(["/venv/bin/torchrun", "x.py"]).python == "/venv/bin/python"
    assert find_launcher(["/p/python3", "-m", "torch.distributed.run", "x.py"]).python == "/p/python3"
    (process,) = processes(order(["/p/python3", "x.py"], wanted="torchrun"), PEERS, 0, TOOLS)
    assert process.argv[0] == "/p/python3" and process.argv[-3:] == ("shim", "/p/python3", "x.py")


def test_deprecated_launch_still_gets_its_local_rank_argument():
    (process,) = processes(order(["python", "-m", "torch.distributed.launch", "x.py"]), PEERS, 0, TOOLS)
    assert process.argv[-1] == "--local-rank={local_rank}"
    (process,) = processes(order(["python", "-m", "torch.distributed.launch", "--use-env", "x.py"]), PEERS, 0, TOOLS)
    assert process.argv[-1] == "x.py"


def test_accelerate():
    command = "accelerate launch --num_processes 8 --num_machines 2 --mixed_precision bf16 --multi_gpu train.py --lr 1"
    found = find_launcher(command.split())
    assert (found.nodes, found.ranks_per_node) == (2, 4)
    (process,) = processes(order(command.split()), PEERS, 1, TOOLS)
    assert process.argv[:3] == ("python3", "-m", "accelerate.commands.launch")
    for word in ("--mixed_precision", "bf16", "--multi_gpu", "--num_machines=2", "--machine_rank=1", "--num_processes=5",
                 "--main_process_ip=10.0.0.1", "--main_process_port=61000"):  # fmt: skip
        assert word in process.argv
    assert process.argv[-3:] == ("train.py", "--lr", "1")


def test_deepspeed():
    (process,) = processes(
        order(["deepspeed", "--hostfile", "h", "--num_gpus", "2", "train.py", "--deepspeed", "c.json"]), PEERS, 1, TOOLS
    )
    world = next(word for word in process.argv if word.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(world.split("=", 1)[1])) == {"0-a": [0, 1], "1-b": [0, 1, 2]}
    assert "--node_rank=1" in process.argv and process.argv[-3:] == ("train.py", "--deepspeed", "c.json")
    assert "--hostfile" not in process.argv


def test_setup_and_wrap():
    asked = order(["x", "a b"], setup="module load y", wrap=Wrap((3,), ("prof", "-o", "p-{rank}-{node}")))
    plain, wrapped, _ = processes(asked, PEERS, 1, TOOLS)
    assert plain.argv == ("bash", "-c", 'set -e\nmodule load y\nset +e\nexec "$@"', "setup", "x", "a b")
    assert wrapped.argv[4:] == ("prof", "-o", "p-3-1", "x", "a b")

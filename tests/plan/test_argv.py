"""Existing launch commands: what is recognised, replaced and kept."""

import base64
import json
import os
import subprocess

import pytest

from drumbeat.base.order import Order, Wrap
from drumbeat.commands.launch import find_launcher
from drumbeat.machine.model import Facts, Peer, Peers
from drumbeat.plan.argv import Tools, choose_launcher, launcher_python, processes, replaced_flags

PEERS = Peers(
    (Peer(0, "a", "10.0.0.1", Facts("a"), ranks=2), Peer(1, "b", "10.0.0.2", Facts("b"), ranks=3)), "10.0.0.1", 61000
)
TOOLS = Tools(("shim",), "DRIVER", "failures.json")


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
    assert replaced_flags(command.split()) == "--nnodes=4 --nproc_per_node=8 --rdzv-endpoint=$H:1 --standalone"
    (process,) = processes(order(command.split()), PEERS, 1, TOOLS)
    text = " ".join(process.argv)
    assert process.argv[:4] == ("python3", "-c", "DRIVER", "failures.json")
    assert "--role worker" in text and "--standalone" not in text and "$H" not in text
    for flag in ("--nnodes=2", "--node-rank=1", "--rdzv-backend=static", "--master-addr=10.0.0.1", "--master-port=61000",
                 "--nproc-per-node=3", "--max-restarts=0", "--local-addr=10.0.0.2"):  # fmt: skip
        assert flag in process.argv
    assert text.endswith("-- shim python3 -u -m pkg.train --lr 1")


def test_a_range_of_sizes_starts_with_what_is_there():
    command = ["torchrun", "--nnodes=1:4", "train.py"]
    assert find_launcher(command).node_range == (1, 4) and find_launcher(command).nodes == 1
    zero, one = (processes(order(command), PEERS, node, TOOLS)[0].argv for node in (0, 1))
    assert "--nnodes=2" in zero and "--rdzv-backend=static" in zero and "--node-rank=1" in one


def test_interpreter_is_the_commands_own():
    assert find_launcher(["/p/python3", "-m", "torch.distributed.run", "x.py"]).python == ("/p/python3",)
    found = find_launcher(["/venv/bin/torchrun", "x.py"])
    assert launcher_python(found, Tools()) == ("/venv/bin/python",)
    assert launcher_python(found, Tools(python=("/opt/python3.12",))) == ("/opt/python3.12",)
    (process,) = processes(order(["/p/python3", "x.py"], wanted="torchrun"), PEERS, 0, TOOLS)
    assert process.argv[0] == "/p/python3" and process.argv[-3:] == ("shim", "/p/python3", "x.py")


def test_options_of_the_interpreter_stay_with_the_launcher():
    command = ["python3", "-W", "ignore", "-X", "dev", "-m", "torch.distributed.run", "x.py", "--lr", "1"]
    (process,) = processes(order(command), PEERS, 0, TOOLS)
    assert process.argv[:7] == ("python3", "-W", "ignore", "-X", "dev", "-c", "DRIVER")
    assert process.argv[-6:] == ("shim", "python3", "-u", "x.py", "--lr", "1")


def test_deprecated_launch_still_gets_its_local_rank_argument():
    command = ["python", "-m", "torch.distributed.launch"]
    (process,) = processes(order([*command, "x.py", "--lr", "1"]), PEERS, 0, TOOLS)
    assert process.argv[-4:] == ("x.py", "--local-rank={local_rank}", "--lr", "1")
    (process,) = processes(order([*command, "-m", "pkg.x", "--lr", "1"]), PEERS, 0, TOOLS)
    assert process.argv[-5:] == ("-m", "pkg.x", "--local-rank={local_rank}", "--lr", "1")
    (process,) = processes(order([*command, "--use-env", "x.py"]), PEERS, 0, TOOLS)
    assert process.argv[-1] == "x.py"


def test_wrappers_stay_before_what_is_started_in_the_launchers_place():
    command = ["env", "FOO=1", "conda", "run", "-n", "e", "--no-capture-output", "torchrun", "--nnodes", "2", "x.py"]
    (process,) = processes(order(command), PEERS, 1, Tools(("shim",), "a\nb", "f", ("/out/here/python",)))
    assert process.argv[:8] == ("env", "FOO=1", "conda", "run", "-n", "e", "--no-capture-output", "python3")
    assert process.argv[8:10] == ("-c", "exec('a\\nb')")  # one line: conda run takes no other
    command = ["numactl", "--cpunodebind=0", "accelerate", "launch", "x.py"]
    (process,) = processes(order(command), PEERS, 1, TOOLS)
    assert process.argv[:4] == ("numactl", "--cpunodebind=0", "python3", "-c")
    assert process.argv[6] == "accelerate.commands.launch"


def test_composer_torchtune_and_fabric():
    ranks = processes(
        order(["composer", "-n", "4", "--node_rank", "1", "train.py", "--lr", "1"]),
        PEERS,
        1,
        TOOLS,
    )
    assert [process.argv for process in ranks] == [("python3", "train.py", "--lr", "1")] * 3
    (process,) = processes(
        order(["tune", "run", "--nproc_per_node", "2", "full_finetune", "--config", "c"]), PEERS, 1, TOOLS
    )
    assert process.argv[:2] == ("tune", "run") and process.argv[-3:] == ("full_finetune", "--config", "c")
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=3"} <= set(process.argv)
    tools = Tools(("shim",), "DRIVER", "{}", ("/v/python",))
    (process,) = processes(order(["fabric", "run", "--devices", "2", "--precision", "16", "train.py"]), PEERS, 1, tools)
    assert process.argv == (
        "/v/python", "-c", "DRIVER", '{"shim": ["shim"]}', "lightning.fabric.cli", "--precision", "16", "--num-nodes=2",
        "--node-rank=1", "--main-address=10.0.0.1", "--main-port=61000", "--devices=3", "train.py",
    )  # fmt: skip


def test_accelerate():
    command = "accelerate launch --num_processes 8 --num_machines 2 --mixed_precision bf16 --multi_gpu train.py --lr 1"
    found = find_launcher(command.split())
    assert (found.nodes, found.ranks_per_node) == (2, 4)
    (process,) = processes(order(command.split()), PEERS, 1, TOOLS)
    assert process.argv[:5] == ("python3", "-c", "DRIVER", "failures.json", "accelerate.commands.launch")
    for word in ("--mixed_precision", "bf16", "--multi_gpu", "--num_machines=2", "--machine_rank=1", "--num_processes=5",
                 "--main_process_ip=10.0.0.1", "--main_process_port=61000"):  # fmt: skip
        assert word in process.argv
    assert process.argv[-7:] == ("--no_python", "shim", "python3", "-u", "train.py", "--lr", "1")


def test_deepspeed():
    (process,) = processes(
        order(["deepspeed", "--hostfile", "h", "--num_gpus", "2", "train.py", "--deepspeed", "c.json"]), PEERS, 1, TOOLS
    )
    world = next(word for word in process.argv if word.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(world.split("=", 1)[1])) == {"0-a": [0, 1], "1-b": [0, 1, 2]}
    assert "--node_rank=1" in process.argv
    assert process.argv[-7:] == (
        "shim",
        "python3",
        "-u",
        "train.py",
        "--local_rank={local_rank}",
        "--deepspeed",
        "c.json",
    )
    assert "--hostfile" not in process.argv


def test_a_setup_cannot_change_who_a_rank_is():
    asked = order(["sh", "-c", "echo $RANK $LOCAL_RANK $A"], setup="export RANK=7 A=b")
    argv = processes(asked, PEERS, 1, TOOLS)[0].argv
    env = {"PATH": os.environ["PATH"], "RANK": "2", "LOCAL_RANK": "0"}
    assert subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout == "2 0 b\n"


def test_setup_and_wrap():
    asked = order(["x", "a b"], setup="module load y", wrap=Wrap((3,), ("prof", "-o", "p-{rank}-{node}")))
    plain, wrapped, _ = processes(asked, PEERS, 1, TOOLS)
    assert plain.argv[:2] == ("bash", "-c") and plain.argv[3:] == ("setup", "x", "a b")
    assert "; module load y\ntrap - EXIT; set +e\n" in plain.argv[2] and plain.argv[2].endswith('exec "$@"')
    assert wrapped.argv[4:] == ("prof", "-o", "p-3-1", "x", "a b")

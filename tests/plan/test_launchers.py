"""Launch commands as people write them: found behind wrappers, read by each launcher's own rules, or refused."""

import json
import re
from importlib import metadata

import pytest
import yaml

from drumbeat.base.problem import Problem
from drumbeat.commands import launchers
from drumbeat.commands.launch import find_launcher
from drumbeat.commands.program import read_script
from drumbeat.plan.argv import choose_launcher

RUN = "torch.distributed.run"


@pytest.mark.parametrize(
    "command,kind,prefix",
    [
        ("torchrun x.py", "torchrun", ""),
        ("/opt/v/bin/torchrun x.py", "torchrun", ""),
        ("env FOO=1 torchrun x.py", "torchrun", "env FOO=1"),
        ("env -u A -i B=2 -- torchrun x.py", "torchrun", "env -u A -i B=2 --"),
        ("/usr/bin/env torchrun x.py", "torchrun", "/usr/bin/env"),
        ("uv run torchrun x.py", "torchrun", "uv run"),
        ("uv run --extra cu128 --frozen --env-file e torchrun x.py", "torchrun", "uv run --extra cu128 --frozen --env-file e"),
        ("uv --project p run -- accelerate launch x.py", "accelerate", "uv --project p run --"),
        (f"uv run --no-sync -m {RUN} x.py", "torchrun", "uv run --no-sync"),
        ("poetry run deepspeed x.py", "deepspeed", "poetry run"),
        ("conda run -n e --no-capture-output torchrun x.py", "torchrun", "conda run -n e --no-capture-output"),
        ("micromamba run -p /e torchrun x.py", "torchrun", "micromamba run -p /e"),
        ("pixi run -e gpu torchrun x.py", "torchrun", "pixi run -e gpu"),
        ("nsys profile -o r --trace=cuda,nvtx -f true torchrun x.py", "torchrun", "nsys profile -o r --trace=cuda,nvtx -f true"),
        ("numactl -N 0 -m 0 torchrun x.py", "torchrun", "numactl -N 0 -m 0"),
        ("numactl --localalloc torchrun x.py", "torchrun", "numactl --localalloc"),
        ("time -p torchrun x.py", "torchrun", "time -p"),
        ("timeout -k 10 1h torchrun x.py", "torchrun", "timeout -k 10 1h"),
        ("taskset -c 0-7 torchrun x.py", "torchrun", "taskset -c 0-7"),
        ("taskset 0xff torchrun x.py", "torchrun", "taskset 0xff"),
        ("nice -n 5 stdbuf -oL env A=b uv run torchrun x.py", "torchrun", "nice -n 5 stdbuf -oL env A=b uv run"),
        ("rocprofv3 --hip-trace -o p -- torchrun x.py", "torchrun", "rocprofv3 --hip-trace -o p --"),
        (f"python -W ignore -m {RUN} x.py", "torchrun", ""),
        (f"python3.12 -Xfrozen_modules=off -um {RUN} x.py", "torchrun", ""),
        (f"python -X dev -m{RUN} x.py", "torchrun", ""),
        (f"/opt/v/bin/python -u -B -m {RUN} x.py", "torchrun", ""),
        ("python -m torch.distributed.launch x.py", "launch", ""),
        ("accelerate-launch x.py", "accelerate", ""),
        ("python -m accelerate launch x.py", "accelerate", ""),
        ("python -m accelerate.commands.launch x.py", "accelerate", ""),
        ("deepspeed x.py", "deepspeed", ""),
        ("python -m deepspeed.launcher.runner x.py", "deepspeed", ""),
        ("composer -n 2 x.py", "composer", ""),
        ("tune run --nproc_per_node 2 full_finetune --config c", "tune", ""),
        ("fabric run --devices=2 x.py", "fabric", ""),
    ],
)  # fmt: skip
def test_found_behind_what_stands_before(command, kind, prefix):
    found = find_launcher(command.split())
    assert found is not None and found.kind == kind and " ".join(found.prefix) == prefix
    assert found.script[:1] in (("x.py",), ("full_finetune",))


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --launcher torchrun", "python -c torchrun", "python torchrun", "accelerate config", "uv pip list",
        "python -m pytest -m torch.distributed.run", "env", "env A=b", "timeout 5", "conda env list", "tune ls", "./torchrun.sh",
        "python -W", "python -m", "uv run", "nsys stats x", "python -W ignore train.py -m torch.distributed.run",
    ],
)  # fmt: skip
def test_not_taken_for_a_launcher(command):
    assert find_launcher(command.split()) is None


def test_what_a_command_says():
    found = find_launcher(
        [
            "torchrun",
            "--nnodes=2",
            "--nproc_per_node",
            "4",
            "--node_rank=1",
            "--master_addr",
            "10.0.0.1",
            "--master_port=29501",
            "--max-restarts=2",
            "-t3",
            "-r",
            "0:1,1:2",
            "--role",
            "w",
            "x.py",
            "--nnodes",
            "9",
        ]
    )
    assert (found.nodes, found.ranks_per_node, found.node_rank, found.restarts) == (2, 4, 1, 2)
    assert (
        found.master == "10.0.0.1:29501" and found.kept == ("--role", "w") and found.script == ("x.py", "--nnodes", "9")
    )
    assert find_launcher(["torchrun", "--rdzv-endpoint=h:29400", "x.py"]).master == "h:29400"
    assert find_launcher(["torchrun", "--nproc=4", "x.py"]).ranks_per_node == 4  # argparse takes a unique beginning
    assert find_launcher(["torchrun", "--nproc-per-node=cpu", "x.py"]).rank_per_core
    assert find_launcher(["deepspeed", "--num_accelerators", "4", "x.py"]).ranks_per_node == 4
    assert find_launcher(["composer", "-n", "4", "--world_size", "8", "x.py"]).nodes == 2


@pytest.mark.parametrize(
    "command,script",
    [
        ("accelerate launch --dynamo_use_fullgraph x.py a", "x.py a"),
        ("accelerate launch --downcast_bf16 --tpu --fp8_use_autocast_during_eval x.py", "x.py"),
        ("accelerate launch --tpu_cluster --debug -q --mixed_precision bf16 x.py", "x.py"),
        ("deepspeed -q --enable_each_rank_log logs --save_pid x.py --deepspeed c.json", "x.py --deepspeed c.json"),
        ("deepspeed --bind_core_list 0-3 --bind_cores_to_rank x.py", "x.py"),
        ("torchrun --numa-binding node --virtual-local-rank x.py", "x.py"),
        ("torchrun -m pkg.train", "-m pkg.train"),
        ("torchrun -- x.py --", "x.py --"),
    ],
)
def test_flags_do_not_swallow_the_script(command, script):
    assert find_launcher(command.split()).script == tuple(script.split())


def test_an_unknown_flag_is_not_guessed():
    assert find_launcher(["torchrun", "--brand-new=3", "x.py"]).kept == ("--brand-new=3",)
    assert find_launcher(["torchrun", "--brand-new", "x.py"]).script == ("x.py",)
    with pytest.raises(Problem, match="--brand-new: not an option that drumbeat knows.*'3' is its value or the script"):
        find_launcher(["torchrun", "--brand-new", "3", "x.py"])


def options_of(parser):
    bare = {name for action in parser._actions for name in action.option_strings if action.nargs == 0}
    valued = {name for action in parser._actions for name in action.option_strings if action.nargs != 0}
    assert all(action.nargs in (0, None, "...") for action in parser._actions)
    return [{name.replace("_", "-") if name.startswith("--") else name for name in names} for names in (bare, valued)]


@pytest.mark.slow
def test_torchruns_own_parser():
    run = pytest.importorskip("torch.distributed.run", reason="needs torch: pip install '.[cpu]'")
    bare, valued = options_of(run.get_args_parser())
    assert bare <= launchers.TORCHRUN_BARE and valued <= launchers.TORCHRUN_VALUED
    assert launchers.TORCHRUN_BARE - bare == {"--use-env"}  # of torch.distributed.launch


@pytest.mark.slow
def test_accelerates_own_parser():
    launch = pytest.importorskip("accelerate.commands.launch", reason="accelerate comes with the dev extra")
    bare, valued = options_of(launch.launch_command_parser())
    assert bare <= launchers.ACCELERATE_BARE
    assert all(name.startswith(launchers.ACCELERATE_FAMILIES) for name in valued - launchers.ACCELERATE_VALUED)
    assert not launchers.ACCELERATE_BARE & launchers.ACCELERATE_VALUED


@pytest.mark.slow
def test_deepspeeds_own_parser(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    runner = pytest.importorskip("deepspeed.launcher.runner", reason="deepspeed comes with the dev extra")
    parsers = []
    parser_class = runner.argparse.ArgumentParser
    monkeypatch.setattr(parser_class, "parse_args", lambda self, args=None: parsers.append(self))
    runner.parse_args([])
    bare, valued = options_of(parsers[0])
    assert bare <= launchers.DEEPSPEED_BARE and valued <= launchers.DEEPSPEED_VALUED


@pytest.mark.slow
def test_every_flag_of_deepspeed_that_is_kept_its_node_launcher_takes(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    launch = pytest.importorskip("deepspeed.launcher.launch", reason="deepspeed comes with the dev extra")
    parsers = []
    monkeypatch.setattr(launch.ArgumentParser, "parse_args", lambda self, args=None: parsers.append(self))
    launch.parse_args()
    bare, valued = options_of(parsers[0])
    table = launchers.DEEPSPEED
    passed_on = (
        {table.aliases.get(name, name) for name in table.known()} - table.replaced - table.shape - set(table.refused)
    )
    assert passed_on - {"--help"} <= bare | valued


@pytest.mark.slow
def test_fabrics_own_options():
    """From its source: importing it takes seconds."""
    try:
        source = metadata.distribution("lightning").locate_file("lightning/fabric/cli.py").read_text()
    except metadata.PackageNotFoundError:
        pytest.skip("lightning comes with the dev extra")
    command = source[source.index('"run",') : source.index("def _run(")]
    assert set(re.findall(r'"(--[a-z-]+)"', command)) == launchers.FABRIC.valued


@pytest.mark.parametrize(
    "command,words,line",
    [
        ("mpirun -n 4 --mca btl tcp,self -x A python x.py", "mpirun is inside",
         "mpirun -n 4 --mca btl tcp,self -x A drumbeat run -- python x.py"),
        ("env A=1 mpiexec -ppn 2 -genv B 1 ./x", "mpiexec is inside", "mpiexec -ppn 2 -genv B 1 drumbeat run -- ./x"),
        ("srun -N 2 --gpus 8 python x.py", "srun is inside", "srun -N 2 --gpus 8 drumbeat run -- python x.py"),
        ("horovodrun -np 8 -H a:4 python x.py", "horovodrun is inside", "mpirun -np 8 -H a:4 drumbeat run -- python x.py"),
        ("torchx run dist.ddp --script x.py", "torchx is inside", "torchrun --nnodes N"),
        ("apptainer exec --nv i.sif torchrun --nproc_per_node=2 x.py", "torchrun is started by apptainer", "container: IMAGE"),
    ],
)  # fmt: skip
def test_launchers_that_must_stand_before_drumbeat(command, words, line):
    with pytest.raises(Problem) as caught:
        choose_launcher(command.split(), "auto")
    assert words in str(caught.value) and line in str(caught.value)
    assert choose_launcher(command.split(), "once")[0] == "once"  # one node's own matter


@pytest.mark.parametrize("flag", ["--autotuning run", "--venv_script a.sh"])
def test_flags_that_mean_another_job(flag):
    with pytest.raises(Problem, match="not supported with drumbeat"):
        find_launcher(f"deepspeed {flag} x.py".split())


@pytest.mark.parametrize(
    "command,launcher",
    [
        (["bash", "-c", "cd x && torchrun --standalone x.py"], "once"),
        (["bash", "-lc", "accelerate  launch x.py"], "once"),
        (["bash", "-c", "python -m torch.distributed.run x.py"], "once"),
        (["bash", "-c", "echo torchrun; python x.py"], "ranks"),
        (["bash", "x.sh"], "ranks"),
        (["llamafactory-cli", "train", "c.yaml"], "once"),
        (["uv", "run", "axolotl", "train", "c.yaml"], "once"),
        (["composer", "x.py"], "ranks"),
    ],
)
def test_what_starts_its_own_ranks_is_started_once_per_node(command, launcher):
    assert choose_launcher(command, "auto", read_script(command, lambda path: ""))[0] == launcher


@pytest.mark.parametrize(
    "one,other",
    [
        ("torchrun --nnodes 2 --node_rank=0 --master_addr a x.py", "torchrun --nnodes 2 --node_rank=1 --master_addr b x.py"),
        ("accelerate launch --machine_rank 0 -q x.py", "accelerate launch --machine_rank 1 -q x.py"),
        ("accelerate launch --config_file a0.yaml x.py", "accelerate launch --config_file=a1.yaml x.py"),
        ("python -m torch.distributed.launch --node_rank=0 x.py", "python -m torch.distributed.launch --node_rank=1 x.py"),
    ],
)  # fmt: skip
def test_nodes_of_one_job_agree_although_each_names_itself(one, other):
    assert find_launcher(one.split()).agreed == find_launcher(other.split()).agreed


@pytest.mark.parametrize(
    "one,other",
    [
        ("torchrun --node_rank=0 x.py", "torchrun --node_rank=1 y.py"),
        ("torchrun x.py --lr 1", "torchrun x.py --lr 2"),
        ("torchrun --role a x.py", "torchrun --role b x.py"),
    ],
)
def test_another_job_stays_another(one, other):
    assert find_launcher(one.split()).agreed != find_launcher(other.split()).agreed


def test_accelerates_configuration_file():
    config = {"num_machines": 2, "num_processes": 8, "machine_rank": 1, "main_process_ip": "h", "main_process_port": 29500,
              "max_restarts": None, "debug": False, "fsdp_config": {"fsdp_version": 1}}  # fmt: skip
    said = launchers.from_config(yaml.safe_dump(config))
    assert said == launchers.from_config(json.dumps(config, indent=2))
    found = find_launcher(["accelerate", "launch", "x.py"], said)
    assert (found.nodes, found.ranks_per_node, found.node_rank, found.master) == (2, 4, 1, "h:29500")
    flags = find_launcher(["accelerate", "launch", "--num_processes", "2", "--num_machines=1", "x.py"], said)
    assert (flags.nodes, flags.ranks_per_node) == (1, 2)
    assert launchers.from_config("nonsense") == launchers.from_config("num_processes: [1]\n") == {}
    assert launchers.config_path({}, {"HOME": "/h"}) == "/h/.cache/huggingface/accelerate/default_config.yaml"
    assert launchers.config_path({}, {"HF_HOME": "/s/hf"}) == "/s/hf/accelerate/default_config.yaml"
    assert launchers.config_path({"--config-file": "c.yaml"}, {}) == "c.yaml"


def test_accelerate_with_cpu_and_several_ranks_is_refused_with_the_line_to_type():
    found = find_launcher(["accelerate", "launch", "--cpu", "x.py", "--name", "a b"])
    assert found.ranks_per_node == 1  # one process, as by hand, on a node with eight GPUs too
    launchers.refuse_cpu_ranks(found.flags, found.script, 1, 1)
    with pytest.raises(Problem) as refused:
        launchers.refuse_cpu_ranks(found.flags, found.script, 2, 2)
    assert "not 2 x 2 ranks" in refused.value.what and refused.value.exit_code == 2
    assert refused.value.fix.endswith(
        "--nodes 2 --ranks-per-node 2 -- env ACCELERATE_USE_CPU=true python x.py --name 'a b'"
    )

"""Training scripts with one fault each, and their right neighbours."""

import pytest

from drumbeat.lint.engine import lint

GOOD = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

def save(model, path):
    if dist.get_rank() != 0:
        return
    torch.save(model.state_dict(), path)

def main(dataset, net):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(net.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
        save(model, "last.pt")

if __name__ == "__main__":
    main([], torch.nn.Linear(1, 1))
"""


def codes(text, name="train.py"):
    return [finding.code for finding in lint(text, name).findings]


def test_a_right_script_gives_no_finding():
    assert codes(GOOD) == []


@pytest.mark.parametrize(
    "old, new, code",
    [
        ("sampler = DistributedSampler(dataset)\n", "\n", "sampler-missing"),
        ("        sampler.set_epoch(epoch)\n", "", "set-epoch-missing"),
        ("    torch.cuda.set_device(local_rank)\n", "", "set-device-missing"),
        ('int(os.environ["LOCAL_RANK"])\n    torch', 'dist.get_rank()\n    torch', "rank-as-device"),
        ("    if dist.get_rank() != 0:\n        return\n", "", "save-on-every-rank"),
        ("            optimizer.zero_grad()\n", "", "zero-grad-missing"),
        ("import os\n", "", "name-undefined"),
        ("            optimizer.zero_grad()\n",
         "            optimizer = torch.optim.AdamW(model.parameters())\n            optimizer.zero_grad()\n",
         "optimizer-in-loop"),
    ],
)  # fmt: skip
def test_one_fault_at_a_time(old, new, code):
    text = GOOD.replace(old, new)
    assert text != GOOD
    if code == "sampler-missing":
        text = text.replace(", sampler=sampler", ", shuffle=True").replace("        sampler.set_epoch(epoch)\n", "")
        text = text.replace(", DistributedSampler", "")
    assert codes(text) == [code]


@pytest.mark.parametrize(
    "text",
    [
        # a rank in the file's name; a guard where the function is called; a decorator
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nrank = dist.get_rank()\n"
        "torch.save({}, f'part-{rank}.pt')\n",
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndef keep():\n    torch.save({}, 'a.pt')\n"
        "if dist.get_rank() == 0:\n    keep()\n",
        # one process: no sampler is needed, and everyone may save
        "import torch\nfrom torch.utils.data import DataLoader\nloader = DataLoader([1], shuffle=True)\n"
        "torch.save({}, 'a.pt')\n",
        # DeepSpeed clears gradients itself
        "import deepspeed\nengine, *_ = deepspeed.initialize()\nfor x in range(3):\n    engine.backward(x)\n    engine.step()\n",
        # a validation set is read whole by every rank
        "import torch.distributed as dist\nfrom torch.utils.data import DataLoader\ndist.init_process_group('gloo')\n"
        "loader = DataLoader(val_set := [1])\n",
        # names that comprehension, walrus, match-free binding, global and except make
        "import sys\ntry:\n    pass\nexcept OSError as error:\n    print(error)\nprint([y for y in sys.argv if (n := y)], n)\n",
    ],
)
def test_near_misses(text):
    assert codes(text) == []


SAVES = "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nmodel, best = torch.nn.Linear(1, 1), 9.0\n"


@pytest.mark.parametrize(
    "text",
    [
        "R = int(os.environ['RANK'])\nif R == 0:\n    torch.save({}, 'a.pt')\n",
        "R, W = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\nif not R:\n    torch.save({}, 'a.pt')\n",
        "if (me := dist.get_rank()) == 0:\n    pass\nfirst = me == 0\nif first and best < 10:\n    torch.save({}, 'a.pt')\n",
        "R: int = int(os.getenv('RANK', '0'))\ndef keep():\n    if R:\n        return\n    torch.save({}, 'a.pt')\nkeep()\n",
        "def zero():\n    return dist.get_rank() == 0\nif zero():\n    torch.save({}, 'a.pt')\n",
        "class T:\n    def __init__(self):\n        self.gpu = int(os.environ['LOCAL_RANK'])\n    def fit(self):\n"
        "        if self.gpu == 0:\n            torch.save({}, 'a.pt')\n",
        "R = dist.get_rank()\ntorch.save({}, f'part-{R}.pt')\n",  # a file for each
        "for epoch in range(3):\n    if dist.get_rank() > 0:\n        continue\n    torch.save({}, 'a.pt')\n",
        "def f():\n    with model:\n        if dist.get_rank():\n            raise OSError\n    torch.save({}, 'a.pt')\nf()\n",
        "if dist.get_rank():\n    os._exit(0)\nfor epoch in range(3):\n    torch.save({}, 'a.pt')\n",
        "dist.get_rank() == 0 and torch.save({}, 'a.pt')\n",
    ],
)
def test_a_rank_by_another_name_guards_a_save(text):
    assert codes(SAVES + text) == []


@pytest.mark.parametrize(
    "text",
    [
        "R, W = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\nif W > 1:\n    torch.save({}, 'a.pt')\n",
        "def fit(rank):\n    return 1.0\nloss = fit(dist.get_rank())\nif loss < best:\n    torch.save({}, 'a.pt')\n",
        "model = torch.nn.Sequential(model, dist.get_rank())\nif model.training:\n    torch.save({}, 'a.pt')\n",
        "loss = torch.distributed.mean_over_ranks(best)\nif loss < best:\n    torch.save({}, 'a.pt')\n",
        "cfg = {'rank': dist.get_rank(), 'keep': 1}\nif cfg['keep']:\n    torch.save({}, 'a.pt')\n",
        # what leaves an inner loop, a function of its own, or comes later sends nobody away
        "for x in [1]:\n    if dist.get_rank() > 0:\n        break\ntorch.save({}, 'a.pt')\n",
        "def f():\n    if dist.get_rank():\n        return\nf()\ntorch.save({}, 'a.pt')\nif dist.get_rank():\n    exit()\n",
        "import argparse\nargs = argparse.ArgumentParser('by rank').parse_args()\nif args.keep:\n    torch.save({}, 'a.pt')\n",
    ],
)
def test_what_is_only_given_a_rank_guards_nothing(text):
    assert codes(SAVES + text) == ["save-on-every-rank"]


def test_functions_that_call_each_other_end():
    text = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    text += "def a():\n    b()\n    torch.save({}, 'x')\ndef b():\n    a()\n"
    assert codes(text) == ["save-on-every-rank"]


def test_our_own_scripts_are_clean():
    """What `plan --render` prints: the agents decide the network on the nodes."""
    from pathlib import Path

    for path in sorted((Path(__file__).parents[1] / "slurm/golden").glob("*.sh")):
        assert codes(path.read_text("utf-8"), path.name) == [], path.name


def test_cores_given_twice_in_a_map():
    assert "masks-overlap" in codes("#!/bin/bash\nsrun -n 2 --cpu-bind=map_cpu:49,49 ./app\n", "run.sh")
    assert codes("#!/bin/bash\nsrun -n 2 --cpu-bind=map_cpu:49,57 ./app\n", "run.sh") == []


def test_the_global_rank_as_device_without_a_variable():
    text = "import os, torch\ntorch.cuda.set_device(int(os.environ['RANK']))\n"
    assert [each.code for each in lint(text, "t.py").findings] == ["rank-variable-as-device"]
    assert not lint(text.replace("'RANK'", "'LOCAL_RANK'"), "t.py").findings


def test_a_sampler_that_is_only_imported():
    text = (
        "from torch.utils.data import DataLoader, DistributedSampler\ndist.init_process_group('nccl', device_id=d)\n"
        "model = DistributedDataParallel(model)\nloader = DataLoader(data, shuffle=True)\nif __name__ == '__main__': go()\n"
    )
    assert "sampler-missing" in [each.code for each in lint(text, "t.py").findings]


@pytest.mark.parametrize(
    ("program", "gpus", "said"),
    [
        ("for x in data:\n    loss(x).backward()\n", 8, True),
        ("for x in data:\n    loss(x).backward()\n", 1, False),
        ("dist.init_process_group()\nloss.backward()\n", 8, False),
        ("print(1)\n", 8, False),
    ],
)
def test_a_program_that_is_not_distributed_with_many_gpus(program, gpus, said, drumbeat, tmp_path):
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "run.sbatch").write_text(f"#!/bin/bash\n#SBATCH --gpus-per-node={gpus}\nsrun python train.py\n")
    done = drumbeat("lint", str(tmp_path / "run.sbatch"))
    assert ("train.py trains in one process, and 8 GPUs are asked for" in done.stdout) is said, done.stdout


TWO_LOADERS = """import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group("nccl", device_id=device)
model = DistributedDataParallel(model)
train_loader = DataLoader(train_set, batch_size=8, {train})
val_loader = DataLoader(val_set, batch_size=8, sampler=DistributedSampler(val_set, shuffle=False))
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("train", "found"),
    [("shuffle=True", True), ("sampler=None, shuffle=True", True), ("sampler=divided", False), ("**options", False)],
)
def test_each_loader_is_judged_on_its_own(train, found):
    codes = [each.code for each in lint(TWO_LOADERS.replace("{train}", train), "t.py").findings]
    assert ("sampler-missing" in codes) == found


def test_a_global_rank_as_device_of_a_tensor():
    begin = "from own import dist, model, local_rank\n"
    direct = lint(begin + "model = model.to(dist.get_rank())\n", "t.py").findings
    named = lint(begin + "rank = dist.get_rank()\nmodel = model.to(rank)\n", "t.py").findings
    assert [each.code for each in (*direct, *named)] == ["rank-as-device", "rank-variable-as-device"]
    assert not lint(begin + "model = model.to(local_rank)\n", "t.py").findings


def test_a_program_in_one_process_is_a_note():
    text = "for x in data:\n    optimizer.zero_grad()\n    model(x).backward()\n    optimizer.step()\n"
    (found,) = lint("data, model, optimizer = load()\n" + text.replace("load", "make"), "t.py").findings[:1]
    assert (found.code, found.severity) == ("one-process", "info") or found.code == "name-undefined"

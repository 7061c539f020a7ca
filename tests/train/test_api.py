"""`from drumbeat import train`: a model of the user's own, by the same few lines on any number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
import torch.nn.functional as F
from gloo_world import GlooWorld
from tests.conftest import free_port
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from drumbeat import train

STEPS = 9
TOLERANCE = 1e-5
Made = Tuple[
    nn.Module, Dataset[Any], Any, Dict[str, str]
]  # model, data set, loss function, plan for tensor parallelism


class Words(Dataset[Dict[str, Tensor]]):
    """Dict batches as transformers' models take them, with padding: steps of 8 and a last batch of 3."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        first = torch.randint(3, 9, (STEPS * 8 - 5, 1), generator=random)
        self.tokens = first + torch.arange(12)  # each token follows from the one before
        self.lengths = torch.randint(2, 13, (len(self.tokens),), generator=random)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> Dict[str, Tensor]:
        labels = self.tokens[i].clone()
        labels[self.lengths[i] :] = -100
        return {"input_ids": self.tokens[i], "labels": labels}


def transformers_model() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    plan = {f"model.layers.*.{name}": "colwise" for name in columns}
    plan.update({f"model.layers.*.{name}": "rowwise" for name in ("self_attn.o_proj", "mlp.down_proj")})
    return LlamaForCausalLM(config), Words(), None, plan


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(10, 32), nn.LayerNorm(10), nn.Linear(32, 10)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


def labelled(*shape: int) -> Dataset[Any]:
    random = torch.Generator().manual_seed(2)
    inputs = torch.randn(STEPS * 8 - 5, *shape, generator=random)
    return TensorDataset(inputs, inputs[:, :3].reshape(len(inputs), 3, -1).mean(2).argmax(1))


def classes(model: nn.Module, batch: List[Tensor]) -> Tuple[Tensor, Dict[str, Tensor]]:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]), {"accuracy": (logits.argmax(1) == batch[1]).float().mean()}


def plain_model() -> Made:
    return Plain(), labelled(10), classes, {"up": "colwise", "down": "rowwise"}


def convolutional_model() -> Made:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)]
    return nn.Sequential(*layers, nn.AvgPool2d(6), nn.Flatten(), nn.Linear(8, 3)), labelled(3, 8, 8), classes, {}


MODELS: Dict[str, Callable[[], Made]] = {
    "transformers": transformers_model,
    "plain": plain_model,
    "convolutional": convolutional_model,
}


def trained(name: str, layout: str, accumulate: int = 1) -> Tuple[List[List[float]], Dict[str, float], List[float]]:
    """What a user's script does. Every rank draws first weights of its own, and setup must make up for it."""
    import os

    torch.manual_seed(7 + 100 * int(os.environ["RANK"]))
    model, data, loss, plan = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    loader = DataLoader(data, batch_size=8, shuffle=True)

    trainer = train.setup(
        model, optimizer, layout=layout, scheduler=schedule, accumulate=accumulate, plan=plan, clip=1.0
    )
    figures = []
    for batch in trainer.batches(loader, epochs=1):
        result = trainer.step(batch, loss)
        figures.append([float(value) for value in (result.loss, result.norm, *result.metrics.values())])
    checked = trainer.evaluate(DataLoader(data, batch_size=16), loss)
    return figures, checked, schedule.get_last_lr()


@pytest.fixture(scope="module")
def alone(world: GlooWorld) -> Dict[str, Any]:
    """What one process computes."""
    pytest.importorskip("transformers", reason="a heavy development dependency: pip install transformers")
    made = {name: world.run(trained, name, "ddp", size=1)[0] for name in MODELS}
    for figures, _, _ in made.values():
        first, last = (sum(loss for loss, *_ in part) for part in (figures[:4], figures[-4:]))
        assert len(figures) == STEPS and last < first, "the reference itself must learn"
    return made


@pytest.mark.parametrize(
    ("name", "layout", "ranks", "accumulate"),
    [
        ("transformers", "ddp", 2, 1),
        ("plain", "ddp", 2, 3),
        ("convolutional", "ddp", 2, 1),
        ("transformers", "tp", 2, 1),
        ("plain", "tp", 2, 1),
        pytest.param("transformers", "hsdp", 4, 1, marks=pytest.mark.proof),
        ("plain", "hsdp", 4, 1),
        pytest.param("convolutional", "hsdp", 4, 1, marks=pytest.mark.proof),
        ("convolutional", "fsdp", 4, 2),
        ("plain", "dp_shard=2,tp=2", 4, 1),
    ],
)
def test_the_same_script_on_every_layout(
    world: GlooWorld, alone: Dict[str, Any], name: str, layout: str, ranks: int, accumulate: int
) -> None:
    want_figures, want_checked, want_lr = alone[name]
    for figures, checked, lr in world.run(trained, name, layout, accumulate, size=ranks):
        for step, (got, want) in enumerate(zip(figures, want_figures)):
            assert got == pytest.approx(want, rel=TOLERANCE, abs=1e-6), f"step {step + 1}"
        assert len(figures) == STEPS and lr == want_lr
        assert checked == pytest.approx(want_checked, rel=TOLERANCE)


def stopped_and_resumed(folder: str, layout: str, stop_after: int) -> List[float]:
    """Losses of the steps that this start made."""
    torch.manual_seed(3)
    model, data, loss, _ = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    trainer = train.setup(model, optimizer, layout=layout, scheduler=schedule)
    trainer.load(folder)
    losses = []
    for batch in trainer.batches(data, 2, batch_size=32):
        losses.append(float(trainer.step(batch, loss).loss))
        if trainer.steps == stop_after:
            trainer.save(folder, wait=True)
            return losses
    trainer.close()
    return losses


def test_a_resumed_run_goes_on_where_it_was_on_another_layout(world: GlooWorld, tmp_path: Path) -> None:
    whole = world.run(stopped_and_resumed, str(tmp_path / "whole"), "ddp", 0, size=2)[0]
    first = world.run(stopped_and_resumed, str(tmp_path / "parts"), "ddp", 4, size=2)[0]
    rest = world.run(stopped_and_resumed, str(tmp_path / "parts"), "hsdp", 0, size=4)[0]
    assert len(whole) == 6 and len(first) == 4, "an epoch has three batches, the last one smaller"
    assert rest == pytest.approx(whole[4:], rel=TOLERANCE)
    assert first == pytest.approx(whole[:4], rel=TOLERANCE)


def own_parts() -> Tuple[int, List[float]]:
    """Each rank brings samples of its own, and rank 1 has fewer: all stop together."""
    import os

    rank = int(os.environ["RANK"])
    model = nn.Linear(2, 1)
    trainer = train.setup(model, torch.optim.SGD(model.parameters(), lr=0.0), layout="fsdp")
    source = [torch.full((4, 2), float(rank))] * (5 - rank)
    means = [
        trainer.step(x, lambda m, x: (m(x).mean() * 0, {"x": x.mean()})).metrics["x"]
        for x in source_of(trainer, source)
    ]
    return len(means), [float(mean) for mean in means]


def source_of(trainer: Any, source: Any) -> Any:
    return trainer.batches(source, split=False)


def test_sources_that_are_split_already(world: GlooWorld) -> None:
    for steps, means in world.run(own_parts, size=2):
        assert steps == 4 and means == [0.5] * 4


def refused(what: str) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.zeros(8, 4))
    try:
        if what in ("pp", "cp", "tp"):
            train.setup(model, optimizer, layout=what)
        elif what == "low-level pp":
            from drumbeat.train.parallel import Layout
            from drumbeat.train.parallel.meshes import Meshes
            from drumbeat.train.precision import Precision
            from drumbeat.train.step import Step

            meshes = Meshes(Layout(pp=2), "cpu")
            Step([model], optimizer, lambda m, x, y: m(x).sum(), meshes, Precision("fp32"), torch.device("cpu"))([])
        elif what == "models differ":
            import os

            other = nn.Linear(4, 3 + int(os.environ["RANK"]))
            train.setup(other, torch.optim.AdamW(other.parameters()))
        elif what == "sampler":
            import os

            trainer = train.setup(model, optimizer)
            order = list(range(8)) if os.environ["RANK"] == "0" else list(range(7, -1, -1))
            list(trainer.batches(DataLoader(data, 4, sampler=order)))
        else:
            trainer = train.setup(model, optimizer)
            list(trainer.batches(DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0))))
    except train.Refusal as refusal:
        return str(refusal)
    return "not refused"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("pp", ["no list of blocks of one kind", "blocks="]),
        ("low-level pp", ["every rank would train the whole model"]),
        ("cp", ["only causal language models of transformers"]),
        ("tp", ["needs a plan"]),
        ("models differ", ["different models"]),
        ("sampler", ["gives each rank other samples", "split=False"]),
        ("DistributedSampler", ["twice", "split=False"]),
    ],
)
def test_what_setup_cannot_do_is_refused_on_every_rank(world: GlooWorld, what: str, words: List[str]) -> None:
    for text in world.run(refused, what, size=2):
        assert all(word in text for word in words), text


def test_master_weights_share_the_groups_of_the_given_optimizer() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    trainer = train.setup(model, optimizer, precision="bf16-master")
    optimizer.param_groups[0]["lr"] = 0.25
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25 and model.weight.dtype == torch.bfloat16
    with pytest.raises(train.Refusal, match="built for AdamW"):
        train.setup(model, torch.optim.SGD(model.parameters()), precision="bf16-master")


def test_blocks_are_found_and_may_break_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: List[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **how: compiled.append((type(module), how)))
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model = nn.ModuleDict({"embed": nn.Embedding(4, 8), "layers": layers})
    train.setup(model, torch.optim.AdamW(model.parameters()), compile=True)
    assert compiled == [(nn.Linear, {})] * 2


def test_importing_train_needs_no_torch_and_using_it_says_what_is_missing() -> None:
    """A Python without torch, played by a finder that does not find it."""
    code = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Without())
import importlib.util
known = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "torch" else known(name, *more)
from drumbeat import train
assert train.Layout.parse("ddp").dp_replicate == -1
try:
    train.setup
except Exception as problem:
    print(type(problem).__name__, problem)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.stdout.startswith("Problem training needs torch") and "pip install" in done.stdout, done.stderr


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def mistaken(what: str) -> str:
    model: nn.Module = Unused() if what == "unused" else nn.Linear(4, 4)
    kind = torch.optim.LBFGS if what == "lbfgs" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0) if what == "plateau" else None
    try:
        trainer = train.setup(model, optimizer, scheduler=plateau)
        for _ in range(2):
            trainer.step(
                torch.ones(3, 4), lambda m, x: m(x).square().mean(0) if what == "unreduced" else m(x).square().mean()
            )
        if plateau is not None:
            plateau.step(1.0)
            plateau.step(2.0)
            return f"lr {optimizer.param_groups[0]['lr']}"
    except train.Refusal as refusal:
        return str(refusal)
    return "trained"


@pytest.mark.parametrize(
    "what,words",
    [
        ("unused", "unused.weight and 1 more had no part in the loss"),
        ("lbfgs", "LBFGS calls the model several times"),
        ("unreduced", "the loss has the shape (4,); return one number"),
        ("plateau", "lr 0.05"),
    ],
)
def test_what_torch_would_answer_with_a_traceback(world: GlooWorld, what: str, words: str) -> None:
    for said in world.run(mistaken, what, size=2):
        assert words in said


class Halves(nn.Module):
    """As public vision transformers are written: each block is a list of layers, or its loop adds to what a layer returns."""

    def __init__(self, lists: bool) -> None:
        super().__init__()
        self.begin, self.end, self.lists = nn.Linear(4, 8), nn.Linear(8, 1), lists
        layers = [nn.Linear(8, 8) for _ in range(4)]
        self.layers = nn.ModuleList([nn.ModuleList([layer]) for layer in layers] if lists else layers)

    def forward(self, x: Tensor) -> Any:
        x = self.begin(x)
        for layer in self.layers:
            for each in layer if self.lists else [layer]:  # type: ignore[union-attr]
                x = x + each(x)
        x = self.end(x.view(len(x), 8))
        return x, x.square().mean()


PLAN = {"begin": "colwise"}


def halves(lists: bool, layout: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model = Halves(lists)
    try:
        trainer = train.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), layout=layout, clip=1.0, **more)
        data = torch.arange(48.0).view(3, 4, 4) / 48
        return [float(trainer.step(batch).loss) for batch in trainer.batches(list(data))]
    except train.Refusal as refusal:
        return str(refusal)


def divided(layout: str, recompute: str) -> Any:
    return halves(True, layout, recompute=recompute)


def piped(lists: bool) -> Any:
    return halves(lists, "pp", accumulate=2)


def planned() -> Any:
    return halves(False, "tp", plan=PLAN)


def test_blocks_that_are_lists_of_layers(world: GlooWorld) -> None:
    (alone,) = world.run(divided, "ddp", "none", size=1)
    for recompute in ("none", "full"):
        for losses in world.run(divided, "fsdp", recompute, size=2):
            assert losses == pytest.approx(alone, rel=1e-6)


def test_what_a_models_own_code_does_not_allow_is_refused_with_the_reason(world: GlooWorld) -> None:
    for said in world.run(piped, True, size=2):
        assert "the blocks in layers are lists, which the model takes apart" in said
    for said in world.run(piped, False, size=2):
        assert "the model changes what a block returns before the next one gets it" in said
    for said in world.run(planned, size=2):
        assert "the first step with this tensor-parallel plan failed: RuntimeError" in said and "-1" in said


def test_a_batch_that_does_not_fit_the_model() -> None:
    model = nn.Linear(4, 4)
    trainer = train.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        train.Refusal, match="cannot be called with this batch: too many positional arguments; pass step"
    ):
        trainer.step((torch.ones(2, 4), torch.ones(2)))


def test_the_norm_of_a_large_gradient_does_not_depend_on_how_it_is_cut() -> None:
    from drumbeat.train.parallel.meshes import Meshes
    from drumbeat.train.step import gradient_norm

    p = nn.Parameter(torch.zeros(4_000_000))
    p.grad = torch.linspace(0, 1, p.numel())
    norm = gradient_norm([p], Meshes(train.Layout(), "cpu"))
    assert float(norm) == pytest.approx(float(p.grad.double().norm()), rel=2e-7)


def gpt2(layout: str, accumulate: int = 1, recompute: str = "none") -> List[float]:
    """Its loss leaves the first label out, as Llama's, and it has no name for that."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = train.setup(model, optimizer, layout=layout, accumulate=accumulate, recompute=recompute)
    return [float(trainer.step(batch).loss) for batch in trainer.batches(Words(), batch_size=8)]


@pytest.mark.parametrize(
    "layout,accumulate,recompute", [("ddp", 1, "none"), ("fsdp", 2, "selective"), ("ddp", 2, "full")]
)
def test_a_loss_is_a_mean_over_what_it_leaves_over(
    world: GlooWorld, layout: str, accumulate: int, recompute: str
) -> None:
    pytest.importorskip("transformers", reason="a heavy development dependency: pip install transformers")
    want = world.run(gpt2, "ddp", size=1)[0]
    assert world.run(gpt2, layout, accumulate, recompute, size=2)[0] == pytest.approx(want, rel=TOLERANCE)


def two_worlds(rank: int, port: int, output: str) -> int:
    """Rank 0, which serves the meeting place, leaves its first world late."""
    import os
    import time

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for number in range(3):
        model = nn.Linear(2, 1)
        with train.setup(model, torch.optim.SGD(model.parameters(), lr=0.1)) as trainer:
            trainer.step(torch.ones(4, 2), lambda m, x: m(x).mean())
            if rank == 0:
                time.sleep(0.5)
        print(f"world {number} left", flush=True)
    return 0


def test_a_process_may_set_up_several_times(world: GlooWorld, tmp_path: Path) -> None:
    port = free_port()
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    ranks = [world.start(file, two_worlds, rank, port, "") for rank, file in enumerate(files)]
    for process in ranks:
        process.join(120)
    alive = [process.is_alive() for process in ranks]
    for process in ranks:
        process.kill()
    assert not any(alive) and [process.exitcode for process in ranks] == [0, 0], [file.read_text() for file in files]


@pytest.mark.parametrize("saved,resumed", [("SGD", "AdamW"), ("AdamW", "Adam")])
def test_an_optimizer_does_not_take_the_state_of_another(tmp_path: Path, saved: str, resumed: str) -> None:
    def trainer(kind: str) -> train.Trainer:
        model = nn.Linear(2, 1)
        return train.setup(model, getattr(torch.optim, kind)(model.parameters(), lr=0.1))

    first = trainer(saved)
    first.step(torch.ones(4, 2), lambda m, x: m(x).mean())
    first.save(str(tmp_path), wait=True)
    with pytest.raises(train.Refusal, match=f"holds the state of {saved}, and this run uses {resumed}"):
        trainer(resumed).load(str(tmp_path))


LAST_STEP = """
import torch
from drumbeat import train

model = torch.nn.Linear(4, 1)
with train.setup(model, torch.optim.SGD(model.parameters(), lr=0.1)) as trainer:
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    for batch in trainer.batches(torch.utils.data.DataLoader(data, batch_size=4)):
        trainer.report(trainer.step(batch, loss))
"""


def test_the_last_step_is_reported_whatever_the_interval(tmp_path: Path) -> None:
    script, told = tmp_path / "train.py", tmp_path / "metrics.jsonl"
    script.write_text(LAST_STEP)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, str(script)], env={**environ, "DRUMBEAT_METRICS": str(told)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in told.read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "step"] == [10, 16]


def one_world_after_another(port: int) -> int:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    for _ in range(5):
        model = nn.Linear(4, 1)
        with train.setup(model, torch.optim.SGD(model.parameters()), layout="fsdp") as trainer:
            trainer.step(torch.ones(2, 4), lambda m, x: m(x).mean())
        assert not torch.distributed.is_initialized()
    return trainer.steps


def test_a_process_joins_one_world_after_another() -> None:
    world = GlooWorld()
    try:
        assert world.run(one_world_after_another, free_port(), size=2) == [1, 1]
    finally:
        world.close()

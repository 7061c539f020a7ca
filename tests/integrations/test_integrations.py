"""Each integration with its real library: what reaches $DRUMBEAT_METRICS."""

import importlib.util
import json
import os
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the libraries need torch: pip install '.[cpu]'")


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} comes with the dev extra")


@pytest.fixture
def reports(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("DRUMBEAT_METRICS", str(path))
    monkeypatch.setattr("drumbeat.metrics._fd", None)
    monkeypatch.chdir(tmp_path)
    return lambda: [json.loads(line) for line in path.read_text().splitlines()]


def data():
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def test_transformers(reports, tmp_path):
    needs("transformers")
    from transformers import Trainer, TrainingArguments

    from drumbeat.metrics.integrations.transformers import DrumbeatCallback

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x, y):
            return {"loss": torch.nn.functional.mse_loss(self.layer(x), y)}

    rows = [{"x": x, "y": y} for x, y in data()]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=4, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, label_names=["y"], prediction_loss_only=True,
    )  # fmt: skip
    Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[DrumbeatCallback()]).train()
    steps = [record for record in reports() if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [2, 4] and all(record["steps"] == 4 for record in steps)
    assert all({"loss", "lr", "grad_norm"} <= set(record) and record["loss_per"] == "all" for record in steps)
    assert [record["step"] for record in reports() if record["kind"] == "validation"] == [4]


def test_lightning(reports, monkeypatch):
    needs("lightning")
    import lightning

    # It asks mpi4py whether this is an MPI job, which starts MPI in this very process: see conftest.py.
    monkeypatch.setattr("lightning.fabric.plugins.environments.mpi._MPI4PY_AVAILABLE", False)

    from drumbeat.metrics.integrations.lightning import DrumbeatLogger

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    loader = torch.utils.data.DataLoader(data(), batch_size=8)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=DrumbeatLogger(), enable_checkpointing=False, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader, loader)
    kinds = [record["kind"] for record in reports()]
    assert kinds.count("step") == 4 and kinds.count("validation") == 1
    assert all(record["loss"] > 0 for record in reports())
    assert [record["step"] for record in reports()] == [1, 2, 3, 4, 4]  # steps made: the last is all of them


def test_accelerate(reports):
    needs("accelerate")
    from accelerate import Accelerator

    from drumbeat.metrics.integrations.accelerate import DrumbeatTracker

    accelerator = Accelerator(cpu=True, log_with=DrumbeatTracker())
    accelerator.init_trackers("x", config={"lr": 1})
    accelerator.log({"train_loss": torch.tensor(1.5), "lr": 0.1, "note": "x"}, step=3)
    accelerator.log({"eval_loss": 1.25, "eval_accuracy": 0.5}, step=3)
    accelerator.end_training()
    step, validation = reports()
    assert (step["step"], step["loss"], step["lr"], step["kind"]) == (3, 1.5, 0.1, "step")
    assert (validation["loss"], validation["accuracy"], validation["kind"]) == (1.25, 0.5, "validation")


def test_deepspeed(reports, monkeypatch):
    needs("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from drumbeat.metrics.integrations.deepspeed import watch

    written = []
    other = types.SimpleNamespace(enabled=True, write_events=written.append)
    engine = types.SimpleNamespace(monitor=other, global_samples=0, global_steps=0)
    watch(engine)
    assert engine.monitor.enabled
    engine.global_samples, engine.global_steps = 64, 2
    events = [("Train/Samples/train_loss", 2.5, 64), ("Train/Samples/lr", 0.01, 64)]
    engine.monitor.write_events(events)
    (record,) = reports()
    assert (record["step"], record["loss"], record["lr"], record["samples"]) == (2, 2.5, 0.01, 64) and written == [
        events
    ]


def test_outside_drumbeat_nothing_is_written(monkeypatch, tmp_path):
    needs("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("DRUMBEAT_METRICS", raising=False)
    from drumbeat.metrics.integrations.deepspeed import watch

    engine = types.SimpleNamespace(monitor="theirs", global_samples=0, global_steps=0)
    watch(engine)
    assert engine.monitor == "theirs"


def test_each_is_small():
    folder = Path(os.path.dirname(__file__)).parent.parent / "src" / "drumbeat" / "integrations"
    assert all(len(path.read_text().splitlines()) < 60 for path in folder.glob("*.py"))

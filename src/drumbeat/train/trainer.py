"""Trainer that `train.setup` returns: steps, batches, evaluation and checkpoints around a loop that stays the user's."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import time
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from drumbeat import metrics
from drumbeat.train.checkpoint.checkpoints import Checkpoints, first_line, write_state
from drumbeat.train.checkpoint.folder import candidates, name_of
from drumbeat.train.checkpoint.snapshots import VARIABLE, Snapshots
from drumbeat.train.checkpoint.state import MEAN, TrainingState, named_parameters
from drumbeat.train.data import Pieces, Samples, Stream
from drumbeat.train.data.loaders import Batches, micro_batches, rows_of, share_of
from drumbeat.train.export import export, keep_config, unwritable
from drumbeat.train.hugging_face import Contexts, FusedLoss, config_of, folder_of
from drumbeat.train.judge import Judge
from drumbeat.train.layers.cross_entropy import IGNORE
from drumbeat.train.measure import Profile, Profiler
from drumbeat.train.parallel.meshes import Meshes, gathered
from drumbeat.train.parallel.pipeline import Pipeline
from drumbeat.train.parallel.replicas import agreed_statistics, mean_statistics
from drumbeat.train.parallel.uncut import Uncut, refuse_different, sketch
from drumbeat.train.precision import Precision
from drumbeat.train.refusal import Refusal
from drumbeat.train.step import Outcome, Step, full_tensor, loss_parallelism, refuse_whole_sizes
from drumbeat.train.world import StopTogether, World, leave

Mean = Callable[[nn.Module, Any], Any]  # (model, batch) -> mean loss, or (mean loss, {name: mean})


@dataclass(frozen=True)
class Summed:
    """A loss that is a sum, and its count: a step divides by the count over all ranks and micro-batches."""

    loss: Callable[[nn.Module, Any], Any]  # (model, batch) -> sum, or (sum, {name: sum})
    count: Callable[[Any], Tensor]  # batch -> how many targets count


Loss = Union[Mean, Summed]


B = TypeVar("B", Batches, Stream)


class Result(NamedTuple):
    """Result of one step, over all ranks. The tensors are on the device: reading one, as float(result.loss) does, waits
    for it."""

    step: int  # optimizer steps so far, this one included
    loss: Tensor  # mean over the batch of all ranks
    norm: Tensor  # of the gradients, before clipping
    targets: Tensor  # samples (language models: tokens that count) in the batch of all ranks
    metrics: Dict[str, Tensor]  # what the loss function returned beside the loss


class StepSettings(NamedTuple):
    clip: Optional[float]
    accumulate: int
    compare_every: int
    pipeline: Optional[Pipeline] = None
    contexts: Optional[Contexts] = None
    fused: Optional[FusedLoss] = None
    ema: float = 0.0
    uncut: Optional[Uncut] = None  # tensor parallelism: the model to compare the cut one with
    judge: Optional[Judge] = None


class Trainer:
    """Made by `drumbeat.train.setup`."""

    def __init__(
        self,
        world: World,
        meshes: Meshes,
        precision: Precision,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        step: StepSettings,
        seed: int,
        profile: str,
        weights: str,
        leave_at_end: bool,
    ) -> None:
        self.world, self.meshes, self.precision = world, meshes, precision
        self.parts, self.optimizer, self.scheduler = list(parts), optimizer, scheduler
        self.model = self.parts[0]  # a pipeline's rank may hold several
        self.accumulate, self.ema, self.seed, self.steps = step.accumulate, step.ema, seed, 0
        self.pipeline, self.contexts, self._fused = step.pipeline, step.contexts, step.fused
        self._fused_tried, self._quiet, self._uncut = False, False, step.uncut
        self.judge = step.judge or Judge("skip", "warn")
        self.inner = Step(
            self.parts,
            optimizer,
            self._weighted,
            meshes,
            precision,
            world.device,
            step.clip,
            step.pipeline,
            self._share if step.contexts is not None else None,
            count=lambda count: count,
            compare_every=step.compare_every,
        )
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._loss: Loss = returned_loss
        self._sums: Dict[str, Tensor] = {}
        self._shifts: Optional[bool] = None  # whether the loss leaves out the first label of each row; not known yet
        self._counts = True  # a rank without samples takes part with a batch that does not count
        self._all_batches: List[Union[Batches, Stream]] = []
        self._positions: List[Dict[str, int]] = []  # loaded, for batches that do not exist yet
        self._checkpoints: Dict[str, Checkpoints] = {}
        self._snapshots: Dict[str, Snapshots] = {}
        self._stop: Optional[StopTogether] = None
        self.profiler = Profiler(Profile.parse(profile) if profile else Profile(), world.rank, world.device)
        self._leave, self._samples, self.weights = leave_at_end, 0, weights
        self._unreported: Optional[Result] = None
        self.made_with: Dict[str, Any] = {}  # what else decides about the numbers: a resume names what is different
        self.changed: List[str] = []
        self.loaded_from = ""  # where a load found the state, if not in storage
        self.usual: List[float] = []  # losses of the last reports: a spike is far above them

    @property
    def module(self) -> nn.Module:
        """Return the model without the wrapper of data parallelism."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def skipped(self) -> int:
        """Return the number of steps left out because gradients were not finite. Reading it waits for the device."""
        return int(self.inner.skipped)

    def batches(
        self,
        source: Any,
        epochs: int = 1,
        *,
        batch_size: Optional[int] = None,
        shuffle: bool = True,
        split: bool = True,
    ) -> Batches:
        """This rank's part of every batch of a DataLoader, a Dataset (with `batch_size`) or any iterable of batches.

        A batch is that of all ranks together. `split=False`: the source gives each rank samples of its own already.
        """
        return self._registered(self._make_batches(source, epochs, batch_size, shuffle, split))

    def stream(
        self,
        samples: Samples,
        batch: int,
        finish: Optional[Callable[[Tensor], Tensor]] = None,
        kind: Type[Stream] = Stream,
    ) -> Stream:
        """Return an endless stream of this rank's batches. A thread reads the samples by number, ahead of time
        (`samples.read(indices, epochs)`); `finish` does what the device does faster."""
        layout = self.meshes.layout
        stream = kind(
            samples,
            batch,
            data_rank=self.meshes.data_rank,
            data_ranks=layout.data_ranks,
            accumulate=self.accumulate,
            seed=self.seed,
            device=self.world.device,
            finish=finish,
        )
        self.made_with["samples"] = len(samples)
        return self._registered(stream)

    def _registered(self, batches: B) -> B:
        """Register batches so that their position is saved and loaded from now on."""
        self._all_batches.append(batches)
        if len(self._positions) >= len(self._all_batches):
            batches.load_state_dict(self._positions[len(self._all_batches) - 1])
        return batches

    def _make_batches(self, source: Any, epochs: int, batch_size: Optional[int], shuffle: bool, split: bool) -> Batches:
        return Batches(
            source,
            epochs,
            data_rank=self.meshes.data_rank,
            data_ranks=self.meshes.layout.data_ranks,
            device=self.world.device,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self.seed,
            split=split,
            on_batch=self._on_batch,
        )

    def _on_batch(self, counts: bool) -> None:
        self._counts = counts

    def step(self, batch: Any, loss: Optional[Loss] = None) -> Result:
        """Forward, backward, one reduction of gradients, clip, update. `loss(model, batch)` returns the mean loss of the
        batch, or that and a dict of other means; without it the model is called with the batch and returns the loss, as
        transformers' models do. A `Summed` loss is divided by its count."""
        return self.result(self.advance(batch, loss))

    def advance(
        self, batch: Any, loss: Optional[Loss] = None, mark: Callable[[str], None] = lambda phase: None
    ) -> Outcome:
        """Make a step as `step` does, without the means over all ranks, which `result` computes from the returned outcome: for
        loops that look at some steps only. `mark(phase)` is called when a phase is over."""
        self._loss, self._sums = loss or returned_loss, {}
        pieces = (
            [(piece, True) for piece in batch] if isinstance(batch, Pieces) else micro_batches(batch, self.accumulate)
        )
        if loss is not None and self.contexts is not None and not self.contexts.plain:
            raise Refusal("layout cp takes the model's own loss", "leave the loss function out, or use another layout")
        if loss is None and not self._quiet:
            # Of what the model returns only its loss is used: nobody writes into a view of something else.
            name = re.escape(type(self.model).__name__)
            warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({name}\) returned a view", UserWarning)
            self._quiet = True
        self._find_shift(pieces[0][0])
        if self._uncut is not None:
            self._compare_with_uncut(self._uncut, pieces[0][0])
            self._uncut = None
        if callable(self.scheduler):
            for group, rate in zip(self.optimizer.param_groups, self._rates):
                group["lr"] = rate * self.scheduler(self.steps)
        outcome = self.inner([(piece, self._weight(piece, counts)) for piece, counts in pieces], mark)
        if self.ema:
            self._average()
        if hasattr(self.scheduler, "step") and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        self.profiler.step()
        self.steps += 1
        self._samples += sum(rows_of(piece) for piece, counts in pieces if counts) if self._counts else 0
        return outcome

    def _compare_with_uncut(self, uncut: Uncut, batch: Any) -> None:
        """Refuse a tensor-parallel plan that the model's code does not allow: by the gradients of one sample."""
        device, step = self.world.device, self.inner
        missing = torch.tensor(uncut.missing_bytes(device), device=device)
        dist.all_reduce(missing, dist.ReduceOp.MAX)
        if int(missing):
            self.say(f"plan not compared with the uncut model, which needs {int(missing) / 1e9:.0f} GB on one device")
            return
        row, _ = share_of(batch, 0, rows_of(batch))
        piece = (row, self._weight(row, True))
        step.equality.batches([piece])
        count, training, precision = step._count([piece]), self.model.training, step.precision
        if precision.name == "bf16" and not step.cast_by_fsdp:
            step.precision = Precision("fp32")  # the weights are: a finer comparison
        dtype = torch.float16 if precision.name == "tf32" else step.precision.compute_dtype  # as many bits
        here = self.meshes.coordinate("tp") == 0
        self.model.eval()
        devices = [device] if device.type == "cuda" else []
        with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices):
            with refuse_whole_sizes():
                step._accumulated([piece], count)
            step.complete_gradients()
            step.equality.gradients(step.summed)
            names = [name for name, _ in named_parameters(self.parts)]
            grads = [p.grad for _, p in named_parameters(self.parts)]
            cut = torch.stack([sketch(full_tensor(grad) if grad is not None else missing) for grad in grads])
            step.optimizer.zero_grad(set_to_none=True)
            whole = uncut.sketches(self.parts, lambda model: self._weighted(model, *piece) / count, device, here, dtype)
        dist.broadcast(cut, src=0)
        self.model.train(training)
        step.precision, self._sums = precision, {}
        if whole.isnan().any():
            self.say(f"plan not compared with the uncut model: {uncut.error or 'its gradients are not finite'}")
        else:
            refuse_different(names, whole, cut, dtype)

    @torch.no_grad()
    def _average(self) -> None:
        """Update the mean of each weight. It is part of the optimizer's state, so it is saved, loaded and sharded with it."""
        for p in self.inner.parameters:
            state = self.optimizer.state[p]
            # An optimizer that has left out its first steps must find its state as it expects it: empty.
            if p.requires_grad and (state or isinstance(self.optimizer, torch.optim.SGD)):
                now = state.get("master", p).detach()
                state[MEAN] = state[MEAN].lerp_(now, 1 - self.ema) if MEAN in state else now.clone()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the weights, inside, by their running means (`setup(ema=...)`): to evaluate or to export."""
        kept = {p: p.detach().clone() for p in self.inner.parameters if MEAN in self.optimizer.state.get(p, {})}
        with torch.no_grad():
            for p in kept:
                p.copy_(self.optimizer.state[p][MEAN])
            try:
                yield
            finally:
                for p, value in kept.items():
                    p.copy_(value)

    def result(self, outcome: Outcome) -> Result:
        """Return the means of the last step over all ranks: every rank must call it."""
        loss, means = self._reduced(outcome.loss, outcome.targets)
        return Result(self.steps, loss, outcome.norm, outcome.targets, means)

    def _weight(self, batch: Any, counts: bool) -> Tensor:
        if not (counts and self._counts):
            return torch.zeros((), device=self.world.device)
        if isinstance(self._loss, Summed):
            return self._loss.count(batch)
        labels = _labels(batch)
        if labels is None:
            return torch.full((), float(rows_of(batch)), device=self.world.device)
        return (labels[:, 1:] if self._shifts else labels).ne(IGNORE).sum()

    @property
    def _micro(self) -> int:
        return 1 if self.pipeline is None else self.accumulate

    @torch.no_grad()
    def _find_shift(self, batch: Any) -> None:
        """Find out whether the loss leaves out the first label of each row, as models that predict the next token do: over first
        labels alone such a loss is not a number, or zero whatever they are."""
        labels = _labels(batch)
        if self._shifts is not None or labels is None or isinstance(self._loss, Summed):
            return
        self._shifts = getattr(self.module, "loss_type", None) == "ForCausalLM" and self._loss is returned_loss
        if self._shifts:
            return
        training = self.model.training
        for part in self.parts:
            part.eval()  # no random numbers are drawn, no statistics change
        means = []
        with torch.compiler.set_stance("force_eager"):
            for label in (0, 1):
                first = torch.full_like(labels, IGNORE)
                first[:, 0] = label
                means.append(self._summed([({**batch, "labels": first}, torch.ones_like(labels[0, 0]))] * self._micro))
        for part in self.parts:
            part.train(training)
        self._sums = {}
        found, pipe = torch.stack(means), self.meshes.one("pp")
        if pipe is not None:
            dist.all_reduce(found, group=pipe.get_group())
        shifts = found.nan_to_num(0, 0, 0).eq(0).all().int()
        if dist.is_initialized():  # one rank's numbers must not decide otherwise
            dist.broadcast(shifts, src=0)
        self._shifts = bool(shifts)

    def _weighted(self, model: nn.Module, batch: Any, count: Tensor) -> Tensor:
        """Return the sum of the losses: a mean over samples of several ranks is the sum of sums over the sum of counts."""
        if isinstance(self._loss, Summed):
            value, by = self._loss.loss(model, batch), torch.ones_like(count)
        else:
            batch, by = _never_empty(batch, count), count
            with self._fused if self._fused is not None and self._fuses(batch) else nullcontext():
                value = self._loss(model, batch)
        value, more = value if isinstance(value, tuple) else (value, {})
        if value.ndim:
            raise Refusal(f"the loss has the shape {tuple(value.shape)}", "return one number, the mean over the batch")
        for name, mean in more.items():
            total = _sum(full_tensor(torch.as_tensor(mean, device=self.world.device)).detach().float(), count, by)
            self._sums[name] = self._sums.get(name, torch.zeros_like(total)) + total
        return _sum(full_tensor(value), count, by)

    def _share(self, piece: Tuple[Any, Tensor]) -> Tuple[Any, Tensor]:
        """Return this rank's part of a micro-batch under context parallelism, and how many labels count in it."""
        assert self.contexts is not None
        part = self.contexts.share(piece[0])
        count = self._loss.count(part) if isinstance(self._loss, Summed) else (part["labels"] != IGNORE).sum()
        return part, count * (piece[1] > 0)

    def _fuses(self, batch: Any) -> bool:
        """Return true if the model's own loss can be computed without logits: tried with the first row of the first batch."""
        if self._loss is not returned_loss or self._fused is None or _labels(batch) is None:
            return False
        if not self._fused_tried:
            self._fused_tried = True
            row, _ = share_of(batch, 0, rows_of(batch))
            training = self.model.training
            self.model.eval()
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), self._fused:
                returned_loss(self.model, row)
            self.model.train(training)
        return not self._fused.changed

    def _summed(self, pieces: Sequence[Tuple[Any, Tensor]]) -> Tensor:
        """Return the sum of the losses of micro-batches, without gradients; of a pipeline, on its last stage."""
        with self.precision.autocast(self.world.device, self.inner.cast_by_fsdp), loss_parallelism(self.meshes):
            if self.contexts is not None:
                pieces = [self._share(piece) for piece in pieces]
            if self.pipeline is None:
                losses = [self._weighted(self.model, *piece) for piece in pieces]
            else:
                losses = self.pipeline.evaluate(pieces, self._weighted)
        return sum((full_tensor(x).float().sum() for x in losses), torch.zeros((), device=self.world.device))

    def _reduced(self, loss: Tensor, divisor: Tensor) -> Tuple[Tensor, Dict[str, Tensor]]:
        names, pipe = sorted(self._sums), self.meshes.one("pp")
        if pipe is not None:  # only the last stage has seen them
            names = max(gathered(names, pipe.get_group()), key=len)
        nothing = torch.zeros((), device=self.world.device)
        values = torch.stack([loss.detach().float(), *(self._sums.get(name, nothing) / divisor for name in names)])
        for mesh in (self.meshes.tokens, pipe):
            if mesh is not None:
                dist.all_reduce(values, group=mesh.get_group())
        return values[0], dict(zip(names, values[1:]))

    @torch.no_grad()
    def evaluate(
        self, source: Any, loss: Optional[Loss] = None, *, batch_size: Optional[int] = None, split: bool = True
    ) -> Dict[str, float]:
        """Return the means over all samples of `source`: "loss" and the other means that `loss(model, batch)` returns."""
        self._loss, self._sums = loss or returned_loss, {}
        total = torch.zeros(2, device=self.world.device)
        for part in self.parts:
            part.eval()
        with agreed_statistics(self.parts, self.meshes):
            for batch in self._make_batches(source, 1, batch_size, False, split):
                pieces = micro_batches(batch, self.accumulate) if self.pipeline is not None else [(batch, True)]
                self._find_shift(pieces[0][0])
                weighted = [(piece, self._weight(piece, counts)) for piece, counts in pieces]
                counts = [(self._share(piece) if self.contexts is not None else piece)[1] for piece in weighted]
                total += torch.stack((self._summed(weighted), torch.stack(counts).sum().float()))
        for part in self.parts:
            part.train()
        count = total[1].clone()
        if self.meshes.tokens is not None:
            dist.all_reduce(count, group=self.meshes.tokens.get_group())
        mean, means = self._reduced(total[0] / count, count)
        return {"loss": float(mean), **{name: float(value) for name, value in means.items()}}

    def save(self, folder: str, *, keep: int = 2, wait: bool = False) -> None:
        """Save weights, optimizer, scheduler, random numbers and the position in the data, in the background unless
        `wait`. Call it on every rank, after a step."""
        saved = self.checkpoints(folder, keep).save(self.steps, self.state(), wait=wait)
        if self.world.lead:
            metrics.report(
                self.steps, kind="checkpoint", path=os.path.abspath(os.path.join(folder, name_of(self.steps)))
            )
        for ended in saved:
            if ended.error:
                self.say(f"the checkpoint of step {ended.step} FAILED: {ended.error}; training goes on without it")

    def state(self) -> Dict[str, str]:
        """Return what a checkpoint holds beside weights, optimizer and random numbers."""
        positions = [batches.state_dict() for batches in self._all_batches]
        state = {"steps": self.steps, "batches": positions, "usual": self.usual, "made_with": self.made_with}
        if hasattr(self.scheduler, "state_dict"):
            state["scheduler"] = self.scheduler.state_dict()
        return {"trainer": json.dumps(state)}

    def export(self, folder: str, dtype: str = "", adapter: bool = False) -> None:
        """Write the weights as transformers' `from_pretrained` reads them: safetensors, config.json and the tokenizer's files.
        Call it on every rank. `dtype`: fp32, bf16 or fp16; without it they stay as they are trained. `adapter`: only what
        LoRA has learnt, as peft reads it."""
        path = os.path.join(folder, ".export")
        shared = mean_statistics(self.parts, self.meshes)
        state = {**TrainingState(self.inner.parts, self.optimizer).now()["model"], **shared}
        problem: Optional[Refusal] = None
        try:
            write_state({"model": state}, path)
            if self.world.lead:
                beside = folder_of(self.module) or self.weights
                self.say(f"exported: {export(path, config_of(self.module), beside, folder, dtype, adapter)}")
        except Refusal as refusal:
            problem = refusal
        except (OSError, CheckpointException) as error:
            problem = unwritable(folder, first_line(error))
        if self.world.lead:
            shutil.rmtree(path, ignore_errors=True)
        if problem := next(filter(None, gathered(problem)), None):  # no rank waits for one that could not
            raise problem

    def load(self, folder: str) -> int:
        """Load the newest checkpoint in `folder` that can be read, saved on any layout and number of ranks, and say so; return
        the step it was taken after, or 0 where there is none."""
        if step := self.restore(folder):
            self.say(f"resumed: step {step} from {folder}{self.loaded_from}")
            if self.changed:
                self.say(f"changed since it was saved: {', '.join(self.changed)}")
        return step

    def restore(self, folder: str) -> int:
        """Load as `load` does, without the line."""
        checkpoints, wanted = self.checkpoints(folder), ["trainer", "sample"]
        loaded, self.loaded_from = None, ""
        if VARIABLE in os.environ:
            began, snapshots = time.monotonic(), self.snapshots(folder)
            newest = checkpoints.told_by_rank_0(max(candidates(folder), default=0) if self.world.lead else 0)
            loaded = snapshots.load(wanted, newer_than=newest - 1)
            self.loaded_from = f", from memory, {time.monotonic() - began:.1f} s" if loaded else ""
        loaded = loaded or checkpoints.load(wanted)
        if loaded is None:
            return 0
        for words in loaded.notes:
            self.say(words)
        self.steps, self._positions = loaded.step, [{"sample": loaded.extra.get("sample", 0)}]  # of an older recipe
        state = json.loads(loaded.extra.get("trainer", "{}"))
        self._positions, self.usual = state.get("batches", self._positions), state.get("usual", [])
        was = {**self.made_with, **state.get("made_with", {})}
        self.changed = [f"{name}={now} (was {was[name]!r})" for name, now in self.made_with.items() if was[name] != now]
        if hasattr(self.scheduler, "load_state_dict") and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        for batches, position in zip(self._all_batches, self._positions):
            batches.load_state_dict(position)
        self.judge.start(self.skipped)
        return self.steps

    def checkpoints(self, folder: str, keep: Optional[int] = None) -> Checkpoints:
        """Return the checkpoints in `folder`, with the config that an export needs beside them."""
        if folder not in self._checkpoints:
            problem: Optional[Refusal] = None
            try:
                if self.world.lead:
                    keep_config(folder, config_of(self.module), folder_of(self.module) or self.weights)
            except Refusal as refusal:
                problem = refusal
            if problem := gathered(problem)[0]:
                raise problem
            self._checkpoints[folder] = Checkpoints(
                folder,
                self.parts,
                self.optimizer,
                others={"step": self.inner},
                shared=lambda: mean_statistics(self.parts, self.meshes),
                rank_state=self.inner.rank_state(),
            )
        self._checkpoints[folder].keep = keep or self._checkpoints[folder].keep
        return self._checkpoints[folder]

    def snapshots(self, folder: str) -> Snapshots:
        """Return the snapshots in memory that belong to the checkpoints in `folder`."""
        checkpoints = self.checkpoints(folder)
        if folder not in self._snapshots:
            replicas = self.meshes.one("dp_replicate")
            twins = [self.world.rank] if replicas is None else replicas.mesh.flatten().tolist()
            self._snapshots[folder] = Snapshots(checkpoints, twins)
        return self._snapshots[folder]

    def use_snapshots(self, folder: str) -> Snapshots:
        """Take snapshots from now on; a save to `folder` takes one too."""
        snapshots = self.checkpoints(folder).snapshots = self.snapshots(folder)
        snapshots.refuse_unavailable()
        return snapshots

    def snapshot(self, folder: str) -> None:
        """Copy the state into the memory of this node's agent and of a neighbour's, where `load(folder)` finds it when ranks or a
        node were lost. Call it on every rank, after a step, between saves to `folder`."""
        snapshots = self.use_snapshots(folder)
        snapshots.take(self.steps, self.state())
        for ended in snapshots.poll():
            if ended.error:
                self.say(f"the snapshot of step {ended.step} FAILED: {ended.error}; training goes on without it")

    def should_stop(self) -> bool:
        """Return true if any rank was told to stop by a signal. Call it once per step on every rank, then save and exit with
        `train.REQUEUE`: from the first call on, the signals no longer end the process by themselves."""
        if self._stop is None:
            self._stop = StopTogether()
        return self._stop.agreed()

    def report(self, result: Result, every: int = 10) -> None:
        """Report every so many steps: a line on rank 0, the figures for drumbeat's own views (`drumbeat status`), and what
        on_nan and on_spike of `setup` say about losses that are not finite or jump. Call it on every rank."""
        self._unreported = result if result.step % every else None
        if self._unreported is None:
            self._report(result)

    def _report(self, result: Result) -> None:
        values = {"loss": float(result.loss), "grad_norm": float(result.norm)}
        values.update({name: float(value) for name, value in result.metrics.items()})
        self.say(f"step {result.step}  " + "  ".join(f"{name} {value:.4f}" for name, value in values.items()))
        skipped = self.skipped
        if skipped:
            values["skipped_steps"] = skipped
        # Ranks that share a batch (tp, cp, pp) count it once.
        first = not any(self.meshes.coordinate(name) for name in ("tp", "cp", "pp"))
        samples = self._samples if first else 0
        metrics.report(result.step, samples=samples, **(values if self.world.lead else {}))  # type: ignore[arg-type]
        self._samples = 0
        self.judge.judge(result.step, values["loss"], skipped, self.usual, self.say)

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.world.lead:
            print(text, flush=True)

    def close(self) -> None:
        """Report the last step, wait for a checkpoint that is being written, and leave the other ranks."""
        if self._unreported is not None:
            self._report(self._unreported)
            self._unreported = None
        for snapshots in self._snapshots.values():
            snapshots.finish()
        for checkpoints in self._checkpoints.values():
            ended = checkpoints.finish()
            if ended is not None and ended.error:
                raise Refusal(f"the checkpoint of step {ended.step} failed: {ended.error}", "make room and save again")
        if self._stop is not None:
            self._stop.close()
        self.profiler.close()
        if self._leave:
            leave()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if kind is None:
            self.close()


def returned_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that the model itself returns for a batch: `.loss`, `["loss"]`, or its only number."""
    args, more = ((), batch) if isinstance(batch, Mapping) else (batch if _many(batch) else (batch,), {})
    fix = "pass step a function: trainer.step(batch, loss) with loss(model, batch); or add labels to the batch"
    try:
        output = model(*args, **more)
    except TypeError:
        _refuse_arguments(model, args, more, fix)
        raise
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None:  # (logits, loss) is usual, too
        numbers = [x for x in (output if _many(output) else [output]) if isinstance(x, Tensor) and x.ndim == 0]
        found = numbers[0] if len(numbers) == 1 else None
    if found is None:
        raise Refusal("the model returned no loss for this batch", fix)
    return found  # type: ignore[no-any-return]


def _refuse_arguments(model: nn.Module, args: Sequence[Any], more: Mapping[str, Any], fix: str) -> None:
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    try:
        inspect.signature(whole.forward).bind(*args, **more)
    except TypeError as problem:
        raise Refusal(f"the model cannot be called with this batch: {problem}", fix) from None


def _labels(batch: Any) -> Optional[Tensor]:
    """Return the labels of tokens: a mean loss is a mean over those that count, not over rows."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) and labels.ndim > 1 and not labels.is_floating_point() else None


def _never_empty(batch: Any, count: Tensor) -> Any:
    """A mean over no label is not a number, and neither is its gradient, whatever it is multiplied by. So a batch without a label
    that counts gets one; the mean over it weighs nothing. The host does not wait to know."""
    if _labels(batch) is None:
        return batch
    changed = dict(batch)
    for name in ("labels", "shift_labels"):
        if name in batch:
            changed[name] = batch[name].clone()
            last = changed[name].view(len(batch[name]), -1)[0, -1]
            last.copy_(torch.where(count > 0, last, torch.zeros_like(last)))
    return changed


def _sum(value: Tensor, count: Tensor, by: Tensor) -> Tensor:
    """Return the sum behind a mean: torch's mean over nothing is NaN, but its sum is 0."""
    return torch.where(count > 0, value, torch.zeros_like(value)) * by


def _many(batch: Any) -> bool:
    return isinstance(batch, (list, tuple))

"""The parts of the runtime, one by one, in this process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from drumbeat.machine.peaks import peak_of
from drumbeat.train.data import Stream, places
from drumbeat.train.data.images import ImageArray, SyntheticImages
from drumbeat.train.data.text import Masked, SyntheticTokens, TokenWindows, token_file
from drumbeat.train.layers import cross_entropy as loss
from drumbeat.train.layers import float8
from drumbeat.train.layers.attention import causal_attention
from drumbeat.train.layers.feed_forward import GatedMLP
from drumbeat.train.measure import WARM_UP, Meter, Utilisation, transformer_flops, utilisation
from drumbeat.train.models import llama, resnet
from drumbeat.train.optim import MasterAdamW
from drumbeat.train.parallel import Layout
from drumbeat.train.parallel.meshes import Meshes
from drumbeat.train.parallel.parallelize import large_modules
from drumbeat.train.precision import Precision
from drumbeat.train.refusal import Refusal
from drumbeat.train.step import Step

CPU = torch.device("cpu")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**31))
def test_an_epoch_is_a_permutation(size: int, seed: int) -> None:
    epochs, indices = places(np.arange(2 * size, dtype=np.uint64), size, seed)
    assert sorted(indices[:size].tolist()) == list(range(size)) == sorted(indices[size:].tolist())
    assert epochs.tolist() == [0] * size + [1] * size
    if size > 50:
        assert indices[:size].tolist() != indices[size:].tolist() != list(range(size))


class Numbers:
    def __len__(self) -> int:
        return 101

    def read(self, indices: List[int], epochs: List[int]) -> Tuple[Tensor, Tensor]:
        return torch.tensor(indices), torch.tensor(epochs)


def taken(ranks: int, accumulate: int, steps: int, start: int = 0, prefetch: int = 0) -> List[int]:
    """The samples of `steps` steps of all ranks, in the order of the whole batch."""
    out = []
    streams = [
        Stream(Numbers(), 12, data_rank=r, data_ranks=ranks, accumulate=accumulate, prefetch=prefetch)
        for r in range(ranks)
    ]
    for stream in streams:
        stream.load_state_dict({"sample": start})
    for _ in range(steps):
        out += [int(i) for stream in streams for inputs, _ in next(stream) for i in inputs]
    assert all(stream.state_dict() == {"sample": start + 12 * steps} for stream in streams)
    for stream in streams:
        stream.close()
    return out


def test_samples_do_not_depend_on_ranks_micro_batches_prefetch_or_resuming() -> None:
    whole = taken(1, 1, 20)
    assert taken(4, 3, 20) == taken(2, 1, 20, prefetch=2) == whole
    assert taken(4, 1, 7) + taken(2, 1, 13, start=84) == whole
    assert len(set(whole[:101])) == 101, "no sample comes twice before all came once"


def test_an_error_while_reading_ahead_is_raised_where_the_batch_is_wanted() -> None:
    class Broken(Numbers):
        def read(self, indices: List[int], epochs: List[int]) -> Tuple[Tensor, Tensor]:
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        next(Stream(Broken(), 4))


def test_windows_cover_files_end_to_end(tmp_path: Path) -> None:
    pieces = [np.arange(0, 7), np.arange(7, 8), np.arange(8, 40)]
    windows = TokenWindows([piece.astype(np.uint8) for piece in pieces], 3)
    inputs, targets = windows.read(list(range(len(windows))), [0] * len(windows))
    assert inputs[2].tolist() == [6, 7, 8] and targets[2].tolist() == [7, 8, 9]
    kept = TokenWindows(windows.arrays, 3, "validation")
    assert len(kept) == 1 and kept.read([0], [0])[0].tolist() == [[27, 28, 29]]
    seen = {int(x) // 3 for x in inputs[:, 0]}
    assert 9 not in seen and len(seen) == 12
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "t.bin")
    np.save(tmp_path / "t.npy", np.arange(1000))
    a, b = (token_file(str(tmp_path / name), 10) for name in ("t.bin", "t.npy"))
    assert torch.equal(a.read([5], [0])[1], b.read([5], [0])[1])
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(Refusal, match="no whole number of uint16 tokens"):
        token_file(str(tmp_path / "odd.bin"), 10)


def test_masks_are_15_percent_and_repeatable() -> None:
    data = Masked(SyntheticTokens(100, 64, 200), 201, mask=200)
    tokens, targets = data.read(list(range(100)), [0] * 100)
    asked = targets != loss.IGNORE
    assert 0.13 < asked.float().mean() < 0.17
    assert 0.75 < (tokens[asked] == 200).float().mean() < 0.85
    assert torch.equal(data.read([7], [0])[0], data.read([7], [0])[0])
    assert not torch.equal(data.read([7], [0])[0], data.read([7], [1])[0])


def test_augmentation_depends_on_sample_and_epoch_alone() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3)).astype(np.uint8)
    images = ImageArray(pixels, np.arange(5))
    together, alone = images.read([1, 3], [2, 2])[0], images.read([3], [2])[0]
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(alone, images.read([3], [3])[0])
    finished = images.finish(together)
    assert finished.shape == (2, 3, 32, 32) and finished.is_contiguous(memory_format=torch.channels_last)
    assert abs(float(finished.mean())) < 0.3 and 0.7 < float(finished.std()) < 1.5


def test_made_up_images_are_the_same_in_any_company_and_show_their_class() -> None:
    made = SyntheticImages(90, 16, 3)
    together, alone = (made.finish(made.read(numbers, [0] * len(numbers))[0]) for numbers in ([4, 7, 8], [7]))
    assert together.shape == (3, 3, 16, 16) and torch.equal(together[1], alone[0])
    assert together.is_contiguous(memory_format=torch.channels_last)
    many = made.finish(torch.arange(90))
    means = torch.stack([many[label::3].mean(dim=0) for label in range(3)])
    distances = ((many[:, None] - means) ** 2).flatten(2).sum(dim=2)
    assert (distances.argmin(dim=1) == torch.arange(90) % 3).all()


def test_made_up_tokens_follow_their_rule_but_for_one_in_eight() -> None:
    made = SyntheticTokens(9, 4000, 50)
    tokens, targets = made.read([3], [0])
    kept = torch.from_numpy(made._next)[tokens[0]] == targets[0]
    assert 0.85 < kept.float().mean() < 0.92


def test_the_sliced_loss_equals_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "_SLICE_BYTES", 2 * 50 * 7)  # slices of 7 rows or fewer
    torch.manual_seed(0)
    head, hidden = nn.Linear(16, 50, bias=False), torch.randn(3, 10, 16, requires_grad=True)
    targets = torch.randint(0, 50, (3, 10))
    targets[1, :4] = loss.IGNORE
    ours = loss.linear_cross_entropy(hidden, head, targets) / 26
    plain = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), ignore_index=loss.IGNORE)
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
    for a, b in zip(*(torch.autograd.grad(x, (hidden, head.weight)) for x in (ours, plain))):
        torch.testing.assert_close(a, b)


def test_grouped_attention_equals_attention_over_repeated_keys() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 9, 6, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    wide = [x.transpose(1, 2) for x in (q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2))]
    want = F.scaled_dot_product_attention(*wide, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(causal_attention(q, k, v), want)


def test_the_folded_stem_is_the_same_convolution() -> None:
    model, x = resnet.ResNet(18, 4), torch.randn(2, 3, 40, 40)
    squares = F.pad(F.pixel_unshuffle(x, 2), (2, 1, 2, 1, 0, 4))
    torch.testing.assert_close(F.conv2d(squares, resnet.fold_filter(model.conv1.weight)), model.conv1(x))
    assert resnet.forward_flops(resnet.ResNet(50), 224) == pytest.approx(8.2e9, rel=0.02)


def test_master_weights_follow_adamw() -> None:
    torch.manual_seed(0)
    theirs = nn.Linear(8, 8)
    ours = nn.Linear(8, 8).bfloat16()
    theirs.load_state_dict(ours.state_dict())
    a = MasterAdamW(ours.parameters(), lr=1e-2)
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(6):
        for p, q in zip(ours.parameters(), theirs.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float() / 2
        a.step(scale=torch.tensor(2.0))
        b.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a.state[p]["master"], q.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(p, a.state[p]["master"].bfloat16())
    before = [p.clone() for p in ours.parameters()]
    a.step(skip=torch.tensor(1.0))
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), before))


def test_fp8_products_are_as_close_as_three_bits_allow() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48, bias=False)
    ours = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 10))
    ours[0].load_state_dict(plain.state_dict())
    assert float8.convert_linears(ours, lambda name, _: True) == 1, "10 columns are not divisible by 16"
    x = torch.randn(4, 32, 64, requires_grad=True)
    up = torch.randn(4, 32, 48)
    for a, b in zip(*(torch.autograd.grad((m(x) * up).sum(), (x, m.weight)) for m in (ours[0], plain))):
        assert (a - b).norm() / b.norm() < 0.1
    torch.testing.assert_close(
        ours[0](x).flatten(0, 1), float8.reference_product(x.flatten(0, 1), plain.weight), rtol=1e-4, atol=1e-4
    )


def test_a_gated_feed_in_fp8_is_as_close_as_its_layers_are() -> None:
    torch.manual_seed(0)
    plain, layers, joined = (GatedMLP(64, 96, 2) for _ in range(3))
    for other in (layers, joined):
        other.load_state_dict(plain.state_dict())
        assert float8.convert_linears(other, lambda name, _: True) == 2
    float8.fuse_mlps(joined)
    x = torch.randn(4, 32, 64, requires_grad=True)
    up = torch.randn(4, 32, 64)
    kinds = []
    for mlp in (plain, layers, joined):
        kinds.append(torch.autograd.grad((mlp(x) * up).sum(), (x, mlp.gate_up.weight, mlp.down.weight)))
    for exact, by_layer, at_once in zip(*kinds):
        torch.testing.assert_close(at_once, by_layer, rtol=1e-3, atol=1e-3)
        assert 0 < (at_once - exact).norm() / exact.norm() < 0.15


def one_step(on: nn.Module, batches: Any, optimizer: Any = None, clip: Any = None) -> Tuple[Step, Any]:
    optimizer = optimizer or torch.optim.SGD(on.parameters(), lr=0.1)
    square = lambda model, x, y: ((model(x).squeeze(-1) - y) ** 2).sum()  # noqa: E731
    step = Step([on], optimizer, square, Meshes(Layout(), "cpu"), Precision("fp32"), CPU, clip)
    return step, step(batches)


def test_micro_batches_of_uneven_size_equal_the_big_batch() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 5), torch.randn(12)
    one, two = nn.Linear(5, 1), nn.Linear(5, 1)
    two.load_state_dict(one.state_dict())
    _, whole = one_step(one, [(x, y)])
    _, parts = one_step(two, [(x[:3], y[:3]), (x[3:], y[3:])])
    torch.testing.assert_close(one.weight, two.weight)
    assert whole.loss.item() == pytest.approx(parts.loss.item(), rel=1e-5) and whole.targets.item() == 12


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_and_leaving_out_a_step_that_is_not_finite(fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    before = model.weight.clone()
    x, y = torch.randn(4, 5), torch.full((4,), math.nan)
    step, outcome = one_step(model, [(x, y)], optimizer, clip=0.5)
    assert step.skipped == 1 and not torch.isfinite(outcome.norm)
    assert torch.equal(model.weight, before)
    outcome = step([(x, torch.full((4,), 100.0))])
    assert outcome.norm > 0.5 and step.skipped == 1 and not torch.equal(model.weight, before)


def test_units_by_size() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)), nn.Linear(50, 50))
    units = large_modules(model, 1600)
    assert units == [model[1][0], model[1][1], model[2]]


def test_model_flops_and_peaks() -> None:
    shape = llama.SHAPES["1b"]
    flops = transformer_flops(shape.matmul_parameters, shape.layers, shape.width, 8192, causal=True)
    assert flops == pytest.approx(9.026e9, rel=1e-3)
    peak = peak_of("NVIDIA H200")
    assert peak is not None and peak.tflops["bf16"] == 989
    assert peak_of("NVIDIA H100 PCIe").name == "H100 PCIe" and peak_of("NVIDIA GH200 480GB").name == "GH200"  # type: ignore[union-attr]
    assert peak_of("Imaginary 9000") is None
    use = utilisation(flops, "formula", "bf16", CPU, measure=False)
    assert "mfu" not in use.of(1e4) and "no MFU" in use.describe()
    known = Utilisation("6 N", 9e9, "bf16", "NVIDIA H200", 989.0, "data sheet", 785.0)
    assert known.of(50_000)["mfu"] == pytest.approx(450 / 989) and known.of(50_000)["mfu_measured"] == 450 / 785
    for word in ("6 N", "989 TFLOP/s bf16 (data sheet)", "NVIDIA H200", "measured matmul 785"):
        assert word in known.describe()
    assert "mfu" not in Utilisation("6 N", 9e9, "mixed fp8 and bf16", "NVIDIA H200", None, "", None).of(1e5)


def test_the_meter_leaves_the_warm_up_out_and_adds_up() -> None:
    meter = Meter(CPU)
    for _ in range(WARM_UP + 4):
        meter.start()
        meter.mark("data")
        sum(range(20_000))
        meter.mark("optimizer")
    phases = meter.take()
    assert len(meter.step_ms) == 3, "the last step is still open"
    assert phases["optimizer"] > phases["data"] > 0
    assert sum(phases.values()) == pytest.approx(sum(meter.step_ms) / 3, rel=0.01)
    assert set(meter.percentiles()) == {"step_ms_p50", "step_ms_p90", "step_ms_p99"}


def scaled_step(fused: bool, on: List[Tensor]) -> Any:
    """fp16 training of one layer whose first gradients overflow: its loss is scaled by 2 ** 24."""
    from drumbeat.train.step import Step

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
    loss = lambda m, x, y: ((m(x).float() - y) ** 2).sum()  # noqa: E731
    step = Step([model], optimizer, loss, Meshes(Layout(), "cpu"), Precision("fp16"), torch.device("cpu"), clip=1.0)
    assert step.scaler is not None
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 2.0**24})
    for x in on:
        step([(x, torch.full((2, 4), 100.0))])
    return model, step


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_fp16s_scaler_leaves_out_is_not_a_nan(fused: bool) -> None:
    model, step = scaled_step(fused, [torch.ones(2, 4)] * 20)
    assert step.rescaled > 5 and step.skipped == 0
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert step.scaler.get_scale() >= 1
    _, bad = scaled_step(fused, [torch.full((2, 4), float("nan"))] * 30)
    assert bad.skipped > 0, "gradients that stay bad at a scale below 1 are"


def test_a_pipeline_layout_without_a_pipeline_is_refused() -> None:
    from drumbeat.train.refusal import Refusal
    from drumbeat.train.step import Step

    class Two:
        layout = Layout(pp=2)

    model = nn.Linear(2, 2)
    with pytest.raises(Refusal, match="every rank would train the whole model; use train.setup"):
        Step([model], torch.optim.SGD(model.parameters()), None, Two(), Precision("fp32"), torch.device("cpu"))  # type: ignore[arg-type]


def test_recomputing_an_image_model_changes_nothing_but_its_memory() -> None:
    """Running means too: the second forward pass of a block must not count the same images again."""
    from drumbeat.train.models.resnet import WideResNet
    from drumbeat.train.parallel.parallelize import apply_recompute, block_list
    from drumbeat.train.refusal import Refusal

    def after_a_step(recompute: str) -> Tuple[List[Tensor], List[Tensor]]:
        torch.manual_seed(0)
        model = WideResNet(10, 1, 4)
        apply_recompute(model, block_list(model, "blocks"), recompute)
        model(torch.randn(4, 3, 8, 8)).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None], list(model.buffers())

    for a, b in zip(after_a_step("none"), after_a_step("full")):
        assert len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b))
    with pytest.raises(Refusal, match="use recompute=full"):
        after_a_step("selective")


def test_what_fits_into_a_gpu() -> None:
    from drumbeat.train.models.llama import SHAPES
    from drumbeat.train.recipes import fit
    from drumbeat.train.recipes.llama import transformer
    from drumbeat.train.refusal import Refusal

    card = 80 << 30
    one = fit(transformer(SHAPES["1b"], 8192), card, "bf16-master", False, 1, 32)
    assert (one.micro, one.recompute) == (4, "none") and 18 < one.state / 2**30 < 19
    assert one.says().startswith("precision bf16-master, 4 per micro-batch, recompute none: 18.4 GiB of state and ")
    small = fit(transformer(SHAPES["1b"], 8192), 40 << 30, "bf16-master", False, 1, 32)
    assert small.micro == 1 and small.state + small.activations < 0.9 * (40 << 30)
    three = fit(transformer(SHAPES["3b"], 8192), card, "bf16-master", False, 1, 32)
    assert three.state + three.activations < 0.9 * card
    with pytest.raises(Refusal, match="take 120 GiB per GPU, which has 80; share them between more GPUs"):
        fit(transformer(SHAPES["8b"], 8192), card, "bf16-master", False, 1, 32)
    assert fit(transformer(SHAPES["8b"], 8192), card, "bf16", True, 8, 4).recompute == "none"
    kept = fit(transformer(SHAPES["8b"], 8192), card, "bf16", True, 4, 4, recompute="full", micro=2)
    assert (kept.micro, kept.recompute) == (2, "full"), "what was said stays"
    assert fit(transformer(SHAPES["1b"], 8192), None, "fp32", False, 1, 32).micro == 32, "a CPU: unknown, one at once"


def test_what_is_not_said_follows_from_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from drumbeat.train import recipes
    from drumbeat.train.models.llama import SHAPES
    from drumbeat.train.recipes import resolved
    from drumbeat.train.recipes.llama import LlamaSettings, transformer
    from drumbeat.train.world import World

    monkeypatch.setattr(recipes, "free_bytes", lambda: 64 << 30)  # whatever else this machine does
    cpu = World(0, 1, 0, 1, torch.device("cpu"))

    def chosen(model: str, **said: Any) -> LlamaSettings:
        return resolved(
            LlamaSettings(model=model, **said), cpu, Meshes(Layout(), "cpu"), transformer(SHAPES[model], 64)
        )

    tiny, large = chosen("byte-tiny"), chosen("1b", steps=20)
    assert (tiny.precision, tiny.accumulate, tiny.recompute, tiny.warmup) == ("fp32", 1, "none", 60)
    assert large.warmup == 100 and chosen("1b", steps=100_000).warmup == 2000
    said = chosen("1b", precision="bf16", accumulate=4, recompute="full", warmup=0)
    assert (said.precision, said.accumulate, said.recompute, said.warmup) == ("bf16", 4, "full", 0)


@pytest.mark.parametrize(
    "arch,kinds,top", [("gfx942:sramecc+:xnack-", float8.FNUZ, 240.0), ("gfx950", float8.OCP, 448.0)]
)
def test_fp8_of_amds_generations(monkeypatch: pytest.MonkeyPatch, arch: str, kinds: Any, top: float) -> None:
    """Emulated: no such GPU was there. The types differ in range, not in what a scaled product comes to."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"gcnArchName": arch}))
    assert float8.kinds(gpu) == kinds and float8.supported(gpu) is None
    assert torch.finfo(kinds[0]).max == top
    x, weight = torch.randn(64, 128), torch.randn(96, 128)
    monkeypatch.setattr(float8, "kinds", lambda device: kinds)
    (a, _, scale_a), (b, _, scale_b) = float8.quantize(x, False), float8.quantize(weight, False)
    assert a.dtype == kinds[0] and float8.quantize(x, True)[0].dtype == kinds[1]
    near = (a.float() * scale_a) @ (b.float() * scale_b).t()
    assert float((near - x @ weight.t()).norm() / (x @ weight.t()).norm()) < 0.05
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"gcnArchName": "gfx90a"}))
    assert "gfx90a has no fp8 matrix products" in str(float8.supported(gpu))


def test_a_profile_waits_for_the_device_where_its_window_opens_and_closes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from drumbeat.train.measure import Profile, Profiler

    waited: List[int] = []
    profiler = Profiler(Profile((0,), 4, 2, str(tmp_path)), 0, torch.device("cpu"))
    profiler.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(profiler._steps))
    for _ in range(8):
        profiler.step()
    profiler.close()
    assert waited == [4, 6], "else kernels of the step before count as those of the first one looked at"


def test_the_summary_of_a_wide_resnet_claims_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    from drumbeat.train.recipes.wide_resnet import WideResNetSettings, _Epochs

    clock = _Epochs(WideResNetSettings(), 10, True, "processes")
    clock.summary(1, 4)
    said = capsys.readouterr().out
    assert "Number of processes per node: 4" in said and "GPU" not in said and "(nothing was validated)" in said
    clock.print(1, {"accuracy": 0.0, "loss": 1.0}, 1.0)
    clock.summary(1, 4)
    assert "best 0.0000, in epoch 1" in capsys.readouterr().out

"""Are the fast ways right? Each against the plain way, on fresh random numbers; the figure is |a - b| / |b|."""

from __future__ import annotations

import copy
from typing import Any, Dict, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = Tuple[Tensor, Tensor]


def far(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().float(), want.detach().float()
    return float((got - want).norm() / want.norm())


def attention() -> Dict[str, float]:
    """By the kernel that is chosen here, and by cuDNN's, which is chosen where FlashAttention 4 is not installed."""
    from drumbeat.train.layers import attention as layer

    q = torch.randn(2, 512, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, 512, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    up = torch.randn_like(q)
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    plain = F.scaled_dot_product_attention(
        wide[0].transpose(1, 2), *(layer.repeat_heads(t.transpose(1, 2), 8) for t in wide[1:]), is_causal=True
    )
    want = torch.autograd.grad((plain.transpose(1, 2) * up).sum(), wide)
    found, chosen = {}, layer.has_flash4
    best = layer.attention_kernel(q.device, q.dtype, 512, 64, 4, False).split(" (")[0]
    for name, has_flash4 in ((best, chosen), ("cuDNN", lambda _q, _k: False)):
        layer.has_flash4 = has_flash4
        got = torch.autograd.grad((layer.causal_attention(q, k, v) * up).sum(), (q, k, v))
        found.update({f"attention {name} d{letter}": far(a, b) for letter, a, b in zip("qkv", got, want)})
    layer.has_flash4 = chosen
    return found


def ring_blocks() -> Dict[str, float]:
    """One block of ring attention by the fused kernels: cuDNN's, and FlashAttention as where cuDNN's does not run."""
    from drumbeat.train.layers import attention as blocks

    q, up = (torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, 2, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found, best = {}, blocks.has_cudnn
    for kernel, chosen in (("cudnn", best), ("flash", lambda _q: False)):
        blocks.has_cudnn = chosen
        for causal in (True, False):
            want = blocks.block_attention(q.float(), k.float(), v.float(), causal)
            got = blocks.block_attention(q, k, v, causal)
            grads = blocks.block_attention_backward(up, q, k, v, *got, causal)
            plain = blocks.block_attention_backward(up.float(), q.float(), k.float(), v.float(), *want, causal)
            for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), (*got, *grads), (*want, *plain)):
                found[f"ring {kernel} {'causal ' if causal else ''}{name}"] = far(a, b)
    blocks.has_cudnn = best
    return found


def gate() -> Dict[str, float]:
    from drumbeat.train.layers.feed_forward import swiglu

    pairs = torch.randn(4, 256, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    up = torch.randn(4, 256, 2048, device="cuda", dtype=torch.bfloat16)
    out = swiglu(pairs, 256)
    (d_pairs,) = torch.autograd.grad((out * up).sum(), pairs)
    wide = pairs.detach().float().requires_grad_()
    one, two = wide.unflatten(-1, (-1, 2, 256)).unbind(-2)
    plain = (F.silu(one) * two).flatten(-2)
    (want,) = torch.autograd.grad((plain * up).sum(), wide)
    return {"swiglu": far(out, plain), "swiglu gradient": far(d_pairs, want)}


def cross_entropy() -> Dict[str, float]:
    from drumbeat.train.layers import cross_entropy as loss

    loss._SLICE_BYTES = 1 << 24  # several slices
    head = torch.nn.Linear(256, 128_256, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 128_256, (2, 128), device="cuda")
    targets[0, :9] = loss.IGNORE
    ours = loss.linear_cross_entropy(hidden, head, targets)
    got = torch.autograd.grad(ours, (hidden, head.weight))
    wide, weight = hidden.detach().float().requires_grad_(), head.weight.detach().float().requires_grad_()
    plain = loss.cross_entropy_sum(F.linear(wide, weight), targets)
    want = torch.autograd.grad(plain, (wide, weight))
    return {"loss": far(ours, plain), "loss dh": far(got[0], want[0]), "loss dw": far(got[1], want[1])}


def float8() -> Dict[str, float]:
    from drumbeat.train.layers import float8 as f8
    from drumbeat.train.layers.feed_forward import gate_gradient, gate_product

    layer = f8.Float8Linear(512, 768, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, 256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    up = torch.randn_like(y)
    dx, dw = torch.autograd.grad((y * up).sum(), (x, layer.weight))
    flat = x.detach().flatten(0, 1)
    found = {
        "fp8 product": far(y.flatten(0, 1), f8.reference_product(flat, layer.weight)),
        "fp8 product against bf16": far(y, F.linear(x, layer.weight)),
        "fp8 dx against bf16": far(dx, up @ layer.weight),
        "fp8 dw against bf16": far(dw, up.flatten(0, 1).t() @ flat),
    }
    # A cast with a guessed scale may be off by hardly more than one with the exact scale; also where the guess fails.
    pairs = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
    d_out = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for kind in ("", " with a spike"):
        wide = pairs.float()
        ways = {
            "cast": (f8.quantize(pairs, False), wide, f8.OCP[0]),
            "cast of gradients": (f8.quantize(pairs, True), wide, f8.OCP[1]),
            "cast of gates": (f8.quantize_gate(pairs, 512), gate_product(wide, 512), f8.OCP[0]),
            "cast of gates' gradients": (
                f8.quantize_gate_gradient(pairs, d_out, 512), gate_gradient(wide, d_out.float(), 512), f8.OCP[1],
            ),
        }  # fmt: skip
        for name, ((straight, turned, back), want, dtype) in ways.items():
            exact, _, exact_back = f8._plain(want, dtype)
            error = far(straight.float() * back, want)
            found[f"fp8 {name}{kind}: error over that with the exact scale"] = error / far(
                exact.float() * exact_back, want
            )
            found[f"fp8 {name}{kind}: its transpose"] = far(turned.t().float(), straight.float())
        pairs[5, 7] = 300.0
    for bad in (float("nan"), float("inf")):
        pairs[3, 3] = bad
        straight, turned, back = f8.quantize(pairs, False)
        found[f"fp8 {bad} is lost"] = float(
            (straight.float() * back).isfinite().all() or (turned.float() * back).isfinite().all()
        )
    return found


def fp8_gradients() -> Dict[str, float]:
    """The gradients of a whole small model: their distance from fp32, beside that of an emulation in the same formats."""
    from drumbeat.train.layers import float8 as f8
    from drumbeat.train.models.llama import Llama, LlamaShape
    from drumbeat.train.precision import Precision

    shape = LlamaShape(512, 4, 8, 4, 2048, 4096, 512)
    text = torch.randint(0, 4096, (8, 513), device="cuda")
    state = Llama(shape).cuda().bfloat16().state_dict()

    def gradients(precision: str) -> torch.Tensor:
        model = Llama(shape).cuda()
        model.load_state_dict(state)
        if precision == "fp8":
            Precision("fp8").prepare(model, False, "blocks")
        (model(text[:, :-1], text[:, 1:]) / 4096).backward()
        return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])

    want = gradients("fp32")
    ours = gradients("fp8")
    kept = (f8.quantize, f8.quantize_gate, f8.quantize_gate_gradient, f8.product)

    def product(
        a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, dtype: torch.dtype, fast: bool
    ) -> torch.Tensor:
        return ((a.float() * scale_a) @ (b.float() * scale_b).t()).to(dtype)

    f8.quantize = lambda x, wide: f8._plain(x.float(), f8.OCP[1] if wide else f8.OCP[0])
    f8.quantize_gate = lambda x, part: f8._plain(f8.gate_product(x.float(), part), f8.OCP[0])
    f8.quantize_gate_gradient = lambda x, d, part: f8._plain(f8.gate_gradient(x.float(), d.float(), part), f8.OCP[1])
    f8.product = product
    emulated = gradients("fp8")
    f8.quantize, f8.quantize_gate, f8.quantize_gate_gradient, f8.product = kept
    return {
        "fp8 gradients against fp32": far(ours, want),
        "fp8 gradients, emulated, against fp32": far(emulated, want),
        "fp8 gradients: error over the emulation's": far(ours, want) / far(emulated, want),
    }


def pooling() -> Dict[str, float]:
    """Batch norm, ReLU and max-pool as one operation."""
    from drumbeat.train.layers.batch_norm import norm_relu_pool

    norm, plain = torch.nn.BatchNorm2d(64).cuda(), torch.nn.BatchNorm2d(64).cuda()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    plain.load_state_dict(norm.state_dict())
    x = torch.randn(16, 64, 112, 112, device="cuda").contiguous(memory_format=torch.channels_last)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = norm_relu_pool(norm, ours), F.max_pool2d(F.relu(plain(theirs)), 3, 2, 1)
    up = torch.randn_like(want)
    got.backward(up)
    want.backward(up)
    pairs = [(got, want), (ours.grad, theirs.grad), (norm.weight.grad, plain.weight.grad)]
    pairs += [(norm.bias.grad, plain.bias.grad), (norm.running_mean, plain.running_mean)]
    pairs += [(norm.running_var, plain.running_var)]
    names = ("", " dx", " dweight", " dbias", " running mean", " running variance")
    return {f"norm, relu, pool{name}": far(a, b) for name, (a, b) in zip(names, pairs)}


def batch_norm() -> Dict[str, float]:
    """Batch norm with ReLU and residual sum, in bf16 against plain torch in fp64; and a whole step of ResNet-50 in fp32."""
    from drumbeat.train.layers import batch_norm as layer
    from drumbeat.train.models import resnet

    found: Dict[str, float] = {}
    for channels, size in ((64, 56), (256, 57), (2048, 7)):
        norms = [torch.nn.BatchNorm2d(channels).cuda() for _ in range(3)]
        for norm in norms:
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
            torch.nn.init.normal_(norm.bias)
        plain = [copy.deepcopy(norm).double() for norm in norms]
        shape = (15, channels, size, size)
        x, other, *ups = ((torch.randn(shape, device="cuda") + 2).bfloat16() for _ in range(5))
        x, other = (t.contiguous(memory_format=torch.channels_last).requires_grad_() for t in (x, other))
        wide, wide_other = (t.detach().double().requires_grad_() for t in (x, other))
        got, want = layer.norm_relu(norms[0], x), F.relu(plain[0](wide))
        block = layer.norm_add_relu(norms[1], x, other, norms[2])
        want_block = F.relu(plain[1](wide) + plain[2](wide_other))
        torch.autograd.backward((got, *block), (ups[0], *ups))
        torch.autograd.backward((want, want_block), (ups[0].double(), sum(up.double() for up in ups)))
        found[f"norm {channels}"], found[f"norm {channels} sum"] = far(got, want), far(block.main, want_block)
        found[f"norm {channels} dx"] = far(x.grad, wide.grad)
        found[f"norm {channels} dshortcut"] = far(other.grad, wide_other.grad)
        found[f"norm {channels} dweight"] = max(far(a.weight.grad, b.weight.grad) for a, b in zip(norms, plain))
        found[f"norm {channels} dbias"] = max(far(a.bias.grad, b.bias.grad) for a, b in zip(norms, plain))
        found[f"norm {channels} running"] = max(far(a.running_var, b.running_var) for a, b in zip(norms, plain))
    fused, plain_model = resnet.ResNet(50).cuda(), resnet.ResNet(50).cuda()
    plain_model.load_state_dict(fused.state_dict())
    images, labels = torch.randn(32, 3, 160, 160, device="cuda"), torch.randint(0, 1000, (32,), device="cuda")
    F.cross_entropy(fused(images), labels).backward()
    usual, layer.fusable = layer.fusable, lambda norm, x: False
    resnet.fusable = layer.fusable
    F.cross_entropy(plain_model(images), labels).backward()
    layer.fusable = resnet.fusable = usual
    pairs = [(a.grad, b.grad) for a, b in zip(fused.parameters(), plain_model.parameters())]
    found["resnet50 gradients with and without kernels"] = far(
        *(torch.cat([t.flatten() for t in ts]) for ts in zip(*pairs))
    )
    return found


def experts() -> Dict[str, float]:
    """A feed-forward of experts by grouped products, against the same in fp32, expert by expert. One of them gets no token."""
    from drumbeat.train.layers.feed_forward import Experts

    wide = Experts(256, 384, 6).cuda()
    for weight in wide.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    narrow = copy.deepcopy(wide).bfloat16()
    x = torch.randn(1003, 256, device="cuda", dtype=torch.bfloat16)
    index = torch.rand(1003, 5, device="cuda").topk(2).indices
    weights = torch.rand(1003, 2, device="cuda")
    found, results = {}, []
    for module, dtype in ((narrow, torch.bfloat16), (wide, torch.float32)):
        own = x.to(dtype, copy=True).requires_grad_()
        out = module(own, index, weights)
        results.append((out, *torch.autograd.grad((out * x).sum(), (own, *module.parameters()))))
    for name, got, want in zip(("out", "dx", "d gate_up", "d down"), *results):
        found[f"experts {name}"] = far(got, want)
    return found


def recomputation() -> Dict[str, float]:
    """Gradients in fp8, compiled, with less kept of the forward pass."""
    from drumbeat.train.models.llama import Llama, LlamaShape
    from drumbeat.train.parallel import Layout
    from drumbeat.train.parallel.meshes import Meshes
    from drumbeat.train.parallel.parallelize import parallelize
    from drumbeat.train.precision import Precision

    tokens = torch.randint(0, 1024, (2, 513), device="cuda")
    grads, memory = {}, {}
    for how in ("none", "selective", "lean", "full"):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: Any = Llama(LlamaShape(512, 4, 8, 2, 2048, 1024, 512))
        kind = Precision("fp8")
        options = {"blocks": "blocks", "recompute": how, "compile": True}
        model = parallelize(model, Meshes(Layout(), "cuda"), device=tokens.device, precision=kind, **options)
        torch.cuda.reset_peak_memory_stats()
        loss, before = model(tokens[:, :-1], tokens[:, 1:]), torch.cuda.memory_allocated()
        memory[how] = before / 2**20
        loss.backward()
        grads[how] = torch.cat([p.grad.flatten().float() for p in model.parameters()])
        del model, loss
    print({name: round(value) for name, value in memory.items()}, "MiB kept", flush=True)
    return {f"recompute {how}": far(grads[how], grads["none"]) for how in grads if how != "none"}


def models() -> Dict[str, float]:
    from torchvision.models import resnet50
    from transformers import LlamaConfig, LlamaForCausalLM

    from drumbeat.train.models.llama import Llama, LlamaShape, segments
    from drumbeat.train.models.resnet import ResNet

    theirs, ours = resnet50().cuda(), ResNet(50).cuda()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(8, 3, 224, 224, device="cuda")
    shape = LlamaShape(256, 2, 4, 2, 512, 1000, 128)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    hf = LlamaForCausalLM(config).cuda()
    llama = Llama(shape).cuda()
    state, pieces = hf.state_dict(), segments(shape)
    llama.load_state_dict(
        {name: torch.cat([state[source][first:end] for source, first, end in some]) for name, some in pieces.items()}
    )
    text = torch.randint(0, 1000, (2, 128), device="cuda")
    with torch.no_grad():
        return {
            "resnet50 against torchvision": far(ours(images), theirs(images)),
            "llama against transformers": far(llama(text), hf(text).logits),
        }


# bf16 has 8 bits and e5m2 gradients have 3: what each may be off by
LIMITS = {
    "fp8 product": 0.01,
    "fp8 product against bf16": 0.06,
    "fp8 dx against bf16": 0.1,
    "fp8 dw against bf16": 0.1,
    "fp8 gradients against fp32": 0.3,
    "fp8 gradients, emulated, against fp32": 0.3,
    # Where a value is within its rounding of zero, the ReLU of one way is open and that of the other is shut.
    "resnet50 gradients with and without kernels": 0.05,
}


def all_checks() -> Dict[str, Any]:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    found = {
        **attention(),
        **ring_blocks(),
        **gate(),
        **cross_entropy(),
        **float8(),
        **fp8_gradients(),
        **pooling(),
        **batch_norm(),
        **experts(),
        **recomputation(),
        **models(),
    }
    wrong = [
        name for name, value in found.items() if not value < (1.1 if " over th" in name else LIMITS.get(name, 0.012))
    ]
    return {**found, **({"error": f"too far off: {', '.join(wrong)}"} if wrong else {})}

"""What people use, set up as its documentation says: each function returns one training step."""

from __future__ import annotations

from typing import Any, Callable, Dict

import torch
import torch.nn.functional as F

IMAGES, LENGTH, VOCABULARY = 256, 8192, 128_256
Step = Callable[[], Any]


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(IMAGES, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (IMAGES,), device="cuda")


def tokens(sequences: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (sequences, LENGTH), device="cuda")


def resnet50() -> torch.nn.Module:
    from torchvision.models import resnet50 as make

    return make().cuda()


def sgd(model: torch.nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, **more)


def document() -> Step:
    """The guide's ResNet-50 recipe: fp16 autocast with a scaler, everything else as torch comes."""
    model = resnet50()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cuda")

    def step() -> None:
        images, labels = pictures()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def by_hand() -> Step:
    """Plain torch, tuned by hand: channels last, bf16, fused SGD, the whole model compiled."""
    model = resnet50().to(memory_format=torch.channels_last)
    optimizer, fast = sgd(model, fused=True), torch.compile(model)

    def step() -> None:
        images, labels = pictures()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(fast(images.to(memory_format=torch.channels_last)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def accelerate_resnet() -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    model = resnet50()
    model, optimizer = accelerator.prepare(model, sgd(model))

    def step() -> None:
        images, labels = pictures()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fabric_resnet() -> Step:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    fabric.launch()
    model = resnet50()
    model, optimizer = fabric.setup(model, sgd(model))

    def step() -> None:
        images, labels = pictures()
        fabric.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()

    return step


def hugging_face_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).train()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)


def transformers_eager(compiled: bool = False) -> Step:
    model = hugging_face_model()
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    optimizer = adamw(model)

    def step() -> None:
        batch = tokens()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def accelerate_llama() -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    model = hugging_face_model()
    model, optimizer = accelerator.prepare(model, adamw(model))

    def step() -> None:
        batch = tokens()
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fabric_llama() -> Step:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    fabric.launch()
    model = hugging_face_model()
    model, optimizer = fabric.setup(model, adamw(model))

    def step() -> None:
        batch = tokens()
        fabric.backward(model(input_ids=batch, labels=batch).loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


RESNET_PEERS: Dict[str, Callable[[], Step]] = {
    "document": document,
    "accelerate": accelerate_resnet,
    "fabric": fabric_resnet,
    "by hand": by_hand,
}
LLAMA_PEERS: Dict[str, Callable[[], Step]] = {
    "transformers": transformers_eager,
    "transformers compiled": lambda: transformers_eager(compiled=True),
    "accelerate": accelerate_llama,
    "fabric": fabric_llama,
}

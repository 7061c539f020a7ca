"""Small data for the programs of the workload table: text, pictures, a tokenizer. Nothing is downloaded."""

from __future__ import annotations

import csv
import json
import random
import struct
from pathlib import Path

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "nine",
    "grey",
    "geese",
    "row",
    "in",
    "time",
)

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "steps_per_print": 2,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def make(folder: Path) -> None:
    """Everything that a row of the table names as {data}."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(7)
    text = ["O God, O God!\n"]  # with which chargpt of minGPT begins its samples
    text += [" ".join(chance.choices(WORDS, k=12)) + ".\n" for _ in range(2000)]
    (folder / "text.txt").write_text("".join(text))
    wikitext = folder / "wikitext"
    wikitext.mkdir(exist_ok=True)
    for name, count in (("train", 400), ("valid", 40), ("test", 40)):
        (wikitext / f"{name}.txt").write_text("".join(text[:count]))
    with open(folder / "pairs.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sentence", "label"])
        rows.writerows([line.strip(), chance.randrange(2)] for line in text[:64])
    _pictures(folder / "pictures", "ab", chance)
    _pictures(folder / "five-kinds", "abcde", chance)
    for root in ("mnist/MNIST/raw", "MNIST/raw"):
        _mnist(folder / root, chance)
    _tokenizer(folder / "tokenizer", text)
    (folder / "deepspeed.json").write_text(json.dumps(DEEPSPEED))


def _pictures(folder: Path, labels: str, chance: random.Random) -> None:
    """Classes of 32 x 32 pictures, as ImageFolder reads them."""
    from PIL import Image

    for part in ("train", "val", "validation"):
        for label in labels:
            (folder / part / label).mkdir(parents=True, exist_ok=True)
            for number in range(16):
                pixels = bytes(chance.randrange(256) for _ in range(32 * 32 * 3))
                Image.frombytes("RGB", (32, 32), pixels).save(folder / part / label / f"{number}.png")


def _mnist(folder: Path, chance: random.Random) -> None:
    """Random digits in the four files that torchvision looks for."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 512), ("t10k", 128)):
        labels = bytes(chance.randrange(10) for _ in range(count))
        pixels = chance.randbytes(count * 28 * 28)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pixels)


def _tokenizer(folder: Path, text: list) -> None:
    """A word-level tokenizer and a tiny GPT-2 configuration, in the files that transformers loads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.trainers import WordLevelTrainer
    from transformers import BertConfig, GPT2Config, PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(text, WordLevelTrainer(special_tokens=special))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", eos_token="[SEP]", bos_token="[CLS]", model_max_length=64,
    )  # fmt: skip
    size = tokenizer.get_vocab_size()
    small = {"vocab_size": size, "pad_token_id": 1}
    configs = {
        "gpt2": GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, bos_token_id=2, eos_token_id=3, **small),
        "bert": BertConfig(
            num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64,
            **small,
        ),
    }  # fmt: skip
    for name, config in configs.items():
        fast.save_pretrained(folder / name)
        config.save_pretrained(folder / name)

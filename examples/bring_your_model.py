"""A model of transformers on any layout: weights in, a few steps, weights out.

drumbeat run --ranks-per-node 2 -- python examples/bring_your_model.py FOLDER --layout pp
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drumbeat import train

parser = argparse.ArgumentParser()
parser.add_argument("folder", help="config.json and safetensors")
parser.add_argument("--layout", default="fsdp")
parser.add_argument("--out", default="trained")
args = parser.parse_args()

with train.on_meta():  # no memory yet: each rank will read its own part
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.folder))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
trainer = train.setup(model, optimizer, layout=args.layout, weights=args.folder, clip=1.0, accumulate=2)

text = (
    Path(sys.executable).resolve().parent.joinpath("../lib").resolve()
)  # any bytes will do: here, Python's own source
data = b"".join(path.read_bytes() for path in sorted(text.glob("python3*/json/*.py")))
tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
rows = tokens[: len(tokens) // 64 * 64].view(-1, 64)
dataset = [{"input_ids": row, "labels": row} for row in rows]

for batch in trainer.batches(torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)):
    result = trainer.step(batch)
    trainer.report(result, every=10)
trainer.export(args.out)
trainer.close()

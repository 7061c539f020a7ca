"""What the ranks of test_snapshots.py run: a loop of their own that takes snapshots, and at its end the same training once more,
not disturbed: weights and moments must be equal bit by bit.

python snapshots.py LAYOUT STEPS FOLDER. It is at its last step only when there is a file `enough` in the working directory.
"""

import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from drumbeat import train


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 16

    def __getitem__(self, number):
        x = torch.randn(8, generator=torch.Generator().manual_seed(number))
        return x, x.sum(0, keepdim=True)


def mean_loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def trained(layout, steps, folder=""):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.BatchNorm1d(64), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = train.setup(model, optimizer, layout=layout, smallest=1, ema=0.9)
    batches = trainer.batches(Points(), batch_size=16)
    first = trainer.load(folder) if folder else 0
    if first:
        trainer.say(f"attempt {os.environ['DRUMBEAT_ATTEMPT']} from step {first}{trainer.loaded_from}")
    for batch in batches:
        result = trainer.step(batch, mean_loss)
        if folder:
            time.sleep(0.2)  # the ranks that wait for another node compute little meanwhile
            trainer.report(result, every=1)
            if trainer.steps % 3 == 0:
                trainer.snapshot(folder)
        if trainer.steps >= steps and (not folder or agreed(trainer, os.path.exists("enough"))):
            break
    trainer.close()
    state = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.module.state_dict().values()]
    moments = [value for p in trainer.inner.parameters for value in optimizer.state[p].values()]
    state += [value.to_local() if hasattr(value, "to_local") else value for value in moments]
    return trainer.steps, [value.clone() for value in state]


def agreed(trainer, value):
    flag = torch.tensor(int(value))
    torch.distributed.broadcast(flag, 0)
    return bool(flag)


def main():
    from drumbeat.train.world import join

    join()
    layout, steps, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    done, state = trained(layout, steps, folder)
    _, again = trained(layout, done)
    same = len(state) == len(again) and all(torch.equal(a, b) for a, b in zip(state, again))
    print(f"rank {os.environ['RANK']} after step {done}: {'the same bits' if same else 'DIFFERENT'}", flush=True)


if __name__ == "__main__":
    main()

"""Checkpoints: their content, and how they are written, checked and found again."""

import warnings

# torch warns at every save and load of a world of one, where it is meant.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)

"""drumbeat keeps every rank of a training job on the beat."""

__version__ = "0.1.0"

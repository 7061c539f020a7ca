"""The state of a training run: saving it, finding it again, restoring it, comparing two of them bit by bit."""

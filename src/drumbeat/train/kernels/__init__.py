"""Triton kernels, each with the one thing that torch.compile does not do as well. Only imported on a GPU."""

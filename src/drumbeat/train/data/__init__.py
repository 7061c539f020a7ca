"""Samples by number: `read(indices, epoch)` of a data set gives a batch; `Stream` says which samples come when."""

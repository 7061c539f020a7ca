"""Samples by number: `read(indices, epoch)` of a data set returns a batch; `Stream` decides the order of the samples."""

"""Layers and losses that are faster or smaller than their plain form, each with the same result (kernels/ has their kernels)."""

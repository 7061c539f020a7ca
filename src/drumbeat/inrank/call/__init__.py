"""Code in the ranks of a submitted function: a plain copy of this folder lies beside their logs."""

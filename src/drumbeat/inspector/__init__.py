"""All reading of a node's processes: everything works on one snapshot (`tree.Snapshot`).

`ranks` finds the ranks, `activity` what they do, `gpu` the GPUs they use; `record` holds the data that is sent.
"""

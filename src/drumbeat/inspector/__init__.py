"""Everything that is read of the processes of a node: one snapshot (`tree.Snapshot`), asked by all who want to know.

`ranks` tells which processes are ranks, `activity` what they do, `gpu` what they compute on; `record` is what travels.
"""

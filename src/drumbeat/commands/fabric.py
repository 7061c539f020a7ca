"""fabric run (Lightning Fabric): a torchrun inside, started once per node."""

from __future__ import annotations

from drumbeat.commands.options import Options, names

OPTIONS = Options(
    valued=names("accelerator strategy devices num-nodes node-rank main-address main-port precision"),
    bare=names("-h help"),
    replaced=names("num-nodes node-rank main-address main-port devices"),
    aliases={"-h": "--help"},
)

"""torchrun, python -m torch.distributed.run, and the deprecated torch.distributed.launch (torch 2.9 to 2.13)."""

from __future__ import annotations

from drumbeat.commands.options import Options, names

VALUED = names(
    "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts monitor-interval start-method "
    "event-log-handler role log-dir -r redirects -t tee local-ranks-filter duplicate-stdout-filters "
    "duplicate-stderr-filters node-rank master-addr master-port local-addr logs-specs numa-binding signals-to-handle "
    "shutdown-timeout"
)
BARE = names("-h help standalone -m module no-python run-path virtual-local-rank use-env")
REPLACED = names(
    "nnodes nproc-per-node node-rank master-addr master-port rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone "
    "local-addr max-restarts log-dir redirects tee logs-specs use-env"
)

OPTIONS = Options(
    valued=VALUED,
    bare=BARE,
    replaced=REPLACED,
    shape=names("module no-python run-path"),
    aliases={"-m": "--module", "-r": "--redirects", "-t": "--tee", "-h": "--help"},
)

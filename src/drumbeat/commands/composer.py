"""composer (MosaicML Composer): it gives each rank the variables that drumbeat gives, so drumbeat starts the ranks."""

from __future__ import annotations

from drumbeat.commands.options import Options, names

VALUED = names("-n nproc stdout stderr world-size base-rank node-rank master-addr master-port run-directory")
BARE = names("-h help -v verbose -m module-mode -c command-mode version")

OPTIONS = Options(
    valued=VALUED,
    bare=BARE,
    replaced=VALUED - names("-n") | names("verbose"),
    shape=names("module-mode command-mode"),
    aliases={"-n": "--nproc", "-m": "--module-mode", "-c": "--command-mode", "-v": "--verbose", "-h": "--help"},
)

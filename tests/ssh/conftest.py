"""Two machines with a real sshd each, and a desk beside them, for all tests here."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from drumbeat.bundle.build import cached_bundle
from tests.bench.hosts import Machines, why_not


class Desk:
    """drumbeat at the desk, the way a user calls it. `own` is a folder that is different on each machine."""

    def __init__(self, machines: Machines, cache: Path) -> None:
        self.machines = machines
        self.shared, self.own = Path(machines.base, "shared"), Path(machines.base, "own")
        self.pyz = Path(machines.base, "drumbeat.pyz")
        shutil.copy(cached_bundle({"XDG_CACHE_HOME": str(cache)}), self.pyz)

    def argv(self, *words):
        return [sys.executable, str(self.pyz), *map(str, words)]

    def __call__(self, *words, timeout=400, env={}):  # noqa: B006
        return self.machines.run(self.argv(*words), env=env, timeout=timeout)

    def start(self, *words):
        return self.machines.start(self.argv(*words))

    def ranks(self, name: str, text: str) -> str:
        """A script for the ranks, where all machines see it."""
        path = self.shared / f"{name}.py"
        path.write_text(text)
        return str(path)

    def read(self, path) -> str:
        """A file as the desk sees it."""
        return self.machines.run(["cat", str(path)]).stdout

    def left(self):
        return {name: found for name in self.machines.names if (found := self.machines.processes(name))}


@pytest.fixture(scope="session")
def desk(cache):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    base = tempfile.mkdtemp(prefix="dbh-", dir="/var/tmp")
    os.chmod(base, 0o755)
    machines = Machines(base, ["oar1", "oar2"])
    try:
        machines.up()
        yield Desk(machines, cache)
    finally:
        machines.down()
        shutil.rmtree(base, ignore_errors=True)

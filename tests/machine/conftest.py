import os
import shutil
import tempfile
from pathlib import Path

import pytest

from drumbeat.machine.gather import gather
from drumbeat.machine.replay import FolderHost
from tests.trees.archetypes import build


@pytest.fixture(scope="session")
def machine():
    """`machine(name)` is the folder of that test machine, built once; nobody may change it."""
    # A thousand small files each: on a busy disk they take minutes, in memory no time.
    base = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    built = set()

    def folder(name, node=0):
        if (name, node) not in built:
            build(name, base / f"{name}-{node}", node)
            built.add((name, node))
        return base / f"{name}-{node}"

    yield folder
    shutil.rmtree(base)


@pytest.fixture(scope="session")
def facts_of(machine):
    known = {}

    def facts(name, node=0):
        if (name, node) not in known:
            known[name, node] = gather(FolderHost(str(machine(name, node))))
        return known[name, node]

    return facts

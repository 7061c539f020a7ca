import pytest

from drumbeat.facts.gather import gather
from drumbeat.facts.replay import FolderHost
from trees.archetypes import build


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    """`machine(name)` is the folder of that test machine, built once; nobody may change it."""
    built = {}

    def folder(name, node=0):
        if (name, node) not in built:
            built[name, node] = tmp_path_factory.mktemp(name)
            build(name, built[name, node], node)
        return built[name, node]

    return folder


@pytest.fixture(scope="session")
def facts_of(machine):
    known = {}

    def facts(name, node=0):
        if (name, node) not in known:
            known[name, node] = gather(FolderHost(str(machine(name, node))))
        return known[name, node]

    return facts

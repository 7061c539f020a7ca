"""Small orders and machines, written by hand."""

from dataclasses import replace

from drumbeat.base.order import Order
from drumbeat.machine.model import Cpus, Facts, Peer, Peers


def order(**changes):
    plain = Order("r", "job", 0.0, ("true",), 2, 2, "ranks", "the default", "/", "/f", "localhost", "local", True)
    return replace(plain, **changes)


def machine(count, **changes):
    cpus = tuple(range(count))
    return Facts("here", cpus=Cpus(online=cpus, allowed=cpus, siblings=tuple((c,) for c in cpus)), **changes)


def peers(facts):
    return Peers((Peer(0, "a", "127.0.0.1", facts, ranks=2), Peer(1, "b", "127.0.0.2", facts, ranks=2)), "127.0.0.1", 1)


def named(variables):
    return {variable.name: variable for variable in variables}

"""Run folders as tests need them, written by hand."""

import json

from drumbeat.base.order import Order, dump_order
from drumbeat.runfolder.files import EventLog, replace, replace_json
from drumbeat.runfolder.layout import SCHEMA, RunFolder
from drumbeat.runfolder.run import Run


def order(path, **changes):
    given = {
        "run_id": path.name, "name": path.name, "created": 1000.0, "command": ("true",), "nodes": 1, "ranks_per_node": 2,
        "launcher": "ranks", "launcher_why": "default", "workdir": "/", "folder": str(path), "site": "localhost",
        "backend": "local",
    }  # fmt: skip
    return Order(**{**given, **changes})


def make_run(path, nodes=1, **record):
    """A run folder with an order and nodes, nothing else."""
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(str(path))
    replace_json(folder.run_json, {"schema": SCHEMA, "run_id": path.name, "created": 1000.0, **record})
    replace(folder.order, dump_order(order(path, nodes=nodes)))
    for node in range(nodes):
        (path / "nodes" / str(node)).mkdir(parents=True, exist_ok=True)
    return Run.open(str(path))


def events(run, *written, node=None):
    """Append events (kind, fields); the lead's, or those of a node."""
    log = EventLog(run.folder.events if node is None else run.folder.node(node).events, node or 0)
    for kind, data in written:
        log.attempt = data.pop("attempt", 0)
        log.write(kind, data)
    log.close()


def metrics(run, *records, node=0):
    with open(run.folder.node(node).metrics, "a") as file:
        file.writelines((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


def log(run, rank, text, stream="out", attempt=0, node=0):
    """Append to a rank's log."""
    path = run.folder.node(node).log(attempt, rank, stream)
    import os

    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a") as file:
        file.write(text)

"""Fixtures that several folders of tests share."""

from __future__ import annotations

import shutil
import tempfile

import pytest


@pytest.fixture(scope="session")
def cluster():
    """A real Slurm of four nodes. Sorted as text, neither names nor addresses come in its order."""
    from bench.cluster import Cluster, why_not

    reason = why_not()
    if reason:
        pytest.skip(reason)
    base = tempfile.mkdtemp(prefix="drumbeat-bench-", dir="/var/tmp")
    made = Cluster(base, {"oar9": "9", "oar10": "10", "oar11": "100", "oar12": "20"})
    try:
        made.up()
        yield made
    finally:
        made.down()
        shutil.rmtree(base, ignore_errors=True)

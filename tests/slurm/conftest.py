"""One real Slurm for all tests here."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from bench.cluster import Cluster, why_not


@pytest.fixture(scope="session")
def cluster():
    """Four nodes. Sorted as text, neither their names nor their addresses come in Slurm's order."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    base = tempfile.mkdtemp(prefix="drumbeat-bench-", dir="/var/tmp")
    os.chmod(base, 0o755)
    made = Cluster(base, {"oar9": "9", "oar10": "10", "oar11": "100", "oar12": "20"})
    try:
        made.up()
        yield made
    finally:
        made.down()
        shutil.rmtree(base, ignore_errors=True)

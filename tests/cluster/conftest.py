"""One cluster for all tests of this folder, which only `make cluster` and `make kube-server` run."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.cluster.bench import Cluster, why_not
from tests.cluster.desk import Desk

KUBELETS = os.environ.get("KUBELETS", "1") != "0"
PROGRAMS = Path(os.environ.get("KUBE_BIN", Path.home() / ".cache/drumbeat-cluster/bin"))


@pytest.fixture(scope="session")
def cluster():
    reason = why_not(PROGRAMS, KUBELETS)
    if reason:
        pytest.fail(reason)
    with tempfile.TemporaryDirectory(prefix="drumbeat-cluster-", dir="/var/tmp", ignore_cleanup_errors=True) as base:
        made = Cluster(Path(base), PROGRAMS, int(os.environ.get("KUBE_NODES", "2")), KUBELETS)
        try:
            made.up()
            yield made
        finally:
            made.down()


@pytest.fixture
def desk(cluster):
    with tempfile.TemporaryDirectory(prefix="drumbeat-desk-", dir="/var/tmp", ignore_cleanup_errors=True) as base:
        os.chmod(base, 0o755)
        made = Desk(cluster, Path(base))
        yield made
        made.cancel_all()

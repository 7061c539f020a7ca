"""The RDMA library in an image against the host's own, as the prologue noted it."""

from drumbeat.agent.agent import provider_findings
from drumbeat.machine.model import Library

ROW = ["roce_library", "/usr/local/lib/libbnxt_re-rdmav34.so", "/usr/local/lib/libbnxt_re-1.2.so", "a" * 64]


def test_another_version_in_the_image_is_an_error():
    inside = Library("libbnxt_re-rdmav34.so", "/usr/lib/libibverbs/libbnxt_re-rdmav34.so", digest="b" * 64)
    (finding,) = provider_findings([ROW], [inside], 1, "n1")
    assert finding.severity == "error" and finding.node == 1
    assert "libbnxt_re in the image is not the host's" in finding.title
    assert "bind /usr/local/lib/libbnxt_re-1.2.so over /usr/lib/libibverbs/libbnxt_re-rdmav34.so" in finding.fix


def test_the_same_bytes_are_fine():
    same = Library("libbnxt_re-rdmav34.so", "/opt/host/roce_library/libbnxt_re-rdmav34.so", digest="a" * 64)
    other = Library("libmlx5-rdmav34.so", "/usr/lib/libibverbs/libmlx5-rdmav34.so", digest="c" * 64)
    assert provider_findings([ROW], [same, other], 0, "n0") == []


def test_folders_and_other_libraries_are_not_compared():
    rows = [["libfabric", "/opt/cray/libfabric/2.3.1/lib64", "/opt/cray/libfabric/2.3.1/lib64", "-"]]
    assert (
        provider_findings(rows, [Library("libfabric.so.1", "/usr/lib/libfabric.so.1", digest="d" * 64)], 0, "n0") == []
    )

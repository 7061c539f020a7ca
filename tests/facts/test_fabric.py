"""Libraries: found as the loader finds them, and judged without being loaded."""

import ctypes.util
import os
import shutil
import struct
import subprocess
import sys

import pytest

from drumbeat.facts import elf, fabric
from drumbeat.facts.host import LiveHost
from drumbeat.facts.loader import Loader, parse_cache
from drumbeat.facts.model import CxiDevice, RdmaDevice
from drumbeat.facts.replay import FolderHost
from trees.tree import Tree

CXI = (CxiDevice("cxi0"),)


def libraries(tree, **devices):
    tree.done()
    return {one.name: one for one in fabric.read(FolderHost(str(tree.root)), tree.arch, **devices)}


@pytest.fixture
def tree(tmp_path):
    tree = Tree(tmp_path, "n1")
    tree.libc()
    return tree


def test_a_plugin_whose_library_is_missing_says_which(tree):
    tree.library("/opt/p/librccl-net.so", ("libfabric.so.1", "libc.so.6"), "Using aws-ofi-rccl 1.4.0")
    tree.environ(LD_LIBRARY_PATH="/opt/p")
    found = libraries(tree, cxi=CXI)
    plugin = found["librccl-net.so"]
    assert (plugin.loadable, plugin.version, plugin.path) == (False, "1.4.0", "/opt/p/librccl-net.so")
    assert plugin.why_not == "libfabric.so.1 is not on the library path (needed by librccl-net.so)"
    assert found["libfabric.so.1"].path is None and "not on the library path" in found["libfabric.so.1"].why_not
    assert found["libcxi.so.1"].path is None


def test_a_fault_two_libraries_down_is_found(tree):
    tree.library("/opt/p/libnccl-net.so", ("libfabric.so.1",))
    tree.library("/opt/f/libfabric.so.1", ("libcxi.so.1",))
    tree.environ(LD_LIBRARY_PATH="/opt/p:/opt/f")
    assert (
        libraries(tree)["libnccl-net.so"].why_not == "libcxi.so.1 is not on the library path (needed by libfabric.so.1)"
    )


def test_a_library_of_another_architecture(tree):
    tree.library("/opt/p/libnccl-net.so", arch="aarch64")
    tree.environ(LD_LIBRARY_PATH="/opt/p")
    assert "built for aarch64, this machine is x86_64" in libraries(tree)["libnccl-net.so"].why_not


def test_no_plugin_where_one_is_needed(tree):
    found = libraries(tree, cxi=CXI)
    assert found["libnccl-net.so"].path is None and found["libnccl-net.so"].loadable is None
    assert "libnccl-net.so" not in libraries(tree), "without a fabric that needs it, it is not missed"


def test_the_loaders_own_order(tree):
    for folder, version in (("/opt/a", "2.1.1"), ("/usr/lib64", "2.2.2"), ("/opt/b", "2.3.3")):
        tree.library(f"{folder}/libnccl.so.2", comment=f"NCCL version {version}+cuda12.4")
    assert libraries(tree)["libnccl.so.2"].version == "2.2.2"
    tree.environ(LD_LIBRARY_PATH="/opt/b:/opt/a")
    assert libraries(tree)["libnccl.so.2"].version == "2.3.3"


def test_run_paths_and_origin(tree):
    tree.file("/opt/p/libnccl-net.so", tree_library(needed=("libx.so.1",), runpath="$ORIGIN/../deps"))
    tree.library("/opt/deps/libx.so.1", ())
    tree.environ(LD_LIBRARY_PATH="/opt/p")
    assert libraries(tree)["libnccl-net.so"].loadable is True


def tree_library(**about):
    from trees.elf import shared_library

    return shared_library("x86_64", **about)


def test_versions_from_texts_names_folders_and_wheels(tree):
    site = "/home/u/venv/lib/python3.11/site-packages"
    tree.library(f"{site}/nvidia/nccl/lib/libnccl.so.2")
    tree.file(f"{site}/nvidia_nccl_cu12-2.27.3.dist-info/METADATA", "")
    tree.library("/opt/cray/libfabric/1.22.0/lib64/libfabric.so.1")
    tree.library("/opt/cray/libfabric/2.3.1/lib64/libfabric.so.1")
    tree.library("/opt/rocm/lib/librccl.so.1.0.60204")
    tree.link("/opt/rocm/lib/librccl.so.1", "/opt/rocm/lib/librccl.so.1.0.60204")
    tree.environ(VIRTUAL_ENV="/home/u/venv")
    found = libraries(tree)
    assert found["libnccl.so.2"].version == "2.27.3"
    assert found["libfabric.so.1"].version == "2.3.1", "the newest folder, by number"
    assert found["librccl.so.1"].version == "1.0.60204"


def test_a_broken_file_is_not_a_library(tree):
    tree.environ(LD_LIBRARY_PATH="/opt/p")
    for content in (b"", b"GROUP ( libc.so.6 )", tree_library()[:40]):
        tree.file("/opt/p/libnccl-net.so", content)
        assert "not a 64-bit shared library" in libraries(tree)["libnccl-net.so"].why_not


def test_a_provider_is_looked_for_where_rdma_core_keeps_them(tree):
    devices = (RdmaDevice("mlx5_0", "mlx5_core"), RdmaDevice("bnxt_re0", "bnxt_re"))
    tree.library("/usr/lib64/libibverbs/libmlx5-rdmav34.so")
    found = libraries(tree, rdma=devices)
    assert found["libmlx5-rdmav34.so"].loadable and len(found["libmlx5-rdmav34.so"].digest) == 64
    assert found["libbnxt_re.so"].path is None and found["libibverbs.so.1"].path is None


def test_the_real_cache_and_real_libraries():
    """Every library of this machine's cache: we must not call one unloadable that the loader loads."""
    host = LiveHost()
    arch = elf.architecture(host, sys.executable) or elf.architecture(host, "/bin/sh")
    loader = Loader(host, arch)
    assert loader.cache, "this machine has no /etc/ld.so.cache we can read"
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
    if listed:
        paths = {line.split("=> ")[1] for line in listed.splitlines() if "=> " in line}
        assert set(loader.cache.values()) <= paths and len(paths) - len(loader.cache) < 0.1 * len(paths)
    name = ctypes.util.find_library("z") or ctypes.util.find_library("c")
    loadable, why_not = loader.why_not(loader.find(name))
    assert loadable, why_not
    about = loader.elf(loader.find(name))
    assert about.soname == name and about.machine == arch


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build real libraries with (apt-get install gcc)")
def test_real_libraries_from_a_real_linker(tmp_path):
    (tmp_path / "a.c").write_text('const char *v(void) { return "NCCL version 2.99.1+cuda12.9"; }\n')
    (tmp_path / "b.c").write_text("const char *v(void); const char *w(void) { return v(); }\n")
    os.mkdir(tmp_path / "lib")
    build = ["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed"]
    subprocess.run([*build, "-o", "lib/libnccl.so.2", "-Wl,-soname,libnccl.so.2", "a.c"], cwd=tmp_path, check=True)
    subprocess.run([*build, "-o", "lib/libnccl-net.so", "b.c", "-Llib", "-l:libnccl.so.2"], cwd=tmp_path, check=True)

    class Here(LiveHost):
        environ = {"LD_LIBRARY_PATH": str(tmp_path / "lib")}

    arch = elf.architecture(Here(), "/bin/sh")
    found = {one.name: one for one in fabric.read(Here(), arch)}
    assert found["libnccl.so.2"].version == "2.99.1" and found["libnccl.so.2"].loadable
    assert found["libnccl-net.so"].loadable
    os.unlink(tmp_path / "lib/libnccl.so.2")
    found = {one.name: one for one in fabric.read(Here(), arch)}
    assert found["libnccl-net.so"].why_not == "libnccl.so.2 is not on the library path (needed by libnccl-net.so)"


@pytest.mark.parametrize(
    "data", [b"", b"glibc-ld.so.cache1.1", b"glibc-ld.so.cache1.1" + struct.pack("<I", 10**6) + b"\0" * 100]
)
def test_a_cut_cache_is_no_cache(data):
    assert parse_cache(data) == {}

"""Libraries: found as the loader finds them, and judged without being loaded."""

import ctypes.util
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumbeat.machine import libraries as elf
from drumbeat.machine import software
from drumbeat.machine.host import LiveHost
from drumbeat.machine.libraries import Loader, parse_cache
from drumbeat.machine.model import CxiDevice, RdmaDevice
from drumbeat.machine.replay import FolderHost
from tests.trees.tree import Tree

CXI = (CxiDevice("cxi0"),)


def libraries(tree, **devices):
    """By name; of several with one name the first, which is the one that would be loaded."""
    tree.done()
    return {
        one.name: one for one in reversed(software.read_libraries(FolderHost(str(tree.root)), tree.arch, **devices))
    }


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
    from tests.trees.elf import shared_library

    return shared_library("x86_64", **about)


def test_versions_from_wheels_folders_and_pkgconfig(tree):
    site = "/home/u/venv/lib/python3.11/site-packages"
    tree.library(f"{site}/nvidia/nccl/lib/libnccl.so.2")
    tree.file(f"{site}/nvidia_nccl_cu12-2.27.3.dist-info/METADATA", "")
    tree.library("/opt/cray/libfabric/1.22.0/lib64/libfabric.so.1")
    tree.library("/opt/cray/libfabric/2.3.1/lib64/libfabric.so.1")
    tree.environ(VIRTUAL_ENV="/home/u/venv")
    found = libraries(tree)
    assert found["libnccl.so.2"].version == "2.27.3"
    assert found["libfabric.so.1"].version == "2.3.1", "the newest folder, by number"
    tree.library("/usr/lib64/libfabric.so.1.20.0")
    tree.link("/usr/lib64/libfabric.so.1", "/usr/lib64/libfabric.so.1.20.0")
    assert libraries(tree)["libfabric.so.1"].version is None, (
        "1.20.0 is its ABI; Debian's libfabric 1.17.0 has that name"
    )
    tree.file("/usr/lib64/pkgconfig/libfabric.pc", "Name: libfabric\nVersion: 1.17.0")
    assert libraries(tree)["libfabric.so.1"].version == "1.17.0"


def test_a_version_in_any_read_only_segment(tree):
    """On x86_64 the segment with the symbol tables is often larger than the one with the constants."""
    library = tree_library(
        soname="libnccl.so.2", needed=["libc.so.6"], comment="NCCL version 2.29.1+cuda13", split=True
    )
    tree.file("/usr/lib64/libnccl.so.2", library)
    assert libraries(tree)["libnccl.so.2"].version == "2.29.1"


def test_rccls_file_name_is_no_version(tree):
    tree.library("/opt/rocm/lib/librccl.so.1.0.60204")
    tree.link("/opt/rocm/lib/librccl.so.1", "/opt/rocm/lib/librccl.so.1.0.60204")
    tree.link("/opt/rocm/lib/librccl.so", "/opt/rocm/lib/librccl.so.1")
    (found,) = [one for one in libraries(tree).values() if "rccl" in one.path]
    assert found.version is None


def test_torchs_own_nccl_comes_before_the_systems(tree):
    tree.file("/usr/lib64/libnccl.so.2.28.3", tree_library(soname="libnccl.so.2"))
    tree.link("/usr/lib64/libnccl.so.2", "/usr/lib64/libnccl.so.2.28.3")
    wheel = "/opt/torch/.venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"
    tree.file(wheel, tree_library(soname="libnccl.so.2", comment="NCCL version 2.28.9+cuda13.0"))
    tree.file("/opt/torch/.venv/bin/python3", "")
    tree.environ(PATH="/nowhere:/opt/torch/.venv/bin:/usr/bin")
    tree.done()
    found = software.read_libraries(FolderHost(str(tree.root)), "x86_64")
    assert [(one.name, one.version) for one in found] == [("libnccl.so.2", "2.28.9"), ("libnccl.so.2", "2.28.3")]
    assert software.versions(found) == {"nccl": "2.28.9"}


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
    refused = {name: loader.why_not(path)[1] for name, path in loader.cache.items() if not loader.why_not(path)[0]}
    for name, why_not in refused.items():
        told = subprocess.run(["ldd", loader.cache[name]], capture_output=True, text=True, check=False)
        assert "not found" in told.stdout + told.stderr, f"{name}: {why_not}; the loader disagrees"
    name = ctypes.util.find_library("z") or ctypes.util.find_library("c")
    loadable, why_not = loader.why_not(loader.find(name))
    assert loadable, why_not
    about = loader.about(loader.find(name))
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
    found = {one.name: one for one in software.read_libraries(Here(), arch)}
    assert found["libnccl.so.2"].version == "2.99.1" and found["libnccl.so.2"].loadable
    assert found["libnccl-net.so"].loadable
    os.unlink(tmp_path / "lib/libnccl.so.2")
    found = {one.name: one for one in software.read_libraries(Here(), arch)}
    assert found["libnccl-net.so"].why_not == "libnccl.so.2 is not on the library path (needed by libnccl-net.so)"


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build real libraries with (apt-get install gcc)")
def test_a_symbol_version_that_is_missing(tmp_path):
    """As with a host's libfabric in an older image: the library is there, but too old."""
    (tmp_path / "new.map").write_text("FAB_1.0 { global: one; local: *; }; FAB_2.0 { global: two; } FAB_1.0;")
    (tmp_path / "old.map").write_text("FAB_1.0 { global: one; two; local: *; };")
    (tmp_path / "fabric.c").write_text("int one(void) { return 1; } int two(void) { return 2; }\n")
    (tmp_path / "plugin.c").write_text("int one(void); int two(void); int both(void) { return one() + two(); }\n")
    os.mkdir(tmp_path / "lib")
    fabric_library = ["gcc", "-shared", "-fPIC", "-o", "lib/libfabric.so.1", "-Wl,-soname,libfabric.so.1", "fabric.c"]
    plugin = ["gcc", "-shared", "-fPIC", "-o", "lib/libnccl-net.so", "plugin.c", "-Llib", "-l:libfabric.so.1"]
    path = str(tmp_path / "lib/libnccl-net.so")

    class Here(LiveHost):
        environ = {"LD_LIBRARY_PATH": str(tmp_path / "lib")}

    subprocess.run([*fabric_library, "-Wl,--version-script=new.map"], cwd=tmp_path, check=True)
    subprocess.run(plugin, cwd=tmp_path, check=True)
    assert Loader(Here(), None).why_not(path) == (True, "")
    subprocess.run([*fabric_library, "-Wl,--version-script=old.map"], cwd=tmp_path, check=True)
    loadable, why_not = Loader(Here(), None).why_not(path)
    assert not loadable and "libfabric.so.1 has no FAB_2.0 (needed by libnccl-net.so)" in why_not
    told = subprocess.run(
        ["ldd", path], capture_output=True, text=True, check=False, env={**os.environ, **Here.environ}
    )
    assert "FAB_2.0' not found" in told.stdout + told.stderr


@pytest.mark.parametrize(
    "data", [b"", b"glibc-ld.so.cache1.1", b"glibc-ld.so.cache1.1" + struct.pack("<I", 10**6) + b"\0" * 100]
)
def test_a_cut_cache_is_no_cache(data):
    assert parse_cache(data) == {}


class OneFile(LiveHost):
    """A machine of one library, in memory."""

    environ = {}

    def __init__(self, content):
        self.content = content

    def data(self, path, start, size):
        return self.content[start : start + size] if start < 1 << 60 else b""


REAL = next(Path(path).read_bytes() for path in ("/bin/sh", sys.executable) if os.path.exists(path))[: 1 << 18]


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=12), st.booleans(), st.integers(0, 1 << 18)
)
def test_a_library_with_wrong_bytes_is_read_or_refused(changes, real, length):
    content = bytearray(REAL if real else tree_library(soname="a", needed=("b", "c"), runpath="/x:$ORIGIN"))[:length]
    for place, value in changes:
        if place < len(content):
            content[place] = value
    about = elf.parse(OneFile(bytes(content)), "/a")
    assert about is None or isinstance(about.needed, tuple)

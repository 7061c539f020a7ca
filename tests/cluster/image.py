"""A container image without a builder or a registry: a tar file in docker's archive format, made from a folder."""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

_ARCH = {"aarch64": "arm64", "x86_64": "amd64"}


def write_image(folder: Path, name: str, out: Path, command=()) -> None:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(folder, arcname=".")
    data = layer.getvalue()
    config = {
        "architecture": _ARCH[platform.machine()],
        "os": "linux",
        "config": {"Cmd": list(command), "Env": ["PATH=/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}"]},
    }
    text = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(text).hexdigest()}.json"
    index = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(out, "w") as tar:
        for member, content in ((config_name, text), ("layer.tar", data), ("manifest.json", index)):
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def host_image(folder: Path, out: Path) -> None:
    """Almost empty: /usr of this machine is mounted into it as a volume, and its programs are the machine's own."""
    for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "root", "var/tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if not (folder / name).is_symlink() and (Path("/") / name).exists():
            (folder / name).symlink_to(f"usr/{name}")
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nada:x:1000:1000:ada:/tmp:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\nada:x:1000:\n")
    (folder / "tmp").chmod(0o1777)
    write_image(folder, "localhost/host:1", out)


def pause_image(folder: Path, program: Path, out: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pause").write_bytes(program.read_bytes())
    (folder / "pause").chmod(0o755)
    write_image(folder, "localhost/pause:1", out, ["/pause"])

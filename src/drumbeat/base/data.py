"""Data that comes with drumbeat: YAML in the package, and its JSON twin inside drumbeat.pyz, which is read 50 times
faster."""

from __future__ import annotations

import functools
import importlib
import json
import os
import pkgutil
from typing import Any, Tuple


@functools.lru_cache(None)  # inside drumbeat.pyz each look reads the list of all its files
def names(package: str) -> Tuple[str, ...]:
    """Return the names of the data files in a folder of the package, without their ending; some have only the JSON twin."""
    parent, _, folder = package.rpartition(".")
    module = importlib.import_module(parent)
    place = os.path.join(os.path.dirname(str(module.__file__)), folder)
    archive = getattr(module.__loader__, "archive", "")
    if archive:
        import zipfile  # importlib.resources would take three times as long

        below = place[len(archive) + 1 :] + "/"
        with zipfile.ZipFile(archive) as file:
            found = [name[len(below) :] for name in file.namelist() if name.startswith(below)]
    else:
        found = os.listdir(place)
    return tuple(sorted({name.rpartition(".")[0] for name in found if name.endswith((".yaml", ".json"))}))


@functools.cache
def load(package: str, name: str) -> Any:
    """Return a data file's content, which callers must not change: it is parsed once per process."""
    try:
        return json.loads(read(package, f"{name}.json"))
    except OSError:
        return parse_yaml(read(package, f"{name}.yaml"))


def read(package: str, file: str) -> bytes:
    """Read a data file. Its folder need not be a package, but the folder's parent must be."""
    parent, _, folder = package.rpartition(".")
    data = pkgutil.get_data(parent, f"{folder}/{file}")
    assert data is not None
    return data


def parse_yaml(data: bytes) -> Any:
    """Parse our own files only: what users write goes through jobfile/yamlfile.py."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(data, Loader=loader)  # noqa: S506 - both are safe loaders

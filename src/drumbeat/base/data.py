"""Data that comes with drumbeat: YAML in the package, and its JSON twin inside drumbeat.pyz, which is read 50 times
faster."""

from __future__ import annotations

import functools
import json
import pkgutil
from typing import Any, Tuple


@functools.lru_cache(None)  # inside drumbeat.pyz each look reads the list of all its files
def names(package: str) -> Tuple[str, ...]:
    """Return the names of the data files in a folder of the package, without their ending; some have only the JSON twin."""
    from importlib.resources import files

    parent, _, folder = package.rpartition(".")
    found = (item.name for item in files(parent).joinpath(folder).iterdir())
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

"""Wait for the import of a framework, then let its adapter tell the framework who this rank is.

Python loads this file at startup, because its folder is the first on PYTHONPATH. It imports nothing of drumbeat, takes its
folder off sys.path again, and loads the user's own sitecustomize, which it has displaced. A rank that ends because a module is
missing leaves a note: which Python ran it, and which environments in reach have that module.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Dict, List

LACKS = "lacks-"  # prefix of the names of notes
HERE = os.path.dirname(os.path.abspath(__file__))
# Module of a framework -> the file beside this one whose adapt(module) runs once that module is loaded.
ADAPTERS = {
    "jax._src.clusters": "jax_cluster.py",
    "tensorflow.python.distribute.cluster_resolver.tfconfig_cluster_resolver": "worker_list.py",
    "paddle.distributed.parallel": "worker_list.py",
    "socket": "stacks.py",
    "mpi4py": "stacks.py",
    "torch.distributed.rendezvous": "stacks.py",
    "wandb": "trackers.py",
    "mlflow.tracking.fluent": "trackers.py",
    "aim.sdk.run": "trackers.py",
    "torch.utils.tensorboard.writer": "trackers.py",
    "tensorboardX.writer": "trackers.py",
}
AT_START: List[str] = []  # sys.path before the program began


class Hook:
    """Finds the modules of ADAPTERS through the finders after it, and adapts each module once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ADAPTERS:
            return None
        finders = (each for each in sys.meta_path if each is not self and hasattr(each, "find_spec"))
        spec = next(filter(None, (each.find_spec(name, path, target) for each in finders)), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_adapt(module: Any) -> None:
                load(module)
                if module.__name__ == name:  # the loader of a zip file serves all its modules
                    adapt(name, module)

            spec.loader.exec_module = load_and_adapt  # type: ignore[method-assign]
        return spec


def adapt(name: str, module: Any) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    try:
        spec = spec_from_file_location("drumbeat_" + ADAPTERS[name][:-3], os.path.join(HERE, ADAPTERS[name]))
        assert spec is not None and spec.loader is not None
        adapter = module_from_spec(spec)
        spec.loader.exec_module(adapter)
        adapter.adapt(module)
    except Exception as error:
        print(f"drumbeat: {ADAPTERS[name]} failed: {type(error).__name__}: {error}", file=sys.stderr)


def load_users_own() -> None:
    """Load the sitecustomize that Python would have found without ours."""
    own = sys.modules.pop("sitecustomize")
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != HERE]
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", own)


def note_missing(name: str) -> None:
    """Append the note about a missing module. Looked through: the active environment, those on PATH, and `.venv` and the like
    beside the program."""
    import json
    from difflib import get_close_matches
    from glob import escape, glob
    from pkgutil import iter_modules

    begin, beside = escape(name.partition(".")[0]), (os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0])))
    places = [os.environ.get(each, "") for each in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    places += [os.path.join(folder, each) for folder in beside for each in (".venv", "venv", "env")]
    places += [os.path.dirname(each) for each in os.environ.get("PATH", "").split(os.pathsep) if each.endswith("/bin")]
    others = (each for each in dict.fromkeys(places) if each and os.path.realpath(each) != os.path.realpath(sys.prefix))

    def holds(place: str, below: str) -> bool:
        return any(glob(os.path.join(escape(place), below, f"{begin}{end}")) for end in ("", ".py", ".*.so"))

    have = [each for each in others if holds(each, "lib/python3*/*-packages")]
    taken = [each for each in AT_START if each not in sys.path and holds(each, "")]
    near = get_close_matches(name, (module.name for module in iter_modules()), 1, 0.8)
    path = os.path.join(os.path.dirname(os.environ["DRUMBEAT_METRICS"]), LACKS + os.environ["RANK"])
    note = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with open(note, "w") as file:
        found = {"have": have, "taken": taken, "near": near}
        file.write(json.dumps({"module": name, "python": sys.executable, **found}) + "\n")


def read_missing(folder: str, rank: int) -> List[Dict[str, Any]]:
    """Return the notes of a rank, the last one first."""
    import json

    try:
        with open(os.path.join(folder, f"{LACKS}{rank}"), encoding="utf-8") as file:
            return [json.loads(line) for line in reversed(file.readlines())]
    except (OSError, ValueError):
        return []


def note_first(show: Any) -> Any:
    """Return an excepthook that notes a missing module before `show` prints it."""

    def note_and_show(kind: Any, value: Any, trace: Any) -> None:
        reason = value  # a missing module may be the reason of another exception
        try:
            for _ in range(20):
                name = str(reason.name or "") if isinstance(reason, ModuleNotFoundError) else ""
                if name and name.partition(".")[0] not in sys.modules:  # else its package is there, in another version
                    note_missing(name)
                reason = reason.__cause__ or reason.__context__
        except Exception:  # noqa: BLE001, S110 - the exception's own words must come out
            pass
        show(kind, value, trace)

    return note_and_show


if __name__ == "sitecustomize":
    sys.excepthook = note_first(sys.excepthook)
    if "socket" in sys.modules:
        adapt("socket", sys.modules["socket"])
    sys.meta_path.insert(0, Hook())
    load_users_own()
    AT_START += sys.path

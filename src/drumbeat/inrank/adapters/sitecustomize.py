"""Wait for the import of a framework, then let its adapter tell the framework who this rank is.

Python loads this file at startup, because its folder is the first on PYTHONPATH. It imports nothing of drumbeat, takes its
folder off sys.path again, and loads the user's own sitecustomize, which it has displaced.
"""

from __future__ import annotations

import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
# Module of a framework -> the file beside this one whose adapt(module) runs once that module is loaded.
ADAPTERS = {
    "jax._src.clusters": "jax_cluster.py",
    "tensorflow.python.distribute.cluster_resolver.tfconfig_cluster_resolver": "worker_list.py",
    "paddle.distributed.parallel": "worker_list.py",
    "socket": "stacks.py",
    "wandb": "trackers.py",
    "mlflow.tracking.fluent": "trackers.py",
    "aim.sdk.run": "trackers.py",
    "torch.utils.tensorboard.writer": "trackers.py",
    "tensorboardX.writer": "trackers.py",
}


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


if __name__ == "sitecustomize":
    if "socket" in sys.modules:
        adapt("socket", sys.modules["socket"])
    sys.meta_path.insert(0, Hook())
    load_users_own()

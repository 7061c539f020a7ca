"""Let experiment trackers continue the same run when the job is started again.

Acts only in rank 0, not in processes started by multiprocessing (only the program knows which rank they are), only for the
first run that a process starts, and only if neither the program nor the user has chosen a run. W&B and TensorBoard take a name
derived from the drumbeat run; MLflow and Aim invent their own, which is kept in a file of the run folder ($DRUMBEAT_TRACKERS).
Imports nothing of drumbeat: it runs in the ranks' own Python.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from typing import Any, Callable, Dict, Tuple

_FILE = os.environ.get("DRUMBEAT_TRACKERS", "")
_NAME = re.sub(r"[^A-Za-z0-9_-]", "-", os.environ.get("DRUMBEAT_RUN", ""))[:64]


def adapt(module: Any) -> None:
    if not _FILE:
        return
    if module.__name__ == "wandb":
        if not any(os.environ.get(name) for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID")):
            _named(module, "init", ("id", "resume"), _wandb)
    elif module.__name__ == "mlflow.tracking.fluent":
        if not os.environ.get("MLFLOW_RUN_ID"):
            _kept(module, "start_run", "mlflow", ("run_id", "nested"), lambda args, run: run.info.run_id)
    elif module.__name__ == "aim.sdk.run":
        _kept(module.Run, "__init__", "aim", ("run_hash", "read_only"), lambda args, made: args[0].hash)
    else:  # torch's SummaryWriter, or tensorboardX's
        _named(module.SummaryWriter, "__init__", ("log_dir", "logdir"), _board)


def _is_first_rank() -> bool:
    """Return true in the first rank. Called when a run begins, since a program may have set its rank by then."""
    process = sys.modules.get("multiprocessing.process")
    numbers = (os.environ.get(name, "0") for name in ("RANK", "LOCAL_RANK", "NODE_RANK"))
    return set(numbers) == {"0"} and (process is None or process.parent_process() is None)


def _wandb(known: Dict[str, Any]) -> Dict[str, Any]:
    _say(f"W&B goes on with run {_NAME} when the job is started again; WANDB_RUN_ID chooses another")
    return {"id": _NAME, "resume": "allow"}


def _board(known: Dict[str, Any]) -> Dict[str, Any]:
    folder = os.path.join("runs", _NAME + str(known.get("comment") or ""))
    _say(f"TensorBoard writes to {folder} at every start of the job; log_dir chooses another")
    return {"log_dir": folder}


def _named(where: Any, name: str, own: Tuple[str, ...], more: Callable[..., Dict[str, Any]]) -> None:
    """Add our arguments to the first call, unless the program passes one of its `own`."""
    call, first = getattr(where, name), [True]

    @functools.wraps(call)
    def called(*args: Any, **known: Any) -> Any:
        plain = len(args) < (2 if name == "__init__" else 1)  # positional arguments may be the ones we would add
        if first and plain and not any(map(known.get, own)) and _is_first_rank():
            known.update(more(known))
        first.clear()
        return call(*args, **known)

    setattr(where, name, called)


def _kept(where: Any, name: str, tracker: str, own: Tuple[str, ...], of: Callable[[Any, Any], str]) -> None:
    """Keep the name of the first run, and pass it to the first run of a later start, unless the program passes one of its
    `own`, the first of which is the run's name. A run that no longer exists is not an error."""
    call, first = getattr(where, name), [True]

    @functools.wraps(call)
    def called(*args: Any, **known: Any) -> Any:
        plain = len(args) <= (1 if name == "__init__" else 0) and not any(map(known.get, own))
        if not (first and plain and _is_first_rank()):
            return call(*args, **known)
        first.clear()
        kept = _read()
        if kept.get(tracker):
            try:
                made = call(*args, **{**known, own[0]: kept[tracker]})
                _say(f"{tracker} goes on with run {kept[tracker]}, of an earlier start of this job")
                return made
            except Exception as error:
                _say(f"{tracker} cannot go on with run {kept[tracker]} ({error}); it starts another one")
        made = call(*args, **known)
        with open(_FILE + ".new", "w", encoding="utf-8") as file:
            json.dump({**kept, tracker: of(args, made)}, file)
        os.replace(_FILE + ".new", _FILE)
        return made

    setattr(where, name, called)


def _read() -> Dict[str, str]:
    try:
        with open(_FILE, encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError):
        return {}


def _say(text: str) -> None:
    print(f"drumbeat: {text}", file=sys.stderr)

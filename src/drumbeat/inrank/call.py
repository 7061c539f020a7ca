"""One rank of a submitted function: calls it, and leaves what it returned or raised in the run folder.

    RUN/call/call.pkl            the function, or its name, and the arguments of each call    the desk, once; mode 0600
    RUN/call/next-R.pkl          what to call after a checkpoint, for rank R                  rank R; N-R in an array
    ATTEMPT/result-R.pkl         what rank R's call gave                                      rank R; mode 0600

Nothing is unpickled from a file that others could have written. Needs nothing of drumbeat: it runs in the job's own Python.
"""

import importlib
import os
import pickle
import signal
import stat
import sys
import traceback
from typing import Any, Dict, Tuple

REQUEUE = 75


def read_own(path: str) -> Any:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022 or not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} belongs to another user, or others can write to it")
        return pickle.load(file)  # noqa: S301 - a file of this user, which nobody else can have changed


def write_own(path: str, value: Any) -> None:
    """Write a file of our own, neither through a link nor into a file that somebody else created."""
    partial = f"{path}.{os.urandom(8).hex()}.tmp"
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        pickle.dump(value, file)
    os.replace(partial, path)


def places() -> Tuple[str, str, int, str]:
    """Return the attempt's folder, the folder with the call, the number of the call, and a name for this rank's own files."""
    attempt, rank = os.environ["DRUMBEAT_FOLDER"], os.environ["RANK"]
    run = os.path.dirname(os.path.dirname(os.path.dirname(attempt)))
    if os.path.basename(os.path.dirname(run)) != "array":
        return attempt, os.path.join(run, "call"), 0, rank
    task = os.path.basename(run)
    whole = os.path.dirname(os.path.dirname(run))
    return attempt, os.path.join(whole, "call"), int(task), f"{task}-{rank}"


def function_of(call: Dict[str, Any]) -> Any:
    if "function" in call:
        return pickle.loads(call["function"])  # noqa: S301 - came out of a file that read_own has judged
    found: Any = importlib.import_module(call["module"])
    for part in call["name"].split("."):
        found = getattr(found, part)
    return found


def main() -> int:
    attempt, folder, number, own = places()
    result = os.path.join(attempt, f"result-{os.environ['RANK']}.pkl")
    call = read_own(os.path.join(folder, "call.pkl"))
    # the work folder too: code that was sent there has another path on the submitting machine
    sys.path[:0] = [path for path in (*call["path"], os.getcwd()) if path not in sys.path]
    later = os.path.join(folder, f"next-{own}.pkl")
    try:
        function = function_of(call)
        args, kwargs = pickle.loads(call["calls"][number])  # noqa: S301 - as above
        if os.path.exists(later):
            function, args, kwargs = read_own(later)
        if hasattr(function, "checkpoint"):

            def save(signum: int, frame: Any) -> None:
                """Save as submitit does: the checkpointed object says how to go on, and the job asks to be started again."""
                again = function.checkpoint(*args, **kwargs)
                if again is None:
                    sys.exit(128 + signum)
                write_own(later, again if isinstance(again, tuple) else (again, (), {}))
                sys.stdout.flush()
                os._exit(REQUEUE)

            signal.signal(signal.SIGTERM, save)
        value = function(*args, **kwargs)
        write_own(result, {"value": value})
        return 0
    except Exception as error:
        text = traceback.format_exc()
        sys.stderr.write(text)
        try:
            write_own(result, {"error": error, "traceback": text})
        except Exception:
            write_own(result, {"error": None, "traceback": text})
        return 1


if __name__ == "__main__":
    sys.exit(main())

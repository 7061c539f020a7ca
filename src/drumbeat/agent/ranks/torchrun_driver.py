"""Runs in the user's interpreter, not in the agent's: `python -c <this file> FAILURES.json <torchrun arguments>`.

torchrun itself exits with 1 whatever happened; this writes which rank failed, with which exit code or signal, as JSON.
"""

import json
import os
import sys


def main() -> int:
    failures_file, arguments = sys.argv[1], sys.argv[2:]
    # Agents of a later attempt must not meet the store of an earlier one.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except ImportError as error:
        print(f"drumbeat: torchrun needs torch in {sys.executable}: {error}", file=sys.stderr)
        return 127
    try:
        run.run(run.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "local_rank": failure.local_rank, "exit_code": failure.exitcode, "t": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        with open(failures_file + ".tmp", "w") as file:
            json.dump(failures, file)
        os.replace(failures_file + ".tmp", failures_file)
        code = error.get_first_failure()[1].exitcode
        return 128 - code if code < 0 else code
    return 0


if __name__ == "__main__":
    sys.exit(main())

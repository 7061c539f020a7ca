"""drumbeat verify: collectives across the ranks: right values, bandwidth against what the hardware can do, slow pair."""

from __future__ import annotations

import os
from typing import Any

from drumbeat.cli import add_json
from drumbeat.cli.output import print_json
from drumbeat.cli.run import add_start, job_to_start

_NOT_OURS = ("command", "launcher", "restarts", "name")


def add_arguments(parser: Any) -> None:
    from drumbeat.jobfile.flags import add_job_flags

    parser.add_argument("--quick", action="store_true", help="half a minute: fewer sizes, shorter measurements")
    add_json(parser)
    parser.add_argument(
        "--backend", choices=("auto", "nccl", "gloo"), default="auto", help="auto: nccl (or rccl) if there are GPUs"
    )
    parser.add_argument(
        "--mpi",
        action="store_true",
        help="test MPI instead, started by mpirun: an all-reduce by mpi4py in host memory, sums checked",
    )
    parser.add_argument(
        "--python", metavar="PATH", help="a Python with torch. Default: this one if it has torch, else python3"
    )
    add_start(parser)
    add_job_flags(parser, leave_out=_NOT_OURS)
    parser.set_defaults(takes_command=False)
    parser.usage = f"{parser.prog} [JOB.yaml] [options]"


def run(args: Any) -> int:
    from drumbeat.desk.start.verify import as_plain, judged, run_verify, verify_job, write_verdict

    if args.mpi:
        return _mpi(args)
    job = verify_job(job_to_start(args), args.quick, args.backend, args.python)
    code, folder = run_verify(job, args.node_rank, args.master)
    if folder is None:
        return code  # the lead's machine has the results
    results, judgement = judged(folder)
    if judgement and judgement.failed and code == 0:
        code = 1
    plain = as_plain(folder, code, results, judgement)
    if results and judgement:
        write_verdict(folder, plain, results, judgement)
    if args.json:
        print_json(plain)
    elif results and judgement:
        from drumbeat.verify.judge import table

        print(table(results, judgement))
    return code


def _mpi(args: Any) -> int:
    from drumbeat.desk.start.verify import mpi_job, mpi_results, require_mpi_launcher, run_verify
    from drumbeat.verify.judge import NOT_MEASURED, mpi_failed, mpi_lines

    require_mpi_launcher(os.environ)
    code, folder = run_verify(mpi_job(job_to_start(args), args.quick, args.python), args.node_rank, args.master)
    if folder is None:
        return code  # the lead's machine has the results
    results = mpi_results(folder)
    if results and mpi_failed(results) and code == 0:
        code = 1
    if args.json:
        print_json({"folder": folder.path, "exit_code": code, "results": results, "note": NOT_MEASURED})
    elif results:
        print("\n".join(mpi_lines(results)))
    return code

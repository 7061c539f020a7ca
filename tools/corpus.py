"""How often `drumbeat diagnose` reads real logs the way an expert does: a table, and the shares that the project asks for.

    python tools/corpus.py        reads $DRUMBEAT_CORPUS, or ../shared/data/corpus beside the repository

Every log has FILE.json beside it with what is true of it; a field that is missing or null there is not judged. In B only
logs whose cause the source itself states count. Exits with 1 when a share is too low, with 0 when there is no corpus.
"""

import glob
import json
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "src"))

from drumbeat.cli.log_sources import Source, lines  # noqa: E402
from drumbeat.diagnose.reader import Reader  # noqa: E402

ENOUGH_A, ENOUGH_B = 0.95, 0.85
FIELDS = ("transport", "gdr", "version", "nranks")

# The corpus' classes of failure -> our codes.
CLASSES = {
    "nccl_watchdog_timeout": {"collective-timeout", "collective-desync", "rank-absent"},
    "nccl_remote_error": {"peer-lost"},
    "nccl_unhandled_cuda": {"cuda-failure", "nccl-error"},
    "nccl_unhandled_system": {"nccl-error", "connect-failed"},
    "nccl_invalid_usage": {"duplicate-gpu", "nccl-error"},
    "ib_retry_exceeded": {"ib-retry-exceeded", "roce-gid-index"},
    "efa_handshake": {"efa-peer-unresponsive"},
    "cuda_oom": {"gpu-out-of-memory", "gpu-memory-taken"},
    "hip_oom": {"gpu-out-of-memory", "gpu-memory-taken"},
    "slurm_oom_kill": {"oom-kill"},
    "host_oom": {"oom-kill"},
    "oom_kill": {"oom-kill"},
    "kernel_log": {"oom-kill", "amdgpu-reset", "gpu-lost", "gpu-ecc", "gpu-xid", "gpu-app-fault", "gpu-hang"},
    "signal_SIGSEGV": {"segfault"},
    "signal_SIGBUS": {"bus-error", "shm-full"},
    "signal_SIGABRT": {"aborted"},
    "signal_SIGKILL": {"oom-kill", "killed"},
    "dataloader_shm": {"shm-full"},
    "rendezvous_timeout": {"rendezvous-timeout"},
    "rendezvous_connection": {"rendezvous-connection", "store-permission", "store-refused"},
    "port_in_use": {"port-in-use"},
    "tcpstore_connect_timeout": {"store-connect-timeout"},
    "tcpstore_wait_clients": {"store-clients-missing"},
    "tcpstore_no_route": {"store-no-route"},
    "tcpstore_refused": {"store-refused"},
    "gloo_fullmesh": {"gloo-connect"},
    "gloo_timeout": {"gloo-timeout"},
    "gloo_closed": {"peer-lost"},
    "time_limit": {"time-limit"},
    "slurm_time_limit": {"time-limit"},
    "import_error": {"import-error"},
    "xid": {"gpu-lost", "gpu-ecc", "gpu-xid", "gpu-app-fault"},
    "ecc": {"gpu-ecc"},
    "python_exception": {"exception", "file-missing", "permission", "import-error"},
}


def read(path):
    reader = Reader()
    for number, some in lines(Source(path, os.path.basename(path))):
        reader.feed_lines(os.path.basename(path), number, some)
    return reader.report()


def transport_word(transport):
    """Our answer in the corpus' words."""
    path = transport.path
    if path.answer == "rdma":
        return "roce" if path.link == "RoCE" else "ib"
    if path.answer == "ofi":
        return f"ofi-{path.provider}"
    return {"tcp": "socket", "local": "none"}.get(path.answer, path.answer)


def ours(report, truth):
    transport = report.transport
    gdr = transport.path.gdr
    if transport.path.answer in ("local", "tcp", "unknown"):  # not in use: then the truth speaks of what is possible
        gdr = bool(transport.gdr_possible) if truth.get("gdr") is not None else transport.gdr_possible
    return {
        "transport": transport_word(transport),
        "gdr": gdr,
        "version": " ".join(transport.versions) or None,
        "nranks": transport.nranks,
    }


def right(field, said, true):
    if field == "version":  # the truth may hold several, with words around them, and leave out the build
        true = set(re.findall(r"2\.\d+\.\d+(?:\+(?:cuda|hip)[\d.]+)?", str(true)))
        return true in (set(str(said).split()), {version.split("+")[0] for version in str(said).split()})
    return said == true


def judge_a(folder):
    counts = {field: [0, 0] for field in FIELDS}
    print(f"{'A':<44}" + "".join(f"{field:<32}" if field == "version" else f"{field:<20}" for field in FIELDS))
    for label in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with open(label, encoding="utf-8") as file:
            truth = json.load(file)["truth"]
        said = ours(read(label[: -len(".json")]), truth)
        cells = []
        for field in FIELDS:
            width = 32 if field == "version" else 20
            true = truth.get(field)
            if true is None:
                cells.append(f"{'.':<{width}}")
                continue
            good = right(field, said[field], true)
            counts[field][0] += good
            counts[field][1] += 1
            cells.append(f"{'ok ' + str(said[field]) if good else f'NO {said[field]}, is {true}':<{width}.{width - 1}}")
        print(f"{os.path.basename(label)[:-5]:<44.43}" + "".join(cells))
    for field, (good, all_of) in counts.items():
        print(f"  {field}: {good}/{all_of} = {good / max(all_of, 1):.1%}")
    good, all_of = (sum(count[index] for count in counts.values()) for index in (0, 1))
    print(f"  all fields: {good}/{all_of} = {good / max(all_of, 1):.1%} (at least {ENOUGH_A:.0%})\n")
    return good >= ENOUGH_A * all_of


def class_word(failure):
    if failure.finding is not None and failure.answer != "unknown":
        return failure.answer
    return failure.consequences[0].code if failure.consequences else failure.answer


def judge_b(folder):
    good = all_of = 0
    print(f"{'B':<48}{'is':<28}{'we say':<28}")
    for label in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with open(label, encoding="utf-8") as file:
            truth = json.load(file)["truth"]
        true = truth.get("failure_class")
        said = class_word(read(label[: -len(".json")]).failure)
        fits = said in CLASSES.get(true, {str(true).replace("_", "-")})
        counts = "stated" in str(truth.get("cause_basis"))
        good, all_of = good + (fits and counts), all_of + counts
        mark = ("ok" if fits else "NO") + ("" if counts else " (inferred, not counted)")
        print(f"{os.path.basename(label)[:-5]:<48.47}{true!s:<28}{said:<28}{mark}")
    print(f"  failure class: {good}/{all_of} = {good / max(all_of, 1):.1%} (at least {ENOUGH_B:.0%})")
    return good >= ENOUGH_B * all_of


def main():
    corpus = os.environ.get("DRUMBEAT_CORPUS") or os.path.join(os.path.dirname(ROOT), "shared", "data", "corpus")
    if not os.path.isdir(corpus):
        print(f"no corpus at {corpus} (set DRUMBEAT_CORPUS); nothing to judge")
        return 0
    results = [judge_a(os.path.join(corpus, "A_nccl_logs")), judge_b(os.path.join(corpus, "B_torch_failures"))]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

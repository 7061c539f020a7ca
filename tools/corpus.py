"""How often `drumbeat diagnose` reads real logs the way an expert does, per repository and in total.

    python tools/corpus.py [--part all|open|held-out] [--files]

Reads $DRUMBEAT_CORPUS (folders separated by ':'), or ../shared/data/corpus and corpus-more beside the repository. Every
log has FILE.json beside it with its source and what is true of it; what is missing or null there is not judged.

A quarter of the repositories, chosen by a hash of their names, was held out until it had been scored once (measured/diagnose.md).
--files lists what was read otherwise than expected.

Strict: `unknown` is right only where the expert says unknown; consequences earn nothing; every log is judged for false
alarms or for its failure; a wrong answer called certain is counted apart. Exits with 1 when a share misses its target.
"""

import argparse
import glob
import hashlib
import json
import os
import re
import sys
from collections import Counter, defaultdict

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "src"))

from drumbeat.desk.log_sources import Source, lines  # noqa: E402
from drumbeat.logs.reader import Reader  # noqa: E402

TARGETS = {"transport": 0.98, "class": 0.96, "rank": 0.90, "no rank": 0.90}
MOST_FALSE_ALARMS = 0.02
LEAST_CERTAIN = {"transport": 0.70, "class": 0.50}
JUDGED = ("transport", "gdr", "version", "nranks", "class", "rank", "no rank", "healthy")

# The expert's classes of failure -> our codes.
CLASSES = {
    "nccl_watchdog_timeout": {"collective-timeout", "collective-desync", "rank-absent"},
    "straggler": {"collective-timeout", "rank-behind", "peer-lost"},
    "nccl_remote_error": {"peer-lost"},
    "nccl_unhandled_cuda": {"cuda-failure", "nccl-error", "gpu-ipc"},
    "nccl_unhandled_system": {"nccl-error", "connect-failed"},
    "nccl_system_error": {"nccl-error", "bootstrap-interface", "connect-failed"},
    "nccl_invalid_usage": {"duplicate-gpu", "nccl-error"},
    "ib_retry_exceeded": {"ib-retry-exceeded", "roce-gid-index"},
    "efa_handshake": {"efa-peer-unresponsive"},
    "ofi_mr_registration": {"ofi-memory-registration"},
    "cuda_aware_mpi_failure": {"mpi-gpu-memory", "ucx-error"},
    "cuda_oom": {"gpu-out-of-memory", "gpu-memory-taken"},
    "hip_oom": {"gpu-out-of-memory", "gpu-memory-taken"},
    "slurm_oom_kill": {"oom-kill"},
    "kernel_oom_kill": {"oom-kill"},
    "host_oom": {"oom-kill"},
    "oom_kill": {"oom-kill"},
    "kernel_log": {"oom-kill", "amdgpu-reset", "gpu-lost", "gpu-ecc", "gpu-xid", "gpu-app-fault", "gpu-hang"},
    "signal_SIGSEGV": {"segfault"},
    "signal_SIGBUS": {"bus-error", "shm-full", "amdgpu-reset", "gpu-hang"},
    "signal_SIGABRT": {"aborted"},
    "signal_SIGKILL": {"oom-kill", "killed"},
    "dataloader_shm": {"shm-full"},
    "rendezvous_timeout": {"rendezvous-timeout"},
    "rendezvous_connection": {"rendezvous-connection", "store-permission", "store-refused"},
    "port_in_use": {"port-in-use"},
    "tcpstore_connect_timeout": {"store-connect-timeout", "store-clients-missing"},
    "tcpstore_wait_clients": {"store-clients-missing"},
    "tcpstore_no_route": {"store-no-route"},
    "tcpstore_refused": {"store-refused"},
    "gloo_fullmesh": {"gloo-connect"},
    "gloo_ifname": {"gloo-interface"},
    "gloo_timeout": {"gloo-timeout"},
    "gloo_closed": {"peer-lost"},
    "gloo_peer_reset": {"peer-lost"},
    "time_limit": {"time-limit"},
    "slurm_time_limit": {"time-limit"},
    "import_error": {"import-error"},
    "xid": {"gpu-lost", "gpu-ecc", "gpu-xid", "gpu-app-fault"},
    "ecc": {"gpu-ecc"},
    "python_exception": {"exception", "file-missing", "permission", "import-error", "removed-api"},
}

# What the expert's words about a failure in an NCCL log mean; the first that fits. An empty set: nothing failed, the log
# only shows something worth a note (a slow path, worlds of one rank).
WORDS = (
    (r"^performance only|1-rank worlds|silent fallback", set()),
    (r"watchdog timeout|collective operation timeout", CLASSES["nccl_watchdog_timeout"]),
    (r"SIGTERM|externally terminated", {"terminated", "cancelled", "interrupted", "time-limit"}),
    (r"Unable to register memory|MR registration", CLASSES["ofi_mr_registration"]),
    (r"(?:posix_fallocate|/dev/shm|shared memory)", {"shm-full", "cumem-host-differs"}),
    (r"ibv_modify_qp", {"gid-wrong", "roce-gid-index", "qp-timeout", "rdma-unreachable"}),
    (r"error 12\b|status=12\b|retry exceeded", CLASSES["ib_retry_exceeded"]),
    (r"Duplicate GPU", {"duplicate-gpu"}),
    (r"completion error|Inappropriate ioctl", {"ofi-error"}),
    (r"No transport found", {"no-transport"}),
    (r"Connect to|socketStartConnect|Cannot assign", {"connect-failed"}),
    (r"named symbol not found|no kernel image", {"wrong-architecture", "cuda-failure"}),
    (r"Cuda failure|CUDA error|HIP failure", {"cuda-failure"}),
)

# The rank that failed first, as the log itself shows it (read by us), by the log's id: a number, several where more than
# one is right, null where a failed log names none.
with open(os.path.join(ROOT, "tools", "first_ranks.json"), encoding="utf-8") as ranks:
    FIRST_RANK = json.load(ranks)


# Where the log itself shows otherwise than its label (read by us).
CORRECTED = {
    "a036_snellius_subsys_P2P.log": None,  # NCCL_DEBUG_SUBSYS=P2P: no line about a network is in it
    "a076_duplicate_gpu_colab.log": None,  # no group was ever formed
    "a080_lumi_rccl_no_route.log": None,  # one line of socket.h, which bootstrap and NET/Socket share
    "b013_hang_then_timelimit.out": {"time-limit"},  # a hang whose only line is the time limit
    "b039_port_in_use_two_launchers_masks_missing_file.txt": {"port-in-use", "file-missing"},  # two faults at once
    "b055_watchdog_checkpoint_disk_full_b300.txt": {"disk-full"},  # its own label calls the full disk the cause
    "a008_jeanzay_megdszero_16n_2.7.8.log": {"time-limit"},  # it ends with slurmstepd's DUE TO TIME LIMIT
    "a042_multithread_1rank.log": {"segfault"},  # it ends with mpirun's "exited on signal 11"
    "a082_cannot_assign_address.log": None,  # one line of the bootstrap: it does not show the data path
}


def repository(source):
    """owner/name; a file whose repository is not known stands for itself."""
    return source if source.startswith("public GitHub file") else source.split(":")[0]


def held_out(name):
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 4 == 0


def read(path):
    reader = Reader()
    for number, some in lines(Source(path, os.path.basename(path))):
        reader.feed_lines(os.path.basename(path), number, some)
    return reader.report()


def transport_word(path):
    """Our answer in the expert's words."""
    if path.answer == "rdma":  # where both kinds of card are used, the expert names the network: ib
        return {"IB": "ib", "IB and RoCE": "ib", "RoCE": "roce"}.get(path.link, "rdma")
    if path.answer == "ofi":
        return f"ofi-{path.provider}"
    return {"tcp": "socket", "local": "none"}.get(path.answer, path.answer)


def expected_codes(truth):
    """The codes that are right; empty: nothing failed; None: not judged."""
    if truth.get("failure_class"):
        name = truth["failure_class"]
        return CLASSES.get(name) or _by_keyword(name) or {name.replace("_", "-")}
    if "failure" not in truth:
        return None
    if truth["failure"] is None:
        return set()
    said = truth["failure"]
    return next((codes for pattern, codes in WORDS if re.search(pattern, said)), {"ANY"})


# For names of classes that the table above does not hold.
KEYWORDS = (
    (r"illegal", {"illegal-memory-access"}),
    (r"assert", {"device-assert", "exception"}),
    (r"oom|out_of_memory", {"gpu-out-of-memory", "gpu-memory-taken", "oom-kill", "host-out-of-memory"}),
    (r"import|module", {"import-error", "removed-api"}),
    (r"duplicate", {"duplicate-gpu"}),
    (r"port|address_in_use", {"port-in-use"}),
    (r"shm|shared_memory", {"shm-full"}),
    (r"disk|quota|space", {"disk-full"}),
    (r"preempt", {"preempted"}),
    (r"cancel|sigterm", {"cancelled", "terminated", "terminated-by-launcher"}),
    (r"node_fail", {"node-failure"}),
    (r"desync|mismatch", {"collective-desync", "sizes-differ", "nccl-versions-differ"}),
    (r"nan", {"nan-loss"}),
    (r"ucx", {"ucx-error", "mpi-gpu-memory"}),
)


def _by_keyword(name):
    return next((codes for pattern, codes in KEYWORDS if re.search(pattern, name)), None)


def judge(name, truth, report):
    """field -> (right, called certain, what we said, what is true)."""
    transport, failure = report.transport, report.failure
    path = transport.path
    result = {}
    if truth.get("transport"):
        said = transport_word(path)
        result["transport"] = (said == truth["transport"], path.confidence == "certain", said, truth["transport"])
        if truth.get("gdr") is not None:
            applies = truth["transport"] in ("ib", "roce", "rdma") or truth["transport"].startswith("ofi")
            right = path.gdr == truth["gdr"] if applies else path.gdr is not True
            result["gdr"] = (right, False, path.gdr, truth["gdr"])
    if truth.get("version"):  # may hold several, with words around them, and leave out the build
        true = set(re.findall(r"2\.\d+\.\d+(?:\+(?:cuda|hip)[\d.]+)?", str(truth["version"])))
        said = set(transport.versions)
        right = true in (said, {version.split("+")[0] for version in said})
        result["version"] = (right, False, sorted(said), sorted(true))
    if truth.get("nranks") is not None:
        result["nranks"] = (transport.nranks == truth["nranks"], False, transport.nranks, truth["nranks"])
    codes = CORRECTED.get(name) or expected_codes(truth)
    if name in CORRECTED and CORRECTED[name] is None:
        result.pop("transport", None)
    said, certain = failure.answer, failure.confidence == "certain"
    if codes is not None and not codes:
        result["healthy"] = (said == "none", certain and said != "none", said, "none")
    elif codes:
        right = said not in ("none", "unknown") if codes == {"ANY"} else said in codes
        result["class"] = (right, certain, said, "/".join(sorted(codes)))
    key = name.split("_")[0]
    if key in FIRST_RANK:
        rank = failure.finding.rank if failure.finding else None
        true = FIRST_RANK[key]
        if true is None:
            result["no rank"] = (rank is None, False, rank, true)
        else:
            result["rank"] = (rank in (true if isinstance(true, list) else [true]), False, rank, true)
    return result


def corpus_folders():
    beside = os.path.join(os.path.dirname(ROOT), "shared", "data")
    if not os.path.isdir(beside):  # a worktree lies one folder deeper
        beside = os.path.join(os.path.dirname(os.path.dirname(ROOT)), "shared", "data")
    default = os.pathsep.join(os.path.join(beside, part) for part in ("corpus", "corpus-more"))
    folders = (os.environ.get("DRUMBEAT_CORPUS") or default).split(os.pathsep)
    return [folder for folder in folders if os.path.isdir(folder)]


def labels(folders, part):
    """(log, repository, truth) of every labelled log of that part."""
    for folder in folders:
        for kind in ("A_nccl_logs", "B_torch_failures"):
            for label in sorted(glob.glob(os.path.join(folder, kind, "*.json"))):
                with open(label, encoding="utf-8") as file:
                    content = json.load(file)
                name = repository(content["source"])
                if part == "all" or held_out(name) == (part == "held-out"):
                    yield label[: -len(".json")], name, content["truth"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "open", "held-out"), default="all")
    parser.add_argument("--files", action="store_true", help="list what was read otherwise")
    args = parser.parse_args()
    folders = corpus_folders()
    if not folders:
        print("no corpus (set DRUMBEAT_CORPUS); nothing to judge")
        return 0
    by_repository = defaultdict(Counter)
    total = Counter()
    for log, name, truth in labels(folders, args.part):
        for field, (right, certain, said, true) in judge(os.path.basename(log), truth, read(log)).items():
            for counter in (by_repository[name], total):
                counter[field, "judged"] += 1
                counter[field, "right"] += right
                counter[field, "right and certain"] += right and certain
                counter[field, "wrong and certain"] += certain and not right
            if args.files and not right:
                print(f"{os.path.basename(log):<52} {field:<10} says {said!s:<28} is {true}{' CERTAIN' * certain}")
    print(f"{'repository':<56}" + "".join(f"{field:>12}" for field in JUDGED))
    for name in sorted(by_repository):
        print(f"{name[:55]:<56}" + "".join(f"{share(by_repository[name], field):>12}" for field in JUDGED))
    print(f"{'all':<56}" + "".join(f"{share(total, field):>12}" for field in JUDGED))
    return 0 if summary(total) else 1


def share(counter, field):
    judged = counter[field, "judged"]
    return f"{counter[field, 'right']}/{judged}" if judged else "."


def summary(total):
    good = True
    for field in ("transport", "class", "rank", "no rank", "gdr", "version", "nranks"):
        right, judged = total[field, "right"], total[field, "judged"]
        certain, wrong = total[field, "right and certain"], total[field, "wrong and certain"]
        target = TARGETS.get(field)
        enough = target is None or right >= target * judged
        enough = enough and (field not in LEAST_CERTAIN or certain >= LEAST_CERTAIN[field] * right)
        wish = f" (at least {target:.0%})" if target else ""
        wish += f", {certain} of them certain" if field in LEAST_CERTAIN else ""
        wish += f", {wrong} wrong and certain" if field in LEAST_CERTAIN else ""
        print(f"  {field}: {right}/{judged} = {right / max(judged, 1):.1%}{wish}")
        good = good and enough and not (target and wrong)
    alarms = total["healthy", "judged"] - total["healthy", "right"]
    print(f"  false alarms: {alarms} of {total['healthy', 'judged']} healthy logs (at most {MOST_FALSE_ALARMS:.0%})")
    return (
        good and alarms <= MOST_FALSE_ALARMS * total["healthy", "judged"] and not total["healthy", "wrong and certain"]
    )


if __name__ == "__main__":
    sys.exit(main())

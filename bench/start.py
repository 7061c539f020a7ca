"""Starting cost, side by side in one run: plain torch.distributed.run typed by hand against `drumbeat run`.

    make bench            (or: .venv/bin/python bench/start.py [--rounds 5] [--steps 300] [--json])
    .venv/bin/python bench/start.py --agent 8 [--every 1]      only the agent's share of a core, beside so many ranks

Both sides run bench/step.py with the same interpreter. Rounds alternate, so that whatever else the machine does hits both;
medians are compared. Steps are compared with what two halves of the same side differ by (A/A).
"""

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
SCRIPT = str(HERE / "step.py")
DRUMBEAT = [sys.executable, "-m", "drumbeat"]


def by_hand(nodes, steps, port):
    """What a person types: one torchrun a node."""
    return [
        [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=2", f"--node-rank={node}",
         "--master-addr=127.0.0.1", f"--master-port={port}", SCRIPT, str(steps)]
        for node in range(nodes)
    ]  # fmt: skip


def ours(nodes, steps, folder):
    return [[*DRUMBEAT, "run", "--nodes", str(nodes), "--ranks-per-node", "2", "--runs", folder, "--", sys.executable,
             SCRIPT, str(steps)]]  # fmt: skip


def measure(commands, out):
    """Seconds from the command to the end of the first step, and seconds a step."""
    env = {**os.environ, "BENCH_OUT": out, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    begin = time.time()
    started = [
        subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in commands
    ]
    codes = [process.wait(300) for process in started]
    if any(codes):
        raise SystemExit(f"failed: {commands[0]}")
    with open(out) as file:
        got = json.load(file)
    return got["first"] - begin, got["step"]


def agents_share(folder):
    """CPU seconds of all agents of the newest run, over its seconds: a share of one core, the start included."""
    newest = max(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime)
    ends = []
    for events in newest.glob("nodes/*/events.jsonl"):
        ends += [e for e in map(json.loads, events.read_text().splitlines()) if e["kind"] == "agent-ended"]
    return [end["cpu_seconds"] for end in ends], [end["seconds"] for end in ends]


# Ranks that meet, as those of a training do, send each other something, and then only report.
RANKS = """
import os, socket, sys, time
from drumbeat import metrics
rank, world, address = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), ("127.0.0.1", int(os.environ["MASTER_PORT"]))
if rank == 0:
    listener = socket.create_server(address, backlog=world)
    peers = [listener.accept()[0] for _ in range(world - 1)]
else:
    peers = []
    while not peers:
        try:
            peers.append(socket.create_connection(address))
        except OSError:
            time.sleep(0.1)
for peer in peers:
    peer.sendall(bytes(100_000))
for peer in peers:
    peer.recv(100_000, socket.MSG_WAITALL)
open("up", "w").close()
step = 0
while True:
    step += 1
    metrics.report(step, loss=1.0, tokens=1)
    time.sleep(float(sys.argv[1]))
"""


def steady_share(folder, ranks=2, every=0.1, seconds=60, settled=30):
    """CPU of an agent while its ranks work: its own, that of its children that have ended (looks), and that of its guard and
    of the processes beside it (samples, the run folder, the ranks' output). Read from /proc at two moments, so that the start
    does not count."""
    command = [*DRUMBEAT, "run", "--ranks-per-node", str(ranks), "--oversubscribe", "64", "--runs", folder, "--"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", RANKS, str(every)],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not os.path.exists(os.path.join(folder, "up")):
        time.sleep(0.1)
    time.sleep(settled)
    agent = next(pid for pid in _all_pids() if _is_agent(pid, process.pid))
    beside = [_parent(agent), *(pid for pid in _all_pids() if _parent(pid) == agent and b"_agent" in _words(pid))]
    before, begin = _shares(agent, beside), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - begin
    shares = [(now - then) / took for now, then in zip(_shares(agent, beside), before)]
    process.terminate()
    process.wait()
    return shares


def _shares(agent, beside):
    """Seconds of CPU time of the agent, of its looks, and of the processes beside it that still run."""
    return (*_cpu(agent), sum(_cpu(pid)[0] for pid in beside if _parent(pid)))


def _all_pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _words(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _is_agent(pid, desk):
    guard = _parent(pid)
    return b"_agent" in _words(pid) and b"_agent" in _words(guard) and _parent(guard) == desk


def _cpu(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, children = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return own / os.sysconf("SC_CLK_TCK"), children / os.sysconf("SC_CLK_TCK")


def times(command, rounds):
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--agent", type=int, metavar="RANKS")
    parser.add_argument("--every", type=float, default=0.1, metavar="SECONDS", help="between two reports of a rank")
    args = parser.parse_args()
    if args.agent:
        with tempfile.TemporaryDirectory(prefix="drumbeat-bench-") as folder:
            own, looks, beside = steady_share(folder, args.agent, args.every)
        about = f"its looks {looks:.2%}, its guard and helpers {beside:.2%}; load {os.getloadavg()[0]:.0f}"
        print(f"agent beside {args.agent} ranks: {own:.2%} of a core, {about}")
        return
    compileall.compile_dir(str(HERE.parent / "src"), quiet=1)
    report = {"rounds": args.rounds, "steps": args.steps}
    with tempfile.TemporaryDirectory(prefix="drumbeat-bench-") as folder:
        out = os.path.join(folder, "out.json")
        runs = os.path.join(folder, "runs")
        measure(ours(1, 5, runs), out)  # builds the bundle, warms the page cache
        port = 61400
        for nodes in (1, 2):
            got = {"torchrun": [], "drumbeat": []}
            for _ in range(args.rounds):
                port += 1
                got["torchrun"].append(measure(by_hand(nodes, args.steps, port), out))
                got["drumbeat"].append(measure(ours(nodes, args.steps, runs), out))
            report[f"{nodes}x2"] = compare(got)
        cpu, seconds = agents_share(runs)
        report["agents of the last run"] = {"cpu_seconds": cpu, "seconds": seconds}
        report["agent share"], report["its looks"], report["its helpers"] = steady_share(folder)
    rounds = 20
    bare = times([sys.executable, "-c", "pass"], rounds)
    program = Path(sys.executable).parent / "drumbeat"
    help_command = [str(program), "--help"] if program.exists() else [*DRUMBEAT, "--help"]
    report["drumbeat --help over python -c pass"] = times(help_command, rounds) / bare
    print(json.dumps(report, indent=2) if args.json else text(report))


def compare(got):
    median = {side: [statistics.median(column) for column in zip(*rows)] for side, rows in got.items()}
    steps = [row[1] for row in got["torchrun"]]
    halves = statistics.median(steps[::2]) / statistics.median(steps[1::2] or steps)
    return {
        "torchrun first step s": median["torchrun"][0],
        "drumbeat first step s": median["drumbeat"][0],
        "drumbeat later by s": median["drumbeat"][0] - median["torchrun"][0],
        "torchrun ms a step": median["torchrun"][1] * 1e3,
        "drumbeat ms a step": median["drumbeat"][1] * 1e3,
        "step ratio": median["drumbeat"][1] / median["torchrun"][1],
        "A/A spread": abs(halves - 1),
    }


def text(report):
    lines = [f"medians of {report['rounds']} alternating rounds, {report['steps']} steps each"]
    for size in ("1x2", "2x2"):
        got = report[size]
        lines.append(
            f"{size}: first step after {got['torchrun first step s']:.2f} s by hand, {got['drumbeat first step s']:.2f} s "
            f"with drumbeat ({got['drumbeat later by s']:+.2f} s); step {got['torchrun ms a step']:.2f} and "
            f"{got['drumbeat ms a step']:.2f} ms, ratio {got['step ratio']:.4f} (A/A {got['A/A spread']:.4f})"
        )
    lines.append(
        f"agent, while ranks work: {report['agent share']:.2%} of a core, its looks {report['its looks']:.2%}, its "
        f"guard and helpers {report['its helpers']:.2%}"
    )
    lines.append(f"drumbeat --help: {report['drumbeat --help over python -c pass']:.2f} x python -c pass")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""What watching a large run costs: 1,000 nodes with 8 GPUs each, recorded, one browser on the page.

    python bench/watch.py [--nodes 1000] [--gpus 8] [--seconds 60] [--step 10] [--browser]

A run folder is written to a temporary place: four minutes of history, then `--seconds` more, second by second, each read by a
process of its own that does what `drumbeat watch --web` does in that second: read, work out the numbers, make the message for the
browser, and every 5 s the heat map and the table. Every rank reports every step (`--step` seconds), and every node's samples of
its GPUs come six at a time, every 30 s, as the agents of large jobs write them. Processor time is compared with the seconds that
were played. `--browser`: half a minute of the page in real Chromium: processor time per message, and how long it takes from the
arrival of a message until what it changed is painted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Optional, Tuple

from drumbeat.base.order import Order, dump_order
from drumbeat.base.proc import start_time
from drumbeat.runfolder.files import EventLog, replace, replace_json
from drumbeat.runfolder.layout import SCHEMA, RunFolder
from drumbeat.runfolder.run import Run

HISTORY = 240
SAMPLES_EVERY, BATCH = 5, 6


class Recording:
    """Writes the run, second by second."""

    def __init__(self, path: str, nodes: int, gpus: int, step: int, history: int = HISTORY) -> None:
        self.folder, self.nodes, self.gpus, self.step = RunFolder(path), nodes, gpus, step
        self.begin = int(time.time()) - history
        self.random = random.Random(1)
        for node in range(nodes):
            os.makedirs(self.folder.node(node).path)
        order = Order(
            "bench", "bench", self.begin, ("true",), nodes, gpus, "ranks", "", "/", path, "localhost", "local"
        )
        replace(self.folder.order, dump_order(order))
        desk = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": start_time(os.getpid()),
        }  # so it is running
        about_run = {"schema": SCHEMA, "run_id": "bench", "created": float(self.begin), "desk": desk}
        replace_json(self.folder.run_json, about_run)
        members = [{"node": node, "host": f"nid{node:06d}", "ranks": gpus} for node in range(nodes)]
        replace_json(self.folder.peers, {"schema": SCHEMA, "nodes": members})
        events = EventLog(self.folder.events, 0)
        about = {"run_id": "bench", "nodes": nodes, "ranks_per_node": gpus, "launcher": "ranks", "launcher_why": ""}
        events.write("run-started", {**about, "t": self.begin})
        for node in range(nodes):
            joined = {"peer": node, "peer_host": f"nid{node:06d}", "address": "", "clock_offset": 0.0}
            events.write("node-joined", {**joined, "t": self.begin})
        meeting = {"master_addr": "10.0.0.1", "master_port": 29500}
        events.write("attempt-started", {"world_size": nodes * gpus, **meeting, "t": self.begin})
        events.close()

    def write(self, second: int) -> int:
        """What is written in this second; how many lines."""
        lines = 0
        t = self.begin + second
        for node in range(self.nodes):
            at = self.folder.node(node)
            if second % self.step == 0:
                lines += self._append(at.metrics, [self._metric(t, node, gpu, second) for gpu in range(self.gpus)])
            if second % (SAMPLES_EVERY * BATCH) == node % (SAMPLES_EVERY * BATCH):  # nodes do not keep time together
                moments = [t - SAMPLES_EVERY * (BATCH - 1 - number) for number in range(BATCH)]
                lines += self._append(at.telemetry, [self._sample(moment, node) for moment in moments])
        return lines

    @staticmethod
    def _append(path: str, lines: List[str]) -> int:
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))
        return len(lines)

    def _metric(self, t: float, node: int, gpu: int, second: int) -> str:
        took = self.step * (0.97 + 0.01 * self.random.random())
        loss = round(2.3 + self.random.random() / 9, 4)
        record = {"t": t + self.random.random() / 10, "rank": node * self.gpus + gpu, "kind": "step", "loss": loss}
        return json.dumps({**record, "step": second // self.step, "steps": 5000, "tokens": 4096, "seconds": took})

    def _sample(self, t: float, node: int) -> str:
        gpus = [self._gpu(t, index) for index in range(self.gpus)]
        ticks = int((t - self.begin) * 100)
        moved = int((t - self.begin) * 4e10)
        about: Dict[str, Any] = {"t": float(t), "node": node, "host": f"nid{node:06d}", "gpus": gpus}
        about["cpu"] = {"busy_ticks": ticks // 3, "all_ticks": ticks, "load": 30.0}
        about["memory"] = {"total": 512 << 30, "used": 200 << 30}
        about["network"] = {f"mlx5_{card}:1": {"received": moved, "sent": moved} for card in range(8)}
        return json.dumps(about, separators=(",", ":"))

    def _gpu(self, t: float, index: int) -> Dict[str, Any]:
        roll = self.random.random()
        return {
            "index": index, "busy": 90.0 + round(10 * roll), "memory_busy": 40.0, "memory_used": 61 << 30,
            "memory_total": 80 << 30, "power": round(600 + 100 * roll, 1), "power_cap": 700.0, "temperature": 60.0,
            "clock": 1755.0, "memory_clock": 2619.0, "throttle": [] if roll < 0.99 else ["power limit"],
            "energy": (t - self.begin) * 650.0, "ecc_corrected": 0, "ecc_uncorrected": 0, "pcie_received": 1 << 40,
            "pcie_sent": 1 << 40, "link_received": 1 << 42, "link_sent": 1 << 42, "name": "NVIDIA H100 80GB HBM3",
        }  # fmt: skip


def watch(path: str) -> int:
    """The reading process: a line on standard input is a second; its answer is what that took."""
    from drumbeat.watch import web
    from drumbeat.watch.session import Session
    from drumbeat.watch.web import Hub

    begin = time.process_time()
    session = Session(Run.open(path))
    session.load()
    hub = Hub(session)
    print(json.dumps({"load": time.process_time() - begin}), flush=True)
    for second, _ in enumerate(sys.stdin):
        begin = time.process_time()
        if second % session.interval:
            print(json.dumps({}), flush=True)
            continue
        session.tick()
        reading = time.process_time() - begin
        message = hub.message()
        making = time.process_time() - begin - reading
        if second % 6 == 0:  # the page asks every 5 s
            json.dumps(web.heat_map(session, "use"))
            json.dumps(web.node_table(session, ""))
        whole = time.process_time() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        about = {"reading": reading, "making": making, "whole": whole, "bytes": len(message), "peak": peak}
        print(json.dumps(about), flush=True)
    return 0


def measure(nodes: int, gpus: int, seconds: int, step: int, browser: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="drumbeat-bench-") as place:
        path = os.path.join(place, "run")
        recording = Recording(path, nodes, gpus, step)
        for second in range(HISTORY):
            recording.write(second)
        argv = [sys.executable, os.path.abspath(__file__), "--watch", path]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin and child.stdout
        load = json.loads(child.stdout.readline())["load"]
        found: List[Dict[str, float]] = []
        lines = 0
        for second in range(HISTORY, HISTORY + seconds):
            lines += recording.write(second)
            child.stdin.write("\n")
            child.stdin.flush()
            answer = json.loads(child.stdout.readline())
            found += [answer] if answer else []
        child.stdin.close()
        child.wait()
        in_browser = _in_browser(path, recording, HISTORY + seconds) if browser else None
    share = 100 * sum(each["whole"] for each in found) / seconds
    print(
        f"{nodes:,} nodes x {gpus} GPUs, a step every {step} s: {lines / seconds:,.0f} lines per second for {seconds} s"
    )
    print(f"watching, with one browser on the page      {share:.1f} % of a core")
    print(f"  reading                                   {100 * sum(each['reading'] for each in found) / seconds:.1f} %")
    print(
        f"a message for the browser: to make it       {1000 * statistics.median(each['making'] for each in found):.1f} ms"
    )
    print(
        f"  its size                                  {statistics.median(each['bytes'] for each in found) / 1024:.0f} KiB"
    )
    print(f"opening the page on this run                {load:.1f} s of processor time")
    print(f"peak memory                                 {max(each['peak'] for each in found):.0f} MiB")
    if in_browser:
        busy, paints = in_browser
        late = sorted(paints)[int(0.95 * (len(paints) - 1))]
        told = f"{statistics.median(paints):.0f} ms (median), {late:.0f} ms (95th percentile), {max(paints):.0f} ms (longest)"
        print(f"Chromium, per message: processor time       {busy:.0f} ms (mean of {len(paints)})")
        print(f"  from its arrival until it is painted      {told}")


def _in_browser(path: str, recording: Recording, second: int) -> Tuple[float, List[float]]:
    """Milliseconds of processor time of the page's thread per message, and from each message's arrival until it is painted."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    argv = [sys.executable, "-m", "drumbeat", "watch", "--web", "--port", "0", path]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert server.stdout
    server.stdout.readline()
    address = server.stdout.readline().split()[1]
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1440,2000",
    ):
        options.add_argument(word)
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    try:
        driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        driver.get(address)
        _play(recording, second, 20)  # the charts are opened
        before = _spent(driver)
        _play(recording, second + 20, 30)
        after = _spent(driver)
        messages = max(1, after[1] - before[1])
        paints = driver.execute_script("return drumbeat.painter.paints")
        return 1000 * (after[0] - before[0]) / messages, [float(each) for each in paints[-messages:]]
    finally:
        driver.quit()
        server.terminate()
        server.wait()


def _play(recording: Recording, second: int, seconds: int) -> None:
    """In real time, however long the writing takes."""
    begin = time.monotonic()
    for number in range(seconds):
        recording.write(second + number)
        time.sleep(max(0.0, begin + number + 1 - time.monotonic()))


def _spent(driver: Any) -> Tuple[float, int]:
    """Processor time of the page's thread so far, and how many messages it has shown."""
    metrics = {each["name"]: each["value"] for each in driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}
    return metrics["TaskDuration"], int(driver.execute_script("return drumbeat.shown"))


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--step", type=int, default=10)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.watch:
        return watch(args.watch)
    measure(args.nodes, args.gpus, args.seconds, args.step, args.browser)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

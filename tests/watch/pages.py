"""A page of a run served as a user would, and a browser to look at it."""

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from drumbeat.base.proc import start_time
from drumbeat.runfolder.files import replace_json
from drumbeat.runfolder.run import Run
from tests.conftest import SOURCE


def running(run):
    """Make this process the run's desk, so that it counts as running."""
    desk = {"host": socket.gethostname(), "pid": os.getpid(), "started": start_time(os.getpid())}
    created = run.record.created
    replace_json(run.folder.run_json, {"schema": "1.0", "run_id": run.run_id, "created": created, "desk": desk})
    return Run.open(run.path)


class Page:
    def __init__(self, process):
        self.process = process
        told = {}
        while "metrics" not in told:
            line = process.stdout.readline()
            assert line, "drumbeat watch --web ended"
            label, _, text = line.partition(" ")
            told[label] = text.strip()
        self.told, self.address = told, told["page"]
        self.base, _, self.token = self.address.partition("/#")
        self.port = int(self.base.rpartition(":")[2])

    def ask(self, path, method="GET", token=True, **headers):
        """Status, headers, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {"Authorization": f"Bearer {self.token if token is True else token}"} if token else {}
        connection.request(method, path, headers={**given, **{k.replace("_", "-"): v for k, v in headers.items()}})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


@contextlib.contextmanager
def served(run, home, *options):
    env = {**os.environ, "HOME": str(home), "PYTHONPATH": SOURCE}
    argv = [sys.executable, "-m", "drumbeat", "watch", "--web", "--port", "0", *options, run.path]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
    try:
        yield Page(process)
    finally:
        process.terminate()
        process.wait(120)


@contextlib.contextmanager
def browser(width=1280, height=1600):
    """Real Chromium, which can reach nothing but this machine."""
    pytest.importorskip("selenium")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    paths = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if not all(paths):
        pytest.skip("needs chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for word in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={width},{height}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--no-first-run", "--disable-background-networking",
    ):  # fmt: skip
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(paths[1]))
    driver.command_executor.client_config.timeout = 600  # on busy cores an answer may take longer than its usual 120 s
    driver.set_page_load_timeout(300)
    driver.set_script_timeout(300)
    try:
        yield driver
    finally:
        driver.quit()


def until(question, seconds=180):
    """The first answer that is not empty."""
    deadline = time.monotonic() + seconds
    while True:
        answer = question()
        if answer or time.monotonic() > deadline:
            return answer
        time.sleep(0.2)

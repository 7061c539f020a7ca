"""From job and site to what the gate is told; from a watcher's words to what the node does."""

import pytest

from drumbeat.agent.lead.decide import Allowed, decide
from drumbeat.agent.lead.model import FAILED, Outcome
from drumbeat.agent.watchers.contract import Emit, Saw, Stop, Warn, Watching
from drumbeat.base.order import Expect
from drumbeat.base.problem import Problem
from drumbeat.findings.model import ERROR, Finding, Verdict
from drumbeat.jobfile.job import job_from_text
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import site_from_text

HERE = Here("n1", "/", {}, 64, None, "me", 0.0, "x")


def order(job="", site=""):
    text = f"summary: s\nemulated: true\n{site}"
    return resolve(job_from_text(f"command: [true]\n{job}"), site_from_text(text, "s", "s.yaml"), HERE)


@pytest.mark.parametrize(
    "job,site,expect,level",
    [
        ("", "", Expect(), "warn"),
        ("expect: {transport: rdma, gdr: yes}", "", Expect("rdma", True), "stop"),
        ("expect: {transport: rdma}\nchecks: {transport: warn}", "", Expect("rdma"), "warn"),
        ("", "expect: {transport: ofi}", Expect("ofi"), "warn"),
        ("checks: {transport: stop}", "expect: {transport: ofi}", Expect("ofi"), "stop"),
        ("expect: {transport: tcp}", "expect: {transport: ofi, gdr: true}", Expect("tcp"), "stop"),
        ("checks: {transport: off}", "", Expect(), "off"),
    ],
)
def test_a_site_warns_and_only_a_job_stops(job, site, expect, level):
    made = order(job, site)
    assert made.expect == expect and made.checks["transport"] == level


@pytest.mark.parametrize(
    "job,words",
    [
        ("expect: {transport: infiniband}", "'infiniband' is not one of any, rdma, roce, ib, ofi, tcp"),
        ("expect: {gdr: maybe}", "expected true or false"),
        ("checks: {transport: loud}", "is not one of off, warn, stop"),
        ("expect: {transprt: ib}", "did you mean 'transport'?"),
    ],
)
def test_refusals(job, words):
    with pytest.raises(Problem, match=words.replace("?", "[?]")):
        order(job)


class Parrot:
    """A watcher that answers every tick with what it was given."""

    def __init__(self, *actions):
        self.actions, self.heard = actions, []

    def on(self, saw, now):
        self.heard.append((saw.kind, now))
        return list(self.actions) if saw.kind == "tick" else []


class Eye:
    def poll(self, now, final=False):
        return [Saw("counters", {"final": final})]


def test_watchers_hear_sensors_first_and_their_words_are_carried_out():
    finding = Finding("odd", ERROR, "something is odd")
    parrot = Parrot(Emit("verdict", {"verdict": Verdict("transport", "tcp")}), Warn(finding), Stop(finding))
    recorded, told = [], []
    watching = Watching(lambda kind, data: recorded.append(kind), told.append, [parrot], [Eye()])
    watching.feed("started", {"pids": [1]}, 1.0)
    watching.tick(2.0)
    assert parrot.heard == [("started", 1.0), ("counters", 2.0), ("tick", 2.0)]
    assert recorded == ["verdict"], "the lead writes findings down"
    assert [type(message).__name__ for message in told] == ["Judged", "Found", "Found"]
    assert [message.stop for message in told[1:]] == [False, True]
    watching.end(3.0)
    assert parrot.heard[-2:] == [("counters", 3.0), ("ended", 3.0)]


def test_what_the_gate_stopped_is_not_started_again():
    finding = Finding("transport-mismatch", ERROR, "tcp, not rdma")
    assert decide([Outcome(FAILED, 1, finding)], {}, Allowed(restarts=5)).action == "stop"
    assert decide([Outcome(FAILED, 1, Finding("unknown", ERROR, "?"))], {}, Allowed(restarts=5)).action == "restart"

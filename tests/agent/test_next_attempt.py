"""What the lead does between two attempts: restarts, spares, nodes that are lost or left out. A false clock, no process."""

import signal

from drumbeat.agent.lead.model import CANCELLED, SIGNAL, Record, StopRequest, Tell
from drumbeat.agent.ranks.start import End
from drumbeat.agent.wire.messages import Done, Prepare, RankEnded
from drumbeat.base.signals import EXIT_PREFLIGHT
from drumbeat.findings.model import ERROR, Finding
from tests.agent.test_lead import done, finish, hello, kinds, lead_of, mustered, order, told


def failed_once(lead, now=10.0, finding="exception", member=0, rank=0):
    """One attempt that fails; what the lead does when all members are done."""
    number = lead.attempts[-1].number
    assert lead.phase == "running"
    finding = Finding(finding, ERROR, finding, node=member, rank=rank)
    lead.rank_ended(member, RankEnded(number, End(rank, 1, None, now, finding=finding)), now)
    acts = list(lead.tick(now + 1))
    for each in lead.attempts[-1].assignment:
        acts += lead.member_done(each, Done(number), now + 2)
    return acts


def test_a_stop_between_two_attempts_is_obeyed():
    lead, _ = mustered(restarts=3)
    failed_once(lead)
    assert lead.phase == "waiting"
    acts = lead.stop(StopRequest(SIGNAL, signal.SIGINT, "asked"))
    assert finish(acts) == [130] and lead.history[-1].outcome == CANCELLED and lead.tick(100.0) == []


def test_a_node_lost_between_two_attempts_is_replaced_or_ends_the_run():
    lead, _ = mustered(restarts=3, nodes=2, spares=1)
    failed_once(lead)
    assert kinds(lead.member_lost(1, "gone", 12.5)) == ["node-lost", "decided"]
    assert told(lead.tick(14.0)) == [(0, "prepare"), (0, "start"), (2, "prepare"), (2, "start")]
    lead, _ = mustered(restarts=3)
    failed_once(lead)
    acts = lead.member_lost(1, "gone", 12.5)
    assert finish(acts) == [1] and lead.requeue is None
    assert "nobody can give the job another one here" in acts[1].data["why"] and acts[1].data["action"] == "stop"
    lead, _ = mustered(restarts=3, queued=True)
    failed_once(lead)
    lead.member_lost(1, "gone", 12.5)
    assert lead.requeue.exclude == ("h1",)


def test_a_spare_has_no_role_until_it_takes_one():
    lead, acts = mustered(spares=1)
    assert told(acts) == [(0, "prepare"), (0, "start"), (1, "prepare"), (1, "start")]
    lead.member_lost(1, "gone", 10.0)
    acts = done(lead, 0, 11.0)
    assert told(acts) == [(0, "prepare"), (0, "start"), (2, "prepare"), (2, "start")]
    (world,) = [act.message.world for act in acts if isinstance(act, Tell) and isinstance(act.message, Prepare)]
    assert world.replaced == ((1, "h2"),) and world.ranks == ((2, 2),)
    (why,) = [act.data["why"] for act in acts if isinstance(act, Record) and act.kind == "decided"]
    assert why == "node 2 (h2) takes the place of node 1 (h1); 0 spares left"


def test_a_node_keeps_its_number_when_others_are_lost():
    """In the second attempt member 2 is node rank 1, and still node 2 to everybody who reads."""
    lead, _ = mustered(nodes=3, fewest_nodes=1)
    lead.member_lost(1, "gone", 10.0)
    done(lead, 0, 11.0)
    done(lead, 2, 11.0)
    assert lead.attempts[-1].assignment == (0, 2)
    acts = lead.member_lost(2, "gone", 20.0) + done(lead, 0, 21.0)
    (failed,) = [act.data["finding"] for act in acts if isinstance(act, Record) and act.kind == "failed"]
    assert failed["node"] == 2 and failed["title"] == "node 2 (h2) was lost" and lead.history[-1].member == 2
    (why,) = [act.data["why"] for act in acts if isinstance(act, Record) and act.kind == "decided"]
    assert why == "the job goes on without node 2 (h2): 1 of 2 nodes, at least 1 needed"


def test_a_bad_gpu_is_excluded_even_on_the_lead_s_node():
    lead, _ = mustered(spares=1)
    acts = failed_once(lead, finding="gpu-lost")
    assert kinds(acts)[-3:] == ["decided", "excluded", "attempt-started"]
    assert lead.attempts[-1].assignment == (2, 1) and lead.members[0].bad == "gpu-lost"


def test_a_failed_preflight_costs_a_spare_first():
    broken = Finding("memlock-low", ERROR, "too little")
    asked = order(spares=1)
    lead = lead_of(asked)
    lead.hello(hello(0, asked), 0.0, 1.0)
    assert kinds(lead.hello(hello(1, asked, findings=(broken,)), 0.0, 1.0)) == ["node-joined", "finding", "excluded"]
    lead.hello(hello(2, asked), 0.0, 1.0)
    assert lead.attempts[-1].assignment == (0, 2)
    lead = lead_of(asked)
    lead.hello(hello(0, asked, findings=(broken,)), 0.0, 1.0)
    assert finish(lead.hello(hello(1, asked, findings=(broken,)), 0.0, 1.0)) == [EXIT_PREFLIGHT]


def test_a_job_with_spares_starts_without_the_missing():
    asked = order(spares=1)
    lead = lead_of(asked)
    for member in (0, 2):
        lead.hello(hello(member, asked), 0.0, 1.0)
    assert lead.phase == "muster" and lead.attempts == []
    lead.tick(61.0)
    assert lead.attempts[-1].assignment == (0, 2)


def test_a_member_that_ended_early_costs_a_spare():
    asked = order(spares=1)
    lead = lead_of(asked)
    for member in (0, 1):
        lead.hello(hello(member, asked), 0.0, 1.0)
    assert kinds(lead.waits_in_vain("the agent of node 2 ended with 70")) == ["finding"]
    assert "attempt-started" in kinds(lead.tick(2.0)) and lead.attempts[-1].assignment == (0, 1)

"""`scontrol show job` and `show node`, pasted beside a log."""

import textwrap

from drumbeat.logs.read.pasted_jobs import read_pasted_jobs


def dump(text, kind):
    found = read_pasted_jobs(textwrap.dedent(text).strip("\n") + "\n", "pasted.txt")
    assert found.kind == kind
    return found


def codes(found):
    return [finding.code for finding in found.findings]


def test_scontrol():
    text = """
    JobId=4711 JobName=train
       JobState=OUT_OF_MEMORY Reason=OutOfMemory Dependency=(null)
       RunTime=00:12:03 TimeLimit=01:00:00 TimeMin=N/A
       NumNodes=2 NumCPUs=16 ExitCode=0:125
       TRES=cpu=16,mem=64G,node=2,gres/gpu=8
    NodeName=n1 Arch=x86_64 CPUTot=64
       State=IDLE+DRAIN ThreadsPerCore=1
       Reason=bad NVLink [root@2026-01-02T03:04:05]
    """
    found = dump(text, "scontrol show job and node")
    assert codes(found) == ["oom-kill", "node-unavailable"] and found.data["drained"] == ["n1"]
    assert "bad NVLink" in found.findings[1].title
    assert found.facts[0] == "job 4711: OUT_OF_MEMORY, 2 nodes, ran 00:12:03 of 01:00:00"


def test_a_job_that_waits_ran_for_no_time():
    text = """
    JobId=4712 JobName=train
       JobState=PENDING Reason=Resources Dependency=(null)
       RunTime=00:00:00 TimeLimit=04:00:00 TimeMin=N/A
       NumNodes=2 TRES=cpu=16,node=2,gres/gpu=8
    """
    assert dump(text, "scontrol show job").facts == ("job 4712: PENDING, 2 nodes, not started, time limit 04:00:00",)


def test_a_node_asked_for_by_name():
    text = (
        "JobId=7 JobName=t\n   JobState=PENDING Reason=Resources\n   ReqNodeList=n7 ExcNodeList=(null)\n   NumNodes=1\n"
    )
    assert "asks for n7 by name" in dump(text, "scontrol show job").findings[0].fix


def test_a_mark_alone_is_no_dump():
    assert read_pasted_jobs("some text JobId= and more NodeName=\n", "x") is None
    read_pasted_jobs("JobId=" * 50_000, "x")  # in bounded time

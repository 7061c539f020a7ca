"""Flight-recorder dumps: JSON, pickles that cannot run anything, and gloo's."""

import json
import os
import pickle

import pytest

from drumbeat.logs.read.flight import DumpError, Group, compare, looks_like_dump, parse


def dump(calls, group=("0", "default_pg"), config=None):
    entries = [
        {
            "record_id": number,
            "process_group": group,
            "collective_seq_id": number,
            "is_p2p": False,
            "profiling_name": f"nccl:{name}",
            "state": "completed" if number < len(calls) else "scheduled",
            "input_sizes": [[8]],
            "frames": [],
        }
        for number, name in enumerate(calls, 1)
    ]
    return {"version": "2.9", "pg_config": config or {"0": {"ranks": "[0, 1]"}}, "entries": entries}


def job(members, last, pending, empty=()):
    """Dumps of a job: group -> members; per rank and group the last call made and the first one that is not over."""
    found = []
    config = {
        group: {"name": group, "desc": group.rstrip("0123456789"), "ranks": str(ranks)}
        for group, ranks in members.items()
    }
    for rank in sorted({rank for ranks in members.values() for rank in ranks}):
        entries = []
        for group, ranks in members.items():
            if rank in ranks and rank not in empty:
                made, first = last.get((group, rank), 20), pending.get((group, rank), 18)
                entries += [
                    {
                        "process_group": (group, group.rstrip("0123456789")),
                        "collective_seq_id": number,
                        "is_p2p": False,
                        "profiling_name": "nccl:all_reduce",
                        "state": "completed" if number < first else "scheduled",
                    }
                    for number in range(first - 1, made + 1)
                ]
        own = {group: about for group, about in config.items() if rank in members[group]}
        content = {"version": "2.9", "pg_config": own, "entries": entries}
        found.append(parse(f"_dump_{rank}", pickle.dumps(content)))
    return found


TENSOR_AND_DATA = {"tp1": [0, 1], "tp2": [2, 3], "dp3": [0, 2], "dp4": [1, 3]}


def test_groups_of_one_description_are_not_compared_with_each_other():
    """The stages of a pipeline have made different numbers of calls, and all is well."""
    ahead = {("tp2", rank): 900 for rank in (2, 3)}
    assert compare(job(TENSOR_AND_DATA, ahead, {("tp2", rank): 898 for rank in (2, 3)})) == []


def test_a_rank_without_entries_is_the_one_that_the_others_wait_for():
    (finding,) = compare(job(TENSOR_AND_DATA, {}, {}, empty=(2,)))
    assert (finding.code, finding.rank) == ("rank-behind", 2)
    assert finding.title == "rank 2 did not make call 18 in group dp, in which the others wait"


def test_a_rank_whose_gpu_stands_still_has_finished_less_than_the_others():
    stuck = {("tp2", 2): 12, ("dp3", 2): 15}
    (finding,) = compare(job(TENSOR_AND_DATA, {}, stuck))
    assert finding.rank == 2 and finding.title == "rank 2 finished 14 calls in group dp, others up to 17"


def test_a_rank_that_waits_in_another_group_is_not_blamed():
    """Rank 3 waits for rank 2, so it has not come to what rank 1 waits in."""
    made = {("tp2", 2): 17, ("dp3", 2): 17, ("dp4", 3): 17}
    pending = {("tp2", 2): 18, ("dp3", 2): 18, ("dp4", 3): 18}
    (finding,) = compare(job(TENSOR_AND_DATA, made, pending))
    assert finding.rank == 2


def test_two_ranks_in_two_groups_are_one_finding():
    members = {"tp1": [0, 1], "tp2": [2, 3]}
    (finding,) = compare(job(members, {}, {}, empty=(0, 3)))
    assert finding.rank is None and finding.fix == "check the stack and the GPU of ranks 0, 3"


@pytest.mark.parametrize("form", ["list", "seq_id", "retired"])
def test_older_forms_and_gloo(form):
    def content(made):
        entries = [
            {"pg_id": 0, "seq_id": number, "profiling_name": "nccl:all_reduce", "state": "completed"}
            for number in range(1, made + 1)
        ]
        if made == 5:
            entries[-1]["state"] = "started"
        if form == "retired":  # gloo: the state stays, and the group has no configuration
            for entry in entries:
                entry.update(retired=entry["state"] == "completed", state="scheduled", process_group=["0", "undefined"])
        return entries if form == "list" else {"version": "1.0", "entries": entries}

    found = [parse(f"nccl_trace_rank_{rank}", pickle.dumps(content(made))) for rank, made in enumerate((5, 4, 5))]
    (finding,) = compare(found)
    assert (finding.rank, finding.title) == (1, "rank 1 made 4 calls in group 0, others up to 5")


def dumps(*calls, pack=lambda value: json.dumps(value).encode(), **options):
    return [parse(f"nccl_trace_rank_{rank}", pack(dump(names, **options))) for rank, names in enumerate(calls)]


@pytest.mark.parametrize("pack", [lambda value: json.dumps(value).encode(), pickle.dumps])
def test_the_rank_behind_is_named(pack):
    (finding,) = compare(dumps(["all_reduce"] * 5, ["all_reduce"] * 3, ["all_reduce"] * 5, pack=pack))
    assert (finding.code, finding.rank) == ("rank-behind", 1)
    assert "made 3 calls" in finding.title


def test_different_calls_under_one_number():
    (finding,) = compare(dumps(["all_reduce", "broadcast"], ["all_reduce", "all_gather"]))
    assert finding.code == "collective-desync" and "collective 2" in finding.title


def test_ranks_in_step_say_nothing():
    assert compare(dumps(["all_reduce"] * 3, ["all_reduce"] * 3)) == []


def test_gloo_with_empty_configuration():
    (finding,) = compare(dumps(["a"] * 4, ["a"] * 2, group=("0", "undefined"), config={}))
    assert (finding.code, finding.rank) == ("rank-behind", 1)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/drumbeat-was-here",)


def test_a_pickle_runs_nothing():
    with pytest.raises(DumpError, match="plain data only"):
        parse("nccl_trace_rank_0", pickle.dumps({"entries": [Evil()]}))
    assert not os.path.exists("/tmp/drumbeat-was-here")


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04", b"{", b"[]", b'{"entries": 3}', b"\x80\x04K\x01.", b"\x80\x05" + b"(" * 99]
)
def test_damaged_dumps_are_refused_by_name(data):
    with pytest.raises(DumpError):
        parse("nccl_trace_rank_0", data)


def test_odd_entries_are_passed_over():
    odd = {"entries": [1, None, {}, {"collective_seq_id": "x"}, {"collective_seq_id": 3, "is_p2p": True}]}
    assert parse("nccl_trace_rank_7", json.dumps(odd).encode()).groups == {}


def test_dumps_are_told_from_logs():
    assert looks_like_dump("nccl_trace_rank_0", pickle.dumps(dump(["a"])))
    assert looks_like_dump("x.json", json.dumps(dump(["a"])).encode())
    assert not looks_like_dump("train.log", b"step 1 loss 2.0")
    assert not looks_like_dump("order.json", b'{"run_id": "x"}')


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02}r\xff\xff\xff\x3f.",  # a memo entry far out
        b"\x80\x02X\xff\xff\xff\x7fa.",  # a text longer than the file
        b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.",
        b"\x80\x02]" + b"q\x00" + b"(h\x00h\x00e" * 100 + b".",  # a list of itself
        b"\x80\x02(" + b"K\x01" * 1000,
        b"\x80\x02" + b"]" * 2_000_000 + b".",
        b"{" + b'"a":' + b"[" * 2_000_000,
    ],
    ids=["memo", "text", "text8", "itself", "no-end", "containers", "json"],
)
def test_a_hostile_pickle_is_refused_without_taking_memory_or_time(data):
    with pytest.raises(DumpError):
        parse("nccl_trace_rank_0", data)


def test_shared_lists_do_not_become_endless_words():
    value = [1, 2]
    for _ in range(60):
        value = [value, value]
    content = dump(["all_reduce"])
    content["entries"][0]["input_sizes"] = value
    (call,) = parse("nccl_trace_rank_0", pickle.dumps(content)).groups[Group("0", "default_pg", frozenset({0, 1}))]
    assert len(call.sizes) <= 200


def test_what_torch_writes_is_read():
    """Its own pickler marks lists of numbers by a function that gives its argument back."""
    data = (
        b"\x80\x02}X\x07\x00\x00\x00entries](}(X\x09\x00\x00\x00pg_id_seqK\x01X\x11\x00\x00\x00collective_seq_idK\x05"
    )
    data += b"X\x0b\x00\x00\x00input_sizesctorch.jit._pickle\nbuild_intlist\n](K\x08e\x85Rues."
    assert parse("trace_3", data).groups[Group("")][0].sequence == 5

"""Flight-recorder dumps: JSON, pickles that cannot run anything, and gloo's."""

import json
import os
import pickle

import pytest

from drumbeat.logs.read.flight import DumpError, compare, looks_like_dump, parse


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
    (call,) = parse("nccl_trace_rank_0", pickle.dumps(content)).groups["default_pg"]
    assert len(call.sizes) <= 200


def test_what_torch_writes_is_read():
    """Its own pickler marks lists of numbers by a function that gives its argument back."""
    data = (
        b"\x80\x02}X\x07\x00\x00\x00entries](}(X\x09\x00\x00\x00pg_id_seqK\x01X\x11\x00\x00\x00collective_seq_idK\x05"
    )
    data += b"X\x0b\x00\x00\x00input_sizesctorch.jit._pickle\nbuild_intlist\n](K\x08e\x85Rues."
    assert parse("trace_3", data).groups[""][0].sequence == 5

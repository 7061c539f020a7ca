import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumbeat.base.ranges import HostlistError, expand


@pytest.mark.parametrize(
    "text,hosts",
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("nid[008-011]", ["nid008", "nid009", "nid010", "nid011"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[09-100]", [f"n{number:02d}" for number in range(9, 101)]),
        ("b[3,1,2]", ["b3", "b1", "b2"]),
        ("z9,a[2-1],m".replace("2-1", "1-2"), ["z9", "a1", "a2", "m"]),
        ("x[0-1]c0r[7-8]b0", ["x0c0r7b0", "x0c0r8b0", "x1c0r7b0", "x1c0r8b0"]),
        ("n[1-2][3-4]", ["n13", "n14", "n23", "n24"]),
        ("n[01-02]-ib0.cluster", ["n01-ib0.cluster", "n02-ib0.cluster"]),
        ("gpu-1-7,ip-10-0-0-[1,3]", ["gpu-1-7", "ip-10-0-0-1", "ip-10-0-0-3"]),
        ("a , b[1-2] ,c", ["a", "b1", "b2", "c"]),
        ("n1,n1", ["n1", "n1"]),
    ],
)
def test_forms(text, hosts):
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text,position,words",
    [
        ("", 0, "missing"),
        ("a,", 2, "missing"),
        (",a", 0, "missing"),
        ("a,,b", 2, "missing"),
        ("a[1-2", 1, "never closed"),
        ("a[", 2, "never closed"),
        ("a[]", 2, "missing"),
        ("a[1,]", 4, "missing"),
        ("a]", 1, "']' is not part of a host name"),
        ("a[x]", 2, "not a number or a range"),
        ("a[1-x]", 2, "not a number or a range"),
        ("a[1-2-3]", 2, "not a number or a range"),
        ("a[3-1]", 2, "runs backwards"),
        ("a[1-3/2]", 5, "not a number or a range"),
        ("a b", 2, "'b' is not part"),
        ("a;reboot", 1, "';' is not part"),
        ("a[1\u0662]", 3, "not a number"),
        ("[" * 60, 1, "not a number or a range"),
        ("c[1-2[0-1],7]", 5, "not a number or a range"),
        ("a" * 300, 0, "longer than 255"),
        ("a[1-" + "9" * 40 + "]", 2, "too many digits"),
    ],
)
def test_malformed_is_an_error_that_names_the_place(text, position, words):
    with pytest.raises(HostlistError, match=words.replace("'", ".")) as error:
        expand(text)
    assert error.value.position == position


@pytest.mark.parametrize(
    "text", ["n[0-999999999]", "n[0-255][0-255][0-255]", "n[" + "0-9999," * 20 + "0]", "a[0-60000],b[0-60000]"]
)
def test_a_bomb_is_refused_before_it_goes_off(text):
    with pytest.raises(HostlistError, match="more than 65536 hosts"):
        expand(text)


def test_the_limit_is_the_callers():
    assert len(expand("n[1-100]", limit=100)) == 100
    with pytest.raises(HostlistError):
        expand("n[1-101]", limit=100)


@given(st.text(alphabet="an0129[],- -.\n]", max_size=60))
def test_any_text_gives_hosts_or_one_kind_of_error(text):
    try:
        hosts = expand(text, limit=1000)
    except HostlistError as error:
        assert 0 <= error.position <= len(text)
    else:
        assert hosts and len(hosts) <= 1000 and all(host and "," not in host and "[" not in host for host in hosts)


def test_published_node_lists():
    from tests.corpus import corpus

    for entry in json.loads((corpus("E_nodelists") / "nodelists.json").read_text()):
        hosts = expand(entry["nodelist"])
        assert len(hosts) == entry["count"] and hosts[0] == entry["first"] and hosts[-1] == entry["last"]
        if entry["hosts_complete"]:
            assert hosts == entry["hosts"], entry["nodelist"]

"""Ports, links and interfaces that should be alike and are not, in pasted output."""

import pytest

from drumbeat.cli import main

IP = """3: {a}: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu {first} qdisc mq state UP group default qlen 256
    link/{kind} 00:00:10:49:fe:80 brd 00:ff:ff:ff:ff:12
4: {b}: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu {second} qdisc mq state UP group default qlen 256
    link/{kind} 00:00:10:49:fe:81 brd 00:ff:ff:ff:ff:12
"""
CARD = """CA 'mlx5_{number}'
	CA type: {model}
	Port 1:
		State: Active
		Physical state: LinkUp
		Rate: {rate}
		Link layer: InfiniBand
"""
TOPO = """	GPU0	GPU1	GPU2	GPU3	CPU Affinity
GPU0	 X 	NV4	NV4	NV4	0-31
GPU1	NV4	 X 	NV4	{word}	0-31
GPU2	NV4	NV4	 X 	NV4	32-63
GPU3	NV4	{word}	NV4	 X 	32-63
"""


@pytest.fixture
def judged(tmp_path, capsys):
    def judge(text):
        (tmp_path / "pasted.txt").write_text(text)
        assert main(["doctor", "--from", str(tmp_path / "pasted.txt")]) == 0
        return capsys.readouterr().out

    return judge


@pytest.mark.parametrize(
    "names, kind, severity",
    [
        (("ib0", "ib1"), "infiniband", "warning"),
        (("ens1f0", "ens2f0"), "ether", "info"),
        (("eth0", "ens1"), "ether", ""),
    ],
)
def test_interfaces_of_one_kind_with_another_mtu(judged, names, kind, severity):
    told = judged(IP.format(a=names[0], b=names[1], kind=kind, first=4092, second=2044))
    words = f"{severity}: interfaces of one kind differ in their MTU: {names[0]} 4092, {names[1]} 2044"
    assert (words in told) is bool(severity) and "not looked at whatever these lines do not show" in told
    assert "MTU" not in judged(IP.format(a=names[0], b=names[1], kind=kind, first=4092, second=4092))


def test_a_slow_port_of_the_same_card_is_a_fault_and_its_line_is_shown(judged):
    fast, slow = CARD.format(number=0, model="MT4123", rate=200), CARD.format(number=1, model="MT4123", rate=100)
    told = judged(fast + slow)
    assert "warning: slower than a card of the same model: mlx5_1 (100 Gb/s)" in told and ":13: Rate: 100" in told
    assert "management or storage card" in judged(fast + slow.replace("MT4123", "MT4117"))


def test_one_missing_nvlink_is_a_fault(judged):
    assert "warning: no NVLink between GPU 1-GPU 3, while nearly all" in judged(TOPO.format(word="SYS"))
    bridges = TOPO.format(word="NV4").replace("NV4", "SYS").replace("X \tSYS", "X \tNV4", 1)
    assert "warning" not in judged(bridges).replace("0 warnings", "")
